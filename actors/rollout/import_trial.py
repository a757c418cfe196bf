"""Modules of the user's own are imported in a process of its own first, since an import may hang or end its process.

`python -m actors.rollout.import_trial` is that process. What an import raises is no matter of this trial: whoever
imports the module afterwards says it.
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
_USUAL_S = 60.0  # the deadline, where cluster.launch_timeout_s is neither shorter nor more than five times as long


def try_imports(functions: Mapping[str, str], launch_timeout_s: float) -> None:
    """Imports the modules of `module:function` names, but for our own and those that this process has imported.

    Args:
        functions: by the setting that names it; what is no such name, such as a URL, is passed over.
        launch_timeout_s: all imports together have 60 s, or a fifth of this where that is longer, and never more.

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
    how, said = f"did not return within {timeout_s:g} s (cluster.launch_timeout_s={launch_timeout_s:g})", b""
    hint = "keep what computes for long, or ends the program, out of the top level of {}"
    asked = {"modules": list(modules.values()), "search_path": sys.path}
    names = ", ".join(Path(name).name if name.endswith(".py") else name for name in dict.fromkeys(asked["modules"]))
    try:
        with stage(f"importing {names}", is_short=True):
            done = run_beside("actors.rollout.import_trial", asked, timeout_s)
    except subprocess.TimeoutExpired as overdue:
        begun = (overdue.stdout or b"").splitlines()
        hint += ", or raise cluster.launch_timeout_s, of which imports have a fifth"
    else:
        begun = done.stdout.splitlines()
        if begun and begun[-1] == _DONE:
            return
        how, said = f"ended its process with status {done.returncode}", done.stderr
    field, name = list(modules.items())[max(len(begun) - 1, 0)]
    words = short_repr(said.decode(errors="replace")[-500:]) if said else "nothing"
    raise ConfigError(
        f"the import of {name} {how}; it printed {words}",
        field=field,
        hint=hint.format(name),
    )


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    asked = json.load(sys.stdin.buffer)
    sys.path += [folder for folder in asked["search_path"] if folder not in sys.path]
    for name in asked["modules"]:
        os.write(stream, b"begun\n")
        with suppress(Exception, SystemExit):
            imported(name)
    os.write(stream, _DONE)
    os._exit(0)  # whatever threads the modules have left


if __name__ == "__main__":
    _main()
