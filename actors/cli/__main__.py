"""`python -m actors.cli`: the command `slimefsdp` of a checkout that is not installed."""

import sys

from actors.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
