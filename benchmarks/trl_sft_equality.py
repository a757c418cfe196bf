"""Supervised training beside TRL's SFTTrainer, on the same files: the loss of each update, and the weights at the end.

    python benchmarks/trl_sft_equality.py --trl-python .venv-trl/bin/python [--json FILE]

`scripts/setup_trl.sh` makes the environment of TRL. Both train the sort-digits model in float32 in one process on a
CPU, at a constant rate, over two epochs in the same order. AdamW divides a gradient by its own size, so that rounding
of a very small one moves a weight as far as any other; by SGD the weights tell how far gradients themselves are apart.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from actors.loop import train
from actors.rollout.prompts import PromptStream
from actors.torchrun import TorchrunGroup
from benchmarks.record import ROOT, write_record
from scripts.make_sort_digits import write_sort_digits
from slimefsdp.config import config_from_dict
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.monitoring.metrics_log import read_metrics

RECORDS, EPOCHS, SAMPLES_PER_UPDATE = 32, 2, 8
LR, BETAS = {"adamw": 1e-3, "sgd": 0.1}, {"adamw": (0.9, 0.95), "sgd": (0.0, 0.95)}
EPS, MAX_GRAD_NORM = 1e-8, 1.0
# the example's template, which also says what the assistant wrote: TRL finds turns in no other way
MARKED_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def forms(chats: list[dict[str, Any]], sortings: list[dict[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """The records of each form that is compared."""
    return {
        "messages, all turns": chats,
        "prompt and completion, chats": [
            {"prompt": one["messages"][:-1], "completion": one["messages"][-1:]} for one in chats
        ],
        "prompt and completion, texts": [
            {"prompt": f"{one['prompt']}\n", "completion": f"sorted: {one['answer']}"} for one in sortings
        ],
        "text": [{"text": f"{one['prompt']} gives {one['answer']}, as you see."} for one in sortings],
    }


def ours(
    folder: Path, model: Path, records: list[dict[str, Any]], optimizer: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each update, and the weights after the last."""
    file = written(folder / "records.jsonl", records)
    config = config_from_dict(
        {
            "algorithm": "sft",
            "run": {"dir": str(folder / "run"), "export_dir": str(folder / "ours"), "epochs": EPOCHS},
            "model": {"path": str(model)},
            "mesh": {"dp": 1, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"samples_per_update": SAMPLES_PER_UPDATE},
            "optim": {
                "name": optimizer,
                "lr": LR[optimizer],
                **({"momentum": 0.0} if optimizer == "sgd" else {"betas": list(BETAS[optimizer]), "eps": EPS}),
                "max_grad_norm": MAX_GRAD_NORM,
            },
            "data": {"train": str(file)},
        }
    )
    train(config, launch=TorchrunGroup.launch)
    losses = [row["loss"] for row in read_metrics(folder / "run")]
    return [float(loss) for loss in losses if loss is not None], load_file(folder / "ours" / "model.safetensors")


def theirs(
    folder: Path, model: Path, records: list[dict[str, Any]], optimizer: str, python: Path
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, str]]:
    """The same of TRL, with its versions; the records come in the order of our epochs."""
    order = PromptStream(range(len(records)), 0, digest="").take(EPOCHS * len(records))
    asked = {
        "model": str(model),
        "records": str(written(folder / "in_order.jsonl", [records[index] for index in order])),
        "assistant_only_loss": "messages" in records[0],
        "samples_per_update": SAMPLES_PER_UPDATE,
        "optimizer": optimizer,
        "lr": LR[optimizer],
        "betas": BETAS[optimizer],
        "eps": EPS,
        "max_grad_norm": MAX_GRAD_NORM,
        **{name: str(folder / name) for name in ("folder", "weights", "answer")},
    }
    settings = folder / "asked.json"
    settings.write_text(json.dumps(asked))
    subprocess.run([python, ROOT / "benchmarks/peers/trl_sft_run.py", settings], check=True, stdout=subprocess.DEVNULL)
    answer = json.loads((folder / "answer").read_text())
    return answer["losses"], load_file(folder / "weights" / "model.safetensors"), answer["versions"]


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    """The path, with the records in it, a line each."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def compared(folder: Path, model: Path, records: list[dict[str, Any]], optimizer: str, python: Path) -> dict[str, Any]:
    """How far both are apart, and the versions of TRL's environment."""
    folder.mkdir()
    our_losses, our_weights = ours(folder, model, records, optimizer)
    their_losses, their_weights, versions = theirs(folder, model, records, optimizer, python)
    assert our_weights.keys() == their_weights.keys()
    start = load_file(model / "model.safetensors")
    return {
        "updates": len(our_losses),
        "losses": our_losses,
        "losses_of_trl": their_losses,
        "largest_difference_of_a_loss": float(np.abs(np.subtract(our_losses, their_losses)).max()),
        "largest_difference_of_a_weight": max(
            (our_weights[name] - their_weights[name]).abs().max().item() for name in our_weights
        ),
        "largest_change_of_a_weight": max((our_weights[name] - start[name]).abs().max().item() for name in start),
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter of TRL's environment")
    parser.add_argument("--json", type=Path, help="write a record of what was measured here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_process_group_from_environment(torch.device("cpu"), timeout_s=600)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sort_digits(folder)
        model = folder / "model"
        (model / "chat_template.jinja").write_text(MARKED_TEMPLATE)
        chats, sortings = (
            [json.loads(line) for line in (folder / f"{stem}.jsonl").read_text().splitlines()[:RECORDS]]
            for stem in ("chats", "train")
        )
        results = {}
        python = options.trl_python.absolute()
        cases = itertools.product(LR, forms(chats, sortings).items())
        for place, (optimizer, (form, records)) in enumerate(cases):
            found = compared(folder / f"case_{place}", model, records, optimizer, python)
            results[f"{form}, {optimizer}"] = found
            print(
                f"{form}, {optimizer}: {found['updates']} updates, "
                f"losses within {found['largest_difference_of_a_loss']:.1e}, "
                f"weights within {found['largest_difference_of_a_weight']:.1e} of changes up to "
                f"{found['largest_change_of_a_weight']:.1e}",
                flush=True,
            )
    write_record(options.json, "supervised training beside TRL's SFTTrainer, on the same records", 1, results)


if __name__ == "__main__":
    main()
