"""Every algorithm on every mesh moves the weights as its formula does, on multi-turn samples with holes in their masks.

The formulas stand in `plain_algorithms.py`. One update of plain SGD is compared: what it takes off the weights, over
its rate, is the gradient.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slimefsdp.algorithms.registry import (
    CORRECTIONS,
    ESTIMATORS,
    KL_ESTIMATORS,
    PER_SEQUENCE,
    POLICY_LOSSES,
    REDUCTIONS,
)
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.config.conditions import ONLY_WITH
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_everything, plan_training
from tests.support.float64 import KeepFloat64
from tests.support.plain_algorithms import PlainPolicy, PlainTraining
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

TEMPERATURE = 0.8
RATE = 0.05
AT_A_TIME = 15
VOCABULARY = 97
# (dp, cp): tokens per rank; a pack holds 64 on all of them, and cp cuts samples of more than 32
MESHES = {(1, 1): 64, (2, 1): 64, (1, 2): 32, (2, 2): 32}
LENGTHS = [
    (44, 30), (17, 12), (29, 21), (9, 6), (38, 25), (13, 9), (25, 19), (7, 3), (31, 22), (12, 10), (2, 1), (20, 14)
]  # fmt: skip
PAIR_LENGTHS = [(25, 18), (9, 6), (36, 28), (17, 12), (13, 9), (19, 11), (12, 10), (31, 22)]
Sections = dict[str, dict[str, Any]]


class Case(NamedTuple):
    """Settings of one algorithm, and what must have happened for the comparison to say something."""

    sections: Sections
    batch: str = "usual"  # a name in `batches`
    happens: tuple[str, ...] = ()  # metrics that are a share of the tokens, neither none nor all


def of(section: str, batch: str = "usual", happens: str = "", **values: Any) -> Case:
    return Case({section: values}, batch, tuple(happens.split()))


BOTH = "clip_fraction_low clip_fraction_high"
OUTSIDE = "correction_below correction_above"
ESTIMATES = [name for name in KL_ESTIMATORS if name != "full"]
UNBIASED = ["k1", "k3"]  # in value, and so what k1_unbiased and k3_unbiased make right in its gradient
PER_TOKEN = ("reinforce_pp", "remax", "gae")  # estimators that tell the tokens of a sample apart
CASES: dict[str, Case] = {
    "grpo": of("advantage", estimator="grpo", happens=BOTH),
    "dr_grpo": of("advantage", estimator="dr_grpo"),
    "rloo": of("advantage", estimator="rloo"),
    "reinforce_pp": of("advantage", "token rewards", estimator="reinforce_pp", gamma=0.9),
    "reinforce_pp_baseline": of("advantage", estimator="reinforce_pp_baseline"),
    "remax": of("advantage", "token rewards", estimator="remax"),
    "opo": of("advantage", estimator="opo"),
    "maxrl": of("advantage", "right or wrong", estimator="maxrl"),
    "pass_at_k": of("advantage", "right or wrong", estimator="pass_at_k", pass_k=2),
    "gae": of("advantage", "token rewards", estimator="gae", gamma=0.95, gae_lambda=0.9),
    "raw": of("advantage", estimator="raw"),
    "grpo, whitened": of("advantage", estimator="grpo", whiten=True),
    "gae, not whitened": of("advantage", "token rewards", estimator="gae", whiten=False),
    "the caller's advantages": of("advantage", "given advantages"),
    "the caller's advantages, whitened": of("advantage", "given advantages", whiten=True),
    "clip-higher": of("loss", clip_low=0.1, clip_high=0.4, happens=BOTH),
    "dual clip": of("loss", dual_clip=1.3, happens=BOTH),
    "gspo": of("loss", policy="gspo", clip_low=0.05, clip_high=0.1, happens=BOTH),
    "gspo_token": of("loss", policy="gspo_token", clip_low=0.05, clip_high=0.1, happens=BOTH),
    "cispo": of("loss", policy="cispo", clip_high=0.5, happens=BOTH),
    "sapo": of("loss", policy="sapo"),
    "gmpo": of("loss", policy="gmpo", clip_low=0.3, clip_high=0.4, happens=BOTH),
    "reinforce": of("loss", policy="reinforce"),
    "importance_sampling": of("loss", policy="importance_sampling"),
    "dro": of("loss", policy="dro", beta=0.7),
    "dpo": of("loss", "pairs", policy="dpo", beta=0.3),
    "dpo by pairs": of("loss", "pairs", policy="dpo", reduction="prompt_mean"),
    "importance": of("correction", method="importance"),
    "importance, bounded": of("correction", method="importance", high=2.0, happens="correction_dropped"),
    "tis": of("correction", method="tis", high=1.3, happens="correction_above"),
    "mis": of("correction", method="mis", high=1.5, happens="correction_dropped"),
    "mis, two bounds": of("correction", method="mis", low=0.6, high=1.5, happens=OUTSIDE),
    "icepop": of("correction", method="icepop", low=0.5, high=2.0, happens=OUTSIDE),
    "sequence_tis": of("correction", method="sequence_tis", high=2.0, happens="correction_above"),
    "sequence_mis": of("correction", method="sequence_mis", low=0.1, high=5.0, happens=OUTSIDE),
    "geometric_mis": of("correction", method="geometric_mis", low=0.85, high=1.6, happens=OUTSIDE),
    "veto": of("correction", veto_below=0.3, happens="correction_dropped"),
    "opsm": of("correction", opsm_threshold=0.05, happens="correction_dropped"),
    "tis, veto and opsm": of(
        "correction", method="tis", high=1.5, veto_below=0.2, opsm_threshold=0.1,
        happens="correction_above correction_dropped",
    ),
    "opsm of the old policy": of(
        "correction", "no rollout log-probs", opsm_threshold=0.05, happens="correction_dropped"
    ),
    "the engine as the old policy": Case(
        {"loss": {"old_log_probs": "rollout"}, "correction": {"opsm_threshold": 0.05}},
        "no old log-probs", (*BOTH.split(), "correction_dropped"),
    ),
    "k1 in the reward": of("loss", kl_coefficient=0.3, kl_estimator="k1", kl_in="reward"),
    "k3 in the reward of tokens": Case(
        {"loss": {"kl_coefficient": 0.3, "kl_in": "reward"}, "advantage": {"estimator": "gae"}}, "token rewards"
    ),
    **{name: of("loss", kl_coefficient=0.4, kl_estimator=name) for name in ESTIMATES},
    **{f"{name}, unbiased": of("loss", kl_coefficient=0.4, kl_estimator=f"{name}_unbiased") for name in UNBIASED},
    "token_mean": of("loss", reduction="token_mean"),
    "sequence_mean": of("loss", reduction="sequence_mean"),
    "prompt_mean": of("loss", reduction="prompt_mean"),
    "constant": of("loss", reduction="constant", constant_length=16),
    "prompt_mean, nothing left out": of("loss", reduction="prompt_mean", entropy_coefficient=0.02),
    "entropy": of("loss", entropy_coefficient=0.2),
}  # fmt: skip


def in_updates(case: Case, samples_per_update: int) -> Case:
    """Two epochs of several updates."""
    loss = case.sections.get("loss", {}) | {"epochs": 2}
    return Case({**case.sections, "loss": loss, "batch": {"samples_per_update": samples_per_update}}, case.batch)


# but for pairs and the engine's, from old log-probs of their own
CASES |= {
    "a step of ppo": in_updates(of("loss", "no old log-probs"), 5),
    "a step of gspo": in_updates(of("loss", "no old log-probs", policy="gspo", clip_high=0.001), 4),
    "a step that cuts prompts": in_updates(of("loss", "no old log-probs", reduction="prompt_mean", policy="cispo"), 5),
    "a step of pairs": in_updates(of("loss", "pairs", policy="dpo", reduction="sequence_mean"), 4),
    "a step of the engine's policy": in_updates(CASES["the engine as the old policy"], 6),
    "a step of k1 in the reward": in_updates(CASES["k1 in the reward"]._replace(batch="no old log-probs"), 7),
}


def drawn(seed: int) -> Case:
    """Any settings that go together."""
    rng = random.Random(seed)
    policy = rng.choice([name for name in POLICY_LOSSES if name != "dpo"])
    estimator = rng.choice([name for name in ESTIMATORS if policy not in PER_SEQUENCE or name not in PER_TOKEN])
    method = rng.choice(["none", *CORRECTIONS])
    advantage = {"estimator": estimator, "whiten": rng.choice([None, True, False])}
    loss: dict[str, Any] = {"policy": policy, "reduction": rng.choice(list(REDUCTIONS))}
    if estimator == "pass_at_k":
        advantage["pass_k"] = rng.choice([1, 2, 3])
    if loss["reduction"] == "constant":
        loss["constant_length"] = 20
    if policy == "dro":
        loss["beta"] = 0.4
    if rng.random() < 0.6:
        loss |= {"kl_coefficient": 0.2, "kl_estimator": rng.choice(ESTIMATES)}
        if loss["kl_estimator"] in UNBIASED and rng.random() < 0.5:
            loss["kl_estimator"] += "_unbiased"
    if rng.random() < 0.4:
        loss["entropy_coefficient"] = 0.1
    bounds = {"low": 0.6, "high": 1.7}
    correction = {"method": method} | {
        name: bound for name, bound in bounds.items() if method in ONLY_WITH[f"correction.{name}"]["correction.method"]
    }
    correction["veto_below"] = rng.choice([None, 0.2])
    correction["opsm_threshold"] = rng.choice([None, 0.1])
    right_or_wrong = estimator in ("pass_at_k", "maxrl")
    batch = "right or wrong" if right_or_wrong else "token rewards" if estimator in PER_TOKEN else "usual"
    return Case({"advantage": advantage, "loss": loss, "correction": correction}, batch)


def joined(*names: str) -> Case:
    """All settings of several cases, of which at most one has a batch of its own."""
    chosen = [CASES[name] for name in names]
    (batch,) = {case.batch for case in chosen} - {"usual"} or {"usual"}
    sections: Sections = {}
    for case in chosen:
        sections |= {section: sections.get(section, {}) | values for section, values in case.sections.items()}
    return Case(sections, batch, tuple(metric for case in chosen for metric in case.happens))


# where ranks work together every name of every table is compared, several at a time
JOINED = {
    " + ".join(names): joined(*names)
    for names in (
        ("grpo", "gspo", "tis", "k3", "sequence_mean"),
        ("dr_grpo", "gspo_token", "sequence_tis", "constant"),
        ("rloo", "clip-higher", "mis", "k1, unbiased", "prompt_mean"),
        ("reinforce_pp", "cispo", "icepop", "k2", "token_mean"),
        ("reinforce_pp_baseline", "importance_sampling", "sequence_mis", "abs", "sequence_mean"),
        ("remax", "sapo", "geometric_mis", "k3, unbiased", "prompt_mean"),
        ("opo", "importance_sampling", "veto", "entropy"),
        ("maxrl", "dual clip", "opsm", "k1"),
        ("pass_at_k", "reinforce", "importance, bounded"),
        ("k3 in the reward of tokens", "mis, two bounds", "sequence_mean"),
        ("raw", "gmpo", "tis, veto and opsm", "entropy"),
        ("the caller's advantages, whitened", "cispo", "importance", "constant"),
        ("rloo", "dro", "prompt_mean"),
        ("dpo", "k2", "prompt_mean"),
        ("a step of gspo", "k1"),
        ("a step of pairs",),
    )
}
COMBINATIONS = {f"combination {seed}": drawn(seed) for seed in range(12)}
EVERYTHING = CASES | JOINED | COMBINATIONS
WHERE = {
    (1, 1): [*CASES, *COMBINATIONS],
    (2, 1): list(JOINED),
    (1, 2): list(JOINED),
    (2, 2): [name for name in JOINED if name.startswith(("grpo", "remax", "dpo", "a step"))],
}


def config_of(folder: Path, axes: tuple[int, int], sections: Sections) -> RunConfig:
    tree: Sections = {
        "model": {"path": str(folder)},
        "mesh": {"device": "cpu", "dp": axes[0], "cp": axes[1]},
        "precision": {"compute_dtype": "float64"},
        "optim": {"name": "sgd", "lr": RATE, "momentum": 0.0, "total_updates": 1000, "max_grad_norm": 1e6},
        "rollout": {"temperature": TEMPERATURE},
        "batch": {"max_tokens_per_rank": MESHES[axes]},
    }
    return config_from_dict(tree | {name: tree.get(name, {}) | values for name, values in sections.items()})


def turns(length: int, style: int) -> np.ndarray:
    """The mask of a response: True where the model wrote it, False where a tool did."""
    mask = np.ones(length, dtype=bool)
    if style == 0:
        mask[length // 3 : length // 2] = False  # model, tool, model
    elif style == 1:
        mask[: length // 3] = False
    elif style == 2:
        mask[-(length // 3) :] = False
    elif style == 3:
        mask[::3] = False  # tools everywhere, at the start too
    return mask


def multi_turn(policy: PlainPolicy, lengths: list[tuple[int, int]], groups: int) -> RolloutBatch:
    """Interleaved groups, tools in most responses, log-probs of policies that are some way from this one."""
    rng = np.random.default_rng(5)
    samples: list[dict[str, Any]] = []
    for index, (length, response) in enumerate(lengths):
        tokens = rng.integers(0, VOCABULARY, length)
        tokens[-1] = 0 if index % 3 == 0 else tokens[-1]  # an id that some take for padding
        samples.append(
            {
                "tokens": tokens,
                "response_length": response,
                "group_id": 7 - index % groups,
                "reward": float(rng.normal()),
                "loss_mask": turns(response, index % 5),
            }
        )
    for sample, (log_probs, _) in zip(samples, policy.says(RolloutBatch.from_samples(samples)), strict=True):
        now = log_probs.detach().numpy()

        def near(origin: np.ndarray, of_tokens: float, of_samples: float) -> np.ndarray:
            moved = origin + rng.normal(0, of_tokens, len(origin)) + rng.normal(0, of_samples)
            return np.minimum(moved, -1e-3)

        sample["old_log_probs"] = near(now, 0.4, 0.2)
        sample["ref_log_probs"] = near(now, 0.6, 0.1)
        sample["rollout_log_probs"] = near(sample["old_log_probs"], 0.5, 0.15)
    return RolloutBatch.from_samples(samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 97 rows and 55 columns divide by no world size used here
    path = tmp_path_factory.mktemp("model")
    return save_tiny_model(path, vocab_size=VOCABULARY, intermediate_size=55, num_hidden_layers=1)


@pytest.fixture(scope="module")
def policy(folder: Path) -> PlainPolicy:
    return PlainPolicy(folder, TEMPERATURE)


@pytest.fixture(scope="module")
def batches(policy: PlainPolicy) -> dict[str, RolloutBatch]:
    rng = np.random.default_rng(6)
    usual, pairs = multi_turn(policy, LENGTHS, 3), multi_turn(policy, PAIR_LENGTHS, 4)
    tokens, samples = usual.num_response_tokens, usual.num_samples
    without_variance = np.arange(samples) % 3 == 2  # a whole group
    usual = usual.replace(
        rewards=np.where(without_variance, 0.5, usual.rewards), loss_mask=usual.mask & (usual.sample_ids != 7)
    )
    right_or_wrong = np.array([1, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 1])
    return {
        "usual": usual,
        "pairs": pairs,
        "right or wrong": usual.replace(rewards=right_or_wrong),
        "token rewards": usual.replace(
            token_rewards=rng.normal(0, 0.3, tokens) * (rng.random(tokens) < 0.3) * usual.mask,
            values=rng.normal(0, 0.5, tokens),
            baseline_rewards=rng.normal(0, 0.5, samples),
        ),
        "given advantages": usual.replace(advantages=rng.normal(0.2, 1, tokens), rewards=None),
        "no rollout log-probs": usual.replace(rollout_log_probs=None),
        "no old log-probs": usual.replace(old_log_probs=None),
    }


def steps(rank: int, cases: list[tuple[RunConfig, RolloutBatch]]) -> list[tuple[dict[str, float], np.ndarray]]:
    """Of each case the metrics of `train_step` and what it takes off the initial weights, over the rate."""
    found = []
    with KeepFloat64(), torch.no_grad():
        trainer = Trainer(cases[0][0], device=torch.device("cpu"))
        start = {name: parameter.clone() for name, parameter in trainer.policy.named_weights()}
        for config, batch in cases:
            trainer._state.use(config)
            trainer._state.kl_coefficient = config.loss.kl_coefficient
            with torch.enable_grad():
                metrics = trainer.train_step(batch)
            moved: dict[str, torch.Tensor] = {}
            for name, parameter in trainer.policy.named_weights():
                moved[name] = (start[name] - parameter).full_tensor() / RATE
                parameter.copy_(start[name])
            found.append((metrics, flat(moved)))
    return found


def gradients_of_a_custom_loop(rank: int, config: RunConfig, batch: RolloutBatch) -> np.ndarray:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        trainer.forward_backward(batch)
    return flat({name: parameter.grad.full_tensor() for name, parameter in trainer.policy.named_weights()})


def flat(tensors: dict[str, torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensors[name].detach().numpy().ravel() for name in sorted(tensors)])


Step = tuple[dict[str, float], np.ndarray]


@pytest.fixture(scope="module")
def step_of(ranks: RankPool, folder: Path, batches: dict[str, RolloutBatch]) -> Callable[[tuple[int, int], str], Step]:
    """Metrics and gradients by mesh and case; some cases at a time share what a start of the ranks costs."""

    @cache
    def steps_of(axes: tuple[int, int], share: int) -> list[Step]:
        chosen = [EVERYTHING[name] for name in WHERE[axes][share * AT_A_TIME : (share + 1) * AT_A_TIME]]
        cases = [(config_of(folder, axes, case.sections), batches[case.batch]) for case in chosen]
        return ranks.run(axes[0] * axes[1], steps, cases)[0]

    def step(axes: tuple[int, int], name: str) -> Step:
        share, place = divmod(WHERE[axes].index(name), AT_A_TIME)
        return steps_of(axes, share)[place]

    return step


@pytest.fixture(scope="module")
def truth_of(policy: PlainPolicy, folder: Path, batches: dict[str, RolloutBatch]) -> Callable[[str], PlainTraining]:
    """What the formulas say, by case."""
    said = {name: policy.says(batches[name]) for name in ("usual", "pairs")}  # the others have the same tokens

    @cache
    def truth(name: str) -> PlainTraining:
        case = EVERYTHING[name]
        config, batch = config_of(folder, (1, 1), case.sections), batches[case.batch]
        updates = None
        if config.loss.epochs > 1:
            plan = plan_training(config, batch)
            updates = [plan.counted_of(update) for update in range(len(plan.updates))]
            assert len(updates) >= 4
        return policy.train(config, batch, said["pairs" if case.batch == "pairs" else "usual"], updates, RATE)

    return truth


def name_of(value: object) -> str:
    return value if isinstance(value, str) else "dp {} cp {}".format(*value)  # type: ignore[misc]


@pytest.mark.parametrize(("axes", "name"), [(axes, name) for axes in WHERE for name in WHERE[axes]], ids=name_of)
def test_every_algorithm_on_every_mesh_takes_the_step_of_its_formula(
    step_of: Callable[..., Step],
    truth_of: Callable[[str], PlainTraining],
    folder: Path,
    batches: dict[str, RolloutBatch],
    axes: tuple[int, int],
    name: str,
) -> None:
    case, (metrics, ours), truth = EVERYTHING[name], step_of(axes, name), truth_of(name)
    config = config_of(folder, axes, case.sections)
    packs = plan_training(config, batches[case.batch]).updates[0]
    assert config.loss.epochs > 1 or len(packs[0]) > 1  # micro-batches of a rank
    expected = flat(truth.moved)
    largest = np.abs(expected).max()
    assert largest > 1e-3
    assert np.abs(ours - expected).max() <= 1e-12 * largest
    assert metrics["loss"] == pytest.approx(np.mean(truth.losses), rel=1e-12, abs=1e-12)
    for metric in case.happens:
        assert 0 < metrics[metric] < 1, metric
    if "correction_weight" in metrics and config.loss.epochs == 1:
        weights = truth.corrections[0].numpy()
        assert metrics["correction_weight"] == pytest.approx(weights.mean(), rel=1e-12)
        assert metrics["correction_dropped"] == pytest.approx(np.mean(weights == 0), rel=1e-12)


def test_the_primitive_of_custom_loops_keeps_pairs_together_too(
    ranks: RankPool, truth_of: Callable[[str], PlainTraining], folder: Path, batches: dict[str, RolloutBatch]
) -> None:
    config = config_of(folder, (2, 1), CASES["dpo"].sections)
    apart = plan_everything(config, batches["pairs"], data_ranks=2)  # as for log-probs
    assert any(len(set(batches["pairs"].group_ids[pack])) == len(pack) for rank in apart.updates[0] for pack in rank)
    expected = flat(truth_of("dpo").moved)
    (ours, _) = ranks.run(2, gradients_of_a_custom_loop, config, batches["pairs"])
    assert np.abs(ours - expected).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.parametrize("axes", [(1, 1), (2, 1), (1, 2)], ids=name_of)
def test_every_name_in_the_tables_is_compared(axes: tuple[int, int]) -> None:
    configs = [config_of(Path(), axes, EVERYTHING[name].sections) for name in WHERE[axes]]
    assert {config.estimator for config in configs} == set(ESTIMATORS)
    assert {config.loss.policy for config in configs} == set(POLICY_LOSSES)
    assert {config.correction.method for config in configs} == {"none", *CORRECTIONS}
    assert {config.kl_estimator for config in configs} == set(ESTIMATES)
    assert {config.loss.reduction for config in configs} == set(REDUCTIONS)
