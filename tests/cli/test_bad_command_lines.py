# ruff: noqa: E501 - tables, a case in a few words
"""Command lines and settings that no one should type: each ends in a typed error that names its field, at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from actors.cli.main import main
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import SlimeError
from tests.support.runs import startable

HUGE = "9" * 31  # digits
Case = tuple[str, int, str | None]  # words, exit status, field


@pytest.fixture(scope="module")
def folder(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all command lines are given: good settings, a model, and files of every wrong kind."""
    here = tmp_path_factory.mktemp("here")
    tree = startable(example, here)
    (here / "c.yaml").write_text(yaml.safe_dump(tree))
    sft = {**tree, "algorithm": "sft", "rollout": {}, "batch": {"samples_per_update": 4}}
    (here / "sft.yaml").write_text(yaml.safe_dump({name: value for name, value in sft.items() if value}))
    (here / "own.yaml").write_text(yaml.safe_dump({"model": tree["model"], "optim": tree["optim"]}))
    for name, content in FILES.items():
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (here / "empty").mkdir()
    (here / "checkout" / ".git").mkdir(parents=True)
    (here / "earlier").mkdir()
    (here / "earlier" / "metrics.jsonl").write_text('{"step": 1}\n')
    (here / "locked").mkdir()
    os.mkfifo(here / "locked" / ".lock")
    os.mkfifo(here / "pipe")
    (here / "locked_by_folder" / ".lock").mkdir(parents=True)
    (here / "m").symlink_to(example / "model")
    (here / "link").symlink_to(here / "nowhere")
    (here / "loop").symlink_to(here / "loop")
    tokens = np.arange(8)
    batch = RolloutBatch(tokens=tokens, lengths=[4, 4], response_lengths=[2, 2], rewards=[0.0, 1.0], group_ids=[0, 0])
    batch.save(here / "batch.safetensors")
    return here


FILES: dict[str, str | bytes] = {
    "text.txt": "no settings\n",
    "half.jsonl": '{"prompt": "\\ud800"}\n',
    "empty.jsonl": "\n\n",
    "no_prompt.jsonl": '{"question": "x"}\n',
    "chat_bad.jsonl": '{"prompt": [{"content": "x"}]}\n',
    "broken.jsonl": '{"prompt": "x"\n',
    "deep_key.jsonl": '{"prompt": "x", "answer": "x", "y": ' + "[" * 900 + "]" * 900 + "}\n",
    "no_answer.jsonl": '{"prompt": "x"}\n',
    "answer_chat.jsonl": '{"prompt": "x", "answer": [{"role": "assistant", "content": "x"}]}\n',
    "answer_nan.jsonl": '{"prompt": "x", "answer": NaN}\n',
    "torn.safetensors": b"\x10\0\0\0\0\0\0\0{",
    "text.safetensors": "hello",
    "lengths.json": "[1, -2]",
    "lengths_text.json": '["a"]',
    "lengths_object.json": '{"a": 1}',
    "rates.json": "{}",
    "rates_bad.json": '{"rates": {"matrix_tflops": "fast"}}',
}

