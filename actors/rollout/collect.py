"""Collects batches: draws responses to prompts, rewards and filters them, and records the batch of each step.

The batch of a step depends only on the settings, `run.seed`, the step and the weights, so that a step can be repeated.
A repeated step uses its recorded batch; if none was recorded, its responses are drawn again.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from actors.engines.pool import EnginePool
from actors.rollout.episodes import EpisodeRunner, Progress
from actors.rollout.groups import (
    Filter,
    Group,
    Metrics,
    ScoredSample,
    batch_of,
    length_penalty,
    load_filter,
    metrics_of,
)
from actors.rollout.prompt_files import Prompts, read_prompts
from actors.rollout.prompts import PromptStream
from actors.rollout.records import Record
from actors.rollout.sample_files import write_step_samples
from actors.rollout.user_code_workers import UserCodeWorkers
from actors.run_dir import SAMPLES, RecordedBatches
from slimefsdp.checkpoint.manifest import differences
from slimefsdp.config import RunConfig
from slimefsdp.config.earlier import with_present_names
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, EngineError, SlimeError

# one of these numbers follows run.seed in the seed of each draw, so that different purposes never share a seed
_TRAINING, EVALUATION, _BASELINE = 1, 2, 3
# settings on which a recorded batch depends, through the samples or through the weights that sampled them
_DECIDING: Any = {
    "algorithm": True, "run": {"seed"}, "data": {"train", "chat_template_kwargs"}, "rollout": True,
    "environment": {"arguments", "max_turns", "max_tokens"}, "batch": {"samples_per_update"},
    "advantage": True, "loss": True, "correction": True, "critic": True, "optim": True, "precision": True,
    "reference": {"path", "update_interval_steps"},
}  # fmt: skip
# settings of `rollout` that do not change a sample: where it is drawn and rewarded, and how the weights were sent
_NOT_DECIDING = {
    *("engines", "placement", "engine_python", "engine_args", "engine_urls", "gpus_per_engine"),
    *("engine_logprob_bound", "weight_transport", "weight_checksums"),
    *("reward_workers", "reward_timeout_s", "reward_concurrency"),
}

MAX_FAILED_STEPS = 3  # after this many steps in a row in which every group had a failure, the run ends
SHOWN_GROUPS = 2  # number of groups of a step that are written to run.dir/samples
_LOOK_S = 1.0  # longest single wait for engines; signals are handled between two waits


class Collector:
    """Collects the batches of a run, and draws the samples for `actors.rollout.evaluation`.

    Args:
        recorded: the store of recorded batches, for a run that may have to repeat a step.
        prompts: the prompts to draw responses for; None means all records of the files, whatever their length.
        rewards: runs the reward function or the environments; None means that this process calls the reward function.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        recorded: RecordedBatches | None = None,
        prompts: Prompts | None = None,
        rewards: UserCodeWorkers | None = None,
    ) -> None:
        self._config = config
        self._engines = engines
        self._recorded_batches = recorded
        self._episodes = EpisodeRunner(config, engines, rewards or UserCodeWorkers(config, in_driver=True))
        self._filter: Filter | None = load_filter(config.rollout.filter) if config.rollout.filter else None
        prompts = prompts or read_prompts(config)
        self.prompts = PromptStream(prompts.train, config.run.seed, lengths=prompts.train_lengths)
        self._train = prompts.train
        self._follows_records = True  # whether every batch so far was recorded by the run that is being resumed
        self._gate = threading.Condition()
        self._drawing = 0  # number of draws in progress
        self._closed = 0  # number of open `engines_at_rest` blocks, which keep new draws from starting
        self._failed_steps = 0  # number of steps in a row in which every group had a failure
        self._before = Progress()  # the counts at the beginning of the current step
        self.heldout = prompts.heldout

    def first_prompts(self, count: int) -> list[Any]:
        """Returns the first prompts of the training file without taking them."""
        return [record["prompt"] for record in self._train[:count]]

    @property
    def samples_drawn(self) -> int:
        """Returns the number of responses so far; with an environment, the number of episodes that have ended."""
        return self._episodes.done

    def progress(self) -> str:
        """Returns a text about the progress of the current step's collection."""
        return self._episodes.progress(self._before)

    def collect(self, step: int, version: int | None, seconds: Metrics) -> tuple[RolloutBatch | None, Metrics]:
        """Returns the batch of a step and the metrics of its samples; the batch is None if no sample can be trained on.

        If an earlier process recorded the batch of this step, that batch is returned, without asking the engines.

        Args:
            version: the weight version of the engines, which a recorded batch must have, too. None (used with
                `max_staleness`) means that a recorded batch is valid if all batches before it were recorded batches.
            seconds: the times of drawing and rewarding are added to the entries `generate` and `reward`. With colocated
                engines, the times of switching devices and of sending weights are added to `turn` and `sync`.
        """
        self._before = self._episodes.counts
        recorded = self._recorded(step, version)
        if recorded is not None:
            return recorded
        self._follows_records = False
        with self.function_named(step + 1):
            batch, metrics = self._draw(step, seconds)
        if batch is not None and version is not None:
            self.check_version(batch.weight_version, version)
        if batch is not None and self._recorded_batches is not None:
            notes = {"metrics": metrics, "prompts": self.prompts.state(), "settings": self._deciding_settings()}
            self._recorded_batches.write(step, batch, notes)
        return batch, metrics

    def check_version(self, drawn: int | None, sent: int) -> None:
        """Checks that the engines drew from the weights that they were sent.

        With a sync interval above one, an engine that replaces a lost engine may have been sent newer weights.

        Args:
            drawn: the oldest version that the samples report.
            sent: the version that the engines were sent.

        Raises:
            EngineError: the versions differ in another way.
        """
        may_be_newer = self._config.rollout.sync_interval_steps > 1
        if drawn is None or drawn < sent or (drawn > sent and not may_be_newer):
            raise EngineError(
                f"engines sampled from weights of version {drawn}, and have been sent version {sent}",
                field="rollout.engine",
                hint="correct the engine: a sample names the version of its last commit",
            )

    @contextmanager
    def function_named(self, step: int) -> Iterator[None]:
        """Adds the step, and how to continue the run, to errors of the user's code that the block raises."""
        try:
            yield
        except BatchError as error:
            if error.field in ("rollout.reward", "rollout.filter", "rollout.environment"):
                error.call = f"step {step}"
                error.hint = f"{error.hint}, and " + (
                    "go on with the same command and checkpoint.resume=true"
                    if self._recorded_batches is not None
                    else "begin the run again; one with checkpoint.interval_steps could be gone on with"
                )
            raise

    @contextmanager
    def engines_at_rest(self) -> Iterator[None]:
        """Waits until no engine draws samples for this collector; no draw starts before the end of the block."""
        with self._gate:
            self._closed += 1
            while self._drawing:
                self._gate.wait(_LOOK_S)
        try:
            yield
        finally:
            with self._gate:
                self._closed -= 1
                self._gate.notify_all()

    @contextmanager
    def _drawing_samples(self, seconds: Metrics) -> Iterator[None]:
        """Marks a draw as in progress; waits while `engines_at_rest` is active. `seconds` is as in `collect`."""
        with self._gate:
            while self._closed:
                self._gate.wait(_LOOK_S)
            self._drawing += 1
        try:
            if self._config.rollout.placement == "colocated":
                self._engines.take_turn(seconds)
            yield
        finally:
            with self._gate:
                self._drawing -= 1
                self._gate.notify_all()

    def _recorded(self, step: int, version: int | None) -> tuple[RolloutBatch, Metrics] | None:
        """Returns the recorded batch of this step; None, with a warning, if sampling now would give another batch."""
        if self._recorded_batches is None or not self._config.checkpoint.resume:
            return None
        record = self._recorded_batches.read(step)
        if record is None:
            return None
        batch, notes = record
        has_same_records = self.prompts.has_records_of(notes["prompts"])
        has_same_weights = self._follows_records if version is None else batch.weight_version == version
        # max_pack_tokens can be the only limit on an episode's length, and may be smaller than when it was recorded
        fits_packs = int(batch.lengths.max()) <= self._config.max_pack_tokens
        if not (has_same_records and has_same_weights and fits_packs and self._is_of_these_settings(notes["settings"])):
            warnings.warn(
                f"recorded batch of step {step} passed over, it is sampled anew: it is of other weights, settings or "
                "prompts, or has a sample that is longer than a pack is now",
                stacklevel=3,
            )
            return None
        self.prompts.restore(notes["prompts"])
        return batch, notes["metrics"]

    def _is_of_these_settings(self, recorded: Mapping[str, Any]) -> bool:
        """Returns whether none of the recorded settings on which a batch depends differs from the current settings."""
        earlier = with_present_names(recorded)
        for name, current in self._deciding_settings().items():
            previous = earlier.get(name)
            if isinstance(current, dict) and isinstance(previous, dict):
                if differences(previous, current):
                    return False
            elif current != previous:
                return False
        return True

    def _deciding_settings(self) -> dict[str, Any]:
        return self._config.model_dump(mode="json", include=_DECIDING, exclude={"rollout": _NOT_DECIDING})

    def _draw(self, step: int, seconds: Metrics) -> tuple[RolloutBatch | None, Metrics]:
        """Draws in rounds until enough groups pass the filter; drops surplus groups of the last round."""
        settings = self._config.rollout
        limits = settings.limits_at(step + 1)
        drawn: list[Group] = []
        kept: list[Group] = []
        rounds = version = 0
        failures: list[SlimeError] = []
        while rounds < settings.max_rounds and len(kept) < settings.prompts_per_step:
            records = self.prompts.take(settings.prompts_per_step, limits.prompt_tokens)
            # the first round has the seeds of a run without a filter, and draws the same samples
            purpose = (_TRAINING, step, rounds) if rounds else (_TRAINING, step)
            version, groups = self.scored_groups(
                records, settings.samples_per_prompt, purpose, seconds, most=limits.new_tokens, failures=failures
            )
            drawn += groups
            kept += [
                group
                for group in groups
                if not group.failures and (self._filter is None or self._filter(group.record, tuple(group.samples)))
            ]
            rounds += 1
        whole = [group for group in drawn if not group.failures]
        self._failed_steps = 0 if whole else self._failed_steps + 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise failures[0]
        metrics = metrics_of(self._config, drawn, limits)
        if not whole:
            return None, metrics
        if self._filter is not None:
            metrics["rollout/groups_dropped"] = 1 - len(kept) / len(whole)
            metrics["rollout/rounds"] = float(rounds)
        kept = kept[: settings.prompts_per_step]
        self._show(step, drawn, kept)
        if not any(group.trains(settings.mask_truncated) for group in kept):
            return None, metrics
        baselines: list[float] | None = None
        if self._config.estimator == "remax":
            kept, baselines = self._with_greedy_rewards(step, kept, limits.new_tokens, seconds)
            if not kept:
                return None, metrics
            metrics["rollout/baseline_reward"] = sum(baselines) / len(baselines)
        return batch_of(self._config, kept, baselines, version), metrics

    def _show(self, step: int, drawn: Sequence[Group], kept: Sequence[Group]) -> None:
        run_dir = self._config.run.dir
        if run_dir is None:
            return
        trained = {id(group) for group in kept}
        shown = []
        for group in drawn[:SHOWN_GROUPS]:
            is_trained = id(group) in trained
            reason = "" if is_trained else "a reward failed" if group.failures else "rollout.filter, or surplus"
            shown.append((group.record, group.samples, reason))
        write_step_samples(run_dir / SAMPLES, step + 1, shown)

    def scored_groups(
        self,
        records: Sequence[Record],
        per_prompt: int,
        purpose: Sequence[int],
        seconds: Metrics,
        greedy: bool = False,
        environment_seeds: Sequence[int] | None = None,
        most: int | None = None,
        failures: list[SlimeError] | None = None,
    ) -> tuple[int, list[Group]]:
        """Draws and scores `per_prompt` responses to each record; returns the weight version and one group per record.

        Args:
            purpose: the numbers that follow run.seed in the seeds of the draws.
            seconds: as in `collect`.
            greedy: whether responses are greedy.
            environment_seeds: one seed for each record; None means that the seeds are derived from `purpose`.
            most: limit on the tokens of a response; None means the limit of the settings.
            failures: a list to which skipped failures are added; all groups may then have failures. With None, at least
                one group must be without failures.
        """
        evaluates = purpose[0] == EVALUATION
        most = most or self._config.sampling(evaluates=evaluates).max_new_tokens
        seed = (self._config.run.seed, *purpose)
        if environment_seeds is None:
            environment_seeds = [self._environment_seed(purpose, index) for index in range(len(records))]
        drawn, outcomes = self._episodes.run(
            records,
            per_prompt,
            seed,
            environment_seeds,
            seconds,
            drawing=self._drawing_samples,
            max_new_tokens=most,
            greedy=greedy,
            evaluates=evaluates,
            may_mix=self._config.rollout.max_staleness > 0,
        )
        groups = [
            Group(record, [], environment_seed)
            for record, environment_seed in zip(records, environment_seeds, strict=True)
        ]
        needs_whole = failures is None
        errors: list[SlimeError] = []
        for (index, _), outcome in sorted(outcomes.items()):
            group = groups[index]
            if isinstance(outcome, SlimeError):
                errors.append(outcome)
                group.failures += 1
                continue
            sample, scores = outcome
            reward = scores["reward"] - length_penalty(self._config, sample.response_length, most)
            group.samples.append(ScoredSample(sample, scores, reward))
        if errors:
            if not self._config.skips_failures or (needs_whole and all(group.failures for group in groups)):
                raise errors[0]
            lost = sum(group.failures > 0 for group in groups)
            words = f"{lost} of {len(groups)} groups are left out, since {len(errors)} rewards failed; the first"
            warnings.warn(f"{words}: {errors[0].message}", stacklevel=2)
        if failures is not None:
            failures += errors
        return drawn, groups

    def _environment_seed(self, purpose: Sequence[int], index: int) -> int:
        """Returns the seed of a record's episodes, which is the same in every evaluation."""
        numbers = purpose[:1] if purpose[0] == EVALUATION else purpose
        sequence = np.random.SeedSequence((self._config.run.seed, *numbers, index))
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _with_greedy_rewards(
        self, step: int, kept: Sequence[Group], most: int, seconds: Metrics
    ) -> tuple[list[Group], list[float]]:
        """Returns groups, and for each group ReMax's baseline, the reward of a greedy response to the group's prompt.

        A group is left out if the reward of its greedy response failed.
        """
        records = [group.record for group in kept]
        seeds = [group.environment_seed for group in kept]
        _, groups = self.scored_groups(records, 1, (_BASELINE, step), seconds, True, seeds, most)
        pairs = [
            (sampled, greedy.samples[0].reward) for sampled, greedy in zip(kept, groups, strict=True) if greedy.samples
        ]
        return [sampled for sampled, _ in pairs], [reward for _, reward in pairs]


