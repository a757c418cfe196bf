"""A snippet costs its call and nothing else: time, memory, files, processes and output have bounds."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest
from python_snippets import SnippetLimits, python_tool, run_snippet
from tool_functions import Tool, ToolError

from tests.support.waiting import wait_until

LIMITS = SnippetLimits(timeout_s=60.0)  # of a machine that is busy


def ran(code: str, limits: SnippetLimits = LIMITS) -> str:
    return asyncio.run(run_snippet(code, limits))


def failed(code: str, limits: SnippetLimits = LIMITS) -> str:
    with pytest.raises(ToolError) as caught:
        ran(code, limits)
    return str(caught.value)


def test_it_says_what_was_printed() -> None:
    assert ran("import sys, math\nprint(math.pi)\nprint('ä', file=sys.stderr)") == "3.141592653589793\nä"
    assert ran("x = 1") == "" and ran("raise SystemExit") == ""
    assert ran("def f(n):\n    return n and n + f(n - 1)\nif __name__ == '__main__':\n    print(f(9))") == "45"


def test_a_program_that_fails_says_how_and_what_it_had_printed() -> None:
    said = failed("print('so far')\ndef f():\n    return 1 / 0\nf()")
    assert said.startswith("so far\nTraceback") and "ZeroDivisionError" in said and said.endswith("(exit status 1)")
    assert "line 3" in said and "return 1 / 0" in said, "with its lines"
    assert "exec(" not in said, "and with no others"
    assert "SyntaxError" in failed("1 +") and "exit status 3" in failed("raise SystemExit(3)")
    assert "SIGSEGV" in failed("import os; os.kill(os.getpid(), 11)")
    assert "UnicodeDecodeError" in failed("print('\ud800')") or "SyntaxError" in failed("print('\ud800')")


def test_it_starts_anew_without_the_environment_in_a_folder_that_is_gone_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_SECRET", "abc")
    first = ran("import os\nopen('x', 'w').write('1')\nprint(os.getcwd())\nprint('MY_SECRET' in os.environ)").split()
    assert first[1] == "False" and not Path(first[0]).exists() and first[0] != str(Path.cwd())
    assert ran("import os; print(os.listdir())") == "[]"
    again = {ran("print({'a', 'b', 'c', 'd', 'e', 'f'})") for _ in range(4)}
    assert len(again) == 1, "answers repeat in other processes"
    assert "ModuleNotFoundError" in failed("import actors_of_the_driver")


@pytest.mark.slow
def test_an_endless_loop_ends_by_the_clock_or_by_what_it_computes() -> None:
    began = time.monotonic()
    assert "computed too long" in failed("print('a', flush=True)\nwhile True: pass", SnippetLimits(60.0, cpu_s=1))
    assert failed("import time\nprint('a', flush=True)\ntime.sleep(600)", SnippetLimits(1.0)) == "a\n(ended after 1 s)"
    assert "SIGKILL" in failed(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", SnippetLimits(60.0, cpu_s=1)
    )
    assert time.monotonic() - began < 60


def test_memory_and_files_are_bounded() -> None:
    limits = SnippetLimits(60.0, memory_mib=256, file_mib=1)
    assert "MemoryError" in failed("x = bytearray(2**30)", limits)
    assert "MemoryError" in failed("x = [0]\nwhile True: x += x", limits)
    assert "File too large" in failed("open('x', 'wb').write(bytes(2**21))", limits)
    assert ran("x = bytearray(2**26)\nprint(len(x))", limits) == str(2**26)


@pytest.mark.slow
def test_giant_output_is_shortened_and_then_ends_the_program() -> None:
    said = ran("print('a' * 200_000 + 'b' * 200_000)")
    assert said.startswith("aaa") and said.endswith("bbb") and "bytes left out" in said and len(said) < 140_000
    said = failed("while True: print('a' * 1000)", SnippetLimits(60.0, cpu_s=30, file_mib=1))
    assert said.startswith("aaa") and "exit status" in said and len(said) < 140_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess\nsubprocess.run(['sleep', '600'])",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nos.execv('/bin/sleep', ['sleep', '600'])",
    ],
)
def test_it_starts_no_processes(code: str) -> None:
    began = time.monotonic()
    assert "processes cannot be started here" in failed(code)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_what_it_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    """Where a way around is found: C code, say, under root, for whom the number of processes has no bound."""
    file = tmp_path / "open"
    code = f"""
import ctypes, os, time
if ctypes.CDLL(None).fork() == 0:
    kept = open({str(file)!r}, "w")
    while True: time.sleep(0.1)
for _ in range(100):
    if os.path.exists({str(file)!r}): break
    time.sleep(0.05)
"""
    ran(code)
    if not file.exists():
        pytest.skip("no process was started")  # by a user who is not root
    assert wait_until(lambda: not has_open(file))


def has_open(path: Path) -> bool:
    """Whether a process has a file open, or one below a folder."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it is closed meanwhile
            if str(descriptor.readlink()).startswith(str(path)):
                return True
    return False


@pytest.mark.slow
def test_a_call_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    code = f"import time\nkept = open({str(tmp_path / 'open')!r}, 'w')\nfor _ in range(6000): time.sleep(0.1)"

    async def given_up() -> None:
        call = asyncio.create_task(run_snippet(code, SnippetLimits(600.0)))
        while not (tmp_path / "open").exists():
            await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(given_up())
    assert wait_until(lambda: not has_open(tmp_path))


def test_as_a_tool_it_takes_code() -> None:
    tool = Tool.of(python_tool(LIMITS))
    assert tool.schema["function"]["parameters"]["required"] == ["code"]
    assert asyncio.run(tool.call({"code": "print(6 * 7)"})) == "42"
