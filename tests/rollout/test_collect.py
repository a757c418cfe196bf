"""A batch is what was drawn, scored and kept, in order; a step can be repeated, and never needs anything to be left."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.loop import RolloutLoop, train
from actors.rollout.collect import MAX_FAILED_STEPS, SHOWN_GROUPS, Collector
from actors.rollout.evaluation import Evaluator
from actors.rollout.groups import ScoredSample, overlong_penalty
from actors.rollout.prompts import PromptStream
from actors.rollout.records import Record
from actors.rollout.user_code import EpisodeCall
from actors.rollout.user_code_workers import UserCodeWorkers
from actors.run_dir import RecordedBatches
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, EngineError
from slimefsdp.results import SyncReport
from slimefsdp.training.plan import loss_weights, plan_training
from tests.support.drawing import DrawsAtOnce
from tests.support.refusals import refused

NUM_PROMPTS, PROMPTS_PER_STEP, GROUP, LONGEST = 23, 4, 3, 6
VERSION = 7
Groups = list[tuple[Record, list[SampledResponse]]]


class Engines(DrawsAtOnce):
    """Draws as engines do: all follows from prompts, seed and greediness, and each call is remembered."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], int, tuple[int, ...], bool]] = []
        self.version = VERSION

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        self.version = int(group.update_weights([]).version)
        return self.version

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        samples_per_prompt: int,
        seed: Sequence[int],
        greedy: bool = False,
        max_new_tokens: int = LONGEST,
        evaluates: bool = False,
        each: Callable[[SampledResponse], None] = lambda sample: None,
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        self.calls.append((list(prompts), samples_per_prompt, tuple(seed), greedy))
        rng = np.random.default_rng([0] if greedy else list(seed))
        samples = []
        for index, prompt in enumerate(prompts):
            for number in range(samples_per_prompt):
                length = int(rng.integers(1, max_new_tokens + 1))
                tokens = [5, int(prompt.split()[1]) + 10, *rng.integers(0, 3, length).tolist()]
                finished = length < max_new_tokens or bool(rng.integers(2))
                text = f"{tokens[-1]}{length}"
                samples.append(
                    SampledResponse(index, number, tokens, length, rng.normal(-2, 0.5, length).tolist(), text, finished)
                )
        for place in np.random.default_rng(1).permutation(len(samples)):  # as they end
            each(samples[place])
        return self.version, samples


class NoEngines:
    """Whoever asks these for samples has not used the record."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("an engine was asked")


def last_token(record: Record, response: str, finished: bool) -> dict[str, float]:
    """One in three responses is right, so that some groups of three are all wrong."""
    return {"reward": float(response[0] == "0"), "length": float(response[1:])}


def hopeless(record: Record, response: str, finished: bool) -> dict[str, float]:
    return {"reward": 0.0}


def some_prompts(record: Record, samples: Sequence[ScoredSample]) -> bool:
    return record["number"] % 3 == 1 and len(samples) == GROUP


@pytest.fixture
def make(tmp_path: Path) -> Any:
    records = [{"prompt": f"prompt {number}", "number": number} for number in range(NUM_PROMPTS)]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))

    def config(**sections: dict[str, Any]) -> RunConfig:
        tree: dict[str, Any] = {
            "run": {"seed": 3},
            "model": {"path": "m"},
            "optim": {"total_updates": 100},
            "data": {"train": str(tmp_path / "train.jsonl"), "heldout": str(tmp_path / "heldout.jsonl")},
            "rollout": {
                "prompts_per_step": PROMPTS_PER_STEP, "samples_per_prompt": GROUP, "max_new_tokens": LONGEST,
                "reward": f"{__name__}:last_token",
            },
            "evaluation": {"interval_steps": 1},
        }  # fmt: skip
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        return config_from_dict(tree)

    return config


def collected(config: RunConfig, step: int = 0, engines: Any = None) -> tuple[RolloutBatch | None, dict[str, float]]:
    return Collector(config, engines or Engines()).collect(step, VERSION, {})


def evaluation_of(config: RunConfig, engines: Any, step: int, version: int | None = None) -> dict[str, float]:
    return Evaluator(config, Collector(config, engines)).evaluate(step, version)


def drawn_by_hand(config: RunConfig, seeds: Sequence[Sequence[int]]) -> Groups:
    """What the stand-in engines draw with these seeds, a step's number of prompts each."""
    records = [json.loads(line) for line in Path(str(config.data.train)).read_text().splitlines()]
    stream, groups = PromptStream(records, config.run.seed), []
    for seed in seeds:
        taken = stream.take(PROMPTS_PER_STEP)
        _, samples = Engines().generate([r["prompt"] for r in taken], samples_per_prompt=GROUP, seed=seed)
        groups += [(record, samples[i * GROUP : (i + 1) * GROUP]) for i, record in enumerate(taken)]
    return groups


