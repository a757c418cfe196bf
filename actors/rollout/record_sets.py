"""Counts the prompts of each set of records that a run reads, and the prompts that two sets share.

An evaluation on prompts that were trained on shows little. Shared prompts are reported but not refused, since a user
may want the same question in two sets. Only equal texts are found, not paraphrases.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.rollout.records import Record, place_of
from slimefsdp.config.data import DataSettings, heldout_field

_Prompt = str | tuple[str]


@dataclass(frozen=True, slots=True)
class Shared:
    """Counts the prompts that a set shares with another set."""

    field: str  # the setting of the other set
    prompts: int  # number of shared prompts
    first: str  # the place of the first shared prompt


@dataclass(frozen=True, slots=True)
class RecordSet:
    """Describes the set of records that one setting of `data` names.

    Args:
        shared: the prompts that the set shares with each earlier set.
    """

    field: str
    source: Path
    prompts: int
    shared: tuple[Shared, ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; {other.prompts:,} of them in {other.field} too" for other in self.shared)
        return f"{self.prompts:,} records of {self.source}{others}"


def record_sets(
    data: DataSettings, heldout: Mapping[str, Sequence[Record]], train: Sequence[Record] | None = None
) -> list[RecordSet]:
    """Describes data.train (if `train` is given) and the held-out sets; compares each set with all sets before it."""
    named = {} if train is None else {"data.train": train}
    named |= {heldout_field(name): records for name, records in heldout.items()}
    sets: list[RecordSet] = []
    prompts_of: dict[str, set[_Prompt]] = {}
    for field, records in named.items():
        prompts = list(map(_hashable, records)) if len(named) > 1 else []
        shared = []
        for other, other_prompts in prompts_of.items():
            if indices := [number for number, prompt in enumerate(prompts) if prompt in other_prompts]:
                shared.append(Shared(other, len(indices), place_of(records[indices[0]])))
        sets.append(RecordSet(field, data.sources[field], len(records), tuple(shared)))
        prompts_of[field] = set(prompts)
    return sets


def warn_of_shared_prompts(sets: Iterable[RecordSet]) -> None:
    for record_set in sets:
        for shared in record_set.shared:
            print(
                f"{record_set.field}: {shared.prompts:,} of {record_set.prompts:,} prompts are in {shared.field} too, "
                f"the first at {shared.first}",
                file=sys.stderr,
            )


def _hashable(record: Record) -> _Prompt:
    """Returns a record's prompt, chat or text as a hashable value; a chat becomes a tuple with its JSON."""
    prompt = next(record[key] for key in ("prompt", "messages", "text") if key in record)
    return prompt if isinstance(prompt, str) else (json.dumps(prompt, sort_keys=True),)
