"""The stages of a start: a line each in a log file, one that is rewritten on a terminal, nothing where nobody asked."""

from __future__ import annotations

import io

import pytest

from actors import startup
from actors.startup import reporting, stage, waited_for, waiting
from tests.support.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_file_gets_a_line_a_stage_and_one_now_and_then_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "HEARTBEATS_S", (0.05,))
    written = io.StringIO()
    with reporting(written):
        with stage("starting ranks", lambda: "1 of 2 ready"):
            assert wait_until(lambda: "1 of 2 ready" in written.getvalue())
        with stage("importing"):
            assert wait_until(lambda: written.getvalue().count("importing") == 2)
        monkeypatch.setattr(startup, "HEARTBEATS_S", (600.0,))
        with stage("starting engines"):
            pass
        with stage("checking", is_short=True):
            pass
    lines = written.getvalue().splitlines()
    assert "starting ranks" in lines[0] and "ready" not in lines[0]
    assert "starting ranks" in lines[1] and "starting engines" in lines[-1]
    assert lines[3].endswith("importing: for 0 s"), "a stage that cannot say how far it is says for how long it lasts"
    assert not any("checking" in line or "\x1b" in line for line in lines)


def test_a_terminal_has_one_line_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "REFRESH_S", 0.05)
    written = Terminal()
    with pytest.raises(KeyError), reporting(written), stage("starting ranks", lambda: "1 of 2 ready"):
        assert wait_until(lambda: "1 of 2 ready" in written.getvalue())
        raise KeyError
    assert written.getvalue().count("\n") == 1 and written.getvalue().endswith("\n"), "an error begins on its own line"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_step_that_takes_long_says_how_far_it_is_on_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    monkeypatch.setattr(startup, "WAITING_S", 600.0)
    written = stream()
    with reporting(written):
        with waiting("step 2", lambda: "1 of 64 responses"):
            assert waited_for() == "step 2: 1 of 64 responses"
        assert waited_for() == written.getvalue() == "", "a step that takes no time is not spoken of"
        monkeypatch.setattr(startup, "WAITING_S", 0.05)
        with waiting("step 3", lambda: "17 of 64 responses"):
            assert wait_until(lambda: written.getvalue().count("\n") > 1)
    assert all(line.endswith("s] step 3: 17 of 64 responses") for line in written.getvalue().splitlines())
    with waiting("step 4", lambda: "18 of 64 responses"):
        assert waited_for() == "step 4: 18 of 64 responses", "a signal is answered in a program of one's own, too"


def test_a_program_of_ones_own_is_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    with reporting(io.StringIO()):
        pass
    with stage("starting ranks"):
        pass
    assert capfd.readouterr() == ("", "")
