"""The rates of a step are its tokens and operations, counted sample by sample, over its seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slimefsdp.batching.prefix_tree import find_prefixes
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.estimate.flops import training_flops
from slimefsdp.model_spec import ModelSpec
from slimefsdp.rpc import Role
from slimefsdp.trainer import Trainer
from slimefsdp.training.metrics import Throughput
from slimefsdp.training.plan import plan_training
from tests.support.plans import plan_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, tiny_model
from tests.support.trainers import CPU, fresh_batch, settings

DIMENSIONS = ModelSpec(hidden=8, layers=3, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=50)
PROMPT = list(range(20))


def group_of_four() -> RolloutBatch:
    """Responses of 3 to 6 tokens to one prompt; every second token of them is not trained."""
    samples = []
    for index in range(4):
        response = [30 + index] * (3 + index)
        mask = [position % 2 == 0 for position in range(len(response))]
        samples.append({"tokens": PROMPT + response, "response_length": len(response), "loss_mask": mask})
    return RolloutBatch.from_samples(samples)


def test_tokens_and_operations_a_second_are_those_of_the_updates_taken() -> None:
    batch = group_of_four()
    plan = plan_of(batch.lengths, dp=1, max_pack_tokens=60, samples_per_update=2)
    assert len(plan.updates) == 2
    for updates in ((), (0,), (1,), (0, 1)):  # of a skipped one nothing is counted
        chosen = [sample for update in updates for sample in plan.samples_of(update)]
        metrics = Throughput(ranks=4, model_spec=DIMENSIONS, peak_tflops=0.5).metrics(plan, batch, 2.0, updates)
        tokens = sum(23 + sample for sample in chosen)
        flops = sum(
            training_flops(DIMENSIONS, np.array([23 + sample]), counted_rows=(4 + sample) // 2).total
            for sample in chosen
        )
        assert metrics == pytest.approx({
            "train_seconds": 2.0, "tokens_per_second": tokens / 2, "tokens_per_second_per_rank": tokens / 8,
            "tflops_per_rank": flops / 8e12, "mfu": flops / 8e12 / 0.5,
        }, rel=1e-12)  # fmt: skip


def test_what_samples_share_is_computed_and_counted_once() -> None:
    batch = group_of_four()
    found = find_prefixes(batch.tokens, batch.lengths)
    assert found is not None
    plan = plan_of(batch.lengths, dp=1, max_pack_tokens=60, shared=found, min_gain=-np.inf)
    assert len(plan.updates[0][0]) == 1, "one pack holds them all"
    metrics = Throughput(ranks=1, model_spec=DIMENSIONS).metrics(plan, batch, 1.0, [0])
    nodes, depths = np.array([20, 3, 4, 5, 6]), np.array([0, 20, 20, 20, 20])
    flops = training_flops(DIMENSIONS, nodes, counted_rows=2 + 2 + 3 + 3, depths=depths)
    assert metrics["tflops_per_rank"] == pytest.approx(flops.total / 1e12, rel=1e-12)
    assert metrics["tokens_per_second"] == batch.lengths.sum() and "mfu" not in metrics


def test_a_critic_has_no_vocabulary_and_a_frozen_weight_no_gradient() -> None:
    batch = group_of_four()
    plan = plan_of(batch.lengths, dp=1, max_pack_tokens=60)
    throughput = Throughput(ranks=1, model_spec=DIMENSIONS, trained_share=0.25, has_vocabulary_head=False)
    flops = training_flops(DIMENSIONS, batch.lengths, counted_rows=0, trained_share=0.25)
    assert throughput.metrics(plan, batch, 1.0, [0])["tflops_per_rank"] == pytest.approx(flops.total / 1e12, rel=1e-12)


def step_of(rank: int, config: RunConfig, role: Role, batch: RolloutBatch) -> dict[str, float]:
    return Trainer(config, role, device=CPU).train_step(batch)


def test_a_train_step_counts_adapters_beside_frozen_weights(ranks: RankPool, tiny_folder: TinyFolder) -> None:
    config = settings(tiny_folder(vocab_size=97), lora={"rank": 4})
    batch = fresh_batch()
    (metrics,) = ranks.run(1, step_of, config, "actor", batch)
    chosen = plan_training(config, batch).samples_of(0)
    rows = int(batch.mask[np.isin(batch.sample_ids, chosen)].sum())
    model_spec = ModelSpec.from_config(tiny_model(vocab_size=97).config.to_dict())
    adapters = model_spec.adapters(4, config.lora.targets).parameters
    lengths = batch.lengths[chosen]
    flops = training_flops(model_spec, lengths, counted_rows=rows, trained_share=0.0, adapter_parameters=adapters)
    rate = flops.total / metrics["train_seconds"] / 1e12
    assert metrics["tflops_per_rank"] == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_train_step_reports_them_for_its_own_model_and_ranks(
    role: Role, ranks: RankPool, tiny_folder: TinyFolder
) -> None:
    folder = tiny_folder(vocab_size=97, intermediate_size=55)
    sections: dict[str, Any] = {"model": {"path": str(folder), "frozen": ["*.mlp.*"]}}
    config = settings(folder, mesh={"dp": 2}, profile={"peak_tflops": 0.125}, **sections)
    if role == "critic":
        config = config.model_copy(update={"algorithm": "ppo"})
    batch = fresh_batch()
    batch = batch.replace(values=np.zeros(batch.num_response_tokens), returns=np.ones(batch.num_response_tokens))
    metrics, _ = ranks.run(2, step_of, config, role, batch)
    model = tiny_model(vocab_size=97, intermediate_size=55)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    share = 1.0
    if role == "actor":  # model.frozen is the actor's
        share = sum(size for name, size in sizes.items() if ".mlp." not in name) / sum(sizes.values())
    plan = plan_training(config, batch, loss="value" if role == "critic" else "policy")
    chosen = plan.samples_of(0)
    rows = 0 if role == "critic" else int(batch.mask[np.isin(batch.sample_ids, chosen)].sum())
    model_spec = ModelSpec.from_config(model.config.to_dict())
    flops = training_flops(model_spec, batch.lengths[chosen], counted_rows=rows, trained_share=share)
    rate = flops.total / metrics["train_seconds"] / 2 / 1e12
    assert metrics["tflops_per_rank"] == pytest.approx(rate, rel=1e-12)
    assert metrics["mfu"] == pytest.approx(rate / 0.125, rel=1e-12)
