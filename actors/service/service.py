"""Performs clients' requests: trains runs on one group, samples from one engine, and lists runs and checkpoints."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from actors.service import wire
from actors.service.catalogue import Saved
from actors.service.datums import Work, output_of, work_of
from actors.service.operations import RequestLog
from actors.service.results import Answer, Result
from actors.service.run_weights import run_weights_of
from actors.service.runs import Runs
from actors.service.samplers import Samplers
from actors.service.state import ServiceState
from actors.service.supervised_engine import SupervisedEngine
from actors.service.training_run import RequestKind, TrainingRun
from actors.service.users import LIMITS, NotFound, ServiceLimits, User
from actors.workers.group_calls import GroupCalls
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, ConfigError, StateError
from slimefsdp.rpc import UpdateSettings
from slimefsdp.sampling.params import SamplingStats

_MOST_LR = 1000.0  # AdamW changes a weight by about the rate; so finite gradients never make a weight infinite
_LEAST_EPS = 1e-15  # AdamW divides by eps alone if the second moment has decayed to 0 and the first has not
_VERSIONS_SHOWN = 10


class Service(ServiceState):
    """Performs the requests that `actors.service.app` receives.

    Args:
        group: the group after its launch, still with its initial weights.
        limits: limits on the requests and objects of clients.
    """

    def __init__(
        self, config: RunConfig, group: GroupCalls, engine: SupervisedEngine, limits: ServiceLimits = LIMITS
    ) -> None:
        super().__init__(config, limits)
        self.engine, self._group = engine, group
        self.weights = run_weights_of(config, group, self.catalogue)
        self.samplers = Samplers(self, engine, self.weights)
        self.training = Runs(self, self.weights, self.samplers)
        assert config.run.dir is not None
        self.log = RequestLog(config.run.dir / "service" / "requests.jsonl")

    @property
    def runs(self) -> dict[str, TrainingRun]:
        return self.training.by_id

    def continue_runs(self) -> None:
        """Continues the runs and sampling clients of the last start in the same run.dir.

        Sampling clients with unnamed weights are not continued.

        Raises:
            SlimeError: a run does not fit the settings of this server.
        """
        self.training.continue_kept()
        self.samplers.continue_kept()

    def close(self) -> None:
        """Finishes all accepted requests, and saves every run for the next start."""
        self.is_ending = True
        self.training.close()
        self.log.close()

    # ------------------------------------------------------------------ sessions

    def heartbeat(self, body: wire.OfSession, user: User) -> Answer:
        self.session(body.session_id, user)
        return {"type": "session_heartbeat"}

    async def finish(self, user: User, id: str) -> Answer:
        """Ends a session of the user; does nothing if the session is unknown, has ended, or belongs to another user."""
        with suppress(NotFound):
            await self.end_session(self.session(id, user).id)
        return {}

    async def end_session(self, key: str, *, is_overdue: bool = False) -> None:
        """Ends a session with its runs and samplers; what was saved under a name stays.

        Args:
            is_overdue: as in `Runs.end_session`.
        """
        if self.sessions.pop(key, None) is not None:
            self.training.end_session(key, is_overdue=is_overdue)
            self.catalogue.samplers.forget(f"{key}.*")
            await self.samplers.end(key)

    # ------------------------------------------------------------------ training

    def forward_backward(self, message: Any, size: int, user: User) -> Result:
        """Submits a ForwardBackwardRequest, which may ask for the forward pass only; its body has `size` bytes."""
        run = self.training.get(message.model_id, user)

        def do(calls: GroupCalls) -> Answer:
            work = work_of(
                message,
                vocab_size=self.vocab_size,
                max_tokens=self.most_tokens,
                max_targets=self.limits.body_bytes // 8,  # as many dense targets as fit into a body
                stable_reinforce=self.config.service.stable_reinforce,
            )
            run.tokens += work.num_tokens
            self.metrics.count_trained(work.num_tokens)
            return output_of(work, _log_probs(calls, work))

        kind: RequestKind = "forward" if message.forward_only else "forward_backward"
        return run.submit(message.seq_id, kind, do, size)

    def optim_step(self, body: wire.OptimStep, user: User) -> Result:
        run, params = self.training.get(body.model_id, user), body.adam_params

        def do(calls: GroupCalls) -> Answer:
            try:
                metrics = calls.optimizer_step(_update_settings(params))
            except StateError:  # there were no gradients, or too many updates in a row were not finite
                run.has_gradients = False
                raise
            run.has_gradients = False
            if metrics["skipped_update"]:
                raise StateError(
                    "the gradients, or their squares in float32, are not finite, so no update was made",
                    field="optim_step",
                    hint="lower the learning rate, or look at the data",
                )
            run.updates += 1
            self.metrics.updates.inc()
            every = self.config.checkpoint.interval_steps
            if every is not None and run.updates % every == 0:
                try:
                    self.training.save(run)
                except CheckpointError as error:  # the update itself succeeded, and the previous checkpoint is valid
                    print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
            return {"type": "optim_step", "metrics": metrics}

        return run.submit(body.seq_id, "optim_step", do, body.size)

    def get_info(self, body: wire.OfModel, user: User) -> Answer:
        run = self.training.get(body.model_id, user)
        about = {"arch": self.model_type, "model_name": self.model_name, "tokenizer_id": self.tokenizer_id}
        return {
            "type": "get_info", "model_id": run.id, "model_data": about, **_lora(run.rank),
            "model_name": self.model_name,
        }  # fmt: skip

    # ------------------------------------------------------------------ lists of runs and checkpoints

    def capabilities(self, user: User) -> Answer:
        model = {"model_name": self.model_name, "max_context_length": self.most_context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    def weights_info(self, body: wire.WeightsInfo, user: User) -> Answer:
        rank = self.catalogue.get(body.tinker_path, user).rank
        return {"base_model": self.model_name, **_lora(rank), **self.weights.switches(rank)}

    def training_runs(self, user: User) -> list[Answer]:
        return [self._described(run, user) for run in list(self.runs.values()) if user.owns(run.owner)]

    def training_run(self, user: User, id: str) -> Answer:
        return self._described(self.training.get(id, user), user)

    def checkpoints(self, user: User, id: str | None = None) -> list[Answer]:
        """Lists the saves of a user, or of one of the user's runs."""
        return [_listed(saved) for saved in self.catalogue.listed(user, id)]

    async def delete_checkpoint(self, user: User, id: str, kind: str, name: str) -> Answer:
        await asyncio.to_thread(self.catalogue.remove, f"tinker://{id}/{kind}/{name}", user)
        return {}

    def _described(self, run: TrainingRun, user: User) -> Answer:
        newest = {saved.kind: _listed(saved) for saved in self.catalogue.listed(user, run.id)}
        return {
            "training_run_id": run.id, "base_model": self.model_name, "model_owner": "local", **_lora(run.rank),
            "corrupted": False, "last_request_time": _time(run.last_request),
            "last_checkpoint": newest.get("weights"), "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata or None,
        }  # fmt: skip

    # ------------------------------------------------------------------ for the operator

    def counts(self, stats: SamplingStats) -> dict[str, int]:
        """Returns the values of the gauges of `Metrics`."""
        return {
            "sessions": len(self.sessions),
            "training_runs": len(self.runs),
            "samplers": len(self.samplers.sessions),
            "waiting_requests": self.results.waiting,
            "waiting_request_bytes": self.results.waiting_bytes,
            "recoveries": len(getattr(self._group, "recoveries", ())),
            "engine_restarts": self.engine.replacements,
            "sampling_is_up": int(self.engine.problem is None),
            "sampled_tokens": stats.tokens_drawn,
            "sampling_rows": stats.running_rows,
            "engine_version_bytes": sum(stats.versions.values()),
            "engine_cache_bytes": stats.cache_bytes,
        }

    async def status(self, user: User) -> Answer:
        """Returns the data of the operator's page."""
        stats, now = await self.engine.stats(), time.time()
        return {
            "model": self.model_name,
            "uptime_s": round(now - self.began, 1),
            "is_ending": self.is_ending,
            "problem": self.engine.problem,
            "counts": self.counts(stats),
            "trained_tokens": self.metrics.trained_tokens,
            "runs": [
                {
                    "run": run.id,
                    "rank": run.rank,
                    "updates": run.updates,
                    "tokens": run.tokens,
                    "waiting": run.waiting,
                    "idle_s": round(now - run.last_request, 1),
                    "incomplete": run.incomplete is not None,
                }
                for run in list(self.runs.values())
            ],
            "sessions": [
                {"session": session.id, "client": session.sdk_version, "age_s": round(now - session.began, 1)}
                for session in list(self.sessions.values())
            ],
            "versions": [
                {"version": name, "bytes": size} for name, size in list(stats.versions.items())[-_VERSIONS_SHOWN:]
            ],
        }


