"""The command: one line of result, typed refusals, nothing left behind, and quick answers to wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.cli.convert import DTYPES
from actors.cli.main import main
from slimefsdp.checkpoint.hf_export import EXPORT_DTYPES
from slimefsdp.errors import byte_text
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


def test_the_dtypes_offered_are_those_that_can_be_written() -> None:
    assert set(DTYPES) == set(EXPORT_DTYPES)


WRONG: dict[str, tuple[list[str], int, str]] = {
    "no kind": ([], 2, "KIND"),
    "no target": (["hf-to-dcp", "MODEL"], 2, "DST"),
    "no like": (["dcp-to-hf", "MODEL", "out"], 2, "--like"),
    "unknown dtype": (["dcp-to-hf", "MODEL", "out", "--like", "MODEL", "--dtype", "int8"], 2, "int8"),
    "a setting": (["hf-to-dcp", "MODEL", "out", "optim.lr=1"], 2, "optim.lr=1"),
    "no source": (["hf-to-dcp", "nowhere", "out"], 5, "nowhere is no folder"),
    "a target that is taken": (["hf-to-dcp", "MODEL", "taken"], 5, "is not empty"),
    "a source without a model": (["hf-to-dcp", "taken", "out"], 4, "config.json"),
    "a source that is no DCP folder": (["dcp-to-hf", "taken", "out", "--like", "MODEL"], 5, "has no .metadata"),
    "a like without a model": (["dcp-to-hf", "taken", "out", "--like", "taken"], 4, "config.json"),
    "a like of a run without a model": (["checkpoint-to-hf", "taken", "out", "--like", "taken"], 4, "config.json"),
}


def test_wrong_arguments_are_answered_without_torch(tmp_path: Path, folder: Path) -> None:
    """In one process, since starting one for each would take longer than the answers."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    program = (
        "import contextlib, io, json, sys\n"
        "from actors.cli.main import main\n"
        "answers = {}\n"
        "for name, arguments in json.loads(sys.argv[1]).items():\n"
        "    errors = io.StringIO()\n"
        "    with contextlib.redirect_stderr(errors):\n"
        "        try: status = main(['convert', *arguments])\n"
        "        except SystemExit as ended: status = ended.code\n"
        "    answers[name] = status, errors.getvalue(), 'torch' in sys.modules\n"
        "print(json.dumps(answers))\n"
    )
    asked = {
        name: [str(folder) if item == "MODEL" else item for item in arguments]
        for name, (arguments, _, _) in WRONG.items()
    }
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(root)},
    )  # fmt: skip
    answers = json.loads(run.stdout)
    for name, (_, status, words) in WRONG.items():
        found, errors, with_torch = answers[name]
        assert found == status and words in errors and not with_torch, (name, answers[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]
