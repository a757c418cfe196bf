"""Tests the Dockerfile without Docker: resolves its pip lines, and runs its steps in a folder.

    python scripts/try_image.py resolve
    debootstrap --variant=minbase bookworm FOLDER && python scripts/try_image.py run FOLDER --then 'slimefsdp check'

`resolve` finds, without downloads, which packages pip would install for each line, and writes them to
tests/fixtures/image.json; tests/test_image.py compares the Dockerfile with this record.

`run` executes the steps of a target by chroot as root in FOLDER, a freshly installed Debian or Ubuntu. Then it runs the
commands of `--then` twice: as the image's user, and as a user that the image does not know. Mounts end with the
program; delete FOLDER by hand afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests/fixtures/image.json"
PYTHON = "3.12"  # the version of Ubuntu 24.04
PROJECT = "/src"  # where the Dockerfile copies the project to
HOME = "/home/slimefsdp"
STRANGER = 54321  # a user id that the image does not have
_SKIPPED_OPTIONS = ("--no-cache-dir", "--no-deps", "--no-build-isolation")


@dataclass(frozen=True)
class PipLine:
    """Describes a call of pip in the Dockerfile.

    Args:
        stage: the stage's name.
        pip: the program, e.g. pip or /venv-vllm/bin/pip.
        wanted: the requirements as written.
        is_constrained: whether constraints.txt applies.
        has_wheels: whether the call also installs wheels that an earlier stage compiled.
        compiles: whether the call only compiles these packages, without their dependencies.
    """

    stage: str
    pip: str
    wanted: tuple[str, ...]
    is_constrained: bool
    has_wheels: bool
    compiles: bool

    def requirements(self) -> list[str]:
        """Returns the requirements that pip must find on the index; the project stands for its own requirements."""
        names: list[str] = []
        for wanted in self.wanted:
            if not wanted.startswith(PROJECT):
                names.append(wanted)
                continue
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"[\w-]+", wanted.removeprefix(PROJECT))
            needed = [*project["dependencies"], *(name for e in extras for name in project["optional-dependencies"][e])]
            compiled = {name for line in pip_lines() if line.compiles for name in map(_name, line.wanted)}
            names += [name for name in needed if not (self.has_wheels and _name(name) in compiled)]
        return names


@dataclass
class Step:
    """Describes an instruction of the Dockerfile, such as RUN, without continuation lines and comments."""

    stage: str
    word: str
    rest: str
    options: dict[str, str] = field(default_factory=dict)


def _name(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")  # type: ignore[index]


def steps() -> Iterator[Step]:
    text = "\n".join(line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#"))
    stage = ""
    for line in filter(None, map(str.strip, text.replace("\\\n", " ").splitlines())):
        word, rest = line.split(maxsplit=1)
        options: dict[str, str] = {}
        while match := re.match(r"--(\w+)=(\S+)\s+", rest):
            options[match[1]], rest = match[2], rest[match.end() :]
        if word == "FROM":
            stage = rest.split(" AS ")[1]
        yield Step(stage, word, " ".join(rest.split()), options)


def chain(target: str) -> list[Step]:
    """Returns the instructions for a target, starting with those of the stages on which the target is based.

    Raises:
        SystemExit: the Dockerfile has no such target.
    """
    own = [step for step in steps() if step.stage == target]
    if not own:
        raise SystemExit(f"the Dockerfile has no target {target}")
    base = own[0].rest.split()[0]
    return [*(chain(base) if any(step.stage == base for step in steps()) else []), *own]


def pip_lines() -> list[PipLine]:
    """Returns every `pip install` and `pip wheel` of the Dockerfile."""
    lines = []
    for step in steps():
        commands = re.split(r"&&|;(?=\s)", step.rest) if step.word == "RUN" else []
        for words in map(shlex.split, commands):
            position = next((index for index, word in enumerate(words) if re.fullmatch(r"(.*/)?pip", word)), None)
            if position is None:
                continue
            verb, *rest = words[position + 1 :]
            for option in ("-c", "--wheel-dir"):
                if option in rest:
                    del rest[rest.index(option) : rest.index(option) + 2]
            lines.append(
                PipLine(
                    step.stage,
                    words[position],
                    tuple(word for word in rest if word not in _SKIPPED_OPTIONS and not word.endswith(".whl")),
                    is_constrained="-c" in words,
                    has_wheels=any(word.endswith(".whl") for word in rest),
                    compiles=verb == "wheel",
                )
            )
    return lines


def resolve(_: argparse.Namespace) -> int:
    """Records which packages pip would install for each line; returns 1 if no versions fit together."""
    record = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", f"{folder}/venv"], check=True)
        pip = [f"{folder}/venv/bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--upgrade", "pip"], check=True
        )  # older ones download packages to inspect them
        # uses only the index, since other sources of this machine may have builds that the image would not get
        alone = {name: value for name, value in os.environ.items() if not re.match(r"PIP_(FIND|EXTRA|CONSTR)", name)}
        for line in pip_lines():
            print(f"{line.stage}: {line.pip} {' '.join(line.wanted)}", file=sys.stderr, flush=True)
            installs = _resolved(pip, line, alone | {"PIP_CONFIG_FILE": os.devnull}, Path(folder))
            if installs is None:
                return 1
            record.append({"stage": line.stage, "pip": line.pip, "wanted": line.wanted, "installs": installs})
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _resolved(pip: list[str], line: PipLine, environment: Mapping[str, str], folder: Path) -> str | None:
    """Returns name==version of every package, separated by spaces; None if no versions fit together."""
    if line.compiles:  # pip would have to run these packages' code to know their requirements: check only existence
        for requirement in line.wanted:
            name, _, version = requirement.partition("==")
            looks = [*pip[:3], "index", "versions", name]
            versions = subprocess.run(looks, env=environment, capture_output=True, text=True)
            if version not in re.findall(r"[^\s,()]+", versions.stdout):
                print(f"the index has no {requirement}: {versions.stderr}", file=sys.stderr)
                return None
        return " ".join(line.wanted)
    report = folder / "report.json"
    command = [*pip, "install", "--dry-run", "--ignore-installed", "--report", str(report), *line.requirements()]
    command += ["--python-version", PYTHON, "--only-binary", ":all:", "--target", str(folder / "none")]
    command += ["-c", str(ROOT / "constraints.txt")] if line.is_constrained else []
    if subprocess.run(command, env=environment).returncode:
        return None
    packages = [requirement["metadata"] for requirement in json.loads(report.read_text())["install"]]
    return " ".join(sorted(f"{requirement['name']}=={requirement['version']}" for requirement in packages))


def run(options: argparse.Namespace) -> int:
    """Runs the steps of a target in the folder, then the commands; returns the status of the first failure, or 0."""
    if os.environ.get("TRY_IMAGE_NAMESPACE") != "own":
        # with separate namespaces, all mounts and processes end with this program, and installers do not see other
        # processes
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        command += [sys.executable, *sys.argv]
        return subprocess.run(command, env={**os.environ, "TRY_IMAGE_NAMESPACE": "own"}).returncode
    folder = options.folder.resolve()
    if not (folder / "etc/os-release").is_file():
        raise SystemExit(f"{folder} holds no installed distribution: debootstrap makes one")
    _mount(folder, options.bind)
    shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
    image = _Image(folder, {name: os.environ[name] for name in options.env if name in os.environ})
    for step in chain(options.target):
        if status := image.take(step):
            return status
    home, as_built = folder / HOME.lstrip("/"), folder / "home-as-built"
    subprocess.run(["cp", "--archive", home, as_built], check=True)
    for user in (image.user, str(STRANGER)):
        shutil.rmtree(home)  # the next user must find the home folder as it is in the image
        subprocess.run(["cp", "--archive", as_built, home], check=True)
        for command in options.then:
            if status := image.shell(command, user):
                return status
    print(f"{options.target}: all steps ran, and the commands as users {image.user} and {STRANGER}", file=sys.stderr)
    return 0


def _mount(folder: Path, shared: list[str]) -> None:
    """Mounts the folders that programs need; folders of this machine are read-only, as installers would change them."""
    for kind, name in (("proc", "proc"), ("tmpfs", "dev")):
        subprocess.run(["mount", "-t", kind, kind, folder / name], check=True)
    (folder / "dev/shm").mkdir(mode=0o1777)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder / "dev/shm"], check=True)
    for device in ("null", "zero", "full", "random", "urandom", "tty"):
        (folder / "dev" / device).touch()
        subprocess.run(["mount", "--bind", f"/dev/{device}", folder / "dev" / device], check=True)
    (folder / "dev/fd").symlink_to("/proc/self/fd")
    for name in shared:
        target = folder / name.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "--bind", name, target], check=True)
        subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)


class _Image:
    """Executes instructions in a folder, and holds the state of the image."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self._folder, self._work = folder, "/"
        self._environment = {"PATH": path, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive", **environment}
        self.user = "0"

    def take(self, step: Step) -> int:
        """Executes one instruction; returns the exit status of a RUN, otherwise 0."""
        if step.word == "RUN":
            return self.shell(step.rest, self.user)
        if step.word in ("ENV", "ARG"):
            for pair in shlex.split(step.rest):
                name, _, value = pair.partition("=")
                self._environment[name] = re.sub(r"\$(\w+)", lambda match: self._environment[match[1]], value)
        elif step.word == "COPY":
            self._copy(step)
        elif step.word == "USER":
            self.user = step.rest
        elif step.word == "WORKDIR":
            self._work = step.rest
            (self._folder / step.rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.word not in ("FROM", "ENTRYPOINT"):
            raise SystemExit(f"the Dockerfile has {step.word}, which this program does not know")
        return 0

    def _copy(self, step: Step) -> None:
        *sources, target = step.rest.split()
        into = self._folder / os.path.join(self._work, target).lstrip("/")  # noqa: PTH118 - of two absolute paths
        for source in sources:
            destination = into / source if target.endswith("/") else into
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source, destination, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(ROOT / source, destination)
            owner = step.options.get("chown", "0")
            subprocess.run(["chown", "--recursive", owner, destination], check=True)

    def shell(self, command: str, user: str) -> int:
        print(f"[{user}] {command}", file=sys.stderr, flush=True)
        inside = f"cd {shlex.quote(self._work)} && {command}"
        chroot = ["chroot", f"--userspec={user}:{user}", self._folder, "/bin/sh", "-c", inside]
        return subprocess.run(chroot, env=self._environment, stdin=subprocess.DEVNULL).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    verbs.add_parser("resolve", help="record what pip would install").set_defaults(run=resolve)
    of_run = verbs.add_parser("run", help="run the steps in a folder that holds a distribution")
    of_run.add_argument("folder", type=Path)
    of_run.add_argument("--target", default="trainer", help="of the Dockerfile (default trainer)")
    of_run.add_argument("--then", action="append", default=[], help="a command that is run afterwards; repeatable")
    of_run.add_argument("--bind", action="append", default=[], help="a folder of this machine, read-only")
    of_run.add_argument("--env", action="append", default=[], help="a variable of this shell that steps are given")
    of_run.set_defaults(run=run)
    options = parser.parse_args()
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
