"""Tables of profiled updates: shown once each, and rank 0 is asked only while chosen ones are still to come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.loop import ProfiledUpdates
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import WorkerHung
from slimefsdp.results import Health


class Group:
    """Counts how often its ranks are asked."""

    def __init__(self, critic: Group | None = None) -> None:
        self.critic, self.updates, self.asked, self.answers = critic, 0, 0, True

    def health(self) -> list[Any]:
        self.asked += 1
        return [Health(0, 1, self.updates) if self.answers else WorkerHung("busy", field="rank")]


def settings(folder: Path, updates: list[int] | None) -> RunConfig:
    return config_from_dict(
        {
            "run": {"dir": str(folder)},
            "model": {"path": "m"},
            "optim": {"total_updates": 10},
            "profile": {"updates": updates} if updates else {},
        }
    )


def write_tables(folder: Path, updates: list[int]) -> None:
    (folder / "profile").mkdir()
    for update in updates:
        (folder / "profile" / f"update_{update:06d}.txt").write_text(f"table {update}\n")


def train(profiles: ProfiledUpdates, group: Any, capsys: pytest.CaptureFixture[str], *, updates: int = 1) -> str:
    """A step of so many updates; what is shown after it."""
    group.updates += updates
    profiles.show_new()
    return capsys.readouterr().err


def test_rank_0_is_asked_only_while_chosen_updates_are_to_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tables(tmp_path, [2, 3])
    group: Any = Group()
    profiles = ProfiledUpdates(settings(tmp_path, [3, 2]), group)
    shown = [train(profiles, group, capsys) for _ in range(6)]
    assert shown == ["", "table 2\n", "table 3\n", "", "", ""]
    assert group.asked == 1 + 3, "at the start, and after each of the steps up to the last chosen one"


def test_nobody_is_asked_where_no_update_is_chosen_or_all_were_taken_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group: Any = Group(critic=Group())
    profiles = ProfiledUpdates(settings(tmp_path, None), group)
    assert train(profiles, group, capsys) == "" and group.asked == group.critic.asked == 0
    resumed: Any = Group()
    resumed.updates = 7
    profiles = ProfiledUpdates(settings(tmp_path, [3]), resumed)
    assert train(profiles, resumed, capsys) == "" and resumed.asked == 1


def test_tables_of_one_step_come_in_order_and_once_even_where_rank_0_was_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tables(tmp_path, [1, 2, 5])
    group: Any = Group()
    profiles = ProfiledUpdates(settings(tmp_path, [1, 2, 5]), group)
    assert train(profiles, group, capsys, updates=3) == "table 1\ntable 2\n"
    group.answers = False
    assert train(profiles, group, capsys) == ""
    group.answers = True
    assert train(profiles, group, capsys) == "table 5\n"
