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
    "empty.yaml": "",
    "comment.yaml": "# nothing\n",
    "list.yaml": "- 1\n- 2\n",
    "number.yaml": "17\n",
    "nothing.yaml": "~\n",
    "utf16.yaml": "run: {}\n".encode("utf-16"),
    "latin1.yaml": "run: {dir: \xe9}\n".encode("latin-1"),
    "nul.yaml": b"run: {dir: a\0b}\n",
    "binary.yaml": bytes(range(256)),
    "tab.yaml": "run:\n\tdir: x\n",
    "twice.yaml": "optim: {lr: 1.0, lr: 2.0}\n",
    "twice_section.yaml": "run: {}\nrun: {}\n",
    "anchor.yaml": "model: &m {path: x}\noptim: *m\n",
    "merge.yaml": "model: {path: x}\noptim: {<<: {lr: 1.0}}\n",
    "tag.yaml": "model: !!python/object/apply:os.system [echo]\n",
    "documents.yaml": "run: {}\n---\nrun: {}\n",
    "deep.yaml": "a: " + "[" * 200 + "]" * 200 + "\n",
    "open.yaml": "run: {dir: x\n",
    "quote.yaml": 'run: {dir: "x}\n',
    "key.yaml": "1: {}\n",
    "null_key.yaml": "~: {}\n",
    "list_key.yaml": "? [a]\n: {}\n",
    "octal.yaml": "optim: {total_updates: 010}\n",
    "sexagesimal.yaml": "optim: {total_updates: 1:30}\n",
    "digits.yaml": f"optim: {{total_updates: {'9' * 5000}}}\n",
    "float.yaml": "optim: {lr: 1e999}\n",
    "big.yaml": "# " + "x" * 200_000 + "\n",
    "bomb.yaml": "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n",
    "surrogate.yaml": 'run: {dir: "\\ud800"}\n',
    "escape.yaml": 'run: {dir: "\\UFFFFFFFF"}\n',
    "section_text.yaml": "run: text\nmodel: {path: m}\noptim: {total_updates: 1}\n",
    "section_list.yaml": "run: [1]\nmodel: {path: m}\noptim: {total_updates: 1}\n",
    "section_null.yaml": "model:\nrun: {steps: 1}\noptim: {total_updates: 1}\n",
    "no_model.yaml": "optim: {total_updates: 1}\n",
    "unknown.yaml": "model: {path: m}\noptim: {total_updates: 1}\ntrainer: {}\n",
    "emoji.yaml": "\U0001f600: {}\n",
    "latin.jsonl": '{"prompt": "\xe9"}\n'.encode("latin-1"),
    "half.jsonl": '{"prompt": "\\ud800"}\n',
    "empty.jsonl": "\n\n",
    "array.jsonl": "[1, 2]\n",
    "no_prompt.jsonl": '{"question": "x"}\n',
    "prompt_number.jsonl": '{"prompt": 7}\n',
    "prompt_empty.jsonl": '{"prompt": " "}\n',
    "chat_bad.jsonl": '{"prompt": [{"content": "x"}]}\n',
    "broken.jsonl": '{"prompt": "x"\n',
    "deep.jsonl": '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}\n",
    "digits.jsonl": '{"prompt": "x", "n": ' + "9" * 5000 + "}\n",
    "deep_key.jsonl": '{"prompt": "x", "answer": "x", "y": ' + "[" * 900 + "]" * 900 + "}\n",
    "keys.jsonl": "{" + ", ".join(f'"{"k" * 90}{n}": 0' for n in range(300)) + "}\n",
    "no_answer.jsonl": '{"prompt": "x"}\n',
    "answer_list.jsonl": '{"prompt": "x", "answer": ["x"]}\n',
    "answer_object.jsonl": '{"prompt": "x", "answer": {"x": 1}}\n',
    "answer_chat.jsonl": '{"prompt": "x", "answer": [{"role": "assistant", "content": "x"}]}\n',
    "answer_true.jsonl": '{"prompt": "x", "answer": true}\n',
    "answer_nan.jsonl": '{"prompt": "x", "answer": NaN}\n',
    "chat_role_empty.jsonl": '{"prompt": [{"role": "", "content": "x"}]}\n',
    "chat_no_words.jsonl": '{"prompt": [{"role": "system", "content": ""}, {"role": "user", "content": " "}]}\n',
    "long_name.yaml": f"optim: {{{'x' * 5000}: 1}}\n",
    "torn.safetensors": b"\x10\0\0\0\0\0\0\0{",
    "text.safetensors": "hello",
    "lengths.json": "[1, -2]",
    "lengths_text.json": '["a"]',
    "lengths_object.json": '{"a": 1}',
    "rates.json": "{}",
    "rates_bad.json": '{"rates": {"matrix_tflops": "fast"}}',
}

