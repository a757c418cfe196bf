"""What a sharded model says of itself is what it is; one flipped bit in one replica is found, named and placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slimefsdp.models.decoder import PolicyModel
from slimefsdp.monitoring.replica_check import compare_replicas, describe_model, model_tensors, optimizer_tensors
from slimefsdp.results import Description, Difference, ReplicaCheck
from tests.support.optimizers import optimizer_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import tiny_model

MESHES = [(1,), (2,), (4,), (2, 2), (4, 1), (3, 1)]
WEIGHT, BUFFER = "model.layers.1.mlp.up_proj.weight", "model.rotary_emb.inv_freq"


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def sharded_policy(sizes: tuple[int, ...]) -> PolicyModel:
    """Layers of one dtype and two ways with reshard; 57 columns, which divide by no number of ranks used."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    policy = PolicyModel(tiny_model(intermediate_size=57))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(policy.decoder_layers()):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=index == 0)
    # two modules as one unit, in another precision
    fully_shard([policy.hf.model.embed_tokens, policy.hf.model.norm], mesh=mesh)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


# ---------------------------------------------------------------------- describe


def described(rank: int, sizes: tuple[int, ...]) -> tuple[Description, Description, dict[str, Any]]:
    policy = sharded_policy(sizes)
    before = describe_model(policy, {"dp": 2, "cp": 3})
    local = {name: p.to_local().numel() * 4 for name, p in policy.named_weights() if isinstance(p, DTensor)}
    policy._get_fsdp_state()._lazy_init()  # type: ignore[operator]  # what the first forward settles
    return before, describe_model(policy, {"dp": 2, "cp": 3}), local


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_units_hold_every_parameter_once_and_their_bytes_add_up(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    whole = dict(tiny_model(intermediate_size=57).named_parameters())
    world_size = 1
    for size in sizes:
        world_size *= size
    copies = sizes[0] if len(sizes) == 2 else 1
    reports = ranks.run(world_size, described, sizes)
    for rank, (report, _, local) in enumerate(reports):
        assert report.rank == rank and report.mesh == {"dp": 2, "cp": 3}
        assert sorted(name for unit in report.units for name in unit.parameters) == sorted(whole)
        for unit in report.units:
            assert unit.numel == sum(whole[name].numel() for name in unit.parameters)
            assert unit.local_bytes == sum(local[name] for name in unit.parameters)
        assert report.numel == sum(parameter.numel() for parameter in whole.values())
    assert sum(report.local_bytes for report, _, _ in reports) == reports[0][0].numel * 4 * copies


def test_units_say_how_they_were_wrapped_before_the_first_forward_and_after(ranks: RankPool) -> None:
    ((report, after, _),) = ranks.run(1, described, (1,))
    assert after == report
    units = {unit.name: unit for unit in report.units}
    embedding = "model.embed_tokens, model.norm"
    assert list(units) == ["(root)", embedding, "model.layers.0", "model.layers.1"]
    assert units["(root)"].parameters == ("lm_head.weight",)
    # the outermost unit stays gathered between forward and backward, and so does the layer that was told to
    assert [unit.reshard_after_forward for unit in report.units] == [False, True, True, False]
    for name, unit in units.items():
        compute = "float32" if name == embedding else "bfloat16"
        assert (unit.master_dtype, unit.compute_dtype, unit.reduce_dtype) == ("float32", compute, "float32")
    assert report.buffer_bytes == sum(buffer.numel() * 4 for buffer in tiny_model().buffers())


# ---------------------------------------------------------------------- check_sync


def flip_bit(tensor: torch.Tensor) -> None:
    """The lowest bit of the last element: no sum would show it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.detach().view(-1)[-1:].view(torch.int32)
    bits ^= 1


def negate_zero(tensor: torch.Tensor) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.detach().view(-1)[-1] = -0.0


def checked(
    rank: int, sizes: tuple[int, ...], spoiled: dict[str, int], spoil: Callable[[torch.Tensor], None], number: int
) -> ReplicaCheck:
    """The check after `spoil` on the tensors of these names, on one rank each; `number` on the last rank."""
    policy = sharded_policy(sizes)
    optimizer = optimizer_of(policy.named_weights(), "adamw", lr=0.1, betas=(0.9, 0.9), eps=1e-8, weight_decay=0.0)
    tensors = {**dict(model_tensors(policy)), **dict(optimizer_tensors(policy, optimizer))}
    for name, where in spoiled.items():
        if where == rank:
            spoil(tensors[name])
    numbers = {"updates_taken": number if rank == dist.get_world_size() - 1 else 3, "lr": 0.1}
    return compare_replicas(tensors.items(), numbers, world())


def run_check(
    ranks: RankPool, sizes: tuple[int, ...], spoiled: dict[str, int] | None = None, *, number: int = 3,
    spoil: Callable[[torch.Tensor], None] = flip_bit,
) -> ReplicaCheck:  # fmt: skip
    world_size = int(torch.tensor(sizes).prod())
    first, *others = ranks.run(world_size, checked, sizes, spoiled or {}, spoil, number)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_healthy_model_is_in_sync_on_every_mesh(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    report = run_check(ranks, sizes)
    assert report.is_in_sync and report.differences == ()
    model = tiny_model(intermediate_size=57)
    parameters = list(model.parameters())
    common = len(list(model.buffers())) + len(parameters) + 2  # buffers, Adam's step counts, two numbers
    # a replicated shard is compared with its moments; empty shards hold nothing
    shards = sum(min(p.shape[0], -(-p.shape[0] // -(-p.shape[0] // sizes[-1]))) for p in parameters)
    if sizes == (1,):
        assert report.checked == 0
    else:
        assert report.checked == common + (3 * shards if len(sizes) == 2 else 0)


@pytest.mark.parametrize("spoil", [flip_bit, negate_zero])
def test_one_bit_of_a_replicas_shard_is_named_with_its_ranks(
    ranks: RankPool, spoil: Callable[[torch.Tensor], None]
) -> None:
    name = f"optimizer.{WEIGHT}.exp_avg_sq" if spoil is negate_zero else f"model.{WEIGHT}"
    report = run_check(ranks, (2, 2), {name: 3}, spoil=spoil)
    # the second shard, rows 29 to 57 of the projection, which ranks 1 and 3 hold
    assert report.differences == (Difference(f"{name}[29:57, 0:32]", ((1,), (3,))),)
    assert not report.is_in_sync and f"{name}[29:57, 0:32]" in str(report)


def test_the_majority_tells_which_of_several_replicas_is_wrong(ranks: RankPool) -> None:
    report = run_check(ranks, (3, 1), {f"model.{WEIGHT}": 0, f"buffer.{BUFFER}": 1})
    assert [(found.name, found.deviating) for found in report.differences] == [
        (f"model.{WEIGHT}", (0,)), (f"buffer.{BUFFER}", (1,))
    ]  # fmt: skip
    assert report.differences[0].ranks == ((1, 2), (0,))


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
def test_buffers_and_numbers_are_compared_where_nothing_is_replicated_too(
    ranks: RankPool, sizes: tuple[int, ...]
) -> None:
    report = run_check(ranks, sizes, {f"buffer.{BUFFER}": 1}, number=4)
    assert [found.name for found in report.differences] == ["state.updates_taken", f"buffer.{BUFFER}"]
    last = int(torch.tensor(sizes).prod()) - 1
    assert all(found.deviating == (1,) for found in report.differences[1:])
    assert report.differences[0].deviating == (last,)
