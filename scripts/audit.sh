#!/usr/bin/env bash
# Checks the installed packages: bash scripts/audit.sh [PYTHON]
#
#   1. Checks that they fit each other (pip check), pyproject.toml and constraints.txt. Needs no network.
#   2. Looks for known vulnerabilities, if pip-audit is installed and its advisory service answers. Otherwise it reports
#      that this was not done, and does not call the result an audit.
#
# PYTHON is the interpreter of the project's environment, by default .venv/bin/python. Exit status 1 means a finding.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-.venv/bin/python}
status=0

"$python" -m pip --disable-pip-version-check check || status=1

"$python" - <<'END' || status=1
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

lines = [line.partition("#")[0].strip() for line in Path("constraints.txt").read_text().splitlines()]
project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wrong, compared = [], 0
for source, texts in (("constraints.txt", filter(None, lines)), ("pyproject.toml", project["dependencies"])):
    for requirement in map(Requirement, texts):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            if source == "pyproject.toml":
                wrong.append(f"{requirement} ({source}) is not installed")
            continue  # of an extra that was not asked for
        compared += 1
        if not requirement.specifier.contains(found, prereleases=True):  # a local version (+cpu) fits the public one
            wrong.append(f"{requirement} ({source}), but {found} is installed")
print(f"scripts/audit.sh: {compared} versions compared with constraints.txt and pyproject.toml, {len(wrong)} do not fit")
print(*wrong, sep="\n", end="\n" if wrong else "")
sys.exit(bool(wrong))
END

if ! "$python" -c "import pip_audit" 2>/dev/null; then
  echo "scripts/audit.sh: NOT audited for known vulnerabilities: pip-audit is not installed (pip install pip-audit)"
  exit "$status"
fi
report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$python" -m pip_audit --progress-spinner off --timeout 15 --skip-editable --format json --output "$report" || true
# pip-audit has the same exit status for a vulnerability and for no answer, but only with an answer it writes a report
"$python" - "$report" <<'END' || status=1
import json
import sys
from pathlib import Path

try:
    packages = json.loads(Path(sys.argv[1]).read_text())["dependencies"]
except (ValueError, KeyError):
    print("scripts/audit.sh: NOT audited for known vulnerabilities: no answer from pip-audit's advisory service")
    sys.exit(0)
known = [package for package in packages if "skip_reason" not in package]
found = [(p["name"], p["version"], v["id"], v["fix_versions"]) for p in known for v in p["vulns"]]
skipped = [package["name"] for package in packages if "skip_reason" in package]
if not known:  # pip-audit itself calls this a pass
    print(f"scripts/audit.sh: NOT audited for known vulnerabilities: the service knows none of {len(skipped)} packages")
    sys.exit(0)
print(f"scripts/audit.sh: {len(known)} packages audited, {len(found)} vulnerabilities")
if skipped:
    print(f"scripts/audit.sh: NOT audited, since the service does not know them: {', '.join(skipped)}")
for name, installed, advisory, fixes in found:
    print(f"  {name} {installed}: {advisory}; fixed in {', '.join(fixes) or 'no version yet'}")
sys.exit(bool(found))
END
exit "$status"
