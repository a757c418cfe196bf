"""The command: one line of result, typed refusals, nothing left behind, and quick answers to wrong arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.cli.main import main
from slimefsdp.errors import CheckpointError, byte_text
from slimefsdp.models.hf_folder import SINGLE_FILE
from tests.support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_model_goes_out_and_comes_back_with_one_line_of_result_each(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dcp, back = tmp_path / "dcp", tmp_path / "back"
    size = byte_text(sum(tensor.nbytes for tensor in load_file(folder / SINGLE_FILE).values()))
    assert main(["convert", "hf-to-dcp", str(folder), str(dcp)]) == 0
    assert capsys.readouterr().out == f"{dcp}: 25 tensors, {size} of bfloat16\n"
    assert main(["convert", "dcp-to-hf", str(dcp), str(back), "--like", str(folder), "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == f"{back}: 25 tensors, {size} of bfloat16 as float32\n"
    source, written = load_file(folder / SINGLE_FILE), load_file(back / SINGLE_FILE)
    assert source.keys() == written.keys() and all(torch.equal(written[n], source[n].float()) for n in source)
    assert json.loads((back / "config.json").read_text())["dtype"] == "float32" and (back / "tokenizer.json").exists()


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_a_run_without_checkpoints_is_refused_with_the_setting_that_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    (tmp_path / "run" / inside).mkdir(parents=True)
    command = ["convert", "checkpoint-to-hf", str(tmp_path / "run"), str(tmp_path / "model")]
    assert main(command) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert f"{tmp_path / 'run'} has no checkpoint" in said and "field: SRC" in said
    assert "checkpoint.interval_steps" in said and "run.export_dir" in said and not (tmp_path / "model").exists()
