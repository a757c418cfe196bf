"""Runs Python snippets of a policy in a separate process with limits on its resources.

THIS IS NO SECURITY BOUNDARY. On Linux, it keeps a policy's mistakes (endless loops, memory, files, processes) from
costing more than their call. A snippet runs as the user of the run: it can read that user's files and reach the
network. If that matters, run environments in containers, or write a tool that calls a remote sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import IO

from tool_functions import ToolError

from slimefsdp.errors import ConfigError, short_repr

# The process runs this before the snippet. Hard limits cannot be raised again. RLIMIT_NPROC counts all processes of the
# user, so 0 allows no new ones; it does not apply to root, for whom the audit hook refuses Python's ways to start one.
_PRELUDE = """
import linecache, resource, sys, traceback
cpu_s, memory, file_bytes = map(int, sys.argv[1:])
def limit(name, value):
    try:
        resource.setrlimit(getattr(resource, name), (value, value))
    except (AttributeError, ValueError, OSError):
        pass  # a lower one is set already, or this system has none
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU first, then SIGKILL
limit("RLIMIT_AS", memory)
limit("RLIMIT_FSIZE", file_bytes)
limit("RLIMIT_NPROC", 0)
limit("RLIMIT_CORE", 0)
limit("RLIMIT_NOFILE", 64)
def forbid(event, arguments):
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "subprocess.Popen"):
        raise PermissionError("processes cannot be started here")
sys.addaudithook(forbid)
sys.argv = [""]
source = sys.stdin.read()
linecache.cache["<snippet>"] = (len(source), None, source.splitlines(True), "<snippet>")  # lines in tracebacks
try:
    code = compile(source, "<snippet>", "exec")
    exec(code, {"__name__": "__main__"})
except SystemExit:
    raise
except BaseException as error:
    error.__traceback__ = error.__traceback__.tb_next
    sys.stdout.flush()
    traceback.print_exception(error)
    sys.exit(1)
"""
_MOST = 10**6  # limit on the limits, in seconds or MiB
_PART_BYTES = 2**16  # bytes to read from the beginning and from the end of an output


@dataclass(frozen=True, slots=True)
class SnippetLimits:
    """Limits on the resources of a snippet.

    Args:
        timeout_s: limit on the wall-clock time; on a busy machine a snippet takes longer than it computes.
        cpu_s: limit on the CPU time.
        memory_mib: limit on the address space, of which libraries like numpy need hundreds of MiB.
        file_mib: limit on the size of the output and of each file that a snippet writes.
    """

    timeout_s: float = 10.0
    cpu_s: int = 5
    memory_mib: int = 1024
    file_mib: int = 16

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            is_number = type(value) is int or (name == "timeout_s" and type(value) is float)
            if not is_number or not 0 < value <= _MOST:
                raise ConfigError(
                    f"environment.arguments.python.{name}={short_repr(value)}",
                    field="environment.arguments",
                    hint=f"set it to a {'number' if name == 'timeout_s' else 'whole number'} above 0",
                )


def python_tool(limits: SnippetLimits) -> Callable[[str], Awaitable[str]]:
    """Returns the function of the tool `python` with these limits."""

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: the program; what is to be seen has to be printed
        """
        return await run_snippet(code, limits)

    return python


async def run_snippet(code: str, limits: SnippetLimits) -> str:
    """Runs a program and returns what it printed, including standard error.

    Raises:
        ToolError: the program ended with an error or a signal, or took too long; the text includes its output.
    """
    with tempfile.TemporaryFile() as output, _empty_folder() as folder:
        # like -I, but with fixed hashes, since the answers of environments must be repeatable; -u keeps output and
        # errors in order, and complete if a signal ends the process
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-s", "-P", "-B", "-u", "-c", _PRELUDE,
            str(limits.cpu_s), str(limits.memory_mib * 2**20), str(limits.file_mib * 2**20),
            stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, cwd=folder, start_new_session=True,
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1", "HOME": folder, "TMPDIR": folder, "PATH": os.defpath},
        )  # fmt: skip
        try:
            async with asyncio.timeout(limits.timeout_s):
                # surrogates are not UTF-8, so Python refuses such a snippet as it would a file
                await process.communicate(code.encode(errors="surrogatepass"))
            problem = _ended(process.returncode)
        except TimeoutError:
            problem = f"ended after {limits.timeout_s:g} s"
        finally:
            # also ends all processes that the snippet has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        printed = _text_of(output)
    if problem is not None:
        raise ToolError(f"{printed}\n({problem})".lstrip())
    return printed


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="snippet-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended(status: int | None) -> str | None:
    """Returns how a process ended; None if it succeeded."""
    if status is None or status == 0:
        return None
    if status == -signal.SIGXCPU:
        return "ended: it computed too long"
    return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"


def _text_of(output: IO[bytes]) -> str:
    """Returns what was printed; of a long output, only the beginning and the end."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= 2 * _PART_BYTES:
        return output.read().decode(errors="replace").strip()
    head = output.read(_PART_BYTES).decode(errors="replace")
    output.seek(size - _PART_BYTES)
    tail = output.read().decode(errors="replace")
    return f"{head}\n... ({size - 2 * _PART_BYTES} bytes left out) ...\n{tail}".strip()
