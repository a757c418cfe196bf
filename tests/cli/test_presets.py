"""Presets in a fresh clone, without network, GPUs, weights or data: each is checked, planned and says what it lacks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from actors.cli import main as cli
from actors.cli import preflight
from actors.cluster import capacity, connect
from slimefsdp.config import load_config
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder, shape_of
from tests.support.hub import use_cache

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*.yaml"))
# as the models' own pages state them
BILLIONS = {
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.1-70B-Instruct": 70.55,
    "unsloth/gpt-oss-20b-BF16": 20.91,
}


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one, an empty cache, no hub, no GPU; nothing starts Ray."""
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    for module, name in ((preflight, "has_nvidia_driver"), (capacity, "has_nvidia_driver")):
        monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setattr(capacity, "gpus_here", lambda: None)
    monkeypatch.setattr(connect, "connect", lambda *_: pytest.fail("Ray was started"))
    return tmp_path


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_planned_checked_and_tried_in_a_fresh_clone(
    fresh: Path, preset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(preset)
    needed = {"model.path": config.model.path, **config.data.sources}
    if config.rollout.engine_python is not None:
        needed["rollout.engine_python"] = config.rollout.engine_python
    commands = [["plan", str(preset)], ["check", str(preset)]]
    if config.data.train is not None:  # but for those of `serve`
        commands.append(["train", str(preset), "--dry-run"])
    for words in commands:
        assert cli.main(words) == 0, (words, capsys.readouterr().err)
        said = capsys.readouterr().out
        if words[0] != "plan":
            absent = [line for line in said.splitlines() if line.startswith("not here")]
            assert [
                field for field, name in needed.items() if not any(f"{field}={name}:" in one for one in absent)
            ] == []
    assert [path for path in fresh.rglob("*") if path.is_file()] == []


def test_presets_for_gpus_say_so_and_compute_in_bfloat16() -> None:
    with_gpus = [load_config(path) for path in PRESETS if path.stem.endswith("gpu")]
    assert len(with_gpus) >= 10
    for config in with_gpus:
        assert config.mesh.device == "cuda" and config.precision.compute_dtype == "bfloat16"
        assert shape_of(config.model.path) is not None
    engines = {config.rollout.placement for config in with_gpus if config.algorithm != "sft"}
    assert engines == {"own", "colocated"} and {config.algorithm for config in with_gpus} == {"grpo", "ppo", "sft"}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_named_shapes_have_the_parameters_that_their_models_state(name: str, billions: float) -> None:
    assert spec_of(Path(name)).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_shapes_of_examples_are_those_of_the_models_that_scripts_make(example: Path) -> None:
    made = ModelSpec.from_config(read_model_folder(example / "model").config)
    assert spec_of(Path("data/sort_digits/model")) == spec_of(Path("runs/sort_digits_sft/model")) == made


def spec_of(path: Path) -> ModelSpec:
    folder = shape_of(path)
    assert folder is not None
    return ModelSpec.from_config(read_model_folder(folder, with_weights=False).config)


@pytest.mark.parametrize(
    ("override", "status"),
    [
        ("data.train=data/nowhere.jsonl", 2),
        ("model.path=nowhere", 4),
        ("model.path=owner/unknown", 4),
        ("rollout.reward=nowhere:f", 2),
        ("lora.targets=[nope]", 2),
    ],
)
def test_what_is_wrong_is_told_although_other_things_are_not_here_yet(fresh: Path, override: str, status: int) -> None:
    preset = ROOT / "configs/llama3.1_8b_lora_1gpu.yaml"
    assert cli.main(["train", str(preset), "--dry-run", override]) == status


def test_a_reward_is_tried_on_records_that_are_here_although_those_to_evaluate_with_are_not(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(preflight, "try_reward", lambda _, prompts: tried.append(prompts.train[0]["prompt"]))
    (fresh / "mine.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    own = ["data.train=mine.jsonl", "data.prompt_column=null", "data.answer_column=null"]
    preset = str(ROOT / "configs/qwen3_0.6b_grpo_1gpu.yaml")
    assert cli.main(["check", preset, "data.heldout=owner/test", *own]) == 0
    assert cli.main(["check", preset]) == 0
    assert tried == ["1 + 1"]


def test_the_figures_of_presets_are_current(fresh: Path) -> None:
    spec = importlib.util.spec_from_file_location("presets_table", ROOT / "scripts/presets_table.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.current(text) == text, "run `python scripts/presets_table.py --write`"
