"""Checks whether two commits train to the same bits: runs the same jobs with both, and compares the results.

    python scripts/compare_commits.py OLD NEW [--quick]

OLD and NEW are commits; `.` is the working tree with all changes, including untracked files. Each is checked out into
its own worktree and installed in its own environment, which uses torch and all other packages of the running
interpreter. Both run the jobs of scripts/compare_jobs.py at the same time. Exit status: 0, equal; 1, something differs
that no --expect names; 2, a job failed, or the arguments are invalid.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import compare_jobs  # noqa: E402

SIDES = ("old", "new")
MAX_PRINTED = 40  # differences to print; --json has all


class Unusable(Exception):
    """The comparison cannot be made; the message says why, and what to do."""


# ---------------------------------------------------------------------- comparing


@dataclass(frozen=True)
class Difference:
    """Describes a value that differs between two records, or that only one record has."""

    job: str
    what: str  # `kind name`, as compare_jobs.Record names it
    old: str | None  # None means missing
    new: str | None
    size: float | None = None  # largest difference relative to the largest value; None if the values are no numbers
    is_expected: bool = False

    def __str__(self) -> str:
        text = f"{self.job}: {self.what}: {_readable(self.old)} -> {_readable(self.new)}"
        return text if self.size is None else f"{text} (by {self.size:.1e})"


Records = Mapping[str, Mapping[str, str]]
"""Name of a job -> its results, in the form of compare_jobs.Record."""


def compare(
    old: Records,
    new: Records,
    *,
    equals: Mapping[str, str] | None = None,
    sizes: Mapping[tuple[str, str], float] | None = None,
    tolerance: float = 0.0,
    expected: Sequence[str] = (),
) -> list[Difference]:
    """Returns the differences between two commits, job by job.

    Args:
        equals: record -> a second record; each must also equal the other one of the other commit.
        sizes: (job, what) -> known difference of two arrays, relative to their largest value.
        tolerance: metrics and arrays with a relative difference of at most this count as equal; 0 means bit-equal.
        expected: patterns for `job: what`; a difference that matches a pattern is expected.
    """
    pairs = [(name, name) for name in dict.fromkeys([*old, *new])]
    for name, other in (equals or {}).items():
        pairs += [pair for pair in ((other, name), (name, other)) if pair[0] in old and pair[1] in new]
    differences = []
    for in_old, in_new in pairs:
        name = in_old if in_old == in_new else f"{in_old} | {in_new}"
        before, after = old.get(in_old, {}), new.get(in_new, {})
        for what in dict.fromkeys([*before, *after]):
            a, b = before.get(what), after.get(what)
            if a == b:
                continue
            size = _relative(a, b) if " metric " in what else (sizes or {}).get((name, what))
            if size is not None and size <= tolerance:
                continue
            is_expected = any(fnmatch.fnmatchcase(f"{name}: {what}", pattern) for pattern in expected)
            differences.append(Difference(name, what, a, b, size, is_expected))
    return differences


def _relative(a: str | None, b: str | None) -> float | None:
    if a is None or b is None:
        return None
    x, y = float.fromhex(a), float.fromhex(b)
    distance = abs(x - y) / max(abs(x), abs(y), 1e-300)
    return distance if np.isfinite(distance) else None


def _readable(value: str | None) -> str:
    if value is None:
        return "nothing"
    if value.lstrip("-").startswith("0x"):
        return f"{float.fromhex(value)!r} ({value})"
    digest, _, rest = value.partition(" ")
    return f"{digest[:12]}.. {rest}".rstrip() if len(digest) == 64 else value


def sizes_of_weights(jobs: Mapping[str, Mapping[str, Path]]) -> dict[tuple[str, str], float]:
    """Returns (job, what) -> relative difference of the exported weights of both commits.

    Args:
        jobs: name of a job -> {"old" or "new": the folder of the weights that this commit's job exported}.
    """
    sizes = {}
    for name, sides in jobs.items():
        folders = [sides[side] for side in SIDES]
        for role, kind in (("actor", "weight"), ("critic", "weight critic")):
            exported = [folder / role for folder in folders]
            if not all(folder.is_dir() for folder in exported):
                continue
            old, new = (compare_jobs.exported_tensors(folder) for folder in exported)
            for tensor in old.keys() & new.keys():
                a, b = old[tensor].astype(np.float64), new[tensor].astype(np.float64)
                if a.shape == b.shape and np.isfinite(a).all() and np.isfinite(b).all():
                    scale = max(np.abs(a).max(initial=0), np.abs(b).max(initial=0), 1e-300)
                    sizes[name, f"end: {kind} {tensor}"] = float(np.abs(a - b).max(initial=0) / scale)
    return sizes


# ---------------------------------------------------------------------- checkouts and environments


def git(*arguments: str, **environment: str) -> str:
    """Returns git's output; raises Unusable with git's error message if git fails."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode:
        raise Unusable(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def resolved(name: str, folder: Path) -> str:
    """Returns the id of a commit; for `.`, first commits the working tree, without changing any branch."""
    if name != ".":
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") if _is_known(name) else _unknown(name)
    index = {"GIT_INDEX_FILE": str(folder / "index")}
    git("read-tree", "HEAD", **index)
    git("add", "--all", **index)
    author = {f"GIT_{who}_{what}": "compare_commits" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return git("commit-tree", git("write-tree", **index), "-p", "HEAD", "-m", "the working tree", **author)


def _is_known(name: str) -> bool:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"], capture_output=True
    )
    return done.returncode == 0


def _unknown(name: str) -> str:
    raise Unusable(f"{name} is no commit of this repository; name one, or . for the working tree")


@contextlib.contextmanager
def worktree(commit: str, path: Path) -> Iterator[Path]:
    """Yields a checkout; afterwards removes the checkout and git's record of it."""
    try:
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        yield path
    finally:
        subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(path)], capture_output=True)
        shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["git", "-C", str(ROOT), "worktree", "prune"], capture_output=True)


