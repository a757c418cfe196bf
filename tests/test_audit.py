"""The audit of dependencies says what it found and what it could not look at, and passes nothing that is unseen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[1]
SOUND = {"name": "numpy", "version": "1", "vulns": []}
VULNERABLE = {"name": "pip", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
UNKNOWN = {"name": "own", "skip_reason": "not found"}


def audit(folder: Path, *, pins: str, report: str | None, pip_check: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the script in a project of its own.

    Args:
        report: what pip-audit leaves, "" where its service does not answer; None: it is not installed.
        pip_check: the exit status of `pip check`.
    """
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "audit.sh", folder / "scripts")
    (folder / "constraints.txt").write_text(pins)
    (folder / "pyproject.toml").write_text('[project]\ndependencies = ["numpy>=1.26"]\n')
    if report is not None:
        code = f"import sys\nopen(sys.argv[sys.argv.index('--output') + 1], 'w').write({report!r})\nsys.exit(1)\n"
        (folder / "pip_audit.py").write_text(f"if __name__ == '__main__':\n    exec({code!r})\n")
    else:
        (folder / "pip_audit.py").write_text("raise ImportError\n")
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={folder}\n[ "$2" = pip ] && exit {pip_check}\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    command = ["bash", str(folder / "scripts" / "audit.sh"), str(python)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


PINNED = f"numpy=={version('numpy').partition('+')[0]}\nnot-installed-here==1\n"


@pytest.mark.default_tier
@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"report": None}, 0, "NOT audited for known vulnerabilities: pip-audit is not installed"),
        ({"report": ""}, 0, "NOT audited for known vulnerabilities: no answer"),
        ({"report": json.dumps({"dependencies": [SOUND, UNKNOWN]})}, 0, "does not know them: own"),
        ({"report": json.dumps({"dependencies": [UNKNOWN]})}, 0, "NOT audited for known vulnerabilities: the service"),
        ({"report": json.dumps({"dependencies": [SOUND, VULNERABLE]})}, 1, "pip 1: CVE-1; fixed in 2"),
        ({"report": None, "pins": "numpy==0.1\n"}, 1, "numpy==0.1 (constraints.txt), but"),
        ({"report": None, "pip_check": 1}, 1, "NOT audited"),
    ],
)
def test_what_is_found_fails_and_what_could_not_be_looked_at_is_said(
    tmp_path: Path, changes: dict[str, Any], status: int, said: str
) -> None:
    done = audit(tmp_path, **{"pins": PINNED, **changes})
    assert done.returncode == status and said in done.stdout, done.stdout + done.stderr
    is_audited = "1 packages audited" in done.stdout or "2 packages audited" in done.stdout
    assert "2 versions compared" in done.stdout and is_audited != ("NOT audited for known" in done.stdout)
