"""Python for policies: a snippet runs in a process of its own that cannot take more than it is given.

THIS IS NO SECURITY BOUNDARY. It keeps a policy's mistakes (endless loops, memory, files, processes) from costing more
than their call, on Linux. A snippet runs as the user of the run: it can read what that user can read, and reach the
network. Where that matters, run environments in containers, or write a tool that asks a sandbox elsewhere.
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

# What a process runs before the snippet. Hard limits cannot be raised again. RLIMIT_NPROC counts processes of the user
# and not of the snippet: 0 lets it start none; it does not hold for root, whom the hook stops where Python asks it.
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
_MOST = 10**6  # seconds, or MiB
_PART_BYTES = 2**16  # of an output that is read, at its beginning and at its end


@dataclass(frozen=True, slots=True)
class SnippetLimits:
    """What a snippet may take.

    Args:
        timeout_s: of the clock; on a busy machine it is longer than what is computed.
        cpu_s: of computing.
        memory_mib: addresses, of which libraries like numpy take hundreds of MiB.
        file_mib: of each file that it writes, its output too.
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
    """The tool `python` with these limits."""

    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: the program; what is to be seen has to be printed
        """
        return await run_snippet(code, limits)

    return python


async def run_snippet(code: str, limits: SnippetLimits) -> str:
    """What a program printed, standard error too.

    Raises:
        ToolError: it ended by an error or a signal, or was ended; with what it had printed.
    """
    with tempfile.TemporaryFile() as output, _empty_folder() as folder:
        # as -I, but that hashes do not differ from process to process: answers of environments have to repeat; -u, so
        # that output and errors are in their order, and there when a signal ends it
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-s", "-P", "-B", "-u", "-c", _PRELUDE,
            str(limits.cpu_s), str(limits.memory_mib * 2**20), str(limits.file_mib * 2**20),
            stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, cwd=folder, start_new_session=True,
            env={"PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1",
                 "OPENBLAS_NUM_THREADS": "1", "HOME": folder, "TMPDIR": folder, "PATH": os.defpath},
        )  # fmt: skip
        try:
            async with asyncio.timeout(limits.timeout_s):
                # surrogates are no UTF-8: the snippet is refused as Python refuses such a file
                await process.communicate(code.encode(errors="surrogatepass"))
            how = _ended(process.returncode)
        except TimeoutError:
            how = f"ended after {limits.timeout_s:g} s"
        finally:
            # all that it may have started too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        said = _text_of(output)
    if how is not None:
        raise ToolError(f"{said}\n({how})".lstrip())
    return said


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="snippet-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ended(status: int | None) -> str | None:
    """How a process ended; None: well."""
    if status is None or status == 0:
        return None
    if status == -signal.SIGXCPU:
        return "ended: it computed too long"
    return f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"


def _text_of(output: IO[bytes]) -> str:
    """What was printed; of much the beginning and the end."""
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= 2 * _PART_BYTES:
        return output.read().decode(errors="replace").strip()
    head = output.read(_PART_BYTES).decode(errors="replace")
    output.seek(size - _PART_BYTES)
    tail = output.read().decode(errors="replace")
    return f"{head}\n... ({size - 2 * _PART_BYTES} bytes left out) ...\n{tail}".strip()