SETTINGS: list[tuple[str, int, str | None]] = [
    ("optim.lr=fast", 2, "optim.lr"), ("mesh.pd=2", 2, "mesh.pd"), ("mesh.dp=100000", 6, "mesh.dp"), ("=2", 2, None),
    ("mesh.dp", 2, None), (f"run.steps={HUGE}", 2, "run.steps"), (f"optim.{'b' * 5000}=1", 2, None),
    ("run.dir=/", 2, "run.dir"), ("run.dir=/tmp", 2, "run.dir"), ("run.dir=~", 2, "run.dir"), ("run.dir=/usr/local", 2, "run.dir"),
    ("run.dir=~nobody_at_all/x", 2, "run.dir"), ("run.dir=$NO_SUCH_VARIABLE/x", 2, "run.dir"), ("run.dir=checkout/../checkout", 2, "run.dir"),
    ("run.dir=earlier", 2, "run.dir"), ("run.dir=text.txt", 2, "run.dir"), ("run.dir=text.txt/x", 2, "run.dir"),
    ("run.dir=/dev/null", 2, "run.dir"), ("run.dir=loop", 2, "run.dir"), (f"run.dir={'x' * 300}", 2, "run.dir"), ("run.dir=m", 2, "run.dir"),
    ("run.dir=${HOME-x}/runs", 2, "run.dir"), ("run.dir=$(whoami)", 2, "run.dir"), ("run.dir=s3://bucket/run", 2, "run.dir"),
    ("run.dir=/sys/x", 2, "run.dir"), ("run.dir=locked", 5, "run.dir"), ("run.dir=locked_by_folder", 5, "run.dir"),
    ("checkpoint.resume=true", 2, "run.dir"), ("run.export_dir=.", 2, "run.export_dir"), ("run.export_dir=text.txt", 2, "run.export_dir"),
    ("run.export_dir=/proc/x", 2, "run.export_dir"), ("run.export_dir=loop", 2, "run.export_dir"),
    ("run.steps=11", 2, "optim.total_updates"), ("run.steps=null", 2, "run.steps"),
    ("model.path=nowhere", 4, "model.path"), ("model.path=empty", 4, "model.path"), ("model.path=text.txt", 4, "model.path"),
    ("model.path=null", 2, "model.path"), ("model.path=/dev/null", 4, "model.path"), ("model.path=owner/no-such-model", 4, "model.path"),
    ("model.path=https://huggingface.co/a/b", 2, "model.path"), ("model.frozen=[]", 2, "model.frozen"),
    *((f"data.train={name}", 2, "data.train") for name in FILES if name.endswith(".jsonl") and name != "answer_chat.jsonl"),
    ("data.train=missing.jsonl", 2, "data.train"), ("data.train=empty", 2, "data.train"), ("data.train=/dev/zero", 2, "data.train"),
    ("data.train=pipe", 2, "data.train"), ("data.train=torn.safetensors", 2, "data.train"), ("data.train=https://example.org/a.jsonl", 2, "data.train"),
    ("data.heldout=missing.jsonl", 2, "data.heldout"), ("evaluation.interval_steps=1", 2, "data.heldout"),
    ("data.heldout=no_answer.jsonl evaluation.interval_steps=1", 2, "data.heldout"),
    ("rollout.reward=exact", 2, "rollout.reward"), ("rollout.reward=no_such_module:f", 2, "rollout.reward"),
    ("rollout.reward=json:no_such", 2, "rollout.reward"), ("rollout.reward=json:__doc__", 2, "rollout.reward"), ("rollout.reward=null", 2, "rollout.reward"),
    ("rollout.environment=bisect_game", 2, "rollout.environment"), ("rollout.filter=actors.rollout.groups:mixed", 2, "rollout.filter"),
    ("advantage.estimator=no_such_module:f", 2, "advantage.estimator"), ("loss.policy=no_such_module:f", 2, "loss.policy"),
    ("rollout.max_new_tokens=9000", 2, "rollout.max_new_tokens"),
    ("rollout.prompts_per_step=10000000", 2, None), ("batch.max_tokens_per_rank=1", 2, "batch.max_tokens_per_rank"),
    ("batch.cost_model=rates.json", 2, "batch.cost_model"), ("loss.policy=pppo", 2, "loss.policy"),
    ("advantage.estimator=gae", 2, "advantage.estimator"), ("algorithm=sft", 2, "rollout.reward"),
    ("attention.kernel=flash_attn", 2, "attention.kernel"), ("attention.kernel=flash_attn_3", 2, "attention.kernel"),
    ("attention.strategy=ring_flash_attn mesh.cp=2 mesh.dp=1", 2, "attention.strategy"), ("run.wandb_project=x", 2, "run.wandb_project"),
    ("profile.updates=[11] run.dir=new", 2, "profile.updates"),
]  # fmt: skip

PATHS = [  # where a command line names a file or folder, PATH
    ("train PATH", "CONFIG"), ("check PATH", "CONFIG"),
    ("plan c.yaml --lengths PATH", "--lengths"), ("replay c.yaml --batch PATH", "--batch"),
    ("replay c.yaml --batch batch.safetensors --export PATH", "--export"), ("plan c.yaml --calibrate PATH", "--calibrate"),
    ("convert hf-to-dcp PATH out", "SRC"), ("convert hf-to-dcp empty PATH", "DST"), ("convert dcp-to-hf empty out --like PATH", "--like"),
]  # fmt: skip

