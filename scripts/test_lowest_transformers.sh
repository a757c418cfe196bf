#!/usr/bin/env bash
# Runs the tests that depend on transformers' internals with the lowest release that pyproject.toml allows.
#
#   scripts/test_lowest_transformers.sh [PYTHON]      PYTHON: of the project's environment, default .venv/bin/python
#
# That release, and whatever it needs in other versions, goes into the virtual environment .venv-lowest; torch and all
# else are found in PYTHON's own environment, which stays as it is. A second run installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${1:-.venv/bin/python}"
version="5.0.0"
folder=".venv-lowest"
stamp="$folder/installed.txt"
site='import sysconfig; print(sysconfig.get_path("purelib"))'
shared="$("$python" -c "$site")"
wanted="transformers==$version over $shared"

if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    "$python" -m venv --clear "$folder"
    # a path file, read after the folder's own packages: pip counts what is there as installed, but never removes it
    echo "$shared" >"$("$folder/bin/python" -c "$site")/shared.pth"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$version"
    echo "$wanted" >"$stamp"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
"$folder/bin/python" - "$version" <<'EOF'
import sys

import torch
import transformers

assert transformers.__version__ == sys.argv[1], f"{transformers.__version__} from {transformers.__file__}"
print(f"transformers {transformers.__version__}, torch {torch.__version__}")
EOF
# the calling convention, and that packed numbers equal plain ones
exec "$folder/bin/python" -m pytest -q tests/attention/test_hf_interface.py tests/models/test_packing.py
