"""Runs the training loop of `slimefsdp train` on the driver: generate, reward, train, update weights, evaluate, save.

If a run on Ray writes checkpoints, its ranks and engines are replaced when they are lost; the loop does not notice.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from actors.engines.pool import EnginePool
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.model_folders import with_model_folders
from actors.rollout.collect import AheadCollector, Collector, timed
from actors.rollout.evaluation import Evaluator
from actors.rollout.groups import Metrics
from actors.rollout.prompt_files import Prompts, read_prompts, with_data_commits, with_steps_left, without_overlong
from actors.rollout.prompts import PromptStream
from actors.rollout.record_sets import record_sets, warn_of_shared_prompts
from actors.rollout.user_code_workers import UserCodeWorkers
from actors.run_dir import RecordedBatches, RunFolder
from actors.signals import Interrupts
from actors.startup import stage, waiting
from actors.supervised_loops import DpoLoop, SftLoop
from actors.torchrun import TorchrunGroup
from actors.workers.worker_group import WorkerGroup
from slimefsdp.algorithms.registry import GROUPED
from slimefsdp.config import RunConfig
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError, Interrupted
from slimefsdp.monitoring.curves import CURVES, RunCurves
from slimefsdp.monitoring.metrics_log import MetricsLog, read_metrics
from slimefsdp.monitoring.progress import GRPO_COLUMNS, Column, Progress, with_held_out
from slimefsdp.results import Health

Group = WorkerGroup | SupervisedGroup | TorchrunGroup
_CLOSE_S = 10.0  # limit in seconds on a wait for the thread that collects batches ahead
_CHECKED_PROMPTS = 4  # number of prompts for checking the log-probs of engines that do not run the trainer's code


def train(
    config: RunConfig,
    interrupts: Interrupts | None = None,
    prompts: Prompts | None = None,
    launch: Callable[[RunConfig], Group] | None = None,
) -> str:
    """Runs all steps, from the start or a checkpoint, and returns a summary of the run in one line.

    docs/checkpoints.md lists the files that a run leaves in `run.dir`.

    Args:
        interrupts: tells whether the run was asked to end before the last step.
        prompts: the records, with their lengths checked; None means that this function reads and checks them.
        launch: starts the ranks; None means that Ray starts them.

    Raises:
        Interrupted: the run was asked to end; `run.dir` has a checkpoint of the last completed step.
        SlimeError: any typed error; all processes have been ended.
    """
    interrupts = interrupts or Interrupts()
    check_ready_to_train(config)
    config = with_data_commits(with_model_folders(config))
    if prompts is None:
        prompts = without_overlong(config, read_prompts(config))
        warn_of_shared_prompts(record_sets(config.data, prompts.heldout, prompts.train))
    config = with_steps_left(config, prompts)
    assert config.run.steps is not None
    if launch is None:  # a supervisor needs checkpoints to replace lost ranks
        launch = (WorkerGroup if config.checkpoint.interval_steps is None else SupervisedGroup).launch
    with ExitStack() as stack:
        run = Run(config, interrupts, prompts, launch, stack)
        for step in range(run.begin(), config.run.steps):
            run.step(step)
        return run.finish()


class Run:
    """Holds the open resources of a run: its folder, groups of ranks, engines and logs.

    Args:
        launch: starts the ranks.
        stack: closes all resources; processes end before the files that they write are closed.
    """

    def __init__(
        self,
        config: RunConfig,
        interrupts: Interrupts,
        prompts: Prompts,
        launch: Callable[[RunConfig], Group],
        stack: ExitStack,
    ) -> None:
        assert config.run.dir is not None and config.run.steps is not None
        self._config = config
        self._interrupts = interrupts
        self._skipped = prompts.skipped
        self._steps = config.run.steps
        self._keeps = config.checkpoint.interval_steps is not None
        self._folder = stack.enter_context(RunFolder(config.run.dir))
        self._curves = RunCurves(
            config.run.dir, algorithm=config.algorithm_title, heldout_sets=config.data.heldout_sets
        )
        stack.callback(self._curves.draw)  # called however the run ends, after its processes have ended
        self._group = launch(config)
        stack.callback(self._group.shutdown)
        launched = self._group.config  # in which mesh.dp is a number
        self._loop: RolloutLoop | SftLoop
        if not config.has_rollouts:
            self._loop = (SftLoop if config.algorithm == "sft" else DpoLoop)(launched, self._group, prompts)
        else:
            assert not isinstance(self._group, TorchrunGroup)
            host = self._group if config.rollout.placement == "colocated" else None
            engines = EnginePool.launch(launched, host, restarts=self._keeps)
            stack.callback(engines.shutdown)
            engines.check_room(prompts.longest)
            engines.check_room(prompts.longest_heldout, evaluates=True)
            rewards = UserCodeWorkers.launch(config)
            stack.callback(rewards.shutdown)
            recorded = self._folder.batches if self._keeps else None
            self._loop = RolloutLoop(launched, self._group, engines, recorded, prompts, rewards)
            stack.callback(self._loop.close)
        self._log = stack.enter_context(
            MetricsLog(config.run.dir, wandb=_wandb_arguments(launched), resumes=config.checkpoint.resume)
        )

    def begin(self) -> int:
        """Loads or writes the first checkpoint, updates the engines, evaluates a new run; returns the steps done."""
        config = self._config
        start = _resume(config, self._group, self._loop.prompts, self._log)
        # written only now, so that a refused resume does not change the files of the earlier run
        self._folder.write_settings(self._group.config)  # in which mesh.dp is a number
        self._folder.write_start(start)
        self._folder.write_skipped([asdict(record) for record in self._skipped])
        self._progress = Progress(self._loop.columns, total_steps=self._steps)
        if self._keeps and not config.checkpoint.resume:
            with stage("saving the checkpoint of step 0"):
                _save(0, self._group, self._loop, self._folder)
        if first := self._loop.before_training(evaluates=start == 0):
            self._log.write(0, first)
            self._progress.write(0, first)
        self._profiles = ProfiledTables(config)
        self._interrupts.steps_begin(start + 1, self._steps)
        return start

    def step(self, step: int) -> None:
        """Runs one step, logs its metrics, and saves a checkpoint if one is due or the run was asked to end.

        Raises:
            Interrupted: the run was asked to end; the checkpoint of this step is on disk.
        """
        config, done = self._config, step + 1
        began = time.perf_counter()
        metrics = self._loop.step(step)
        if config.reference.update_interval_steps is not None:
            is_due = _is_due(done, config.reference.update_interval_steps)
            if is_due:
                self._group.update_ref()
            metrics["reference_updated"] = float(is_due)
        metrics |= _memory_metrics(self._group)
        metrics["seconds/step"] = time.perf_counter() - began
        self._log.write(done, metrics)
        self._progress.write(done, metrics)
        self._profiles.show_new()
        self._curves.draw_if_due()
        is_last = done == self._steps
        ends_here = self._interrupts.step_done(done) and not is_last
        if ends_here or (self._keeps and (is_last or _is_due(done, config.checkpoint.interval_steps))):
            _save(done, self._group, self._loop, self._folder)
        if ends_here:
            self._loop.settle()
            self._group.finish_save()
            self._interrupts.done()
            raise Interrupted(
                f"the run ended as it was asked to, after step {done} of {self._steps}, with a checkpoint",
                hint="go on with the same command and checkpoint.resume=true",
            )

    def finish(self) -> str:
        """Waits for the last checkpoint, exports the model, and returns a summary of the run in one line."""
        run = self._config.run
        assert run.dir is not None
        if self._keeps:
            self._group.finish_save()
            self._folder.forget_old_batches()
        self._interrupts.done()
        if run.export_dir is not None:
            self._group.export_hf(run.export_dir, self._config.precision.compute_dtype)
            if self._config.lora.rank is not None:
                self._group.export_adapter(run.export_dir / "adapter")
        return self._loop.summary(read_metrics(run.dir))


class RolloutLoop:
    """Runs reinforcement learning: samples, rewards, trains policy and critic, and sends the weights to the engines.

    With rollout.placement=colocated, the engines receive the weights when their turn begins, before they sample. They
    sleep outside of `step` and `before_training`.
    """

    def __init__(
        self,
        config: RunConfig,
        group: Group,
        engines: EnginePool,
        recorded: RecordedBatches | None = None,
        prompts: Prompts | None = None,
        rewards: UserCodeWorkers | None = None,
    ) -> None:
        self._config = config
        self._group = group
        self._engines = engines
        self._collector = Collector(config, engines, recorded, prompts, rewards)
        self._evaluator = Evaluator(config, self._collector)
        self._are_colocated = config.rollout.placement == "colocated"
        self._version = -1  # version of the engines' weights; with colocated engines, of the policy's weights
        self._engines_are_outdated = True
        self._has_warned = False  # whether a warning was given that a step had no differing rewards
        self._ahead: AheadCollector | None = None  # set in the first step, if rollout.max_staleness is set
        self._trained_prompts: dict[str, Any] | None = None  # with `_ahead`: state of `prompts` after the newest batch

    @property
    def columns(self) -> tuple[Column, ...]:
        """Returns the columns of the progress lines, including one for each held-out set."""
        return with_held_out(GRPO_COLUMNS, self._evaluator.columns())

    @property
    def prompts(self) -> PromptStream:
        return self._collector.prompts

    def prompts_state(self) -> dict[str, Any]:
        """Returns the state of `prompts` after the last trained batch; collecting ahead may have moved `prompts` on."""
        return self.prompts.state() if self._trained_prompts is None else self._trained_prompts

    def settle(self) -> None:
        """Waits until a batch that is being collected ahead is recorded, so that a resumed run can use it."""
        if self._ahead is not None:
            self._ahead.settle(_CLOSE_S)

    def close(self) -> None:
        """Ends the thread that collects batches ahead, if there is one, and the engines that this thread uses."""
        if self._ahead is not None:
            self._engines.shutdown()
            self._ahead.close(_CLOSE_S)

    def before_training(self, *, evaluates: bool) -> Metrics:
        """Sends the first weights to the engines; if `evaluates`, evaluates the policy and returns the metrics."""
        self.rest_critic()
        with stage("sending the first weights to the engines"):
            self._update_engines()
        if self._config.rollout.engine != "embedded":  # embedded engines run the trainer's code
            with stage("comparing log-probs of engines and trainer", is_short=True):
                self._engines.check_log_probs(self._group, self._collector.first_prompts(_CHECKED_PROMPTS))
        metrics: Metrics = {}
        if evaluates and self._config.evaluation.interval_steps is not None:
            with stage("evaluating before the first step", self._evaluator.progress):
                metrics = self._evaluator.evaluate(0, self._version)
            self._show_example()
        if self._are_colocated:
            self._engines.sleep()
        return metrics

    def step(self, step: int) -> Metrics:
        """Collects one rollout batch and trains on it; evaluates if an evaluation is due.

        If nothing in the batch can be trained on, the weights stay unchanged.
        """
        seconds: Metrics = {"generate": 0.0, "reward": 0.0, "train": 0.0, "sync": 0.0}
        seconds |= {"turn": 0.0} if self._are_colocated else {}
        with waiting(f"step {step + 1}", self._collector.progress):
            batch, scores = self._collected(step, seconds)
        if self._are_colocated:
            self._engines.end_turn(seconds, wakes_trainer=batch is not None)
        metrics: Metrics = {"updates": 0.0}
        if batch is not None:
            metrics |= self._staleness(batch)
            metrics |= self._trained(step, batch, seconds)
        self._warn_if_rewards_are_equal(step, metrics)
        self._engines_are_outdated |= metrics["updates"] > 0
        interval = self._config.evaluation.interval_steps
        is_last = step + 1 == self._config.run.steps
        evaluates = interval is not None and (is_last or _is_due(step + 1, interval))
        if self._are_colocated:
            self._version += int(metrics["updates"])
        # a resumed run starts its engines with the checkpoint's weights, so this run updates its engines then, too
        elif self._engines_are_outdated and (
            evaluates
            or _is_due(step + 1, self._config.rollout.sync_interval_steps)
            or _is_due(step + 1, self._config.checkpoint.interval_steps)
        ):
            with timed(seconds, "sync"):
                self._update_engines()
        if self._ahead is not None:
            self._ahead.step_done()
        metrics |= scores
        metrics["weight_version"] = float(self._version)
        if evaluates:
            metrics |= self._evaluated(step + 1, seconds)
        return metrics | {f"seconds/{name}": value for name, value in seconds.items()}

    def _warn_if_rewards_are_equal(self, step: int, metrics: Metrics) -> None:
        """Warns once that the rewards of a step had no effect, although other terms of the loss were trained."""
        rewards_differ = self._config.estimator not in GROUPED or metrics.get("zero_variance_groups") != 1.0
        if self._has_warned or rewards_differ or metrics["updates"] == 0:
            return
        self._has_warned = True
        reason = "no prompt has responses with differing rewards, so the rewards teach nothing in it (said once)"
        print(f"step {step + 1}: {reason}", file=sys.stderr, flush=True)

    def _evaluated(self, done: int, seconds: Metrics) -> Metrics:
        """Evaluates the policy after `done` steps and returns the metrics; colocated engines get a turn for this."""
        if self._are_colocated:
            self._engines.take_turn(seconds)
        with timed(seconds, "evaluate"):
            metrics = self._evaluator.evaluate(done, None if self._config.rollout.max_staleness else self._version)
        self._show_example()
        if self._are_colocated:
            self._engines.end_turn(seconds, wakes_trainer=False)
        return metrics

    def _show_example(self) -> None:
        if self._evaluator.example:
            print(self._evaluator.example, flush=True)

    def _collected(self, step: int, seconds: Metrics) -> tuple[RolloutBatch | None, Metrics]:
        """Returns the batch of a step and its metrics; with rollout.max_staleness, a thread collects batches ahead."""
        settings = self._config.rollout
        if not settings.max_staleness:
            return self._collector.collect(step, self._version, seconds)
        if self._ahead is None:
            assert self._config.run.steps is not None
            self._ahead = AheadCollector(
                self._collector, first_step=step, steps=self._config.run.steps, max_staleness=settings.max_staleness
            )
        with timed(seconds, "wait"):
            collected = self._ahead.next()
        assert collected.step == step
        seconds |= collected.seconds
        self._trained_prompts = collected.prompts
        return collected.batch, collected.metrics

    def _staleness(self, batch: RolloutBatch) -> Metrics:
        """Returns the age, in updates, of the weights that sampled the batch; empty without rollout.max_staleness."""
        if not self._config.rollout.max_staleness:
            return {}
        versions = batch.weight_versions
        ages = self._version - np.asarray(batch.weight_version if versions is None else versions)
        return {"rollout/staleness": float(ages.mean()), "rollout/staleness_max": float(ages.max())}

    def _trained(self, step: int, batch: RolloutBatch, seconds: Metrics) -> Metrics:
        """Trains the policy and, under PPO, the critic; returns their metrics.

        In the first critic.warmup_steps steps of PPO, only the critic is trained.
        """
        group, critic, settings = self._group, self._group.critic, self._config.critic
        if critic is None:
            with timed(seconds, "train"):
                return dict(group.train_step(batch))
        metrics: Metrics = {}
        with timed(seconds, "critic"):
            if self._config.has_kl_in_reward:
                batch = self._with_log_probs(batch)
            batch = batch.replace(values=critic.compute_values(batch))
            self.rest_critic()
        is_policy_trained = step >= settings.warmup_steps
        if is_policy_trained:
            with timed(seconds, "train"):
                metrics |= group.train_step(batch)
        # the critic trains after the policy, since the policy's step may change the KL coefficient
        gae_lambda = None if is_policy_trained else 1.0
        coefficient = metrics.get("kl_coefficient") if self._config.has_kl_in_reward else None
        with timed(seconds, "critic"):
            of_critic = critic.train_step(batch, gae_lambda=gae_lambda, kl_coefficient=coefficient)
            self.rest_critic()
        return metrics | {f"critic/{name}": value for name, value in of_critic.items()}

    def _with_log_probs(self, batch: RolloutBatch) -> RolloutBatch:
        """Adds the log-probs of the policy (before its update) and the reference, from which both roles get the KL."""
        group = self._group
        if self._config.loss.old_log_probs == "rollout":
            batch = batch.replace(old_log_probs=batch.rollout_log_probs)
        else:
            batch = group.compute_log_probs(batch).as_old(batch)
        return batch.replace(ref_log_probs=(group.reference_group or group).compute_log_probs(batch, "ref").log_probs)

    def _update_engines(self) -> None:
        """Sends the policy's weights to the engines; rollout.on_update decides what happens to unfinished samples."""
        on_update = self._config.rollout.on_update
        with self._collector.engines_at_rest() if on_update == "wait" else nullcontext():
            self._version = self._engines.update_from(self._group, aborts=on_update == "abort")
        self._engines_are_outdated = False

    def rest_critic(self) -> None:
        if self._group.critic is not None and self._config.critic.is_colocated:
            self._group.critic.sleep()

    def summary(self, rows: Sequence[dict[str, Any]]) -> str:
        config = self._config
        seconds = sum(row.get("seconds/step") or 0.0 for row in rows)
        rewards = [reward for row in rows if (reward := row.get("rollout/reward")) is not None] or [0.0]
        result = self._evaluator.summary(rows) or f"reward {rewards[0]:.3f} -> {rewards[-1]:.3f}"
        num_idle = sum(row.get("updates") == 0 and "critic/updates" not in row for row in rows)
        idle = f" ({num_idle} of them without an update)" if num_idle else ""
        return (
            f"{config.algorithm_title} on {config.ranks} FSDP2 rank{'s' * (config.ranks != 1)}: {result} "
            f"in {config.run.steps} steps{idle}, {seconds:.0f} s; curves in {Path(str(config.run.dir)) / CURVES}"
            + (f"; model in {config.run.export_dir}" if config.run.export_dir else "")
        )