FILE_CASES = [
    (name, 2, None)
    for name in FILES
    if name.endswith(".yaml") and not name.startswith(("section_", "no_model", "unknown", "emoji"))
]
FILE_CASES += [
    ("text.txt", 2, None), ("missing.yaml", 2, None), ("empty", 2, None), ("link", 2, None), ("loop", 2, None),
    ("/dev/null", 2, None), ("/dev/zero", 2, None), ("x" * 300, 2, None), ("c.yaml/x", 2, None),
    ("section_text.yaml", 2, "run"), ("section_list.yaml", 2, "run"), ("section_null.yaml", 2, "model"),
    ("no_model.yaml", 2, "model"), ("unknown.yaml", 2, "trainer"), ("emoji.yaml", 2, "\U0001f600"),
]  # fmt: skip

SETTINGS: list[tuple[str, int, str | None]] = [
    (f"{field}={HUGE}", 2, field)
    for field in (
        "batch.max_tokens_per_rank", "batch.samples_per_update", "run.steps", "run.seed", "optim.total_updates",
        "optim.warmup_updates", "optim.max_skipped_updates", "mesh.dp", "mesh.cp", "mesh.dp_replicate", "loss.epochs",
        "rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_new_tokens", "rollout.engines",
        "rollout.sync_interval_steps", "rollout.max_rounds", "rollout.overlong_buffer_tokens", "reference.dp",
        "reference.update_interval_steps", "checkpoint.interval_steps", "checkpoint.keep_last", "critic.dp",
        "critic.pretrain_steps", "evaluation.interval_steps", "evaluation.samples_per_prompt", "cluster.max_restarts",
        "cluster.max_ranks_per_core", "fsdp.wrap_min_parameters", "fsdp.prefetch_layers", "advantage.pass_k",
        "loss.kl_horizon", "loss.constant_length", "precision.loss_scale_init", "model.checkpoint_every_n_layers",
        "optim.lr", "loss.clip_high", "rollout.temperature", "cluster.call_timeout_s",
    )
]  # fmt: skip
SETTINGS += [
    ("optim.lr=-1", 2, "optim.lr"), ("optim.lr=0", 2, "optim.lr"), ("optim.lr=.nan", 2, "optim.lr"),
    ("optim.lr=.inf", 2, "optim.lr"), ("optim.lr=1e999", 2, None), ("optim.lr=1e308", 2, "optim.lr"),
    ("optim.lr=fast", 2, "optim.lr"), ("optim.lr='1e-3'", 2, "optim.lr"), ("optim.lr=true", 2, "optim.lr"),
    ("optim.lr=", 2, "optim.lr"), ("optim.lr=[1]", 2, "optim.lr"),
    ("optim.lr={a: 1}", 2, "optim.lr"), ("optim.betas=0.9", 2, "optim.betas"), ("optim.betas=[0.9]", 2, "optim.betas"),
    ("optim.betas=[0.9, 1.0]", 2, "optim.betas"), ("optim.name=adam", 2, "optim.name"),
    ("optim=1", 2, "optim"), ("optim.lr.x=1", 2, "optim.lr"), ("mesh.dp=0", 2, "mesh.dp"),
    ("mesh.dp=-1", 2, "mesh.dp"), ("mesh.dp=1.0", 2, "mesh.dp"), ("mesh.dp=two", 2, "mesh.dp"),
    ("mesh.dp=010", 2, None), ("mesh.dp=true", 2, "mesh.dp"), ("mesh.dp=100000", 6, "mesh.dp"),
    ("mesh.pd=2", 2, "mesh.pd"), ("mesh.device=gpu", 2, "mesh.device"), ("mesh.device=cuda:0", 2, "mesh.device"),
    ("Mesh.dp=2", 2, "Mesh"), ("mesh..dp=2", 2, None), (".dp=2", 2, None), ("=2", 2, None), ("mesh.dp:2", 2, None),
    ("mesh.dp", 2, None), ("m\u00ebsh.dp=2", 2, "m\u00ebsh"), ("mesh.dp=\u0662", 2, "mesh.dp"),
    ("run.dir=", 2, "run.dir"), ("run.dir=' '", 2, "run.dir"), ("run.dir=7", 2, "run.dir"),
    ("run.dir=[a]", 2, "run.dir"), ("run.dir=/", 2, "run.dir"), ("run.dir=/tmp", 2, "run.dir"),
    ("run.dir=~", 2, "run.dir"), ("run.dir=~/", 2, "run.dir"), ("run.dir='~'", 2, "run.dir"), ("run.dir=/usr", 2, "run.dir"),
    ("run.dir=~nobody_at_all/x", 2, "run.dir"), ("run.dir=$NO_SUCH_VARIABLE/x", 2, "run.dir"),
    ("run.dir=${NO_SUCH_VARIABLE}", 2, "run.dir"), ("run.dir=checkout", 2, "run.dir"), ("run.dir=checkout/../checkout", 2, "run.dir"),
    ("run.dir=earlier", 2, "run.dir"), ("run.dir=text.txt", 2, "run.dir"), ("run.dir=text.txt/x", 2, "run.dir"),
    ("run.dir=/dev/null", 2, "run.dir"), ("run.dir=loop", 2, "run.dir"), (f"run.dir={'x' * 300}", 2, "run.dir"),
    ("checkpoint.resume=true", 2, "run.dir"), ("checkpoint.resume=yes", 2, "checkpoint.resume"),
    ("run.export_dir=.", 2, "run.export_dir"), ("run.export_dir=/", 2, "run.export_dir"),
    ("run.export_dir=text.txt", 2, "run.export_dir"), ("run.export_dtype=float32", 2, "run.export_dtype"),
    ("run.steps=0", 2, "run.steps"), ("run.steps=11", 2, "optim.total_updates"), ("run.steps=null", 2, "run.steps"),
    ("run.seed=-1", 2, "run.seed"), ("run.wandb_project=''", 2, "run.wandb_project"),
    ("model.path=nowhere", 4, "model.path"), ("model.path=empty", 4, "model.path"), ("model.path=text.txt", 4, "model.path"),
    ("model.path=null", 2, "model.path"), ("model.path=$NO_SUCH_VARIABLE", 2, "model.path"),
    ("model.path=/dev/null", 4, "model.path"), ("model.path=owner/no-such-model", 4, "model.path"),
    ("model.compile=1", 2, "model.compile"), ("model.frozen=a", 2, "model.frozen"), ("model.frozen=[]", 2, "model.frozen"),
    ("data.train=missing.jsonl", 2, "data.train"), ("data.train=empty", 2, "data.train"), ("data.train=.", 2, "data.train"),
    ("data.train=latin.jsonl", 2, "data.train"), ("data.train=half.jsonl", 2, "data.train"),
    ("data.train=empty.jsonl", 2, "data.train"), ("data.train=array.jsonl", 2, "data.train"),
    ("data.train=no_prompt.jsonl", 2, "data.train"), ("data.train=prompt_number.jsonl", 2, "data.train"),
    ("data.train=prompt_empty.jsonl", 2, "data.train"), ("data.train=chat_bad.jsonl", 2, "data.train"),
    ("data.train=broken.jsonl", 2, "data.train"), ("data.train=deep.jsonl", 2, "data.train"),
    ("data.train=digits.jsonl", 2, "data.train"), ("data.train=torn.safetensors", 2, "data.train"),
    ("data.heldout=missing.jsonl", 2, "data.heldout"), ("evaluation.interval_steps=1", 2, "data.heldout"),
    ("rollout.reward=exact", 2, "rollout.reward"), ("rollout.reward=a b:c", 2, "rollout.reward"),
    ("rollout.reward=no_such_module:f", 2, "rollout.reward"), ("rollout.reward=json:no_such", 2, "rollout.reward"),
    ("rollout.reward=json:__doc__", 2, "rollout.reward"), ("rollout.reward=null", 2, "rollout.reward"),
    ("rollout.filter=mixed", 2, "rollout.filter"), ("rollout.max_new_tokens=9000", 2, "rollout.max_new_tokens"),
    ("rollout.temperature=0", 2, "rollout.temperature"), ("rollout.samples_per_prompt=1", 2, "rollout.samples_per_prompt"),
    ("rollout.prompts_per_step=10000000", 2, None), ("rollout.engines=0", 2, "rollout.engines"),
    ("rollout.max_rounds=2", 2, "rollout.max_rounds"), ("batch.max_tokens_per_rank=1", 2, "batch.max_tokens_per_rank"),
    ("batch.cost_model=rates.json", 2, "batch.cost_model"), ("loss.policy=pppo", 2, "loss.policy"),
    ("loss.clip_low=1", 2, "loss.clip_low"), ("loss.max_kl=0.1", 2, "loss.max_kl"),
    ("advantage.estimator=gae", 2, "advantage.estimator"), ("algorithm=ddpo", 2, "algorithm"),
    ("algorithm=sft", 2, "rollout.reward"), ("attention.strategy=star", 2, "attention.strategy"),
    ("attention.kernel=flash_attn", 2, "attention.kernel"),
    ("attention.kernel=flash_attn_3", 2, "attention.kernel"),
    ("attention.strategy=ring_flash_attn mesh.cp=2 mesh.dp=1", 2, "attention.strategy"),
    ("run.wandb_project=x", 2, "run.wandb_project"), ("cluster.call_timeout_s=1e300", 2, "cluster.call_timeout_s"),
    ("cluster.call_timeout_s=0", 2, "cluster.call_timeout_s"), ("cluster.address=''", 2, "cluster.address"),
    ("profile.updates=[11] run.dir=new", 2, "profile.updates"), ("profile.updates=[0]", 2, "profile.updates"),
    (f"profile.updates=[{HUGE}]", 2, "profile.updates"), ("profile.memory=true", 2, "profile.memory"),
    ("fsdp.wrap_layers=[]", 2, "fsdp.wrap_layers"), ("fsdp.sharding=zero3", 2, "fsdp.sharding"),
    ("run.dir=${HOME", 2, "run.dir"), ("run.dir=${HOME-x}/runs", 2, "run.dir"), ("run.dir=$(whoami)", 2, "run.dir"),
    ("run.dir=$(pwd)/x", 2, "run.dir"), ("run.dir=s3://bucket/run", 2, "run.dir"), ("run.dir=file:///tmp/run", 2, "run.dir"),
    ("run.export_dir=hf://a/b", 2, "run.export_dir"), ("data.train=https://example.org/a.jsonl", 2, "data.train"),
    ("model.path=https://huggingface.co/a/b", 2, "model.path"), ("run.dir=/sys/x", 2, "run.dir"),
    ("run.dir=/dev/x", 2, "run.dir"), ("run.dir=/bin", 2, "run.dir"), ("run.dir=/usr/local", 2, "run.dir"),
    ("run.dir=/opt", 2, "run.dir"), ("run.dir=m", 2, "run.dir"), ("run.dir=locked", 5, "run.dir"),
    ("run.dir=locked_by_folder", 5, "run.dir"), ("run.export_dir=/proc/x", 2, "run.export_dir"),
    ("run.export_dir=/sys/x", 2, "run.export_dir"), ("run.export_dir=loop", 2, "run.export_dir"),
    (f"run.export_dir={'x' * 300}", 2, "run.export_dir"), ("rollout.temperature=1e-320", 2, "rollout.temperature"),
    ("rollout.temperature=1e31", 2, "rollout.temperature"), (f"optim.{'b' * 5000}=1", 2, None), (f"{'a' * 5000}=1", 2, None),
    ("data.train=deep_key.jsonl", 2, "data.train"), ("data.train=keys.jsonl", 2, "data.train"),
    ("data.train=no_answer.jsonl", 2, "data.train"), ("data.train=answer_list.jsonl", 2, "data.train"),
    ("data.train=answer_object.jsonl", 2, "data.train"), ("data.train=answer_true.jsonl", 2, "data.train"),
    ("data.train=answer_nan.jsonl", 2, "data.train"), ("data.train=chat_role_empty.jsonl", 2, "data.train"),
    ("data.train=chat_no_words.jsonl", 2, "data.train"),
    ("data.heldout=no_answer.jsonl evaluation.interval_steps=1", 2, "data.heldout"),
]  # fmt: skip