def require_dependencies(checkout: Path, name: str) -> None:
    """Checks that the running interpreter has the packages that a commit needs.

    Raises:
        Unusable: packages are missing or have another version; the message names all of them.
    """
    from packaging.requirements import Requirement

    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    missing = []
    for requirement in map(Requirement, project.get("dependencies", ())):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            missing.append(f"{requirement} is here in version {version}")
    if missing:
        problems = "; ".join(missing)
        raise Unusable(
            f"{name} needs what {sys.executable} does not have: {problems}; install it there, and start again"
        )


def install(checkout: Path, folder: Path) -> Path:
    """Makes an environment with the checkout, which also uses this interpreter's packages; returns its python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # packages in a path file come after the environment's own; checkouts on this interpreter's path are left out
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (Path(site) / "shared.pth").write_text("\n".join(shared) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet",
         "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(checkout)],
        capture_output=True, text=True, env=clean_environment(),
    )  # fmt: skip
    if done.returncode:
        raise Unusable(f"{checkout} cannot be installed:\n{done.stderr[-2000:]}")
    return python


def clean_environment() -> dict[str, str]:
    """Returns environment variables without paths of other checkouts, and with one thread per process."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


# ---------------------------------------------------------------------- running


def run_both(
    pythons: Mapping[str, Path], requests: Mapping[str, compare_jobs.Request], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Runs the jobs of both commits at the same time and prints progress; returns the output lines of each commit."""
    processes: dict[str, subprocess.Popen[str]] = {}
    total = len(requests["old"].jobs)
    start = time.monotonic()
    try:
        with contextlib.ExitStack() as files:
            for side in SIDES:
                request = folder / f"{side}.json"
                request.write_text(json.dumps(asdict(requests[side])))
                processes[side] = subprocess.Popen(
                    [str(pythons[side]), "-P", str(ROOT / "scripts" / "compare_jobs.py"), str(request)],
                    stdout=files.enter_context((folder / f"{side}.jsonl").open("w")),
                    stderr=files.enter_context((folder / f"{side}.log").open("w")),
                    cwd=folder, env=clean_environment(), text=True, start_new_session=True,
                )  # fmt: skip
        printed = -1
        while True:
            ended = [process.poll() is not None for process in processes.values()]
            done = min((folder / f"{side}.jsonl").read_bytes().count(b"\n") for side in SIDES)
            if done != printed and (done == total or done - printed >= max(1, total // 20)):
                name = requests["old"].jobs[done - 1] if done else ""
                print(f"  {time.monotonic() - start:4.0f} s  {done} of {total} jobs  {name}", flush=True)
                printed = done
            if all(ended):
                break
            time.sleep(1)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):  # also kills the ranks that the process has forked
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = {side: _lines(folder / f"{side}.jsonl") for side in SIDES}
    for side, process in processes.items():
        if process.returncode or len(lines[side]) < total:
            log = (folder / f"{side}.log").read_text()[-3000:]
            raise Unusable(f"the jobs of the {side} commit ended with status {process.returncode}:\n{log}")
    return lines


def _lines(file: Path) -> list[dict[str, Any]]:
    whole, _, _ = file.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def write_shared(folder: Path, jobs: Sequence[compare_jobs.Job]) -> None:
    compare_jobs.write_models(folder)
    if any(job.model == compare_jobs.SORT_DIGITS for job in jobs):
        import make_sort_digits

        make_sort_digits.write_sort_digits(folder / compare_jobs.SORT_DIGITS)


def chosen_jobs(*, is_quick: bool, patterns: Sequence[str]) -> list[compare_jobs.Job]:
    """Returns the jobs (with `is_quick`, only quick jobs) whose names match a pattern; without patterns, all of them.

    Raises:
        Unusable: no job matches.
    """
    jobs = [job for job in compare_jobs.jobs() if job.is_quick or not is_quick]
    if patterns:
        jobs = [job for job in jobs if any(fnmatch.fnmatchcase(job.name, pattern) for pattern in patterns)]
    if not jobs:
        raise Unusable(f"--only {' '.join(patterns)} matches no job of this form; --list names them")
    return jobs


def json_setting(text: str) -> str:
    """Returns `section.name=value` with the value as JSON; a value that is not JSON becomes a text."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not section.name=value")
    try:
        json.loads(value)
    except json.JSONDecodeError:
        value = json.dumps(value)
    return f"{name}={value}"


