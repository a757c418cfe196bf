"""The sets of records that a run reads, with how many prompts each has, and how many of them are in another set too.

A held-out prompt that is trained on says little about what was learned. Nothing is refused: prompts are compared word
for word, so a paraphrase is not found, and the same question may be meant to be in two sets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.rollout.prompts import Record, place_of
from slimefsdp.config.rollout import DataSettings, heldout_field

_Prompt = str | tuple[str]


@dataclass(frozen=True, slots=True)
class Shared:
    """Prompts of one set that another one has too."""

    field: str  # the setting of the other one
    prompts: int
    first: str  # where the first of them stands


@dataclass(frozen=True, slots=True)
class RecordSet:
    """What one setting of `data` names.

    Args:
        shared: with each of the sets before it.
    """

    field: str
    source: Path
    prompts: int
    shared: tuple[Shared, ...] = ()

    def __str__(self) -> str:
        others = "".join(f"; {one.prompts:,} of them in {one.field} too" for one in self.shared)
        return f"{self.prompts:,} records of {self.source}{others}"


def record_sets(
    data: DataSettings, heldout: Mapping[str, Sequence[Record]], train: Sequence[Record] | None = None
) -> list[RecordSet]:
    """data.train, where it is read, and then the held-out sets, each compared with those before it."""
    named = {} if train is None else {"data.train": train}
    named |= {heldout_field(name): records for name, records in heldout.items()}
    found: list[RecordSet] = []
    prompts_of: dict[str, set[_Prompt]] = {}
    for field, records in named.items():
        prompts = list(map(_hashable, records)) if len(named) > 1 else []
        shared = []
        for other, theirs in prompts_of.items():
            if places := [number for number, prompt in enumerate(prompts) if prompt in theirs]:
                shared.append(Shared(other, len(places), place_of(records[places[0]])))
        found.append(RecordSet(field, data.sources[field], len(records), tuple(shared)))
        prompts_of[field] = set(prompts)
    return found


def warn_of_shared_prompts(sets: Iterable[RecordSet]) -> None:
    """Says on stderr which sets hold prompts of others."""
    for one in sets:
        for shared in one.shared:
            print(
                f"{one.field}: {shared.prompts:,} of {one.prompts:,} prompts are in {shared.field} too, the first at "
                f"{shared.first}",
                file=sys.stderr,
            )


def _hashable(record: Record) -> _Prompt:
    """The prompt, or what a demonstration has in its place; chat messages as their JSON, apart from any text."""
    prompt = next(record[key] for key in ("prompt", "messages", "text") if key in record)
    return prompt if isinstance(prompt, str) else (json.dumps(prompt, sort_keys=True),)