LINES: list[Case] = [
    ("trian c.yaml", 2, "COMMAND"), ("TRAIN c.yaml", 2, "COMMAND"), ("--fast", 2, "COMMAND"),
    ("train", 2, "config"), ("train c.yaml --fast", 2, "--fast"), ("train c.yaml --dry_run", 2, "--dry_run"),
    ("train c.yaml --dry", 2, "--dry"), ("train c.yaml mesh.dp 2", 2, None), ("train c.yaml --mesh.dp=2", 2, "--mesh.dp=2"),
    ("train c.yaml --mesh.dp 2", 2, "--mesh.dp"), ("train mesh.dp=2", 2, None), ("plan", 2, "config"),
    ("plan c.yaml --ranks", 2, "--ranks"), ("plan c.yaml --ranks x", 2, "--ranks"), ("plan c.yaml --ranks 0 mesh.dp=auto", 2, "mesh.dp"),
    ("plan c.yaml --ranks 7", 2, "--ranks"), ("plan c.yaml --ranks -4 mesh.dp=auto", 2, "mesh.dp"),
    (f"plan c.yaml --ranks {HUGE} mesh.dp=auto", 2, "--ranks"), ("plan c.yaml --lengths gamma(2)", 2, "--lengths"),
    ("plan c.yaml --lengths fixed(-1)", 2, "--lengths"), ("plan c.yaml --lengths fixed(0)", 2, "--lengths"),
    (f"plan c.yaml --lengths fixed({HUGE})", 2, "--lengths"), ("plan c.yaml --lengths uniform(9,3)", 2, "--lengths"),
    ("plan c.yaml --lengths fixed(nan)", 2, "--lengths"),
    ("plan c.yaml --lengths lengths.json", 3, "--lengths"), ("plan c.yaml --lengths lengths_text.json", 3, "--lengths"),
    ("plan c.yaml --lengths lengths_object.json", 3, "--lengths"), ("plan c.yaml --lengths empty", 2, "--lengths"),
    ("plan c.yaml --lengths missing.json", 2, "--lengths"), ("plan c.yaml --lengths fixed(70000)", 3, "batch.max_tokens_per_rank"),
    ("plan c.yaml --counted 0", 2, "--counted"), ("plan c.yaml --counted nan", 2, "--counted"), ("plan c.yaml --counted x", 2, "--counted"),
    ("plan c.yaml --gbps 0", 2, "--gbps"), ("plan c.yaml --gbps -1", 2, "--gbps"), ("plan c.yaml --tflops inf", 2, "--tflops"),
    ("plan c.yaml --tflops nan", 2, "--tflops"), ("plan c.yaml --memory-gb 1e-9", 6, "--memory-gb"),
    ("plan c.yaml --memory-gb 0.001", 6, "--memory-gb"), ("plan c.yaml --memory-gb 1e300", 2, "--memory-gb"),
    ("plan c.yaml --device TPU", 2, "--device"), ("plan c.yaml --calibration rates.json", 2, "--calibration"),
    ("plan c.yaml --calibration rates_bad.json", 2, "--calibration"), ("plan c.yaml --calibration missing.json", 2, "--calibration"),
    ("plan c.yaml --calibration empty", 2, "--calibration"), ("plan c.yaml model.path=nowhere", 4, "model.path"),
    ("plan c.yaml mesh.dp=auto", 2, "--ranks"), ("plan c.yaml mesh.cp=100000 mesh.dp=100000", 2, "mesh.dp"),
    ("plan c.yaml rollout.prompts_per_step=1000000000000", 2, "rollout.prompts_per_step"),
    ("calibrate --ranks 0", 2, "--ranks"), ("calibrate --ranks -1", 2, "--ranks"), ("calibrate --ranks many", 2, "--ranks"),
    ("calibrate --scale 0", 2, "--scale"), ("calibrate --scale nan", 2, "--scale"), ("calibrate --scale x", 2, "--scale"),
    ("calibrate --out nowhere/x.json", 2, "--out"), ("calibrate --out empty", 2, "--out"), ("calibrate --out text.txt/x", 2, "--out"),
    ("calibrate --device gpu", 2, "--device"), ("calibrate --device cuda --out r.json", 2, "mesh.device"),
    ("calibrate --dtype int8", 2, "--dtype"), ("calibrate c.yaml", 2, "c.yaml"),
    ("check missing.yaml", 2, None), ("check c.yaml mesh.pd=2", 2, "mesh.pd"), ("check c.yaml model.path=nowhere", 4, "model.path"),
    ("check c.yaml data.train=broken.jsonl", 2, "data.train"), ("check c.yaml run.dir=earlier", 2, "run.dir"),
    ("check c.yaml run.steps=null", 2, "run.steps"),
    ("check own.yaml rollout.reward=json:no_such", 2, "rollout.reward"), ("check sft.yaml data.train=no_answer.jsonl", 2, "data.train"),
    ("check sft.yaml data.train=answer_chat.jsonl", 2, "data.train"), ("check sft.yaml data.train=answer_true.jsonl", 2, "data.train"), ("check c.yaml --fast", 2, "--fast"),
    ("convert", 2, "KIND"), ("convert hf", 2, "KIND"), ("convert hf-to-dcp", 2, "SRC"), ("convert hf-to-dcp empty", 2, "DST"),
    ("convert hf-to-dcp nowhere out", 5, "SRC"), ("convert hf-to-dcp text.txt out", 5, "SRC"), ("convert hf-to-dcp empty out", 4, "SRC"),
    ("convert hf-to-dcp empty checkout", 5, "DST"), ("convert hf-to-dcp empty text.txt", 5, "DST"),
    ("convert dcp-to-hf empty out", 2, "--like"), ("convert dcp-to-hf empty out --like empty", 4, "--like"),
    ("convert dcp-to-hf empty out --like nowhere", 4, "--like"), ("convert checkpoint-to-hf empty out", 5, None),
    ("convert checkpoint-to-hf empty out --dtype int8", 2, "--dtype"), ("convert checkpoint-to-hf nowhere out", 5, "SRC"),
    ("replay", 2, "config"), ("replay c.yaml", 2, "--batch"), ("replay c.yaml --batch", 2, "--batch"),
    ("replay c.yaml --batch missing.safetensors", 3, "--batch"), ("replay c.yaml --batch torn.safetensors", 3, None),
    ("replay c.yaml --batch text.safetensors", 3, None), ("replay c.yaml --batch empty", 3, None),
    ("replay c.yaml --batch batch.safetensors model.path=nowhere", 4, "model.path"),
    ("replay c.yaml --batch batch.safetensors mesh.device=cuda", 2, "mesh.device"),
    ("replay c.yaml --batch batch.safetensors mesh.dp=1000", 6, "mesh.dp"),
    ("replay missing.yaml --batch batch.safetensors", 2, None),
    ("replay c.yaml --batch batch.safetensors --export checkout", 5, "--export"),
    ("replay c.yaml --batch batch.safetensors --export text.txt", 5, "--export"),
    *(
        (line, 2, field)
        for path in ("$NO_SUCH_VARIABLE/x", "~nobody_at_all/x", "''")
        for line, field in (
            (f"train {path}", "config"), (f"check {path}", "config"), (f"plan c.yaml --calibration {path}", "--calibration"),
            (f"plan c.yaml --lengths {path}", "--lengths"), (f"replay c.yaml --batch {path}", "--batch"),
            (f"replay c.yaml --batch batch.safetensors --export {path}", "--export"), (f"calibrate --out {path}", "--out"),
            (f"convert hf-to-dcp {path} out", "SRC"), (f"convert hf-to-dcp empty {path}", "DST"),
            (f"convert dcp-to-hf empty out --like {path}", "--like"), (f"bench --out {path}", "--out"),
            (f"bench --peers {path}", "--peers"),
        )
    ),
    ("bench --systems nobody", 2, "--systems"), ("bench --workloads nothing", 2, "--workloads"),
    ("bench --rounds 0", 2, "--rounds"), ("bench --rounds x", 2, "--rounds"), ("bench --threads 0", 2, "--threads"),
    ("bench --seed -1", 2, "--seed"), (f"bench --seed {HUGE}", 2, "--seed"), ("bench --out empty", 2, "--out"),
    *(
        (line.replace("LONG", "x" * 300), 2, field)
        for line, field in (
            ("calibrate --out LONG", "--out"), ("convert hf-to-dcp LONG out", "SRC"), ("convert hf-to-dcp empty LONG", "DST"),
            ("convert dcp-to-hf empty out --like LONG", "--like"), ("replay c.yaml --batch LONG", "--batch"),
            ("replay c.yaml --batch batch.safetensors --export LONG", "--export"), ("bench --out LONG", "--out"),
            ("bench --peers a/LONG/b", "--peers"), ("plan c.yaml --calibration LONG", "--calibration"),
            ("plan c.yaml --lengths LONG", "--lengths"), ("check LONG", "config"),
        )
    ),
    (f"plan c.yaml --ranks {'9' * 5000}", 2, "--ranks"), (f"plan c.yaml --lengths {'x' * 5000}", 2, "--lengths"),
    (f"calibrate --ranks {'9' * 5000}", 2, "--ranks"), (f"train c.yaml --{'x' * 5000}", 2, None),
    ("calibrate --out pipe", 2, "--out"), ("calibrate --out /proc/x", 2, "--out"), ("calibrate --out /dev/null", 2, "--out"),
    ("calibrate --out s3://a/b", 2, "--out"), ("convert hf-to-dcp m /proc/x/y", 5, "DST"), ("convert hf-to-dcp m text.txt/x", 5, "DST"),
    ("replay c.yaml --batch batch.safetensors --export text.txt/x", 5, "--export"),
    ("replay c.yaml --batch batch.safetensors --export /sys/x", 5, "--export"), ("bench --out pipe", 2, "--out"),
    ("bench --out /proc/x", 2, "--out"), (f"bench --threads {HUGE}", 2, "--threads"), (f"bench --rounds {HUGE}", 2, "--rounds"),
    ("bench --set model.compile", 2, "--set"), ("bench --set evil=1", 2, "--set"), ("bench --out nowhere/x.json", 2, "--out"), ("bench --device gpu", 2, "--device"), ("bench c.yaml", 2, "c.yaml"),
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
    "files of settings": lambda: [
        ([command, name], status, field) for name, status, field in FILE_CASES for command in ("train", "check")
    ],
    "settings": lambda: [
        (["train", "c.yaml", "--dry-run", *re.split(r" (?=\w+\.\w+=)", text)], status, field)
        for text, status, field in SETTINGS
    ],
    "command lines": lambda: [(split(line), status, field) for line, status, field in LINES],
}


def test_the_tables_are_no_shorter_than_they_were() -> None:
    cases = {(*words, str(status)) for make in CASES.values() for words, status, _ in make()}
    assert len(cases) >= 471


@pytest.mark.parametrize("kind", CASES)
def test_what_is_wrong_is_answered_by_a_typed_error_that_names_it(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for module in ("cluster.connect", "cli.preflight", "cli.dry_run"):  # on a machine that has neither GPU nor extras
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
    with pytest.raises(SlimeError) as caught:
        main([*split(line), "--debug"])
    assert caught.value.field != "--debug"