# ---------------------------------------------------------------------- the command


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Patterns have * and ?, as file names have in a shell."
    )
    parser.add_argument("old", nargs="?", help="a commit")
    parser.add_argument("new", nargs="?", help="a commit, or . for the working tree")
    parser.add_argument("--quick", action="store_true", help="the telling jobs only, two minutes on two cores")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="jobs with such a name")
    for option, whom in (("--set", "both"), ("--set-old", "the old commit"), ("--set-new", "the new commit")):
        parser.add_argument(
            option, action="append", default=[], type=json_setting, metavar="SETTING",
            help=f"section.name=value on top of every job of {whom} that reads it",
        )  # fmt: skip
    parser.add_argument("--expect", action="append", default=[], metavar="PATTERN",
                        help="differences `job: what` that are expected")  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.0, metavar="X",
                        help="metrics and weights apart by no more than this, relatively, count as equal")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a record of everything here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in this new folder, and leave results there")
    parser.add_argument("--list", action="store_true", help="name the jobs and end")
    options = parser.parse_args(arguments)
    if not options.list and (options.old is None or options.new is None):
        parser.error("OLD and NEW are needed")
    if not 0 <= options.tolerance < 1:
        parser.error(f"--tolerance {options.tolerance} is not from 0 to 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = arguments_of(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that checkouts and processes are removed
    try:
        jobs = chosen_jobs(is_quick=options.quick, patterns=options.only)
        if options.list:
            print("\n".join(job.name for job in jobs))
            return 0
        with contextlib.ExitStack() as cleanup:
            if options.keep is None:
                folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="compare_commits_")))
            else:
                folder = options.keep.resolve()
                folder.mkdir(parents=True)
            return _compare_in(folder, jobs, options, cleanup)
    except (Unusable, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing is left behind", file=sys.stderr)
        return 130


def _compare_in(
    folder: Path, jobs: Sequence[compare_jobs.Job], options: argparse.Namespace, cleanup: contextlib.ExitStack
) -> int:
    start = time.monotonic()
    names = dict(zip(SIDES, (options.old, options.new), strict=True))
    commits = {side: resolved(names[side], folder) for side in SIDES}
    pythons, requests = {}, {}
    for side, commit in commits.items():
        checkout = cleanup.enter_context(worktree(commit, folder / side))
        require_dependencies(checkout, names[side])
        pythons[side] = install(checkout, folder / f"{side}-env")
        settings = (*options.set, *(options.set_old if side == "old" else options.set_new))
        requests[side] = compare_jobs.Request(
            str(checkout), str(folder / "shared"), str(folder / "out" / side), tuple(job.name for job in jobs), settings
        )
        print(f"{side}: {commit[:12]} {git('show', '--no-patch', '--format=%s', commit)}", flush=True)
    write_shared(folder / "shared", jobs)
    print(f"{len(jobs)} jobs in both, after {time.monotonic() - start:.0f} s of installation", flush=True)
    lines = run_both(pythons, requests, folder)
    return report(lines, requests, options, seconds=time.monotonic() - start, commits=commits)


def report(
    lines: Mapping[str, list[dict[str, Any]]],
    requests: Mapping[str, compare_jobs.Request],
    options: argparse.Namespace,
    *,
    seconds: float,
    commits: Mapping[str, str],
) -> int:
    for side in SIDES:
        for setting in requests[side].settings:
            if all(setting in line["unread"] for line in lines[side]):
                raise Unusable(f"{setting} is read by no job of the {side} commit, or it is no setting of it")
    failures = [(side, line["job"], line["problem"]) for side in SIDES for line in lines[side] if line["problem"]]
    failed = {name for _, name, _ in failures}
    records = {
        side: {part: values for line in lines[side] if line["job"] not in failed for part, values in
               line["records"].items()} for side in SIDES
    }  # fmt: skip
    folders = {
        line["job"]: {"old": Path(line["folder"]), "new": Path(other["folder"])}
        for line, other in zip(*(lines[side] for side in SIDES), strict=True)
        if line["job"] not in failed
    }
    differences = compare(
        records["old"], records["new"], equals=compare_jobs.EQUALS, sizes=sizes_of_weights(folders),
        tolerance=options.tolerance, expected=options.expect,
    )  # fmt: skip
    refused = [name for name, values in records["old"].items() if "end: refused" in values]
    counted = [difference for difference in differences if not difference.is_expected]
    for side, name, problem in failures:
        print(f"failed on the {side} commit: {name}\n{problem}", file=sys.stderr)
    for difference in counted[:MAX_PRINTED]:
        print(f"differs: {difference}")
    if len(counted) > MAX_PRINTED:
        print(f"and {len(counted) - MAX_PRINTED} more")
    compared = sum(map(len, records["old"].values()))
    jobs_that_differ = {difference.job for difference in counted}
    print(
        f"{len(records['old'])} records with {compared} values ({len(refused)} of them refusals) in {seconds:.0f} s: "
        + (f"{len(counted)} values differ in {len(jobs_that_differ)} records" if counted else "equal")
        + (f", {len(differences) - len(counted)} differ as expected" if len(differences) > len(counted) else "")
        + (f", {len(failures)} jobs failed" if failures else "")
    )
    if options.json is not None:
        record = {
            "commits": dict(commits),
            "seconds": seconds,
            "jobs": {line["job"]: line["seconds"] for line in lines["old"]},
            "refused": refused,
            "differences": [asdict(difference) for difference in differences],
            "failures": [{"side": side, "job": name, "problem": problem} for side, name, problem in failures],
            "records": records,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 2 if failures else 1 if counted else 0


if __name__ == "__main__":
    sys.exit(main())
