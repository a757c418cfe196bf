"""The driver's loop: generate, reward, train, update weights, evaluate, save. It knows no ranks and no retries."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from actors.curves import draw_curves
from actors.metrics_log import MetricsLog, read_metrics
from actors.progress import GRPO_COLUMNS, SFT_COLUMNS, ProgressTable
from actors.rollout.engine import EnginePool, Sampled, encode_demonstrations
from actors.rollout.prompts import PromptStream, Record, check_answers, read_jsonl
from actors.rollout.rewards import RewardFunction, load_reward
from actors.run_folder import RecordedBatches, RunFolder
from actors.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError

Metrics = dict[str, float]

# settings that a recorded batch follows from, through the samples or through the weights that were sampled
_DECIDING: Any = {
    "run": {"seed"}, "data": {"train"}, "rollout": True, "batch": {"samples_per_update"}, "loss": True, "optim": True,
    "precision": True, "reference": {"path", "update_interval_steps"},
}  # fmt: skip


def train(config: RunConfig) -> str:
    """Runs what the settings describe, from start or checkpoint to the last step; returns a closing line to quote.

    Leaves in `run.dir`: metrics.jsonl, tensorboard/, curves.png, settings.yaml, and checkpoints/ with batches/ where
    they are asked for.

    Raises:
        SlimeError: any typed error; worker processes are ended before it travels on.
    """
    config.check_ready_to_train()
    assert config.run.dir is not None and config.run.steps is not None
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(config.run.dir))
        group = WorkerGroup.launch(config)
        stack.callback(group.shutdown)
        folder.write_settings(group.config)
        keeps = config.checkpoint.interval_steps is not None
        loop: RolloutLoop | SupervisedLoop
        if config.algorithm == "sft":
            loop = SupervisedLoop(group.config, group)  # where mesh.dp is a number
        else:
            engines = EnginePool.launch(config)
            stack.callback(engines.shutdown)
            loop = RolloutLoop(group.config, group, engines, folder.batches if keeps else None)
        log = stack.enter_context(MetricsLog(config.run.dir, wandb_project=config.run.wandb_project))
        start = _resume(config, group, loop.prompts, log)
        table = ProgressTable(loop.columns, total_steps=config.run.steps)
        if keeps and not config.checkpoint.resume:
            _save(0, group, loop, folder)
        first = loop.before_training(evaluates=start == 0)
        if first:
            log.write(0, first)
            table.write(0, first)
        for step in range(start, config.run.steps):
            began = time.perf_counter()
            metrics = loop.step(step)
            if config.reference.update_interval_steps is not None:
                is_due = _is_due(step + 1, config.reference.update_interval_steps)
                if is_due:
                    group.update_ref()
                metrics["reference_updated"] = float(is_due)
            metrics["seconds/step"] = time.perf_counter() - began
            log.write(step + 1, metrics)
            table.write(step + 1, metrics)
            is_last = step + 1 == config.run.steps
            if keeps and (is_last or _is_due(step + 1, config.checkpoint.interval_steps)):
                _save(step + 1, group, loop, folder)
        if keeps:
            group.finish_save()
            folder.forget_old_batches()
        if config.run.export_dir is not None:
            dtype = config.run.export_dtype
            group.export_hf(config.run.export_dir, None if dtype == "auto" else dtype)
        rows = read_metrics(config.run.dir)
        draw_curves(rows, config.run.dir / "curves.png", title=f"{config.run.dir.name}: {config.algorithm}")
        return loop.summary(rows)


class RolloutLoop:
    """One step: sample from the engines, reward, train, send the weights back."""

    columns = GRPO_COLUMNS

    def __init__(
        self, config: RunConfig, group: WorkerGroup, engines: EnginePool, recorded: RecordedBatches | None = None
    ) -> None:
        assert config.data.train is not None and config.rollout.reward is not None
        self._config = config
        self._group = group
        self._engines = engines
        self._recorded_batches = recorded
        self._version = -1  # of the engines' weights, and of the trainer's between steps
        self._reward: RewardFunction = load_reward(config.rollout.reward)
        self.prompts = PromptStream(read_jsonl(config.data.train, field="data.train"), config.run.seed)
        heldout = config.data.heldout
        self._heldout: list[Record] = read_jsonl(heldout, field="data.heldout") if heldout else []

    def before_training(self, *, evaluates: bool) -> Metrics:
        """First weights to the engines; held-out metrics of the policy as it is, if asked for."""
        self._version = self._group.update_weights(self._engines.receivers).version
        return self._evaluate(0) if evaluates else {}

    def step(self, step: int) -> Metrics:
        """One rollout batch, trained on; held-out metrics where they are due.

        A step that an earlier process had begun trains on the batch it had recorded, and asks no engine for samples.
        """
        seconds: Metrics = {"generate": 0.0, "reward": 0.0}
        batch, scores = self._recorded(step) or self._sampled(step, seconds)
        with _timed(seconds, "train"):
            metrics = self._group.train_step(batch)
        with _timed(seconds, "sync"):
            self._version = self._group.update_weights(self._engines.receivers).version
        metrics |= scores
        metrics["weight_version"] = float(self._version)
        interval = self._config.evaluation.interval_steps
        is_last = step + 1 == self._config.run.steps
        if interval is not None and (is_last or _is_due(step + 1, interval)):
            with _timed(seconds, "evaluate"):
                metrics |= self._evaluate(step + 1)
        return metrics | {f"seconds/{name}": value for name, value in seconds.items()}

    def _sampled(self, step: int, seconds: Metrics) -> tuple[RolloutBatch, Metrics]:
        """A new batch and the metrics of its samples, recorded for a run that may have to repeat the step."""
        settings = self._config.rollout
        records = self.prompts.take(settings.prompts_per_step)
        with _timed(seconds, "generate"):
            version, samples = self._generate(records, settings.samples_per_prompt, (1, step))
        with _timed(seconds, "reward"):
            scores = self._scores(records, samples)
        batch = RolloutBatch.from_samples(
            [
                {
                    "tokens": sample.tokens,
                    "response_length": sample.response_length,
                    "rollout_log_probs": sample.log_probs,
                    "reward": score["reward"],
                    "group_id": sample.prompt,
                }
                for sample, score in zip(samples, scores, strict=True)
            ],
            temperature=settings.temperature,
            weight_version=version,
        )
        metrics = _means(scores, "rollout/")
        metrics["rollout/response_length"] = sum(sample.response_length for sample in samples) / len(samples)
        metrics["rollout/truncated"] = sum(not sample.finished for sample in samples) / len(samples)
        if self._recorded_batches is not None:
            notes = {"metrics": metrics, "prompts": self.prompts.state(), "settings": self._deciding_settings()}
            self._recorded_batches.write(step, batch, notes)
        return batch, metrics

    def _recorded(self, step: int) -> tuple[RolloutBatch, Metrics] | None:
        """What `_sampled` recorded of this step, if it can stand for sampling anew from the weights as they are."""
        if self._recorded_batches is None or not self._config.checkpoint.resume:
            return None
        found = self._recorded_batches.read(step)
        if found is None:
            return None
        batch, notes = found
        if (batch.weight_version, notes["settings"]) != (self._version, self._deciding_settings()):
            warnings.warn(
                f"recorded batch of step {step} passed over, it is sampled anew: it is of other weights or settings",
                stacklevel=2,
            )
            return None
        self.prompts.restore(notes["prompts"])
        return batch, notes["metrics"]

    def _deciding_settings(self) -> dict[str, Any]:
        # which of the engines draws a sample makes no difference to it
        return self._config.model_dump(mode="json", include=_DECIDING, exclude={"rollout": {"engines"}})

    def summary(self, rows: Sequence[dict[str, Any]]) -> str:
        """The run in one line."""
        config = self._config
        key = "eval/exact" if any("eval/exact" in row for row in rows) else "eval/reward"
        values = [row[key] for row in rows if row.get(key) is not None]
        seconds = sum(row.get("seconds/step") or 0.0 for row in rows)
        what = (
            f"held-out sampled {key.removeprefix('eval/')} {values[0]:.3f} -> {values[-1]:.3f} "
            f"({len(self._heldout)} prompts x {config.evaluation.samples_per_prompt} samples)"
            if len(values) > 1
            else f"reward {rows[0].get('rollout/reward', 0.0):.3f} -> {rows[-1].get('rollout/reward', 0.0):.3f}"
        )
        return (
            f"{config.algorithm.upper()} on {config.ranks} FSDP2 ranks: {what} "
            f"in {config.run.steps} steps, {seconds:.0f} s; curves in {Path(str(config.run.dir)) / 'curves.png'}"
            + (f"; model in {config.run.export_dir}" if config.run.export_dir else "")
        )

    def _generate(
        self, records: Sequence[Record], per_prompt: int, purpose: tuple[int, int]
    ) -> tuple[int, list[Sampled]]:
        prompts = [record["prompt"] for record in records]
        seed = (self._config.run.seed, *purpose)  # training and evaluation never share draws
        return self._engines.generate(prompts, samples_per_prompt=per_prompt, seed=seed)

    def _scores(self, records: Sequence[Record], samples: Sequence[Sampled]) -> list[Metrics]:
        return [self._reward(records[sample.prompt], sample.text, sample.finished) for sample in samples]

    def _evaluate(self, step: int) -> Metrics:
        if self._config.evaluation.interval_steps is None:
            return {}
        _, samples = self._generate(self._heldout, self._config.evaluation.samples_per_prompt, (2, step))
        return _means(self._scores(self._heldout, samples), "eval/")


class SupervisedLoop:
    """One step: one update on demonstrations, the same loop without rollouts."""

    columns = SFT_COLUMNS

    def __init__(self, config: RunConfig, group: WorkerGroup) -> None:
        assert config.data.train is not None
        self._config = config
        self._group = group
        records = read_jsonl(config.data.train, field="data.train")
        check_answers(records, config.data.train, field="data.train")
        encoded = encode_demonstrations(config, records)
        demonstrations = [{"tokens": tokens, "response_length": length} for tokens, length in encoded]
        self.prompts = PromptStream(demonstrations, config.run.seed)

    def before_training(self, *, evaluates: bool) -> Metrics:
        """Nothing: there is no one to send weights to."""
        return {}

    def step(self, step: int) -> Metrics:
        """One update on the next `batch.samples_per_update` demonstrations."""
        seconds: Metrics = {}
        batch = RolloutBatch.from_samples(self.prompts.take(self._config.samples_per_step))
        with _timed(seconds, "train"):
            metrics: Metrics = self._group.train_step(batch)
        return metrics | {"seconds/train": seconds["train"]}

    def summary(self, rows: Sequence[dict[str, Any]]) -> str:
        """The run in one line."""
        seconds = sum(row.get("seconds/step") or 0.0 for row in rows)
        return (
            f"SFT on {self._config.ranks} FSDP2 ranks: loss {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f} "
            f"in {self._config.run.steps} updates, {seconds:.0f} s"
            + (f"; model in {self._config.run.export_dir}" if self._config.run.export_dir else "")
        )


def _resume(config: RunConfig, group: WorkerGroup, prompts: PromptStream, log: MetricsLog) -> int:
    """The step to begin with: 0, or where the newest checkpoint stands."""
    if not config.checkpoint.resume:
        return 0
    state = group.load("latest")
    if type(state.get("step")) is not int or type(state.get("prompts")) is not dict:
        raise CheckpointError(
            f"the checkpoint in {config.run.dir} has no loop_state of this loop",
            field="run.dir",
            hint="name the folder of a run of `slimefsdp train`",
        )
    step = state["step"]
    if config.run.steps is not None and step > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps} is below the checkpoint's step {step}",
            field="run.steps",
            hint="raise run.steps, or begin another run",
        )
    found = group.restored()
    for reason in found.skipped:
        print(f"checkpoint passed over: {reason}", file=sys.stderr)
    for difference in found.differences:
        print(f"resuming: {difference}", file=sys.stderr)
    print(f"resuming at step {step} of {config.run.steps}, from {found.path}", file=sys.stderr)
    prompts.restore(state["prompts"])
    log.truncate_after(step if step else -1)  # a run that begins again at 0 evaluates again, too
    if group.reference_group is not None:
        _restore_reference_group(group, step, config.reference.update_interval_steps)
    return step


def _restore_reference_group(group: WorkerGroup, step: int, interval: int | None) -> None:
    """No checkpoint holds a reference in a group of its own: it is as launched, or equals the policy of this step."""
    if interval is None or step < interval:
        return
    if step % interval:
        raise CheckpointError(
            f"the reference of step {step} is that of step {step - step % interval}, which is in no checkpoint",
            field="reference.placement",
            hint="make checkpoint.interval_steps a multiple of reference.update_interval_steps, or use "
            "reference.placement=colocated",
        )
    group.update_ref()


def _save(step: int, group: WorkerGroup, loop: RolloutLoop | SupervisedLoop, folder: RunFolder) -> None:
    """A checkpoint from which `_resume` goes on; what the engines draw follows from run.seed and the step alone."""
    group.save(step, {"step": step, "prompts": loop.prompts.state()})
    folder.forget_old_batches()


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


@contextmanager
def _timed(seconds: Metrics, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def _means(scores: Sequence[Metrics], prefix: str) -> Metrics:
    return {f"{prefix}{key}": sum(score[key] for score in scores) / len(scores) for key in scores[0]}