LINES: list[Case] = [
    ("train own.yaml --dry-run", 2, "run.dir"), ("trian c.yaml", 2, "COMMAND"), ("--fast", 2, "--fast"), ("train", 2, "CONFIG"), ("train c.yaml --dry", 2, "--dry"),
    ("train c.yaml mesh.dp 2", 2, None), ("train c.yaml --mesh.dp=2", 2, "--mesh.dp"), ("train c.yaml --mesh.dp 2", 2, "--mesh.dp"),
    ("train mesh.dp=2", 2, None), (f"train c.yaml --{'x' * 5000}", 2, None),
    ("plan", 2, "CONFIG"), ("plan c.yaml --ranks", 2, "--ranks"), ("plan c.yaml --ranks x", 2, "--ranks"), ("plan c.yaml --ranks 7", 2, "--ranks"),
    ("plan c.yaml --ranks -4 mesh.dp=auto", 2, "mesh.dp"), (f"plan c.yaml --ranks {HUGE} mesh.dp=auto", 2, "--ranks"),
    (f"plan c.yaml --ranks {'9' * 5000}", 2, "--ranks"), ("plan c.yaml mesh.dp=auto", 2, "--ranks"),
    ("plan c.yaml --lengths gamma(2)", 2, "--lengths"), ("plan c.yaml --lengths fixed(nan)", 2, "--lengths"),
    ("plan c.yaml --lengths lengths.json", 3, "--lengths"), ("plan c.yaml --lengths lengths_object.json", 3, "--lengths"),
    ("plan c.yaml --lengths missing.json", 2, "--lengths"), ("plan c.yaml --lengths fixed(70000)", 3, "batch.max_tokens_per_rank"),
    ("plan c.yaml --gbps -1", 2, "--gbps"), ("plan c.yaml --memory-gb inf", 2, "--memory-gb"),
    ("plan c.yaml --longest-context --gbps 1", 2, "--gbps"), ("plan c.yaml --longest-context --device CPU", 2, "--memory-gb"),
    ("plan c.yaml --memory-gb 0.001", 6, "--memory-gb"), ("plan c.yaml --device TPU", 2, "--device"),
    ("plan c.yaml batch.cost_model=rates.json", 2, "batch.cost_model"), ("plan c.yaml model.path=nowhere", 4, "model.path"),
    ("plan c.yaml rollout.prompts_per_step=1000000000000", 2, "rollout.prompts_per_step"),
    ("plan c.yaml --calibrate nowhere/x.json", 2, "--calibrate"), ("plan c.yaml --calibrate empty", 2, "--calibrate"),
    ("plan c.yaml --calibrate text.txt/x", 2, "--calibrate"), ("plan c.yaml --calibrate r.json mesh.device=cuda", 2, "mesh.device"),
    ("plan c.yaml --calibrate pipe", 2, "--calibrate"), ("plan c.yaml --calibrate /proc/x", 2, "--calibrate"),
    ("plan c.yaml --calibrate r.json mesh.device=cpu mesh.dp=1000", 6, "--calibrate"),
    ("check missing.yaml", 2, None), ("check c.yaml mesh.pd=2", 2, "mesh.pd"), ("check c.yaml model.path=nowhere", 4, "model.path"),
    ("check c.yaml data.train=broken.jsonl", 2, "data.train"), ("check c.yaml run.dir=earlier", 2, "run.dir"),
    ("check own.yaml rollout.reward=json:no_such", 2, "rollout.reward"), ("check own.yaml rollout.engine=actors.rollout.groups:FILTERS", 2, "rollout.engine"),
    ("check sft.yaml data.train=no_answer.jsonl", 2, "data.train"), ("check sft.yaml data.train=answer_chat.jsonl", 2, "data.train"),
    ("convert", 2, "KIND"), ("convert hf", 2, "KIND"), ("convert hf-to-dcp", 2, "SRC"), ("convert hf-to-dcp empty", 2, "DST"),
    ("convert hf-to-dcp nowhere out", 5, "SRC"), ("convert hf-to-dcp empty out", 4, "SRC"), ("convert hf-to-dcp empty checkout", 5, "DST"),
    ("convert hf-to-dcp m text.txt/x", 5, "DST"), ("convert hf-to-dcp m out optim.lr=1", 2, None),
    ("convert dcp-to-hf empty out", 2, "--like"), ("convert dcp-to-hf empty out --like empty", 4, "--like"), ("convert dcp-to-hf empty out --like m", 5, "SRC"),
    ("convert checkpoint-to-hf empty out", 5, None), ("convert checkpoint-to-hf empty out --like empty", 4, "--like"),
    ("convert checkpoint-to-hf empty out --dtype int8", 2, "--dtype"),
    ("replay c.yaml", 2, "--batch"), ("replay c.yaml --batch missing.safetensors", 3, "--batch"), ("replay c.yaml --batch torn.safetensors", 3, None),
    ("replay c.yaml --batch batch.safetensors mesh.device=cuda", 2, "mesh.device"), ("replay c.yaml --batch batch.safetensors mesh.dp=1000", 6, "mesh.dp"),
    ("replay c.yaml --batch batch.safetensors --export checkout", 5, "--export"),
    *((line.replace("PATH", "$NO_SUCH_VARIABLE/x"), 2, field) for line, field in PATHS),
    *((line.replace("PATH", "x" * 300), 2, field) for line, field in PATHS),
    ("groups", 2, "COMMAND"), ("groups stop", 2, "NAME"), ("groups list a b c", 2, None), ("curves nowhere", 2, "run.dir"),
]  # fmt: skip