def is_mixed(group: tuple[Record, list[SampledResponse]]) -> bool:
    return len({sampled.text[0] == "0" for sampled in group[1]}) == 2


def assert_holds(batch: RolloutBatch | None, groups: Groups) -> None:
    """The batch is these groups, in their order, and nothing else."""
    assert batch is not None and batch.group_ids is not None and batch.rollout_log_probs is not None
    samples = [sampled for _, group in groups for sampled in group]
    assert batch.tokens.tolist() == [token for sampled in samples for token in sampled.tokens]
    assert batch.response_lengths.tolist() == [sampled.response_length for sampled in samples]
    expected = np.array([p for sampled in samples for p in sampled.log_probs], dtype=np.float32)
    np.testing.assert_array_equal(batch.rollout_log_probs, expected)
    assert batch.group_ids.tolist() == [number for number in range(len(groups)) for _ in range(GROUP)]
    assert batch.weight_version == VERSION and batch.temperature == 1.0


def test_without_a_filter_a_batch_is_all_that_was_drawn(make: Any) -> None:
    config = make()
    batch, metrics = collected(config, step=5)
    groups = drawn_by_hand(config, [(3, 1, 5)])
    assert_holds(batch, groups)
    assert batch is not None and batch.rewards is not None
    assert batch.loss_mask is None and batch.baseline_rewards is None
    samples = [sampled for _, group in groups for sampled in group]
    lengths = [sampled.response_length for sampled in samples]
    assert batch.rewards.tolist() == [float(sampled.text[0] == "0") for sampled in samples]
    assert metrics == {
        "rollout/reward": pytest.approx(batch.rewards.mean()),
        "rollout/length": pytest.approx(np.mean(lengths)),
        "rollout/response_length": pytest.approx(np.mean(lengths)),
        "rollout/response_length_max": max(lengths),
        "rollout/truncated": pytest.approx(np.mean([not sampled.finished for sampled in samples])),
    }


def test_drawing_goes_on_until_enough_groups_are_mixed_and_the_surplus_is_left_out(make: Any) -> None:
    config = make(rollout={"filter": "mixed_groups", "max_rounds": 9})
    seen = set()
    for step in range(6):
        collector = Collector(config, Engines())
        batch, metrics = collector.collect(step, VERSION, {})
        rounds = int(metrics["rollout/rounds"])
        drawn = drawn_by_hand(config, [(3, 1, step), *((3, 1, step, number) for number in range(1, rounds))])
        mixed = [group for group in drawn if is_mixed(group)]
        assert_holds(batch, mixed[:PROMPTS_PER_STEP])
        assert len(mixed) >= PROMPTS_PER_STEP > sum(map(is_mixed, drawn[:-PROMPTS_PER_STEP])), "no round too many"
        assert metrics["rollout/groups_dropped"] == pytest.approx(1 - len(mixed) / len(drawn))
        rewards = [sampled.text[0] == "0" for _, group in drawn for sampled in group]
        assert metrics["rollout/reward"] == pytest.approx(np.mean(rewards)), "of all that was drawn"
        place = collector.prompts.state()
        assert place["epoch"] * NUM_PROMPTS + place["offset"] == rounds * PROMPTS_PER_STEP
        seen.add((rounds, len(mixed) > PROMPTS_PER_STEP))
    assert len({rounds for rounds, _ in seen}) > 1 and any(has_surplus for _, has_surplus in seen), seen


