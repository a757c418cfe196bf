"""The train-step benchmark: the same batches through slimefsdp and its peers, one step each in turn, and the ratios.

Every system has a process of its own with one thread, in its own virtual environment. Per workload all are started and
take an untimed step of every micro-batch size that their user could choose (the first one's loss and gradient norm must
agree with slimefsdp's), then timed ones of each, and the size of the fastest is kept. Then come the rounds, a step of
each in turn, every other round in reverse: what disturbs the machine meets all of them. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.step.workloads import WORKLOADS, build_batch, padding, write_adapter, write_model
from slimefsdp.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
OURS = "slimefsdp"
OWN = "benchmarks/step/own.py"
TRL = "benchmarks/peers/trl_grpo.py"
SLIME = "benchmarks/peers/slime_semantics.py"
RELATIVE_TOLERANCE = 1e-3  # of losses and gradient norms in float32
ABSOLUTE_TOLERANCE = 1e-5  # of advantages of about 1, whose mean, the loss, may be 0
ANSWER_TIMEOUT_S = 1800
MOST_ROUNDS = 10_000
MIB = 2**20
CHOOSING_STEPS, CHOOSING_S = 3, 20.0  # timed steps of each micro-batch size at most, and seconds after which no more
WHAT = (
    "one train step (forward, backward, clipping, AdamW) of the same batch; seconds: user CPU-seconds of the process, "
    "on a GPU those between CUDA events; medians of rounds in which each system takes a step in turn; "
    "slimefsdp_is_faster_by: median over rounds of a system's seconds over slimefsdp's, of a system with adapters over "
    "those of slimefsdp with adapters; of_all_weights: the same of seconds over those of slimefsdp with all weights; "
    "peak_extra_mib: largest "
    "resident set (on a GPU: allocation) in a step over that before it, gradient_mib of it being the gradient"
)


@dataclass(frozen=True)
class SystemSpec:
    """How a system is started.

    Args:
        title: in tables.
        script: from the root of the checkout.
        venv: its folder below that of the peers; None: slimefsdp's own environment.
        arguments: {folder} in them is where model, batch and adapter are.
        beside: the system that computes the same and that it is compared with.
    """

    title: str
    script: str
    venv: str | None = None
    arguments: tuple[str, ...] = ()
    beside: str = OURS


LORA = "lora"
SYSTEMS = {
    OURS: SystemSpec("slimefsdp", OWN),
    "unshared": SystemSpec("itself without shared prefixes", OWN, arguments=("--set", "batch.share_prefixes=never")),
    "trl": SystemSpec("TRL", TRL, "trl"),
    "trl_compiled": SystemSpec("TRL with torch.compile", TRL, "trl", ("--compile",)),
    "hf_padded": SystemSpec("HF padded", "benchmarks/peers/hugging_face.py", "hugging_face", ("--layout", "padded")),
    "hf_packed": SystemSpec("HF packed", "benchmarks/peers/hugging_face.py", "hugging_face", ("--layout", "packed")),
    "slime": SystemSpec("slime semantics", SLIME),
    "slime_by_sequence": SystemSpec("slime semantics, by sequence", SLIME, arguments=("--attention", "by_sequence")),
    LORA: SystemSpec("slimefsdp, adapters", OWN, arguments=("--set", "lora.path={folder}/adapter"), beside=LORA),
    "trl_lora": SystemSpec("TRL with peft", TRL, "trl", ("--adapter", "{folder}/adapter"), LORA),
    "trl_lora_compiled": SystemSpec(
        "TRL with peft and torch.compile", TRL, "trl", ("--adapter", "{folder}/adapter", "--compile"), LORA
    ),
}
DEFAULT_SYSTEMS = tuple(name for name, spec in SYSTEMS.items() if spec.beside == OURS)


class Failed(Exception):
    """A system that does not answer; the message says why, by the last line that it wrote where there is one."""


class Process:
    """One system at work on one workload.

    Args:
        checkout: that its modules come from.

    Raises:
        Failed: at any time.
    """

    def __init__(self, command: Sequence[str], *, threads: int, stderr: Path, checkout: Path = ROOT) -> None:
        self._stderr = stderr
        environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environment |= {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with stderr.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )

    def answer(self) -> dict[str, Any]:
        """The next line of its output."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_TIMEOUT_S)
        if not readable:
            raise Failed(f"no answer within {ANSWER_TIMEOUT_S} s")
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise Failed(self._last_words())
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Failed(f"no answer but {line.strip()!r}") from None
        return found

    def step(self, micro_batch: int, *, with_memory: bool = False) -> dict[str, Any]:
        """One measured step."""
        assert self._process.stdin is not None
        request = json.dumps({"micro_batch": micro_batch, "with_memory": with_memory})
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # answer() says what happened
        return self.answer()

    def _last_words(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"ended by signal {-status}"
        said = [line for line in self._stderr.read_text().splitlines() if line.strip()]
        return said[-1] if said else "ended without an answer"

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        self._process.kill()
        self._process.communicate()


@dataclass
class Competitor:
    """What is known of one system on one workload; `status` is measured, absent or failed."""

    name: str
    status: str = "measured"
    reason: str | None = None  # why there is no measurement, or the way to have one
    process: Process | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)  # its first step, untimed
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)  # the fastest step of each size
    steps: list[dict[str, Any]] = field(default_factory=list)  # one a round

    @property
    def runs(self) -> bool:
        """Whether it has not failed so far."""
        return self.status == "measured"

    @property
    def micro_batch(self) -> int:
        """The fastest of its sizes."""
        return min(self.choices, key=lambda size: seconds_of(self.choices[size]))

    def warm_up(self, process: Process) -> None:
        """The first step, and some of each size for its time and peak memory, after one in which it may compile."""
        ready = process.answer()
        sizes = ready.pop("micro_batches")
        self.ready, self.first = ready, process.step(sizes[0])
        for size in sizes[1:]:
            process.step(size)
        spent_s = 0.0
        for number in range(CHOOSING_STEPS):
            if number > 0 and (len(sizes) == 1 or spent_s > CHOOSING_S):
                break
            for size in sizes:
                step = process.step(size, with_memory=True)
                self.choices[size] = min(self.choices.get(size, step), step, key=seconds_of)
                spent_s += step["wall_s"]

    def take_step(self, process: Process) -> None:
        """A timed step."""
        self.steps.append(process.step(self.micro_batch))

    def attempt(self, action: Callable[[Process], None]) -> None:
        """A part of the measurement; nothing where an earlier one failed."""
        if not self.runs or self.process is None:
            return
        try:
            action(self.process)
        except Failed as error:
            self.status, self.reason = "failed", str(error)
            self.close()

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.close()


