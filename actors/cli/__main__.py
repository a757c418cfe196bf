"""Runs the command `slimefsdp` of a checkout that is not installed, by `python -m actors.cli`."""

import os
import sys

from actors.cli.main import main
from actors.cli.torchrun import is_rank_of_torchrun

if __name__ == "__main__":
    code = main(sys.argv[1:])
    if is_rank_of_torchrun():  # gloo may abort while the interpreter ends; the work is done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