def test_a_step_leaves_the_texts_of_some_groups_also_of_those_that_are_not_trained_on(
    make: Any, tmp_path: Path
) -> None:
    run = {"seed": 3, "dir": str(tmp_path / "run")}
    config = make(run=run, rollout={"filter": "mixed_groups"})
    collected(config, step=5)
    text = (tmp_path / "run" / "samples" / "step_00000006.txt").read_text()
    groups = drawn_by_hand(config, [(3, 1, 5)])[:SHOWN_GROUPS]
    assert all(f"\n  {record['prompt']}\n" in text for record, _ in groups)
    assert text.count("rollout.filter") == len(groups) - sum(map(is_mixed, groups)) > 0


def test_a_group_that_a_filter_dropped_is_in_no_denominator_and_one_that_trains_nothing_is(make: Any) -> None:
    def weights(batch: RolloutBatch | None) -> np.ndarray:
        """What the update divides each token's loss by, 1 over it, of the samples that are computed."""
        assert batch is not None
        plan = plan_training(config, batch)
        computed = np.isin(batch.sample_ids, plan.samples_of(0))
        found: np.ndarray = loss_weights(config, batch, plan.counted_of(0))[computed]
        return found

    config = make()
    mixed = [sum(map(is_mixed, drawn_by_hand(config, [(3, 1, step)]))) for step in range(9)]
    step = next(step for step, count in enumerate(mixed) if 0 < count < PROMPTS_PER_STEP)
    whole, _ = collected(config, step)
    kept, _ = collected(make(rollout={"filter": "mixed_groups"}), step)
    assert whole is not None and kept is not None and kept.num_samples < whole.num_samples
    share = kept.num_response_tokens / whole.num_response_tokens
    assert weights(kept).sum() == pytest.approx(1, rel=1e-12)
    assert weights(whole).sum() == pytest.approx(share, rel=1e-12)
    np.testing.assert_allclose(weights(whole), share * weights(kept), rtol=1e-12)


def test_rounds_that_run_out_leave_a_smaller_batch(make: Any) -> None:
    config = make(rollout={"filter": f"{__name__}:some_prompts"})
    batch, metrics = collected(config)
    groups = [group for group in drawn_by_hand(config, [(3, 1, 0)]) if group[0]["number"] % 3 == 1]
    assert 0 < len(groups) < PROMPTS_PER_STEP
    assert_holds(batch, groups)
    assert metrics["rollout/rounds"] == 1


def test_no_two_purposes_share_a_seed(make: Any) -> None:
    config, engines = (
        make(rollout={"filter": "mixed_groups", "max_rounds": 4, "reward": f"{__name__}:hopeless"}),
        Engines(),
    )
    collector = Collector(config, engines)
    for step in range(3):
        collector.collect(step, VERSION, {})
        Evaluator(config, collector).evaluate(step)
    seeds = [tuple(np.random.SeedSequence([*seed, 0]).generate_state(4)) for _, _, seed, _ in engines.calls]
    assert len(seeds) == 3 * (4 + 1) == len(set(seeds))


def test_where_every_group_is_dropped_there_is_no_batch_and_nothing_is_recorded(make: Any, tmp_path: Path) -> None:
    config = make(rollout={"filter": "mixed_groups", "max_rounds": 2, "reward": f"{__name__}:hopeless"})
    recorded, engines = RecordedBatches(tmp_path / "batches"), Engines()
    collector = Collector(config, engines, recorded)
    batch, metrics = collector.collect(0, VERSION, {})
    assert batch is None and recorded.read(0) is None
    assert metrics["rollout/groups_dropped"] == 1 and metrics["rollout/rounds"] == 2 == len(engines.calls)
    assert metrics["rollout/reward"] == 0 and metrics["rollout/response_length"] > 0
    assert collector.collect(1, VERSION, {})[1]["rollout/rounds"] == 2, "the next step goes on"


