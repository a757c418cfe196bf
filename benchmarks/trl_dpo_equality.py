"""Training with algorithm=dpo, under torchrun, against TRL's DPOTrainer on the same pairs.

    python benchmarks/trl_dpo_equality.py --trl-python .venv-trl/bin/python --json FILE

Both compute in float32 from the model of scripts/make_sort_digits.py. slimefsdp shuffles by its seed, so TRL is given
the pairs in the order that this makes. `bash scripts/setup_trl.sh` makes TRL's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.engines.tokenizer import load_tokenizer
from actors.rollout.demonstrations import encode_demonstration
from actors.rollout.prompts import PromptStream
from actors.rollout.records import demonstrations, read_pairs
from benchmarks.record import ROOT, write_record
from scripts.make_sort_digits import write_sort_digits
from slimefsdp.config import config_from_dict

STEPS, PAIRS, BETA, SEED = 12, 8, 0.1, 0
COMPARED = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")
COMPARED += ("logps/rejected",)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05, "betas": [0.0, 0.999], "eps": 1e-8},
    "adamw": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8},
}


def records_of(form: str, example: Path) -> list[dict[str, Any]]:
    """The pairs of the example in one of the forms that TRL reads: chats, whole conversations, or texts."""
    found = []
    for line in (example / "pairs.jsonl").read_text().splitlines()[: STEPS * PAIRS]:
        pair = json.loads(line)
        responses = {name: pair[name] for name in ("chosen", "rejected")}
        turns = {name: [{"role": "assistant", "content": text}] for name, text in responses.items()}
        if form == "texts":
            found.append({"prompt": pair["prompt"][0]["content"] + "\n", **responses})
        elif form == "chats":
            found.append({"prompt": pair["prompt"], **turns})
        else:
            found.append({name: pair["prompt"] + turn for name, turn in turns.items()})
    return found


def compared(form: str, optimizer: str, ranks: int, example: Path, folder: Path, trl_python: Path) -> dict[str, Any]:
    """The largest differences of one case over all updates, and whether both encoded the same tokens."""
    folder.mkdir()
    records = records_of(form, example)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = {
        "algorithm": "dpo",
        "run": {"dir": str(folder / "run"), "steps": STEPS, "seed": SEED},
        "model": {"path": str(example / "model")},
        "mesh": {"dp": ranks, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"samples_per_update": 2 * PAIRS, "max_tokens_per_rank": 512},
        "loss": {"beta": BETA},
        "optim": {"name": optimizer, "schedule": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0}
        | (
            {"lr": OPTIMIZERS["sgd"]["lr"], "momentum": OPTIMIZERS["sgd"]["betas"][0]}
            if optimizer == "sgd"
            else OPTIMIZERS[optimizer]
        ),
        "data": {"train": str(folder / "pairs.jsonl")},
    }
    (folder / "run.yaml").write_text(json.dumps(tree))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*torchrun, "-m", "actors.cli", "train", str(folder / "run.yaml")], cwd=ROOT, check=True)
    ours = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]

    config, tokenizer = config_from_dict(tree), load_tokenizer(str(example / "model"))
    order = PromptStream(list(range(len(records))), SEED).take(len(records))
    pairs = read_pairs(config.data, "train")
    encoded = [encode_demonstration(tokenizer, one) for one in demonstrations([pairs[place] for place in order])]
    asked = {
        "folder": str(folder), "model": str(example / "model"), "steps": STEPS, "pairs_per_update": PAIRS,
        "beta": BETA, "optimizer": optimizer, "records": [records[place] for place in order], **OPTIMIZERS[optimizer],
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(asked))
    module = "benchmarks.peers.trl_dpo_run"
    subprocess.run([trl_python, "-m", module, str(folder / "trl.json")], cwd=ROOT, check=True, env=_plain_environment())
    theirs = json.loads((folder / "found.json").read_text())
    tokens = [
        [chosen.tokens.tolist(), rejected.tokens.tolist(), chosen.prompt_length]
        for chosen, rejected in zip(encoded[::2], encoded[1::2], strict=True)
    ]
    assert len(ours) == len(theirs["updates"]) == STEPS
    return {
        "form": form,
        "optimizer": optimizer,
        "ranks": ranks,
        "updates": STEPS,
        "pairs_per_update": PAIRS,
        "same_tokens": tokens == theirs["tokens"],
        "largest_difference": {
            name: max(abs(one[name] - other[name]) for one, other in zip(ours, theirs["updates"], strict=True))
            for name in COMPARED
        },
        "last_update": {name: [ours[-1][name], theirs["updates"][-1][name]] for name in COMPARED},
        "versions": theirs["versions"],
    }


def _plain_environment() -> dict[str, str]:
    """Without this environment's packages, which another Python would import."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="of the environment of scripts/setup_trl.sh")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    cases = [("chats", "adamw", 1), ("conversations", "sgd", 2), ("texts", "adamw", 1)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        example = Path(folder) / "example"
        write_sort_digits(example)
        for number, (form, optimizer, ranks) in enumerate(cases):
            found = compared(form, optimizer, ranks, example, Path(folder) / str(number), options.trl_python.absolute())
            print(json.dumps(found, indent=1), flush=True)
            results.append(found)
    what = "DPO by slimefsdp and by TRL's DPOTrainer on the same pairs, float32: largest differences over all updates"
    write_record(options.json, what, 1, results)


if __name__ == "__main__":
    main()
