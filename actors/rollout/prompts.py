"""Hands out records in an order that depends only on the seed, and that a resumed run can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.rollout.records import Record
from slimefsdp.errors import CheckpointError, short_repr


def digest_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Returns the sha256 of records without the keys that `Record.outside_digest` names; key order does not matter."""
    digest = hashlib.sha256()
    for record in records:
        left_out = record.outside_digest if isinstance(record, Record) else ()
        fields = {key: value for key, value in record.items() if key not in left_out}
        digest.update(json.dumps(fields, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class PromptStream:
    """Hands out records endlessly, each once per epoch, in an order that depends only on the seed and the epoch.

    The order of epoch e is a permutation by numpy's Philox generator with the key (seed, e). So a position in the
    stream is the epoch and an offset, without a generator state.

    Args:
        digest: identifies the records for a resumed run; None means that it is computed from the records.
        lengths: the number of tokens of each record's prompt, for `take` with a limit.
    """

    def __init__(
        self, records: Sequence[Any], seed: int, *, digest: str | None = None, lengths: Sequence[int] = ()
    ) -> None:
        assert records and len(lengths) in (0, len(records))
        self._records = records
        self._seed = seed
        self._lengths = lengths
        self._digest = digest_of(records) if digest is None else digest
        self._start_epoch(0)

    def take(self, count: int, max_tokens: int | None = None) -> list[Any]:
        """Returns the next `count` records; begins the next epoch when all records were taken or skipped.

        Args:
            max_tokens: limit on the tokens of a prompt; records with longer prompts are skipped.
        """
        assert max_tokens is None or (self._lengths and min(self._lengths) <= max_tokens), "none would ever be taken"
        taken: list[Any] = []
        while len(taken) < count:
            if self._offset == len(self._records):
                self._start_epoch(self._epoch + 1)
            index = self._order[self._offset]
            self._offset += 1
            if max_tokens is None or self._lengths[index] <= max_tokens:
                taken.append(self._records[index])
        return taken

    @property
    def records_passed(self) -> int:
        """Returns the number of records that were taken or skipped since the first epoch began."""
        return self._epoch * len(self._records) + self._offset

    def state(self) -> dict[str, Any]:
        """Returns the stream's position as JSON values; `offset` counts the records of `epoch` taken or skipped."""
        position = {"seed": self._seed, "records": len(self._records), "epoch": self._epoch, "offset": self._offset}
        return {**position, "digest": self._digest}

    def has_records_of(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a `state()` was taken from a stream of these records."""
        return state.get("records") == len(self._records) and state.get("digest") == self._digest

    def restore(self, state: dict[str, Any], *, allow_changed: bool = False) -> None:
        """Continues from a `state()` of a stream with the same records and seed.

        Args:
            allow_changed: whether the records may differ from those of the state; then the next epoch begins.

        Raises:
            CheckpointError: the state is invalid, or of another seed, or of other records without `allow_changed`.
        """
        keys = ("seed", "records", "epoch", "offset")
        numbers = [state.get(key) for key in keys] if isinstance(state, dict) else [None]
        if (
            not all(type(value) is int and 0 <= value < 2**62 for value in numbers)
            or state["offset"] > state["records"]
        ):
            raise CheckpointError(
                f"{short_repr(state)} is no place in the prompts",
                field="prompts",
                hint="resume from a checkpoint of this loop",
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the place in the prompts was saved with seed={state['seed']}, but this run has {self._seed}",
                field="run.seed",
                hint=f"set run.seed={state['seed']}, or begin a new run",
            )
        if self.has_records_of(state):
            self._start_epoch(state["epoch"])
            self._offset = state["offset"]
        elif allow_changed:
            self._start_epoch(state["epoch"] + 1)
        else:
            is_shorter_or_longer = state["records"] != len(self._records)
            raise CheckpointError(
                f"the place in the prompts was saved with {state['records']} records, and this run has "
                + (str(len(self._records)) if is_shorter_or_longer else "others, of the same number"),
                field="data.train",
                hint="resume with the data.train and model the run began with and, under data.overlong_prompts=skip, "
                "with as much room for a prompt (data.max_prompt_tokens, rollout.max_new_tokens, "
                "batch.max_tokens_per_rank x mesh.cp), or go on with the new records from the next epoch: "
                "data.allow_changed=true",
            )

    def _start_epoch(self, epoch: int) -> None:
        generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)))
        self._order: list[int] = generator.permutation(len(self._records)).tolist()
        self._epoch = epoch
        self._offset = 0