@pytest.mark.parametrize(
    ("sections", "changed"),
    [
        ({}, {"samples_per_prompt": GROUP + 1}),
        ({"rollout": {"filter": "mixed_groups", "max_rounds": 9}}, {"max_rounds": 8}),
        ({"rollout": {"overlong_buffer_tokens": 4, "mask_truncated": True}}, {"overlong_buffer_tokens": 3}),
        ({"advantage": {"estimator": "remax"}}, {"filter": "mixed_groups"}),
        ({}, {"curriculum": [{"from_step": 1, "max_new_tokens": 5}]}),
    ],
)
def test_a_recorded_step_is_repeated_without_engines_unless_settings_differ(
    make: Any, tmp_path: Path, sections: dict[str, Any], changed: dict[str, Any]
) -> None:
    recorded = RecordedBatches(tmp_path / "batches")
    first = Collector(make(**sections), Engines(), recorded)
    batches = [first.collect(step, VERSION, {}) for step in range(2)]
    resumed = {**sections, "checkpoint": {"resume": True}}
    again: Any = Collector(make(**resumed), NoEngines(), recorded)  # type: ignore[arg-type]
    for step, (batch, metrics) in enumerate(batches):
        found, found_metrics = again.collect(step, VERSION, {})
        assert found.same_as(batch) and found_metrics == metrics
    assert again.prompts.state() == first.prompts.state()
    other = make(**{**resumed, "rollout": {**resumed.get("rollout", {}), **changed}})
    for config, version in ((other, VERSION), (make(**resumed), VERSION + 1)):
        engines = Engines()
        engines.version = version
        with pytest.warns(UserWarning, match=r"step 1\b"):
            Collector(config, engines, recorded).collect(1, version, {})
        assert engines.calls


def raising(record: Record, *_: Any) -> Any:
    return 1 / 0


def ending(record: Record, *_: Any) -> Any:
    sys.exit(3)


def undecided(record: Record, *_: Any) -> Any:
    return None


def many_names(record: Record, *_: Any) -> Any:
    return {"reward": 1.0, f"of_{record['number']}": 1.0}


@pytest.mark.parametrize("records_batches", [True, False])
@pytest.mark.parametrize(
    ("setting", "function", "cause"),
    [
        ("reward", "raising", ZeroDivisionError),
        ("reward", "ending", SystemExit),
        ("reward", "undecided", None),
        ("reward", "many_names", None),
        ("filter", "raising", ZeroDivisionError),
        ("filter", "ending", SystemExit),
        ("filter", "undecided", None),
    ],
)
def test_a_reward_or_filter_that_fails_is_named_with_record_step_and_the_way_to_go_on(
    make: Any, tmp_path: Path, setting: str, function: str, cause: type[BaseException] | None, records_batches: bool
) -> None:
    config = make(rollout={setting: f"{__name__}:{function}"})
    recorded = RecordedBatches(tmp_path / "batches") if records_batches else None
    collector = Collector(config, Engines(), recorded)
    with pytest.raises(BatchError) as caught:
        collector.collect(4, VERSION, {})
    error = caught.value
    assert error.field == f"rollout.{setting}" and error.call == "step 5"
    taken = Collector(config, Engines()).prompts.take(PROMPTS_PER_STEP)
    assert any(record.place in error.message for record in taken)
    assert ("checkpoint.resume=true" in str(error.hint)) == records_batches
    assert ("checkpoint.interval_steps" in str(error.hint)) != records_batches
    assert type(error.__cause__) is (cause or type(None))
    assert recorded is None or recorded.read(4) is None
    if setting == "reward":
        with pytest.raises(BatchError) as evaluated:
            Evaluator(config, collector).evaluate(5)
        assert evaluated.value.call == "step 5" and "heldout.jsonl:" in evaluated.value.message


class Failing(UserCodeWorkers):
    """Has some rewards fail: the first of all responses to each of these prompts."""

    def __init__(self, config: RunConfig, numbers: Sequence[int]) -> None:
        super().__init__(config, in_driver=True)
        self.numbers = numbers

    def pending(self) -> Any:
        pending: Any = super().pending()
        whole = pending.finish
        pending.finish = lambda: self.with_failures(pending.calls, whole())
        return pending

    def with_failures(self, calls: Sequence[EpisodeCall], outcomes: Sequence[Any]) -> list[Any]:
        failed: set[int] = set()
        found = list(outcomes)
        for place, call in enumerate(calls):
            number = call.record["number"]
            if number in self.numbers and number not in failed:
                failed.add(number)
                found[place] = self.code.failure("it failed", call, 1)
        return found