def _wandb_arguments(config: RunConfig) -> dict[str, Any] | None:
    """Returns the arguments of `wandb.init`; None if the settings name no project."""
    run = config.run
    if run.wandb_project is None:
        return None
    assert run.dir is not None
    # wandb itself reads WANDB_RUN_GROUP, but it ignores WANDB_NAME when its argument `name` is given
    name = os.environ.get("WANDB_NAME") or run.dir.resolve().name
    return {"project": run.wandb_project, "name": name, "config": config.model_dump(mode="json")}


def _resume(config: RunConfig, group: Group, prompts: PromptStream, log: MetricsLog) -> int:
    """Loads the newest checkpoint of a resumed run; returns how many steps are done."""
    if not config.checkpoint.resume:
        return 0
    with stage("loading the checkpoint"):
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
    restored = group.restored()
    assert restored is not None
    for reason in restored.skipped:
        print(f"checkpoint passed over: {reason}", file=sys.stderr)
    for difference in restored.differences:
        print(f"resuming: {difference}", file=sys.stderr)
    print(f"resuming at step {step} of {config.run.steps}, from {restored.path}", file=sys.stderr)
    prompts.restore(state["prompts"], allow_changed=config.data.allow_changed)
    log.truncate_after(step if step else -1)  # a run that starts at step 0 evaluates again
    return step


