"""The driver's loop: generate, reward, train, update weights, evaluate, save. It knows no ranks and no retries."""

from __future__ import annotations

import time
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
from actors.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout import RolloutBatch

Metrics = dict[str, float]


def train(config: RunConfig) -> str:
    """Runs what the settings describe, from start or checkpoint to the last step; returns a closing line to quote.

    Leaves in `run.dir`: metrics.jsonl, tensorboard/, curves.png, and checkpoints/ where they are asked for.

    Raises:
        SlimeError: any typed error; worker processes are ended before it travels on.
    """
    config.check_ready_to_train()
    assert config.run.dir is not None and config.run.steps is not None
    with ExitStack() as stack:
        group = WorkerGroup.launch(config)
        stack.callback(group.shutdown)
        loop: RolloutLoop | SupervisedLoop
        if config.algorithm == "sft":
            loop = SupervisedLoop(group.config, group)  # where mesh.dp is a number
        else:
            engines = EnginePool.launch(config)
            stack.callback(engines.shutdown)
            loop = RolloutLoop(group.config, group, engines)
        log = stack.enter_context(MetricsLog(config.run.dir, wandb_project=config.run.wandb_project))
        start = _resume(config, group, loop.prompts, log)
        table = ProgressTable(loop.columns, total_steps=config.run.steps)
        first = loop.before_training(evaluates=start == 0)
        if first:
            log.write(0, first)
            table.write(0, first)
        for step in range(start, config.run.steps):
            began = time.perf_counter()
            metrics = loop.step(step)
            metrics["seconds/step"] = time.perf_counter() - began
            log.write(step + 1, metrics)
            table.write(step + 1, metrics)
            interval = config.checkpoint.interval_steps
            if interval is not None and (step + 1) % interval == 0:
                group.save(step + 1, {"step": step + 1, "prompts": loop.prompts.state()})
        if config.run.export_dir is not None:
            group.export_hf(config.run.export_dir)
        rows = read_metrics(config.run.dir)
        draw_curves(rows, config.run.dir / "curves.png", title=f"{config.run.dir.name}: {config.algorithm}")
        return loop.summary(rows)


class RolloutLoop:
    """One step: sample from the engines, reward, train, send the weights back."""

    columns = GRPO_COLUMNS

    def __init__(self, config: RunConfig, group: WorkerGroup, engines: EnginePool) -> None:
        assert config.data.train is not None and config.rollout.reward is not None
        self._config = config
        self._group = group
        self._engines = engines
        self._reward: RewardFunction = load_reward(config.rollout.reward)
        self.prompts = PromptStream(read_jsonl(config.data.train, field="data.train"), config.run.seed)
        heldout = config.data.heldout
        self._heldout: list[Record] = read_jsonl(heldout, field="data.heldout") if heldout else []

    def before_training(self, *, evaluates: bool) -> Metrics:
        """First weights to the engines; held-out metrics of the policy as it is, if asked for."""
        self._group.update_weights(self._engines.receivers)
        return self._evaluate(0) if evaluates else {}

    def step(self, step: int) -> Metrics:
        """One rollout batch, trained on; held-out metrics where they are due."""
        seconds: Metrics = {}
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
        with _timed(seconds, "train"):
            metrics = self._group.train_step(batch)
        with _timed(seconds, "sync"):
            report = self._group.update_weights(self._engines.receivers)
        metrics |= _means(scores, "rollout/")
        metrics["rollout/response_length"] = sum(sample.response_length for sample in samples) / len(samples)
        metrics["rollout/truncated"] = sum(not sample.finished for sample in samples) / len(samples)
        metrics["weight_version"] = float(report.version)
        interval = self._config.evaluation.interval_steps
        is_last = step + 1 == self._config.run.steps
        if interval is not None and (is_last or (step + 1) % interval == 0):
            with _timed(seconds, "evaluate"):
                metrics |= self._evaluate(step + 1)
        return metrics | {f"seconds/{name}": value for name, value in seconds.items()}

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
    prompts.restore(state["prompts"])
    log.truncate_after(state["step"])
    return int(state["step"])


@contextmanager
def _timed(seconds: Metrics, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def _means(scores: Sequence[Metrics], prefix: str) -> Metrics:
    return {f"{prefix}{key}": sum(score[key] for score in scores) / len(scores) for key in scores[0]}
