"""The document's longest contexts are those of the estimate, and the command line gives the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from actors.cli.main import main
from benchmarks.longest_context import GOAL, MODEL, TRAINED, contexts, with_tables
from slimefsdp.model_spec import ModelSpec

ROOT = Path(__file__).resolve().parents[2]
QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "hidden_act": "silu",
}  # fmt: skip


def test_the_document_shows_the_tables_of_the_estimate() -> None:
    document = (ROOT / "docs/long_context.md").read_text()
    assert with_tables(document) == document, "python benchmarks/longest_context.py --render docs/long_context.md"


def test_a_hundred_and_twenty_eight_thousand_tokens_fit_where_inputs_of_layers_wait_on_the_host() -> None:
    tokens = {one.settings: one.tokens for one in contexts(TRAINED["adapters of rank 16"])}
    assert tokens["model.activation_checkpointing=full"] < GOAL
    assert tokens["model.activation_checkpointing=full model.offload_activations=true"] >= GOAL
    whole = {one.settings: one.tokens for one in contexts(TRAINED["all parameters"])}
    assert whole["model.activation_checkpointing=full model.offload_activations=true"] == 0
    assert whole["model.activation_checkpointing=full model.offload_activations=true fsdp.cpu_offload=true"] >= GOAL


@pytest.mark.parametrize("trained", list(TRAINED))
def test_plan_says_the_same_of_settings(trained: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ModelSpec.from_config(QWEN3_8B) == MODEL
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(QWEN3_8B))
    tree = {
        "model": {"path": str(tmp_path / "model"), "init": "random", "activation_checkpointing": "full"},
        "mesh": {"dp": 1},
        "fsdp": {"sharding": "full"},
        "lora": {"rank": TRAINED[trained].lora_rank},
        "optim": {"total_updates": 10},
        "batch": {"max_tokens_per_rank": 1024},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    command = ["plan", str(tmp_path / "c.yaml"), "--longest-context", "--device", "H100"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ways = {one["settings"]: (one["tokens"], one["memory"]["total"]) for one in found["longest_context"]}
    assert ways == {one.settings: (one.tokens, one.memory.total) for one in contexts(TRAINED[trained])}
    assert main(command) == 0
    text = capsys.readouterr().out
    assert all(f"{tokens:,}" in text for tokens, _ in ways.values())