class ProfiledTables:
    """Prints the profiler's tables of the updates in `profile.updates`, if the driver shares `run.dir` with rank 0."""

    def __init__(self, config: RunConfig) -> None:
        folder = Path(str(config.run.dir)) / "profile"
        self._folders = [folder, folder / "critic"] if config.profile.updates else []
        self._shown = self._tables()  # tables of earlier starts are not printed again

    def show_new(self) -> None:
        """Prints the tables that were written since the last call."""
        tables = self._tables()
        for file in [file for file, written_at in tables.items() if self._shown.get(file) != written_at]:
            print(file.read_text(), end="", file=sys.stderr, flush=True)
        self._shown = tables

    def _tables(self) -> dict[Path, int]:
        files = [file for folder in self._folders for file in sorted(folder.glob("update_*.txt"))]
        return {file: file.stat().st_mtime_ns for file in files}


def _memory_metrics(group: Group) -> Metrics:
    """Returns the most memory that any rank has allocated, now and at its peak; empty if no rank answers."""
    answers = [health for health in group.health() if isinstance(health, Health)]
    if not answers:
        return {}
    return {
        "memory/allocated_bytes": float(max(health.allocated_bytes for health in answers)),
        "memory/peak_bytes": float(max(health.peak_bytes for health in answers)),
    }


def _save(step: int, group: Group, loop: RolloutLoop | SftLoop, folder: RunFolder) -> None:
    """Writes a checkpoint for `_resume`. Sampling has no state: samples follow from run.seed, step and weights."""
    group.save(step, {"step": step, "prompts": loop.prompts_state()})
    if isinstance(loop, RolloutLoop):
        loop.rest_critic()
    folder.forget_old_batches()


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