def seconds_of(step: Mapping[str, Any]) -> float:
    """What is compared: the device's time where there is one, else the user CPU-seconds of the process."""
    return float(step["user_s"] if step["device_s"] is None else step["device_s"])


def check_names(kind: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    """Whether all are known.

    Raises:
        ConfigError: naming the first that is not.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"{kind} has {name!r}", field=kind, hint=f"choose from {', '.join(known)}")


def run(
    systems: Sequence[str],
    workloads: Sequence[str],
    *,
    rounds: int,
    peers: Path,
    device: str = "auto",
    threads: int = 1,
    seed: int = 0,
    settings: Sequence[str] = (),
    note: Callable[[str], None] = lambda line: None,
    save: Callable[[dict[str, Any]], None] = lambda record: None,
) -> dict[str, Any]:
    """Measures all systems on all workloads.

    Args:
        peers: the folder of the peers' virtual environments.
        device: auto, cpu or cuda.
        settings: overrides of slimefsdp's, as on the command line.
        note: is told what runs next, as lines with the time since the start, while no system is at work.
        save: is given what there is after each workload.

    Returns:
        As JSON: `workloads` and `results`, one of each system on each workload.

    Raises:
        ConfigError: a name that is not known; rounds or threads below 1, or too many.
    """
    check_names("--systems", systems, SYSTEMS)
    check_names("--workloads", workloads, WORKLOADS)
    for number, option, most in ((rounds, "--rounds", MOST_ROUNDS), (threads, "--threads", os.cpu_count() or 1)):
        if not 1 <= number <= most:
            raise ConfigError(
                f"{option}={number} cannot be measured here", field=option, hint=f"give a number from 1 to {most:,}"
            )
    described: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    record = {"rounds": rounds, "seed": seed, "settings": list(settings), "workloads": described, "results": results}
    began, chosen = time.monotonic(), list(dict.fromkeys(workloads))

    def say(line: str) -> None:
        note(f"{timedelta(seconds=int(time.monotonic() - began))} {line}")

    for number, name in enumerate(chosen, 1):
        batch = build_batch(WORKLOADS[name], seed)
        described[name] = {
            "title": WORKLOADS[name].title,
            "vocab": WORKLOADS[name].vocab,
            "samples": batch.num_samples,
            "tokens": batch.num_tokens,
            "trained_tokens": batch.num_response_tokens,
            "padding": round(padding(batch), 3),
        }
        competitors = [Competitor(system) for system in dict.fromkeys(systems)]
        with tempfile.TemporaryDirectory(prefix="slimefsdp-bench-") as folder:
            path = Path(folder)
            batch.save(path / "batch.safetensors")
            write_model(path / "model", WORKLOADS[name].vocab, seed)
            write_adapter(path / "adapter", seed)
            say(f"{name} ({number} of {len(chosen)}): {batch.num_samples} samples, {batch.num_tokens:,} tokens")
            try:
                for one in competitors:
                    command = _command(one.name, path, device, threads, settings)
                    _start(one, command, peers, threads=threads, stderr=path / f"{one.name}.err")
                _measure(competitors, rounds, name, say)
            finally:
                for one in competitors:
                    one.close()
        results += [_result(name, one, competitors, batch.num_tokens) for one in competitors]
        save(record)
    return record


def provenance() -> dict[str, Any]:
    """The command line and the commit of the checkout, and whether files differ from it."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        # the folders of one machine say nothing on another
        "command": " ".join(
            ["slimefsdp", *(Path(word).name if word.startswith("/") else word for word in sys.argv[1:])]
        ),
        "commit": git("rev-parse", "HEAD"),
        "is_changed_since": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def _command(name: str, folder: Path, device: str, threads: int, settings: Sequence[str]) -> list[str]:
    """What follows the interpreter."""
    system = SYSTEMS[name]
    files = ["--model", str(folder / "model"), "--batch", str(folder / "batch.safetensors")]
    overrides = [f"--set={setting}" for setting in settings] if system.script == OWN else []
    how = ["--device", device, "--threads", str(threads)]
    arguments = [argument.format(folder=folder) for argument in system.arguments]
    return [str(ROOT / system.script), *arguments, *files, *how, *overrides]


def _start(one: Competitor, command: Sequence[str], peers: Path, *, threads: int, stderr: Path) -> None:
    venv = SYSTEMS[one.name].venv
    python = sys.executable if venv is None else str(peers / venv / "bin" / "python")
    if not Path(python).is_file():
        one.status, one.reason = "absent", f"bash benchmarks/peers/setup.sh {peers}"
        return
    one.process = Process([python, *command], threads=threads, stderr=stderr)


def _measure(competitors: Sequence[Competitor], rounds: int, workload: str, note: Callable[[str], None]) -> None:
    """Fills the competitors in; those that fail drop out, the others go on."""
    for place, one in enumerate(competitors, 1):
        system = f"{workload}, {one.name} ({place} of {len(competitors)})"
        if one.runs:
            note(f"{system}: first steps")
        one.attempt(one.warm_up)
        note(f"{system}: " + (f"micro-batch {one.micro_batch}" if one.runs else f"{one.status}: {one.reason}"))
    for number in range(rounds):
        turns = competitors[:: -1 if number % 2 else 1]  # nobody always follows the same neighbour
        for place, one in enumerate(turns, 1):
            if one.runs:
                note(f"{workload}, round {number + 1} of {rounds}: {one.name} ({place} of {len(turns)})")
            one.attempt(one.take_step)
        seconds = ", ".join(f"{one.name} {seconds_of(one.steps[-1]):.2f}" for one in competitors if one.runs)
        note(f"{workload}, round {number + 1} of {rounds}, seconds: {seconds}")


def _result(workload: str, one: Competitor, competitors: Sequence[Competitor], tokens: int) -> dict[str, Any]:
    measured = {other.name: other for other in competitors if other.runs}
    found: dict[str, Any] = {"workload": workload, "system": one.name, "status": one.status}
    if not one.runs:
        return found | {"reason": one.reason}
    ours, whole = measured.get(SYSTEMS[one.name].beside), measured.get(OURS)
    if one.name == LORA and whole is not None:
        found["of_all_weights"] = round(_ratio(one, whole), 3)
    if ours is not None:
        agrees = all(
            math.isclose(one.first[name], ours.first[name], rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
            for name in ("loss", "grad_norm")
        )
        ratio = {"slimefsdp_is_faster_by": round(_ratio(one, ours), 3)} if agrees else {}
        found |= {"agrees_with_slimefsdp": agrees} | ratio
    chosen = one.choices[one.micro_batch]
    medians = {
        name: round(statistics.median(step[name] for step in one.steps), 4) for name in ("user_s", "system_s", "wall_s")
    }
    seconds = statistics.median(map(seconds_of, one.steps))
    on_device = one.steps[0]["device_s"] is not None
    return found | {
        **one.ready,
        "micro_batch": one.micro_batch,
        **medians,
        "device_s": round(seconds, 4) if on_device else None,
        "tokens_per_second": round(tokens / seconds, 1),
        "peak_extra_mib": round(chosen["peak_extra_bytes"] / MIB, 1),
        "gradient_mib": round(one.ready["parameters"] * 4 / MIB, 1),
        "first_loss": one.first["loss"],
        "first_grad_norm": one.first["grad_norm"],
        "choices": [{"micro_batch": size, **step} for size, step in one.choices.items()],
        "steps": one.steps,
    }


def _ratio(one: Competitor, other: Competitor) -> float:
    """Of seconds, the median over rounds."""
    pairs = zip(one.steps, other.steps, strict=True)
    return statistics.median(seconds_of(mine) / seconds_of(theirs) for mine, theirs in pairs)


def table(record: Mapping[str, Any]) -> str:
    """The results as text."""
    rows = [("workload", "system", "tokens/s", "slimefsdp is", "peak MiB", "micro-batch", "")]
    for one in record["results"]:
        start = (one["workload"], SYSTEMS[one["system"]].title)
        if one["status"] != "measured":
            rows.append((*start, "-", "-", "-", "-", f"{one['status']}: {one['reason']}"))
            continue
        ratio = one.get("slimefsdp_is_faster_by")
        differs = "computes something else" if one.get("agrees_with_slimefsdp") is False else ""
        shown = "-" if ratio is None else f"{ratio:.2f}x as fast"
        memory, speed = f"{one['peak_extra_mib']:,.0f}", f"{one['tokens_per_second']:,.0f}"
        rows.append((*start, speed, shown, memory, str(one["micro_batch"]), differs))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[2:6], widths[2:6], strict=True)]
        lines.append("  ".join([*left, *right, row[6]]).rstrip())
    return "\n".join(lines)
