"""A PEFT folder is read as peft reads it; what would be computed otherwise is refused by name, from headers alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists

from slimefsdp.errors import ModelError
from slimefsdp.models.peft_folder import PeftFolder, read_peft_folder
from tests.support.peft_folders import rewrite
from tests.support.refusals import refused
from tests.support.tiny_models import tiny_model

A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
HEAD = "base_model.model.lm_head.base_layer.weight"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What peft's save_pretrained leaves of adapters that are new."""
    model = get_peft_model(tiny_model(), LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"]))
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_rank_alpha_and_modules_are_those_of_the_files(written: Path) -> None:
    found = read_peft_folder(written)
    assert (found.rank, found.alpha, found.path) == (3, 7.0, written)
    sizes = {"self_attn.q_proj": (64, 32), "mlp.down_proj": (32, 56)}
    assert found.modules == {f"model.layers.{layer}.{name}": size for layer in (0, 1) for name, size in sizes.items()}


def test_a_rank_above_that_of_a_matrix_is_refused_beside_its_base(tmp_path: Path) -> None:
    base = tiny_model()
    shapes = {name: tuple(weight.shape) for name, weight in base.named_parameters()}
    for rank in (32, 33):  # down_proj is 32 x 56
        folder = tmp_path / str(rank)
        get_peft_model(tiny_model(), LoraConfig(r=rank, target_modules=["down_proj"])).save_pretrained(folder)
        found = read_peft_folder(folder)
        if rank == 32:
            found.check_base(shapes, tmp_path)
        else:
            with refused(ModelError, "lora.path", "r=33", "32 x 56"):
                found.check_base(shapes, tmp_path)


REFUSED_SETTINGS: dict[str, Any] = {
    "peft_type": "IA3",
    "task_type": "SEQ_CLS",
    "bias": "lora_only",
    "use_dora": True,
    "use_rslora": True,
    "lora_dropout": 0.1,
    "lora_bias": True,
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 16},
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "a_key_of_tomorrow": "x",
    "r": 0,
    "lora_alpha": -1,
    "target_modules": None,
    "exclude_modules": 3,
    "layers_to_transform": ["0"],
    "layers_pattern": ["layers"],
}
CASES = [
    *REFUSED_SETTINGS.items(),
    *(("init_lora_weights", name) for name in ("pissa_niter_4", "loftq")),
    *(("init_lora_weights", name) for name in ("new", 1)),
    *(("r", value) for value in (True, 3.0, "3", None)),
    *(("lora_alpha", value) for value in (True, math.nan, math.inf, 10**400, "7", None)),
    ("lora_alpha", 0),
    ("target_modules", []),
    ("target_parameters", ["down_proj"]),
    ("target_parameters", ["q_proj.weight"]),
    ("target_parameters", "experts.down_proj"),
    ("target_modules", "("),
    ("exclude_modules", "("),
]


@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda value: str(value)[:20])
def test_what_cannot_be_honoured_is_refused_by_name_and_value(written: Path, key: str, value: Any) -> None:
    rewrite(written, config={key: value})
    shown = "401 digits" if value == 10**400 else repr(value)
    with refused(ModelError, "lora.path", f"{key}=", written / "adapter_config.json") as caught:
        read_peft_folder(written)
    assert shown.strip("'")[:6] in caught.value.message


