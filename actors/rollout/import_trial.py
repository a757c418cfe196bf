"""Imports the user's modules in a separate process first, since an import may hang or end its process.

`python -m actors.rollout.import_trial` is that process. It ignores exceptions of the imports: they are reported when
the modules are imported for use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from actors.rollout.tokenizer import end_with_parent, run_beside, stream_of_answer
from actors.startup import stage
from slimefsdp.config.callables import imported
from slimefsdp.errors import ConfigError, short_repr

_OURS = ("actors", "slimefsdp")
_DONE = b"done"
_USUAL_S = 60.0  # the deadline, unless cluster.launch_timeout_s is shorter or more than five times as long


def try_imports(functions: Mapping[str, str], launch_timeout_s: float) -> None:
    """Imports the modules of `module:function` names, except our own and those that are imported already.

    Args:
        functions: the names by the setting that has them; other names, such as URLs, are skipped.
        launch_timeout_s: all imports together have 60 s or a fifth of this, whichever is longer, but at most this.

    Raises:
        ConfigError: an import did not return in time, or ended its process.
    """
    modules = {field: name.partition(":")[0] for field, name in functions.items() if ":" in name and "://" not in name}
    modules = {
        field: name for field, name in modules.items() if name.split(".")[0] not in _OURS and name not in sys.modules
    }
    if not modules:
        return
    timeout_s = min(launch_timeout_s, max(_USUAL_S, launch_timeout_s / 5))
    problem, printed = f"did not return within {timeout_s:g} s (cluster.launch_timeout_s={launch_timeout_s:g})", b""
    hint = "keep what computes for long, or ends the program, out of the top level of {}"
    request = {"modules": list(modules.values()), "search_path": sys.path}
    names = ", ".join(Path(name).name if name.endswith(".py") else name for name in dict.fromkeys(request["modules"]))
    try:
        with stage(f"importing {names}", is_short=True):
            done = run_beside("actors.rollout.import_trial", request, timeout_s)
    except subprocess.TimeoutExpired as overdue:
        begun = (overdue.stdout or b"").splitlines()
        hint += ", or raise cluster.launch_timeout_s, of which imports have a fifth"
    else:
        begun = done.stdout.splitlines()
        if begun and begun[-1] == _DONE:
            return
        problem, printed = f"ended its process with status {done.returncode}", done.stderr
    field, name = list(modules.items())[max(len(begun) - 1, 0)]
    words = short_repr(printed.decode(errors="replace")[-500:]) if printed else "nothing"
    raise ConfigError(
        f"the import of {name} {problem}; it printed {words}",
        field=field,
        hint=hint.format(name),
    )


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    request = json.load(sys.stdin.buffer)
    sys.path += [folder for folder in request["search_path"] if folder not in sys.path]
    for name in request["modules"]:
        os.write(stream, b"begun\n")
        with suppress(Exception, SystemExit):
            imported(name)
    os.write(stream, _DONE)
    os._exit(0)  # does not wait for threads that the modules left running


if __name__ == "__main__":
    _main()
