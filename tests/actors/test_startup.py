"""The stages of a start: a line each in a log file, one that is rewritten on a terminal, a log message elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from actors import startup
from actors.startup import reporting, stage, waited_for, waiting
from tests.support.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


def stages() -> None:
    for what in ("starting ranks", "loading the model"):
        with stage(what), stage("a moment", is_short=True):
            pass


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """The product's logger as in a program that has not configured logging; pytest itself has handlers."""
    logger = logging.Logger("slimefsdp")
    monkeypatch.setattr(startup, "_logger", logger)
    return logger


def test_a_program_of_ones_own_gets_a_line_for_each_long_stage(
    logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    stages()
    assert capfd.readouterr() == ("", "slimefsdp: starting ranks\nslimefsdp: loading the model\n")


@pytest.mark.parametrize(("level", "messages"), [("WARNING", []), ("INFO", ["starting ranks", "loading the model"])])
@pytest.mark.parametrize("has_handlers", [True, False])
def test_a_program_that_configures_logging_decides_about_the_lines(
    logger: logging.Logger, capfd: pytest.CaptureFixture[str], level: str, messages: list[str], has_handlers: bool
) -> None:
    written = io.StringIO()
    if has_handlers:
        logger.parent = logging.RootLogger(level)
        logger.parent.addHandler(logging.StreamHandler(written))
    else:
        logger.setLevel(level)
    stages()
    assert written.getvalue().splitlines() == (messages if has_handlers else [])
    assert capfd.readouterr() == ("", "")


def test_a_command_writes_its_stages_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with reporting(io.StringIO()), stage("starting ranks"):
        pass
    assert caplog.messages == []
