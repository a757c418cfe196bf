"""What a plan says can be acted on: sizes in the unit that fits, rates that say what they were measured in, numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from actors.cli.main import main
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import byte_text

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def in_bytes(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * UNITS[unit]


@given(st.integers(0, 10**16))
def test_bytes_are_said_in_the_unit_that_fits_and_never_less_where_less_would_not_do(number: int) -> None:
    near, enough = in_bytes(byte_text(number)), in_bytes(byte_text(number, round_up=True))
    assert abs(near - number) <= 0.051 * max(number, 1) and enough >= number * (1 - 1e-12)
    assert enough - number <= 0.101 * max(number, 1)
    assert number >= 10**15 or float(byte_text(number).split()[0].replace(",", "")) <= 1000


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A YAML file of a tiny model of which config.json is there."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "model").mkdir()
    described = {"model_type": "llama", "vocab_size": 100, "head_dim": 8, "intermediate_size": 64, **sizes}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "mesh": {"dp": 2},
        "optim": {"total_updates": 10},
        "batch": {"max_tokens_per_rank": 512},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 64},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path / "c.yaml"


def test_a_plan_of_adapters_takes_less_of_everything_and_says_how_many_are_trained(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(*overrides: str) -> dict[str, Any]:
        assert main(["plan", str(config), "--json", "--lengths", "fixed(64)", *overrides]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    whole, adapters = planned(), planned("lora.rank=4")
    assert "adapters" not in whole and adapters["adapters"]["parameters"] == 4 * 2 * (224 + 3 * 96)
    chosen = [found["estimate"]["chosen"] for found in (whole, adapters)]
    assert chosen[1]["memory"]["total"] < chosen[0]["memory"]["total"]
    assert chosen[1]["seconds"]["products"] < 0.9 * chosen[0]["seconds"]["products"]
    assert adapters["sharding"]["reduce_scatter"] < 0.5 * whole["sharding"]["reduce_scatter"]
    assert main(["plan", str(config), "--lengths", "fixed(64)", "lora.rank=4", "fsdp.sharding=auto"]) == 0
    assert "parameters of rank 4 are trained" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "cp", "can_serve"),
    [
        ({"num_attention_heads": 4}, 4, {"ring", "ulysses", "all_gather"}),
        ({"num_attention_heads": 4}, 8, {"ring", "all_gather"}),
        ({"model_type": "mistral", "sliding_window": 16}, 2, {"ulysses", "all_gather"}),
    ],
)
@pytest.mark.parametrize("lengths", ["fixed(20)", "uniform(2, 500)"])
def test_the_lightest_strategy_sends_least_of_those_that_can_serve_the_model(
    config: Path, capsys: pytest.CaptureFixture[str], model: dict[str, Any], cp: int, can_serve: set[str], lengths: str
) -> None:
    file = config.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | model))
    assert main(["plan", str(config), "--json", "--lengths", lengths, f"mesh.cp={cp}"]) == 0
    found = json.loads(capsys.readouterr().out)
    sent = {name: sum(comm.values()) for name, comm in found["comm"].items() if name in can_serve}
    assert sent.keys() == can_serve and found["lightest_strategy"] in can_serve
    assert sent[found["lightest_strategy"]] == min(sent.values())


def test_a_batch_file_is_planned_with_what_its_samples_share(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def saved(prompt: int) -> list[str]:
        file = tmp_path / f"batch{prompt}.safetensors"
        RolloutBatch.from_samples(
            {
                "tokens": [*[group] * prompt, *range(n, n + 20)],
                "response_length": 20,
                "reward": float(n) if group < 5 else 0.0,
                "group_id": group,
            }
            for group in (3, 4, 5)
            for n in range(6, 14)
        ).save(file)
        return ["plan", str(config), "--lengths", str(file)]

    assert main([*saved(200), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["samples"], record["tokens"], record["computed_tokens"]) == (16, 16 * 220, 2 * 200 + 16 * 20)
    assert main([*saved(200), "--json", "batch.share_prefixes=never"]) == 0
    apart = json.loads(capsys.readouterr().out)
    assert apart["computed_tokens"] == apart["tokens"] == record["tokens"]
    speeds = [one["estimate"]["chosen"]["tokens_per_second"] for one in (record, apart)]
    assert speeds[0] > 3 * speeds[1]
    guess = ["plan", str(config), "--lengths", "fixed(220)"]
    assert main([*guess, "--json"]) == 0 and record["is_batch"] is True
    assert json.loads(capsys.readouterr().out)["is_batch"] is False


def test_the_longest_context_grows_with_the_ranks_that_share_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = []
    for more in ([], ["mesh.cp=2"]):
        assert main(["plan", str(config), "--longest-context", "--memory-gb", "0.1", "--json", *more]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["longest_context"][0]["tokens"])
    assert tokens[1] >= 1.9 * tokens[0]


def test_no_longest_context_is_longer_than_the_positions_that_a_model_learned(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 300}
    (config.parent / "model" / "config.json").write_text(json.dumps(learned))
    command = ["plan", str(config), "--longest-context", "--memory-gb", "80"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["most_tokens"] == 300 and {one["tokens"] for one in found["longest_context"]} == {300}
    assert main(command) == 0
    assert "no longer samples than 300 tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_a_calibration_of_this_machine_is_written_and_planned_with(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config.parent / "measured.json"
    given = ["mesh.device=cpu", "precision.compute_dtype=float32", "--json"]
    assert main(["plan", str(config), "--calibrate", str(file), *given]) == 0
    measured = json.loads(capsys.readouterr().out)["estimate"]["rates"]
    assert "2 ranks" in measured["source"] and measured["dtype"] == "float32" and measured["comm_gbps"] > 0
    assert main(["plan", str(config), f"batch.cost_model={file}", *given]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["rates"] == measured