def test_groups_whose_reward_failed_are_left_out_and_counted_if_asked_for(make: Any) -> None:
    config = make(rollout={"reward_failure": "skip"})
    drawn = drawn_by_hand(config, [(3, 1, 5)])
    lost = [drawn[1][0]["number"], drawn[2][0]["number"]]
    left = [group for group in drawn if group[0]["number"] not in lost]
    collector = Collector(config, Engines(), rewards=Failing(config, lost))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=f"train.jsonl:{lost[0] + 1}$"):
        batch, metrics = collector.collect(5, VERSION, {})
    assert_holds(batch, left)
    assert metrics["rollout/reward_failures"] == 2 / (PROMPTS_PER_STEP * GROUP)
    rewards = [sampled.text[0] == "0" for _, group in left for sampled in group]
    assert metrics["rollout/reward"] == pytest.approx(np.mean(rewards))
    assert metrics["rollout/response_length"] == pytest.approx(
        np.mean([sampled.response_length for _, group in left for sampled in group])
    )
    with pytest.warns(UserWarning):
        evaluated = Evaluator(config, collector).evaluate(5)
    assert evaluated["eval/reward_failures"] == 2 / NUM_PROMPTS
    whole, metrics = Collector(config, Engines()).collect(5, VERSION, {})  # type: ignore[arg-type]
    assert_holds(whole, drawn)
    assert metrics["rollout/reward_failures"] == 0
    with pytest.raises(BatchError) as caught:
        Collector(make(), Engines(), rewards=Failing(make(), lost)).collect(5, VERSION, {})  # type: ignore[arg-type]
    assert caught.value.message.endswith(f"train.jsonl:{lost[0] + 1}") and caught.value.call == "step 6"


@pytest.mark.parametrize("sections", [{}, {"advantage": {"estimator": "remax"}}, {"filter": "mixed_groups"}])
def test_steps_in_which_every_group_failed_train_nothing_and_several_in_a_row_end_the_run(
    make: Any, sections: dict[str, Any]
) -> None:
    rollout = {"reward_failure": "skip"} | ({} if "advantage" in sections else sections)
    config = make(rollout=rollout, **({"advantage": sections["advantage"]} if "advantage" in sections else {}))
    rewards = Failing(config, range(NUM_PROMPTS))
    collector = Collector(config, Engines(), rewards=rewards)  # type: ignore[arg-type]

    def collected(step: int) -> Any:
        with pytest.warns(UserWarning):
            return collector.collect(step, VERSION, {})

    assert collected(0) == (None, {"rollout/reward_failures": 1 / GROUP})
    rewards.numbers = []
    collector.collect(1, VERSION, {})  # the count begins anew
    rewards.numbers = range(NUM_PROMPTS)
    for step in range(2, 1 + MAX_FAILED_STEPS):
        assert collected(step)[0] is None
    with pytest.raises(BatchError) as caught:
        collected(4)
    assert caught.value.field == "rollout.reward" and caught.value.call == "step 5"
    with pytest.raises(BatchError):  # an evaluation without a single score tells nothing
        Evaluator(config, collector).evaluate(5)


def test_an_overlong_response_loses_reward_as_the_paper_says() -> None:
    longest, buffer = 20480, 4096
    for length in (1, 16383, 16384, 16385, 18000, 20479, 20480):
        # equation 13 of arXiv 2503.14476, case by case
        expected = 0.0 if length <= longest - buffer else ((longest - buffer) - length) / buffer
        assert overlong_penalty(length, longest, buffer) == -expected
    assert overlong_penalty(longest, longest, buffer) == 1