@contextmanager
def timed(seconds: Metrics, name: str) -> Iterator[None]:
    """Adds the time of the block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Collected:
    """Holds the batch of one step, and the metrics and times of its collection."""

    step: int
    batch: RolloutBatch | None
    metrics: Metrics
    seconds: Metrics
    prompts: dict[str, Any]  # the position in the stream of prompts after this batch


class AheadCollector:
    """Collects the batches of coming steps in a thread, in order, while the loop trains on earlier batches.

    The collection of a step's batch begins when the batch of the previous step is complete, and the engines' weights
    are at most `max_staleness` steps older than the step.

    Args:
        first_step: the first step to collect; at the start, the engines have the weights of this step.
        steps: the number of steps of the whole run.
    """

    def __init__(self, collector: Collector, *, first_step: int, steps: int, max_staleness: int) -> None:
        self._collector = collector
        self._allowed = threading.Semaphore(max_staleness + 1)  # number of collections that may begin now
        self._ready: queue.Queue[Collected | BaseException | None] = queue.Queue()  # None follows the last step
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, args=(first_step, steps), name="collector", daemon=True)
        self._thread.start()

    def next(self) -> Collected:
        """Waits for the batch of the next step and returns it.

        Raises:
            SlimeError: the error with which the collection failed.
        """
        collected = self._ready.get()
        assert collected is not None, "every step was collected"
        if isinstance(collected, BaseException):
            self._ready.put(collected)  # for the next call
            raise collected
        return collected

    def step_done(self) -> None:
        """Allows the collection of one more batch; called when the engines have the weights of the next step."""
        self._allowed.release()

    def settle(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` until the next batch is collected and recorded, so that a resumed run can use it."""
        with suppress(queue.Empty):
            self._ready.get(timeout=timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stops collecting; waits up to `timeout_s` for a running collection, which fails once engines have ended."""
        self._is_closed = True
        self._allowed.release()
        self._thread.join(timeout_s)

    def _run(self, first_step: int, steps: int) -> None:
        try:
            for step in range(first_step, steps):
                self._allowed.acquire()
                if self._is_closed:
                    return
                seconds: Metrics = {"generate": 0.0, "reward": 0.0}
                batch, metrics = self._collector.collect(step, None, seconds)
                self._ready.put(Collected(step, batch, metrics, seconds, self._collector.prompts.state()))
            self._ready.put(None)
        except BaseException as error:  # next() raises it on the caller's thread
            self._ready.put(error)
