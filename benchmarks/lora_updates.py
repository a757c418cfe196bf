"""Bytes and seconds of an update of an embedded engine's weights: all of them, merged adapters, adapters alone.

    python benchmarks/lora_updates.py --tokenizer data/sort_digits/model --json benchmarks/results/lora_updates.json

A rank and an engine on Ray, a model of the sizes of SmolLM2-135M with random weights in float32. After a first update,
which brings everything, the medians of three are taken. Prints the Markdown table of docs/lora.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from actors import EnginePool, WorkerGroup, connect  # noqa: E402
from actors.cluster.connect import disconnect  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import config_from_dict  # noqa: E402

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 100000, "tie_word_embeddings": True,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "rank 8, merged": {"rank": 8},
    "rank 8, adapters alone": {"rank": 8, "sync": "adapters"},
    "rank 32, adapters alone": {"rank": 32, "sync": "adapters"},
}
"""Name -> settings of `lora`."""


def measured(folder: Path, lora: dict[str, Any]) -> dict[str, Any]:
    """A group and an engine, and three updates after the first."""
    config = config_from_dict(
        {
            "model": {"path": str(folder), "init": "random"},
            "lora": lora,
            "mesh": {"dp": 1, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": 1024},
            "optim": {"lr": 1e-4, "total_updates": 1},
            "rollout": {"engines": 1, "max_new_tokens": 8},
        }
    )
    connect(config)
    try:
        group = WorkerGroup.launch(config)
        engines = EnginePool.launch(config)
        first = group.update_weights(engines.receivers)
        later = [group.update_weights(engines.receivers) for _ in range(3)]
        engines.shutdown()
        group.shutdown()
    finally:
        disconnect()
    return {
        "first_bytes": first.bytes,
        "bytes": later[-1].bytes,
        "seconds": round(statistics.median(one.seconds for one in later), 3),
    }


def table(runs: dict[str, Any]) -> str:
    """The rows of docs/lora.md."""
    whole = runs["all weights"]
    lines = ["| sent | MB of an update | of all weights | seconds |", "|---|---|---|---|"]
    for name, run in runs.items():
        share = run["bytes"] / whole["bytes"]
        lines.append(f"| {name} | {run['bytes'] / 1e6:.1f} | {share:.1%} | {run['seconds']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a folder that has one, such as data/sort_digits/model"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MODEL))
        for file in options.tokenizer.glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
        runs = {}
        for run, lora in RUNS.items():
            runs[run] = measured(folder, lora)
            print(run, runs[run], flush=True)
    what = "bytes and median seconds of three updates of an embedded engine's weights, after a first one, in float32"
    write_record(options.json, what, 1, runs)
    print(table(runs))


if __name__ == "__main__":
    main()