def test_the_penalty_trains_and_the_metrics_keep_the_reward_as_it_was(make: Any) -> None:
    plain, before = collected(make())
    batch, metrics = collected(make(rollout={"overlong_buffer_tokens": 4}))
    assert batch is not None and plain is not None and batch.rewards is not None and plain.rewards is not None
    penalties = np.clip((batch.response_lengths - (LONGEST - 4)) / 4, 0, None)
    assert 0 < penalties.max() == 1 and (penalties == 0).any()
    np.testing.assert_allclose(batch.rewards, plain.rewards - penalties, atol=1e-7)
    assert metrics.pop("rollout/overlong_penalty") == pytest.approx(penalties.mean())
    assert metrics == before


def test_truncated_responses_stay_in_their_group_and_out_of_the_loss(make: Any) -> None:
    config = make(rollout={"mask_truncated": True})
    batch, _ = collected(config)
    groups = drawn_by_hand(config, [(3, 1, 0)])
    assert_holds(batch, groups)
    assert batch is not None and batch.loss_mask is not None
    samples = [sampled for _, group in groups for sampled in group]
    assert 0 < sum(not sampled.finished for sampled in samples) < len(samples)
    assert batch.loss_mask.tolist() == [sampled.finished for sampled in samples for _ in sampled.log_probs]


def test_remax_compares_with_one_greedy_response_per_prompt_that_trains(make: Any) -> None:
    overlong = {"overlong_buffer_tokens": 4}
    sections = {"advantage": {"estimator": "remax"}, "rollout": {"filter": "mixed_groups", "max_rounds": 9, **overlong}}
    config, engines = make(**sections), Engines()
    batch, metrics = collected(config, engines=engines)
    *sampling, (prompts, per_prompt, seed, greedy) = engines.calls
    assert greedy and per_prompt == 1 and not any(call[3] for call in sampling)
    assert seed not in [call[2] for call in sampling]
    seeds = [call[2] for call in sampling]
    kept = [group for group in drawn_by_hand(config, seeds) if is_mixed(group)][:PROMPTS_PER_STEP]
    assert_holds(batch, kept)
    assert prompts == [record["prompt"] for record, _ in kept]
    _, likeliest = Engines().generate(prompts, samples_per_prompt=1, seed=(), greedy=True)
    penalties = [max(0, s.response_length - (LONGEST - 4)) / 4 for s in likeliest]
    baselines = [float(s.text[0] == "0") - penalty for s, penalty in zip(likeliest, penalties, strict=True)]
    assert len(set(baselines)) > 1
    assert batch is not None and batch.baseline_rewards is not None
    np.testing.assert_allclose(batch.baseline_rewards, np.repeat(baselines, GROUP), atol=1e-7)
    assert metrics["rollout/baseline_reward"] == pytest.approx(np.mean(baselines))


def test_evaluation_samples_every_held_out_prompt_and_takes_nothing_off(make: Any) -> None:
    config = make(
        advantage={"estimator": "remax"}, evaluation={"samples_per_prompt": 2}, rollout={"overlong_buffer_tokens": 4}
    )
    engines = Engines()
    collector = Collector(config, engines)
    metrics = Evaluator(config, collector).evaluate(4)
    ((prompts, per_prompt, seed, greedy),) = engines.calls
    assert len(prompts) == NUM_PROMPTS and per_prompt == 2 and not greedy
    _, samples = Engines().generate(prompts, samples_per_prompt=2, seed=seed)
    assert metrics == {
        "eval/reward": pytest.approx(np.mean([s.text[0] == "0" for s in samples])),
        "eval/length": pytest.approx(np.mean([s.response_length for s in samples])),
    }
    assert evaluation_of(make(evaluation={"interval_steps": None}), NoEngines(), 4) == {}


def test_samples_of_weights_that_were_not_sent_are_refused(make: Any) -> None:
    def collected_of(version: int, **rollout: int) -> RolloutBatch | None:
        collector = Collector(make(rollout=rollout), Engines())  # type: ignore[arg-type]
        return collector.collect(0, version, {"generate": 0.0, "reward": 0.0})[0]

    for version in (VERSION - 1, VERSION + 1):
        with refused(EngineError, "rollout.engine", VERSION, version):
            collected_of(version)
    with refused(EngineError, "rollout.engine", VERSION, VERSION + 1):
        collected_of(VERSION + 1, sync_interval_steps=2)
    with refused(EngineError, "rollout.engine", VERSION, VERSION + 1):
        evaluation_of(make(), Engines(), 0, VERSION + 1)
    newer = collected_of(VERSION - 1, sync_interval_steps=2)  # an engine was replaced, and all have newer weights
    assert newer is not None and newer.weight_version == VERSION