def _lora(rank: int) -> dict[str, Any]:
    """Returns the API's fields for the rank of weights; rank 0 means all weights."""
    return {"is_lora": rank > 0, "lora_rank": rank or None}


def _update_settings(params: wire.AdamParams) -> UpdateSettings:
    """Converts the client's settings of an update.

    Raises:
        ConfigError: a value is out of range, or would make weights infinite or NaN with ordinary gradients.
    """
    bounds = {
        "learning_rate": (params.learning_rate, params.learning_rate <= _MOST_LR, f"{_MOST_LR:g} at most"),
        "eps": (params.eps, params.eps >= _LEAST_EPS, f"{_LEAST_EPS:g} at least"),
        "weight_decay": (
            params.weight_decay,
            params.learning_rate * params.weight_decay <= 1,
            "1 / learning_rate at most, which takes a whole weight off",
        ),
    }
    for name, (value, is_in_range, rule) in bounds.items():
        if not is_in_range:
            raise ConfigError(f"{name}={value:g}, and it may be {rule}", field=name, hint="choose another value")
    return UpdateSettings(
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
        max_grad_norm=params.grad_clip_norm,
    )


def _log_probs(calls: GroupCalls, work: Work) -> Any:
    """Returns the log-probs of the targets, float32 [R]; adds the loss's gradients unless the work is forward only."""
    if work.forward_only:
        return calls.compute_log_probs(work.batch).log_probs
    output = calls.forward_backward(work.batch, work.loss, 1.0, settings=work.settings, with_log_probs=True)
    return output.log_probs.log_probs


def _listed(saved: Saved) -> Answer:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind == "weights" else "sampler",
        "time": _time(saved.time),
        "tinker_path": saved.path,
        "size_bytes": saved.size,
        "public": False,
        "user_metadata": saved.user_metadata,
        "expires_at": None if saved.expires is None else _time(saved.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
