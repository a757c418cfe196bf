"""Sends tensors between context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Transfer:
    """Holds messages in flight; their buffers must not be touched before `wait`."""

    def __init__(
        self, received: list[torch.Tensor], requests: Sequence[dist.Work], sent: Sequence[torch.Tensor]
    ) -> None:
        self._received = received
        self._requests = requests
        self._sent = sent  # kept alive until the messages are sent

    def wait(self) -> list[torch.Tensor]:
        for request in self._requests:
            request.wait()
        return self._received


class Comm:
    """Sends tensors between the ranks that share a pack.

    All ranks must make the same calls in the same order; sizes may differ or be 0.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent_bytes = 0  # total bytes that this rank has sent
        self._group = group

    def pass_on(self, outgoing: torch.Tensor, rows: int) -> Transfer:
        """Sends a tensor to the next rank and receives one from the previous rank.

        Args:
            outgoing: [2, any, heads, head_dim], contiguous.
            rows: number of rows of the arriving tensor, [2, rows, heads, head_dim].
        """
        arriving = outgoing.new_empty(2, rows, *outgoing.shape[2:])
        return self._start([(outgoing, (self.rank + 1) % self.size)], [(arriving, (self.rank - 1) % self.size)])

    def exchange(self, outgoing: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> Transfer:
        """Sends outgoing[r] to every other rank r and receives arriving[r] from it; a rank's own entries are unused."""
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        return self._start([(outgoing[r], r) for r in others], [(arriving[r], r) for r in reversed(others)])

    def all_to_all(self, rows: torch.Tensor, outgoing: Sequence[int], arriving: Sequence[int]) -> torch.Tensor:
        """Sends outgoing[r] rows to every rank r and receives arriving[r] rows from it; rows are ordered by rank."""
        received = rows.new_empty(sum(arriving), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), list(arriving), list(outgoing), group=self._group)
        self.sent_bytes += (rows.shape[0] - outgoing[self.rank]) * rows[0:1].nbytes
        return received

    def _start(self, outgoing: list[tuple[torch.Tensor, int]], arriving: list[tuple[torch.Tensor, int]]) -> Transfer:
        sends = [(tensor, rank) for tensor, rank in outgoing if tensor.numel()]
        receives = [(tensor, rank) for tensor, rank in arriving if tensor.numel()]
        operations = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=rank) for tensor, rank in sends]
        operations += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=rank) for tensor, rank in receives]
        self.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
        requests = dist.batch_isend_irecv(operations) if operations else []
        return Transfer([tensor for tensor, _ in arriving], requests, [tensor for tensor, _ in sends])
