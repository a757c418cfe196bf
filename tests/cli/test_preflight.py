"""What attention's settings ask of models and of the machine is looked for before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cli import preflight
from actors.cluster.capacity import compute_capabilities_here
from slimefsdp.attention.backends import flash_attn_3
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from tests.support.plain_step import settings
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

HALF = {"compute_dtype": "bfloat16"}


def asking(folder: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {"mesh": {"device": "auto"}, "precision": HALF, "attention": {"kernel": "flash_attn_3"}}
    return settings(folder, **{**tree, **sections})


def says(programs: Path, text: str, status: int = 0) -> None:
    """Puts an nvidia-smi in a folder that prints this where it is asked for compute capabilities."""
    program = programs / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--query-gpu=compute_cap*) printf "{text}"; exit {status};; esac\n')
    program.chmod(0o755)


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The programs of a machine with a driver, and with a torch and the package that FlashAttention 3 takes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(preflight, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(preflight, "find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(flash_attn_3, "find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: ["FA3"], raising=False)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: None, raising=False)
    return tmp_path


@pytest.mark.parametrize("text", ["9.0\\n9.0\\n", "8.6\\n9.0\\n", "Field compute_cap is not a valid field\\n", ""])
def test_flash_attention_3_is_taken_where_a_gpu_may_have_it(programs: Path, tiny_folder: TinyFolder, text: str) -> None:
    says(programs, text)
    preflight.check_installed(asking(tiny_folder()))
    says(programs, text, status=9)
    preflight.check_installed(asking(tiny_folder()))  # a driver that does not answer says nothing
    (programs / "nvidia-smi").unlink()
    preflight.check_installed(asking(tiny_folder()))


def test_gpus_of_another_kind_and_a_torch_without_the_switch_are_refused_before_a_launch(
    programs: Path, tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = asking(tiny_folder())
    says(programs, "8.0\\n8.6\\n")
    assert compute_capabilities_here() == ["8.0", "8.6"]
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn_3", "9.0", "8.0, 8.6"):
        preflight.check_installed(config)
    preflight.check_installed(asking(tiny_folder(), cluster={"address": "auto"}))  # whose nodes have their own
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", list)
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn_3", torch.__version__):
        preflight.check_installed(config)


@pytest.mark.parametrize(
    "attention", [{"kernel": "flash_attn_3"}, {"kernel": "flash_attn"}, {"strategy": "ring_flash_attn"}]
)
@pytest.mark.parametrize(
    "computing",
    [{"precision": {"compute_dtype": "float32"}}, {"mesh": {"device": "cpu", "cp": 2}}],
    ids=["dtype", "cpu"],
)
def test_what_no_machine_can_compute_is_refused_for_another_cluster_too(
    programs: Path, tiny_folder: TinyFolder, attention: dict[str, str], computing: dict[str, Any]
) -> None:
    sections = {"mesh": {"device": "auto", "cp": 2}, "attention": attention, "cluster": {"address": "auto"}}
    preflight.check_installed(asking(tiny_folder(), **sections))
    (name, value), *_ = attention.items()
    with refused(ConfigError, f"attention.{name}", f"attention.{name}={value}"):
        preflight.check_installed(asking(tiny_folder(), **{**sections, **computing}))


@pytest.mark.parametrize(
    ("kind", "changes", "values"),
    [("gemma2", {}, ["soft-cap"]), ("qwen3", {"head_dim": 12}, [12]), ("qwen3", {"head_dim": 264}, [264])],
)
def test_a_model_that_flash_attention_3_would_not_compute_is_refused_before_a_launch(
    tiny_folder: TinyFolder, kind: str, changes: dict[str, Any], values: list[object]
) -> None:
    folder = tiny_folder(kind, **changes)
    with refused(ConfigError, "attention.kernel", "attention.kernel=flash_attn_3", *values):
        preflight.check_models(asking(folder))
    preflight.check_models(asking(folder, attention={}))
    preflight.check_models(asking(tiny_folder()))
