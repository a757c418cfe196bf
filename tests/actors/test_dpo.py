"""DPO's loop against plain PyTorch: one pair after the other, nothing packed or sharded, in float64."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.rollout.demonstrations import Demonstration
from actors.rollout.prompt_files import Prompts
from actors.rollout.prompts import PromptStream
from actors.rollout.records import Record
from actors.supervised_loops import DpoLoop
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import plain_model

BETA, RATE, STEPS = 0.7, 0.2, 4
Metrics = dict[str, float]


def demonstrations(pairs: int, seed: int) -> list[Demonstration]:
    """Chosen and rejected responses in turns, of other lengths, behind the prompts that they share."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(pairs):
        prompt = rng.integers(0, 96, rng.integers(1, 9))
        for length in rng.integers(1, 9, 2):
            found.append(Demonstration(np.concatenate([prompt, rng.integers(0, 96, length)]), int(length)))
    return found


def prompts() -> Prompts:
    records = [Record({"prompt": str(number)}, f"pairs:{number}") for number in range(7)]
    return Prompts(
        records,
        {},
        demonstrations=demonstrations(7, seed=1),
        heldout_demonstrations={"": demonstrations(3, 2), "hard": demonstrations(2, 3)},
    )


def settings(folder: Path, **sections: Any) -> RunConfig:
    return config_from_dict(
        {
            "algorithm": "dpo",
            "run": {"steps": STEPS, "seed": 3},
            "model": {"path": str(folder)},
            "mesh": {"device": "cpu", "dp": 1},
            "precision": {"compute_dtype": "float64"},
            "batch": {"max_tokens_per_rank": 40, "samples_per_update": 6},
            "loss": {"beta": BETA},
            "optim": {"name": "sgd", "lr": RATE, "momentum": 0.0, "max_grad_norm": 0},
            "data": {"heldout": "pairs.jsonl"},
            "evaluation": {"interval_steps": 3},
            **sections,
        }
    )


class Group:
    """A group of ranks as one of them sees it: each runs the loop itself."""

    reference_group = None

    def __init__(self, config: RunConfig) -> None:
        trainer = Trainer(config, device=torch.device("cpu"))
        self.trainer, self.train_step, self.compute_log_probs = trainer, trainer.train_step, trainer.compute_log_probs


def run_of(rank: int, config: RunConfig) -> tuple[list[Metrics], dict[str, np.ndarray]]:
    """The metrics before training and of each step, and the weights at the end."""
    with KeepFloat64():
        group = Group(config)
        loop = DpoLoop(config, group, prompts())
        rows = [loop.before_training(evaluates=True), *(loop.step(step) for step in range(STEPS))]
    assert loop.prompts.records_passed == STEPS * 3
    return rows, {name: value.full_tensor().detach().numpy() for name, value in group.trainer.policy.named_weights()}


class PlainDpo:
    """Plain Hugging Face on one sample after the other."""

    def __init__(self, folder: Path) -> None:
        with KeepFloat64():
            self.model = plain_model(folder, torch.float64)
        self.reference = deepcopy(self.model)

    def log_prob(self, model: torch.nn.Module, one: Demonstration) -> torch.Tensor:
        tokens = torch.tensor(one.tokens)
        with KeepFloat64():
            table = model(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1)
        return table.gather(-1, tokens[1:, None])[-one.response_length :, 0].sum()

    def says(self, pairs: list[list[Demonstration]]) -> tuple[torch.Tensor, Metrics]:
        losses, rows = [], []
        for pair in pairs:
            log_probs = [self.log_prob(self.model, one) for one in pair]
            rewards = [
                BETA * (log_prob - self.log_prob(self.reference, one).detach())
                for log_prob, one in zip(log_probs, pair, strict=True)
            ]
            losses.append(-torch.nn.functional.logsigmoid(rewards[0] - rewards[1]))
            chosen, rejected = (reward.item() for reward in rewards)
            rows.append(
                {
                    "loss": losses[-1].item(),
                    "rewards/chosen": chosen,
                    "rewards/rejected": rejected,
                    "rewards/margins": chosen - rejected,
                    "rewards/accuracies": float(chosen > rejected),
                    "logps/chosen": log_probs[0].item(),
                    "logps/rejected": log_probs[1].item(),
                }
            )
        return torch.stack(losses).mean(), {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}

    def update(self, pairs: list[list[Demonstration]]) -> Metrics:
        loss, metrics = self.says(pairs)
        parameters = list(self.model.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= RATE * gradient
        return metrics


def in_pairs(samples: list[Demonstration]) -> list[list[Demonstration]]:
    return [samples[start : start + 2] for start in range(0, len(samples), 2)]


@pytest.fixture(scope="module")
def plain_run(folder: Path) -> tuple[list[Metrics], dict[str, np.ndarray]]:
    """As `run_of`, but for metrics that DPO does not have of its own."""
    plain, given = PlainDpo(folder), prompts()
    stream = PromptStream(in_pairs(given.demonstrations), seed=3, digest="")
    prefixes = {"": "eval/", "hard": "eval/hard/"}

    def held_out() -> Metrics:
        found: Metrics = {}
        for name, samples in given.heldout_demonstrations.items():
            found |= {prefixes[name] + metric: value for metric, value in plain.says(in_pairs(samples))[1].items()}
        return found

    rows = [held_out()]
    for step in range(STEPS):
        rows.append(plain.update(stream.take(3)) | (held_out() if step + 1 in (3, 4) else {}))
    return rows, {name: value.detach().numpy() for name, value in plain.model.named_parameters()}


@pytest.mark.default_tier
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"cp": 2, "dp": 1}], ids=["1 rank", "2 ranks", "cp"])
def test_weights_and_metrics_of_a_run_equal_plain_pytorch(
    folder: Path, ranks: RankPool, plain_run: tuple[list[Metrics], dict[str, np.ndarray]], mesh: dict[str, int]
) -> None:
    expected_rows, expected_weights = plain_run
    config = settings(folder, mesh={"device": "cpu", **mesh})
    for rows, weights in ranks.run(math.prod(mesh.values()), run_of, config):
        for name, expected in expected_weights.items():
            assert np.abs(weights[name] - expected).max() <= 1e-12
        for row, expected in zip(rows, expected_rows, strict=True):
            for name, value in expected.items():
                # held-out log-probs come back in float32
                assert row[name] == pytest.approx(value, abs=1e-5 if name.startswith("eval/") else 1e-11), name
    assert expected_rows[1]["loss"] == pytest.approx(math.log(2)) and expected_rows[4]["rewards/accuracies"] > 0.5


def test_adapters_begin_at_the_policy_they_are_compared_with(folder: Path, ranks: RankPool) -> None:
    ((rows, _),) = ranks.run(1, run_of, settings(folder, lora={"rank": 4}))
    first, *_, last = rows
    assert first["eval/rewards/margins"] == first["eval/hard/rewards/chosen"] == 0.0
    assert rows[1]["loss"] == pytest.approx(math.log(2)) and last["loss"] < math.log(2) and last["logps/chosen"] < 0