def of_experts(folder: Path) -> Path:
    lora = LoraConfig(r=3, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    get_peft_model(tiny_model("qwen3_moe"), lora).save_pretrained(folder)
    return folder


def test_stacks_of_experts_are_those_that_target_parameters_names(tmp_path: Path) -> None:
    found = read_peft_folder(of_experts(tmp_path / "adapters"))
    owners = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
    assert found.stacks == {owner: ["down_proj", "gate_up_proj"] for owner in owners}
    assert sorted(found.modules) == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert found.targets[-1] == "model.layers.1.mlp.experts.gate_up_proj" and len(found.targets) == 6


OUTER = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
INNER = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
DEEPER = "base_model.model.model.layers.0.mlp.experts.base_layer.base_layer.lora_A.weight"
REFUSED_STACKS: dict[str, tuple[dict[str, torch.Tensor | None], list[str]]] = {
    "another rank": ({OUTER: torch.zeros(14, 24)}, [OUTER, "[14, 24]", "r=3"]),
    "one of two": ({INNER: None, INNER.replace("lora_A", "lora_B"): None}, [INNER, "missing"]),
    "one of three": (
        {DEEPER: torch.zeros(15, 24), DEEPER.replace("lora_A", "lora_B"): torch.zeros(32, 15)},
        ["base_layer.base_layer"],
    ),
}


@pytest.mark.parametrize("case", REFUSED_STACKS)
def test_a_tensor_of_experts_that_is_not_as_the_settings_have_it_is_named(tmp_path: Path, case: str) -> None:
    tensors, named = REFUSED_STACKS[case]
    rewrite(of_experts(tmp_path / "adapters"), tensors=tensors)
    with refused(ModelError, "lora.path", *named):
        read_peft_folder(tmp_path / "adapters")


def test_layers_of_a_pattern_are_refused_as_peft_does(written: Path) -> None:
    rewrite(written, config={"target_modules": ".*q_proj", "layers_to_transform": [1]})
    with refused(ModelError, "lora.path", "layers_to_transform=[1]"):
        read_peft_folder(written)
    with pytest.raises(ValueError, match="layers_to_transform"):
        PeftConfig.from_pretrained(written)


REFUSED_TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], list[Any]]] = {
    "no A": ({A: None}, [A, "missing"]),
    "no B": ({B: None}, [B, "missing"]),
    "surplus": ({HEAD: torch.zeros(96, 32)}, [HEAD]),
    "another name": ({A.replace("lora_A", "lora_A.default"): torch.zeros(3, 32)}, ["lora_A.default.weight"]),
    "of an embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(3, 96)},
        ["embed_tokens.lora_embedding_A"],
    ),
    "of DoRA": ({A.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(64)}, ["lora_magnitude_vector"]),
    "another rank": ({A: torch.zeros(4, 32)}, [A, "[4, 32]", "r=3"]),
    "another rank of B": ({B: torch.zeros(64, 2)}, [B, "[64, 2]", "r=3"]),
    "another number of dims": ({A: torch.zeros(3)}, [A, "[3]"]),
    "whole numbers": ({A: torch.zeros(3, 32, dtype=torch.int64)}, [A, "I64"]),
    "a float of one byte": ({B: torch.zeros(64, 3).to(torch.float8_e4m3fn)}, [B, "F8_E4M3"]),
    "not a target": (
        {A.replace("q_proj", "k_proj"): torch.zeros(3, 32), B.replace("q_proj", "k_proj"): torch.zeros(32, 3)},
        ["k_proj", "target_modules="],
    ),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_a_tensor_that_is_not_as_the_settings_have_it_is_named(written: Path, case: str) -> None:
    tensors, named = REFUSED_TENSORS[case]
    rewrite(written, tensors=tensors)
    with refused(ModelError, "lora.path", *named):
        read_peft_folder(written)


TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "mlp.down_proj"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj", "proj"]},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": "q_proj"},
    {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.1\..*k_proj"},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 0},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["blocks"]},
    {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1], "layers_pattern": []},
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_targets_choose_what_they_choose_in_peft(targets: dict[str, Any]) -> None:
    names = [name for name, _ in tiny_model().named_modules()]
    names += ["model.layers.1.mlp.experts.0.up_proj", "layers.1.q_proj", "q_proj"]
    folder = PeftFolder(Path(), targets, {}, {})
    theirs = LoraConfig(**targets)
    for name in names:
        wanted = check_target_module_exists(theirs, name)
        # an excluded one is an object of peft's own
        assert folder.chooses(name) == (bool(wanted) and type(wanted).__name__ != "_ExcludedModule"), name