def finished(record: Record, response: str, finished: bool) -> dict[str, float]:
    return {"reward": 1.0, "finished": 0.25}


def test_a_score_with_the_name_of_an_evaluations_own_metric_is_refused(make: Any) -> None:
    config = make(evaluation={"pass_at": [1]}, rollout={"reward": f"{__name__}:finished"})
    with refused(BatchError, "rollout.reward", "finished"):
        evaluation_of(config, Engines(), 4)


class Trainers:
    """A worker group that counts what it is asked for; each update makes a new version."""

    critic = None

    def __init__(self) -> None:
        self.trained = self.sent = 0

    def train_step(self, batch: RolloutBatch) -> dict[str, float]:
        self.trained += 1
        return {"updates": 1.0, "loss": 0.5}

    def update_weights(self, receivers: Any) -> SyncReport:
        self.sent += 1
        return SyncReport(version=self.trained, bytes=0, seconds=0.0)


@pytest.mark.parametrize(("reward", "trained"), [("hopeless", 0), ("last_token", 2)])
def test_a_step_without_a_batch_leaves_the_weights_and_says_so(make: Any, reward: str, trained: int) -> None:
    given = {"filter": "mixed_groups", "max_rounds": 9, "reward": f"{__name__}:{reward}"}
    config = make(run={"steps": 4}, evaluation={"interval_steps": 2}, rollout=given)
    engines: Any = Engines()
    group: Any = Trainers()
    loop = RolloutLoop(config, group, engines)
    loop.before_training(evaluates=False)
    rows = [loop.step(step) for step in range(2)]
    assert group.trained == trained and group.sent == 1 + trained
    for row, version in zip(rows, (trained / 2, trained), strict=True):
        assert row["updates"] == (trained > 0) and ("loss" in row) == (trained > 0)
        assert row["weight_version"] == version and row["rollout/groups_dropped"] >= 1 - trained
        assert {f"seconds/{name}" for name in ("generate", "reward", "train", "sync")} <= row.keys()
    assert "eval/reward" in rows[1]


def odd_length(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """A reward that a random model gets half of the time."""
    return {"reward": float(len(response) % 2)}


def test_a_run_draws_filters_and_trains_against_greedy_responses(
    cluster: None, make_config: Any, example: Path, tmp_path: Path
) -> None:
    config = make_config(
        run={"dir": str(tmp_path / "run"), "steps": 2},
        mesh={"dp": 1},
        data={"train": str(example / "train.jsonl")},
        advantage={"estimator": "remax"},
        rollout={
            "prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 3, "overlong_buffer_tokens": 2,
            "reward": f"{__name__}:odd_length", "filter": "mixed_groups", "max_rounds": 5, "engines": 1,
        },
        checkpoint={"interval_steps": 2},
    )  # fmt: skip
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and sum(row["rollout/groups_dropped"] for row in rows) > 0
    rounds = 0
    for step, row in enumerate(rows):
        assert row["updates"] == 1 and row["grad_norm"] > 0 and row["rollout_mismatch_max"] < 1e-4
        assert row["rollout/groups_dropped"] < 1 and 1 <= row["rollout/rounds"] <= 5
        assert 0 < row["rollout/overlong_penalty"] <= 1 and row["rollout/response_length_max"] == 3
        found = RecordedBatches(tmp_path / "run" / "batches").read(step)
        assert found is not None and found[0].baseline_rewards is not None
        assert row["rollout/baseline_reward"] == pytest.approx(found[0].baseline_rewards[::2].mean())
        rounds += int(row["rollout/rounds"])
        assert found[1]["prompts"]["offset"] == 4 * rounds
