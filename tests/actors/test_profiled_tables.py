"""Tables of profiled updates are shown once each, those of the critic, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.loop import ProfiledTables
from slimefsdp.config import config_from_dict


@pytest.mark.parametrize("updates", [[1, 2], None])
def test_tables_are_shown_once_each_and_not_those_of_earlier_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], updates: list[int] | None
) -> None:
    tree = {"run": {"dir": str(tmp_path)}, "model": {"path": "m"}, "optim": {"total_updates": 10}}
    critic = tmp_path / "profile" / "critic"
    critic.mkdir(parents=True)
    (critic.parent / "update_000001.txt").write_text("earlier\n")
    tables = ProfiledTables(config_from_dict(tree | ({"profile": {"updates": updates}} if updates else {})))
    shown = []
    for file, text in ((critic / "update_000001.txt", "critic\n"), (critic.parent / "update_000002.txt", "actor\n")):
        tables.show_new()
        file.write_text(text)
        tables.show_new()
        shown.append(capsys.readouterr().err)
    assert shown == (["critic\n", "actor\n"] if updates else ["", ""])
