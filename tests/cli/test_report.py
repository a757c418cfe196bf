"""`slimefsdp report` writes the page of runs, follows a run that goes on, and refuses folders that are no runs."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.cli import report
from actors.cli.main import main
from slimefsdp.errors import CheckpointError, ConfigError
from tests.support.report_runs import write_run


def shown(page: Path) -> dict[str, object]:
    """The data of a page."""
    found: dict[str, object] = json.loads(page.read_text().partition('id="data">')[2].partition("</script>")[0])
    return found


def test_the_page_of_one_run_stands_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", hack=True, steps=30)
    before = {path.name for path in folder.iterdir()}
    assert main(["report", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} - before == {"report.html"}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(str(folder / "report.html")) and "to step 30 (ended)" in line and "4 findings" in line
    assert shown(folder / "report.html")["refresh_s"] is None


def test_several_runs_need_a_page_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", *runs]) == ConfigError.exit_code
    assert main(["report", runs[0], runs[0], "--output", str(tmp_path / "page.html")]) == ConfigError.exit_code
    assert main(["report", *runs, "--output", str(tmp_path / "new" / "page.html")]) == 0
    assert len(shown(tmp_path / "new" / "page.html")["runs"]) == 2  # type: ignore[arg-type]


def test_a_run_is_followed_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, pages = write_run(tmp_path / "run"), list[dict[str, object]]()
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def sleep(seconds: float) -> None:
            pages.append(shown(folder / "report.html"))
            if len(pages) == 2:
                fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr(report.time, "sleep", sleep)
        assert main(["report", str(folder), "--watch", "7"]) == 0
    assert [page["refresh_s"] for page in pages] == [7, 7]
    assert shown(folder / "report.html")["refresh_s"] is None


def no_run(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()


def foreign_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n')


def binary_metrics(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(bytes(range(256)) * 9)


def foreign_evaluation(folder: Path) -> None:
    (folder / "evaluations" / "step_00000012.jsonl").write_text("<html>\x1b[2J\n{}\n")


def page_is_a_folder(folder: Path) -> None:
    (folder / "report.html").mkdir()


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (no_run, ConfigError.exit_code),
        (foreign_metrics, CheckpointError.exit_code),
        (binary_metrics, CheckpointError.exit_code),
        (foreign_evaluation, CheckpointError.exit_code),
        (page_is_a_folder, CheckpointError.exit_code),
    ],
)
def test_what_is_no_run_is_refused_in_a_few_lines(
    damage: Callable[[Path], None], status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    damage(folder)
    assert main(["report", str(folder)]) == status
    said = capsys.readouterr().err
    assert 3 <= len(said.splitlines()) <= 4 and "\x1b" not in said and "Traceback" not in said
    assert not (folder / "report.html").is_file()