def answered(words: list[str], status: int, field: str | None, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with the answer to a command line; None: nothing."""
    try:
        code = main(words)
    except BaseException as error:
        return f"{' '.join(words)[:100]!r}: raised {type(error).__name__}: {error!s:.200}"
    printed = capsys.readouterr().err
    found = re.search(r"^  field: (.*)$", printed, re.MULTILINE)
    named = found[1] if found else None
    problems = [
        *([f"status {code}, not {status}"] if code != status else []),
        *([] if re.search(r"^error \[\w+\]: .", printed, re.MULTILINE) else ["no typed error"]),
        *([f"field {named}, not {field}"] if field is not None and named != field else []),
        *([] if "\n  hint:  " in printed else ["no way out"]),
        *(["a traceback"] if "Traceback" in printed else []),
        *(["an endless line"] if any(len(line) > 1500 for line in printed.splitlines()) else []),
    ]
    return f"{' '.join(words)[:100]!r}: {', '.join(problems)}: {printed[:300]}" if problems else None


def split(line: str) -> list[str]:
    return [] if not line else ["" if word == "''" else word for word in line.split(" ")]


CASES: dict[str, Callable[[], list[tuple[list[str], int, str | None]]]] = {
    "settings": lambda: [
        (["train", "c.yaml", "--dry-run", *re.split(r" (?=\w+\.\w+=)", text)], status, field)
        for text, status, field in SETTINGS
    ],
    "command lines": lambda: [(split(line), status, field) for line, status, field in LINES],
}


@pytest.mark.parametrize("kind", CASES)
def test_what_is_wrong_is_answered_by_a_typed_error_that_names_it(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for module in ("cluster.capacity", "cli.preflight", "cli.train"):  # on a machine that has neither GPU nor extras
        monkeypatch.setattr(f"actors.{module}.has_nvidia_driver", lambda: False)
    monkeypatch.setattr("actors.cli.preflight.find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    cases = CASES[kind]()
    problems = [problem for words, status, field in cases if (problem := answered(words, status, field, capsys))]
    assert not problems, "\n".join(problems)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before, "nothing was written"


@pytest.mark.parametrize("line", ["train nowhere.yaml", "check nowhere.yaml", "convert hf-to-dcp nowhere out"])
def test_debug_is_taken_by_every_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([*split(line), "--debug"], ["--debug", *split(line)]):
        with pytest.raises(SlimeError) as caught:
            main(words)
        assert caught.value.field != "--debug"
