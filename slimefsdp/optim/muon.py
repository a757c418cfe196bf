"""Updates matrices by Muon, which takes steps along the momentum, orthogonalized by Newton-Schulz iterations.

Keller Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the arithmetic of `torch.optim.Muon`. The
momentum is sharded like the parameters, but the iterations need whole matrices. Each matrix is therefore assigned to
one rank, its owner, so that the cost is balanced over all ranks. The owner receives the matrix's rows, computes the
iterations, and sends the rows back to the ranks that hold them. The result has the same bits on every mesh.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.model_spec import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial, whose slope at 0 is steep (Jordan et al.)
NORM_EPS = 1e-7
ROUND_ELEMENTS = 2**26  # largest number of elements that a rank owns in a round, unless a single matrix is larger


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Returns approximately U V^T for a matrix U S V^T, [rows, columns], in the matrix's dtype.

    The singular values of the result are between 0.7 and 1.2.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=NORM_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def adjusted_lr(lr: float, shape: Sequence[int]) -> float:
    """Returns the learning rate of a matrix, or of each matrix of a stack.

    The rate is lr x 0.2 sqrt(max(rows, columns)). It makes updates as large as AdamW's, so that learning rates for
    AdamW also suit Muon (Liu et al. 2025, https://arxiv.org/abs/2502.16982, section 2.2; `match_rms_adamw` of torch).
    """
    rows, columns = shape[-2:]
    return lr * 0.2 * math.sqrt(max(rows, columns))


@torch.no_grad()
def update_matrices(
    parameters: Sequence[nn.Parameter],
    momenta: Sequence[torch.Tensor],
    group: dist.ProcessGroup | None,
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
) -> None:
    """Collective: updates matrices [rows, columns] and stacks of them [matrices, rows, columns] by one step.

    Args:
        parameters: all must have gradients, which are overwritten.
        momenta: momentum of each parameter, sharded like the parameter; updated in place.
        group: all ranks; None means a single process.
    """
    updates = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    buffers = [local_shard(buffer) for buffer in momenta]
    if not parameters:
        return
    torch._foreach_lerp_(buffers, updates, 1 - momentum)
    torch._foreach_lerp_(updates, buffers, momentum)  # Nesterov momentum
    _orthogonalize(parameters, updates, group)
    for parameter, update in zip(parameters, updates, strict=True):
        shard = local_shard(parameter)
        shard.mul_(1 - lr * weight_decay)
        shard.add_(update, alpha=-adjusted_lr(lr, parameter.shape))


def _orthogonalize(
    parameters: Sequence[nn.Parameter], updates: Sequence[torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    """Replaces each shard of `updates` by its rows of the orthogonalized matrix, in place.

    The iterations run on the mesh's device. On CUDA they use bfloat16, for tensor cores, unless parameters are float64.
    """
    first = parameters[0]
    world, own = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    shards, device, dtype = 1, first.device, first.dtype
    if isinstance(first, DTensor):
        shards, device = first.device_mesh.size(first.device_mesh.ndim - 1), torch.device(first.device_mesh.device_type)
    if device.type == "cuda" and dtype == torch.float32:
        dtype = torch.bfloat16
    flat = [update.view(-1, update.shape[-1]) for update in updates]
    own_copy, own_shard = divmod(own, shards)
    for owned in assign_owners(tuple(tuple(parameter.shape) for parameter in parameters), world, shards):
        # send rows to the owners; the ranks of this copy of the model together hold all rows
        gathered = _exchange(
            [
                [
                    flat[matrix.parameter][matrix.rows_in(own_shard)]
                    for matrix in (owned[to] if to // shards == own_copy else ())
                ]
                for to in range(world)
            ],
            [
                [matrix.shape_in(rank % shards) for matrix in (owned[own] if rank // shards == own_copy else ())]
                for rank in range(world)
            ],
            group,
            device=device,
            dtype=dtype,
        )
        own_rows = gathered[own_copy * shards : (own_copy + 1) * shards]
        results = [newton_schulz(torch.cat(rows), NEWTON_SCHULZ_STEPS) for rows in zip(*own_rows, strict=True)]
        # send the results back to the ranks of all copies of the model
        returned = _exchange(
            [
                [result[matrix.rows_of_matrix(to % shards)] for matrix, result in zip(owned[own], results, strict=True)]
                for to in range(world)
            ],
            [[matrix.shape_in(own_shard) for matrix in owned[owner]] for owner in range(world)],
            group,
            device=device,
            dtype=dtype,
        )
        for owner, pieces in enumerate(returned):
            for matrix, piece in zip(owned[owner], pieces, strict=True):
                flat[matrix.parameter][matrix.rows_in(own_shard)].copy_(piece)


def _exchange(
    sent: list[list[torch.Tensor]],
    shapes: list[list[tuple[int, int]]],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[list[torch.Tensor]]:
    """Collective: sends a list of pieces to every rank; returns the pieces received from every rank.

    Args:
        sent: the pieces for each rank.
        shapes: the shapes of the pieces from each rank.
    """
    flat = [[piece.reshape(-1).to(device, dtype) for piece in pieces] for pieces in sent]
    empty = torch.empty(0, device=device, dtype=dtype)
    out = torch.cat([empty, *(piece for pieces in flat for piece in pieces)])
    received = out
    if group is not None and dist.get_world_size(group) > 1:
        sizes = [sum(math.prod(shape) for shape in of_rank) for of_rank in shapes]
        received = torch.empty(sum(sizes), device=device, dtype=dtype)
        dist.all_to_all_single(received, out, sizes, [sum(map(len, pieces)) for pieces in flat], group=group)
    parts = iter(received.split([math.prod(shape) for of_rank in shapes for shape in of_rank]))
    return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


# ---------------------------------------------------------------------- ownership of matrices


@dataclass(frozen=True, slots=True)
class ShardedMatrix:
    """Describes a matrix parameter, or one matrix of a stack. Row numbers count through the whole stack."""

    parameter: int  # index in the list of parameters
    first_row: int  # index of the matrix's first row in the stack
    rows: int
    columns: int
    bounds: tuple[int, ...]  # rows [bounds[s], bounds[s + 1]) of the parameter are in shard s

    def rows_in(self, shard: int) -> slice:
        """Returns which rows of a shard belong to the matrix, counted from the shard's first row."""
        rows = self.rows_of_matrix(shard)
        offset = self.first_row - self.bounds[shard]
        return slice(rows.start + offset, rows.stop + offset)

    def rows_of_matrix(self, shard: int) -> slice:
        """Returns which rows of the matrix belong to a shard, counted from the matrix's first row."""
        start, stop = (min(max(bound - self.first_row, 0), self.rows) for bound in self.bounds[shard : shard + 2])
        return slice(start, stop)

    def shape_in(self, shard: int) -> tuple[int, int]:
        rows = self.rows_of_matrix(shard)
        return rows.stop - rows.start, self.columns

    @property
    def cost(self) -> int:
        """Returns half of the multiplications and additions of one iteration."""
        short, long = sorted((self.rows, self.columns))
        return 2 * short * short * long + short**3


@lru_cache(maxsize=16)
def assign_owners(
    shapes: tuple[tuple[int, ...], ...], world: int, shards: int, round_elements: int = ROUND_ELEMENTS
) -> list[list[list[ShardedMatrix]]]:
    """Assigns each matrix, costliest first, to the rank with the least work; returns the matrices as [round][rank].

    In each round a rank owns at most `round_elements` elements, or a single larger matrix.

    Args:
        shapes: shapes of the parameters.
        shards: number of shards of each parameter, which divide its first dim.
    """
    matrices = []
    for index, shape in enumerate(shapes):
        chunk, rows_of_each = -(-shape[0] // shards), math.prod(shape[1:-1])
        bounds = tuple(min(shard * chunk, shape[0]) * rows_of_each for shard in range(shards + 1))
        *stack, rows, columns = shape
        matrices += [ShardedMatrix(index, number * rows, rows, columns, bounds) for number in range(math.prod(stack))]
    queues: list[list[ShardedMatrix]] = [[] for _ in range(world)]
    load = [(0, rank) for rank in range(world)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        done, rank = heapq.heappop(load)
        queues[rank].append(matrix)
        heapq.heappush(load, (done + matrix.cost, rank))
    of_ranks = [_split_rounds(queue, round_elements) for queue in queues]
    return [
        [rounds[number] if number < len(rounds) else [] for rounds in of_ranks]
        for number in range(max(map(len, of_ranks), default=0))
    ]


def _split_rounds(queue: list[ShardedMatrix], most: int) -> list[list[ShardedMatrix]]:
    """Splits a rank's matrices, in order, into rounds of at most `most` elements or of a single matrix."""
    rounds: list[list[ShardedMatrix]] = []
    room = 0
    for matrix in queue:
        room -= matrix.rows * matrix.columns
        if not rounds or room < 0:
            rounds.append([])
            room = most - matrix.rows * matrix.columns
        rounds[-1].append(matrix)
    return rounds
