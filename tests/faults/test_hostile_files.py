"""Files from elsewhere run no code, do not lead out of their folder, and cost neither memory nor time to refuse."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from actors.engines.pool import EnginePool
from actors.engines.tokenizer import encode_prompt, end_token_ids, load_tokenizer
from actors.rollout.prompts import read_jsonl
from actors.run_dir import RunFolder
from slimefsdp.attention.hf_interface import ATTENTION_NAME
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.batching.hardware import Rates, read_calibration, write_calibration
from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.checkpoint.shards import SavedShards, ShardedTensor, write_shard
from slimefsdp.checkpoint.store import LATEST, CheckpointStore
from slimefsdp.config import config_from_dict, load_config
from slimefsdp.convert.dcp import read_saved
from slimefsdp.convert.dcp_metadata import Chunk, SavedTensor, read_dcp_folder
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError, ConfigError, ModelError, ResourceError, SlimeError, WorkerDied
from slimefsdp.io.file_lock import LOCK, FolderLock
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.build import build_for_sampling, build_policy
from slimefsdp.models.hf_folder import INDEX_FILE, SINGLE_FILE, SUPPORTED_MODELS, check_architecture, read_model_folder
from slimefsdp.monitoring.metrics_log import METRICS_FILE, MetricsLog, read_metrics
from slimefsdp.perf_model.lengths import sample_lengths
from tests.support.tiny_models import save_tiny_model

CANARY = "code_was_run"
SPARE_BYTES = 1 << 30  # of address space, beyond what the process has when a case begins
MOST_SECONDS = 2.0  # of the processor
MANY_DIGITS, DEEP = "9" * 400, "[" * 100_000
GOOD_RATES = asdict(Rates("here", 2.0, 0.5, 10.0, 4.0, 5.0))


class Payload:
    """Pickled, a call that leaves the canary when it is read."""

    def __init__(self, folder: Path) -> None:
        self.canary = folder / CANARY

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def code(folder: Path) -> str:
    return f"import pathlib\npathlib.Path({str(folder / CANARY)!r}).touch()\nclass Evil: pass\n"


def hostile_pickle(folder: Path) -> bytes:
    return pickle.dumps(Payload(folder))


@contextmanager
def bounded(most_seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Little more memory than there is in use, and little time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert time.process_time() - began < most_seconds


@dataclass(frozen=True)
class Case:
    """A file that somebody made, what reads it, and what comes of that."""

    read: Callable[[Path], object]  # given a folder with a sound model/, checkpoints/ and nothing else
    error: type[SlimeError]
    field: str | None
    words: str


# ---------------------------------------------------------------------- how each kind of file is read


def settings(content: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "c.yaml").write_text(content.replace("CANARY", str(folder / CANARY)))
        return load_config(folder / "c.yaml")

    return read


def model(prepare: Callable[[Path], object]) -> Callable[[Path], object]:
    """All that a folder is asked for before and while its weights are loaded."""

    def read(folder: Path) -> object:
        prepare(folder / "model")
        found = read_model_folder(folder / "model")
        check_architecture(found)
        return build_policy(found, torch.float32)

    return read


def config(**changes: Any) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return model(prepare)


def written(name: str, content: str | bytes | Callable[[Path], bytes]) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        raw = content(path.parent) if callable(content) else content
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(raw.encode() if isinstance(raw, str) else raw)

    return prepare


def header(content: object, length: int | None = None, data: bytes = b"\0" * 8) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(shape: list[int], end: int, begin: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def indexed(name: str) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        shutil.copy(path / SINGLE_FILE, path.parent / "secret.safetensors")
        (path / SINGLE_FILE).unlink()
        place = name.replace("PARENT", str(path.parent))
        (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))

    return model(prepare)


def linked(name: str, target: str) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        (path.parent / "secret").write_text('{"password": 1}')
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target.replace("PARENT", str(path.parent)))

    return model(prepare)


def pipe(name: str) -> Callable[[Path], object]:
    def prepare(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return prepare


def checkpoint(prepare: Callable[[Path], object], *, seal: bool = False) -> Callable[[Path], object]:
    """A step of a run, read offline; `seal`: its manifest vouches for what was prepared."""

    def read(folder: Path) -> object:
        step = folder / "checkpoints" / "step_00000001"
        prepare(step)
        if seal:
            document = json.loads((step / MANIFEST).read_text())
            for record in document["files"]:
                data = (step / record["name"]).read_bytes()
                record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            sealed(step, document)
        weights = SavedShards(CheckpointStore.find(step).folder)
        return [weights.read(name) for name in weights.specs]

    return read


def sealed(step: Path, document: dict[str, Any]) -> None:
    document.pop("sha256", None)
    own = hashlib.sha256((json.dumps(document, indent=1) + "\n").encode()).hexdigest()
    (step / MANIFEST).write_text(json.dumps(document | {"sha256": own}, indent=1) + "\n")


def manifest(**changes: Any) -> Callable[[Path], object]:
    """Of the first file that it lists."""

    def prepare(step: Path) -> None:
        document = json.loads((step / MANIFEST).read_text())
        document["files"][0] |= changes
        sealed(step, document)

    return checkpoint(prepare)


def index(**changes: Any) -> Callable[[Path], object]:
    """Of the tensor that a rank's index describes."""

    def prepare(step: Path) -> None:
        document = json.loads((step / "rank_00000.json").read_text())
        document["tensors"]["model.w"] |= changes
        (step / "rank_00000.json").write_text(json.dumps(document))

    return checkpoint(prepare, seal=True)


def moved_out(step: Path) -> None:
    """The very bytes that were saved, but somewhere else."""
    shutil.move(step / "rank_00000.safetensors", step.parent.parent / "elsewhere")
    (step / "rank_00000.safetensors").symlink_to(step.parent.parent / "elsewhere")


def dcp(content: bytes | Callable[[Path], bytes]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "dcp").mkdir()
        (folder / "dcp" / ".metadata").write_bytes(content(folder) if callable(content) else content)
        return read_dcp_folder(folder / "dcp")

    return read


def dcp_tensor(folder: Path) -> object:
    stream = io.BytesIO()
    torch.save(Payload(folder), stream)
    (folder / "0.distcp").write_bytes(stream.getvalue())
    chunk = Chunk((0,), (2,), folder / "0.distcp", 0, len(stream.getvalue()))
    return read_saved(SavedTensor("w", torch.float32, (2,), (chunk,)))


def batch(content: bytes | Callable[[Path], bytes]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        file = folder / "batch.safetensors"
        file.write_bytes(content(folder) if callable(content) else content)
        return RolloutBatch.load(file)

    return read


def batch_pipe(folder: Path) -> object:
    os.mkfifo(folder / "batch.safetensors")
    return RolloutBatch.load(folder / "batch.safetensors")


def batch_of(lengths: list[int]) -> bytes:
    """Field by field sound, but for what the lengths add up to."""
    fields = {"lengths": lengths, "response_lengths": [1] * len(lengths), "tokens": [1] * 4}
    described, data = {}, b""
    for name, values in fields.items():
        raw = b"".join(value.to_bytes(8, "little") for value in values)
        offsets = [len(data), len(data) + len(raw)]
        described[name] = {"dtype": "I64", "shape": [len(values)], "data_offsets": offsets}
        data += raw
    return header(described, data=data)


def calibration(content: str | Callable[[Path], bytes]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        raw = content(folder) if callable(content) else content.encode()
        (folder / "rates.json").write_bytes(raw)
        return read_calibration(folder / "rates.json", field="batch.cost_model")

    return read


def calibration_pipe(folder: Path) -> object:
    os.mkfifo(folder / "rates.json")
    return read_calibration(folder / "rates.json", field="batch.cost_model")


def rates(**changes: Any) -> Callable[[Path], object]:
    return calibration(json.dumps({"rates": GOOD_RATES | changes}))


def prompts(content: str | Callable[[Path], bytes]) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        raw = content(folder) if callable(content) else content.encode()
        (folder / "p.jsonl").write_bytes(raw)
        return read_jsonl(folder / "p.jsonl", field="data.train")

    return read


def settings_pipe(folder: Path) -> object:
    os.mkfifo(folder / "c.yaml")
    return load_config(folder / "c.yaml")


def prompts_pipe(folder: Path) -> object:
    os.mkfifo(folder / "p.jsonl")
    return read_jsonl(folder / "p.jsonl", field="data.train")


def sparse(file: Path) -> Path:
    """A terabyte of zeros, which takes no room."""
    file.touch()
    os.truncate(file, 10**12)
    return file


def prompts_sparse(folder: Path) -> object:
    return read_jsonl(sparse(folder / "p.jsonl"), field="data.train")


def lengths_sparse(folder: Path) -> object:
    return sample_lengths(str(sparse(folder / "lengths.json")), 4)


def metrics_pipe(folder: Path) -> object:
    os.mkfifo(folder / METRICS_FILE)
    return read_metrics(folder)


def metrics_log_pipe(folder: Path) -> object:
    os.mkfifo(folder / METRICS_FILE)
    return MetricsLog(folder)


def lengths(content: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        (folder / "lengths.json").write_text(content)
        return sample_lengths(str(folder / "lengths.json"), 4)

    return read


def template(text: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        tokenizer.chat_template = text.replace("CANARY", str(folder / CANARY))
        return encode_prompt(tokenizer, "a")

    return read


def tokenizer_code(folder: Path) -> object:
    """A tokenizer that only code in the folder could make."""
    (folder / "model" / "evil.py").write_text(code(folder))
    asked = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(asked))
    (folder / "model" / "tokenizer.json").write_text("{}")
    return load_tokenizer(str(folder / "model"))


def end_tokens(folder: Path) -> object:
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": "__import__(1)"}')
    return end_token_ids(str(folder / "model"), 0)


def lock_link(folder: Path) -> object:
    (folder / "secret").write_text("kept")
    (folder / "run").mkdir()
    (folder / "run" / LOCK).symlink_to(folder / "secret")
    try:
        return FolderLock(folder / "run").acquire()
    finally:
        assert (folder / "secret").read_text() == "kept"


def lock_pipe(folder: Path) -> object:
    (folder / "run").mkdir()
    os.mkfifo(folder / "run" / LOCK)
    FolderLock(folder / "run").require_free()
    return None


# ---------------------------------------------------------------------- the cases

PYTHON_TAG = "!!python/object/apply:os.system ['touch CANARY']"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
RUNS_CODE: dict[str, Case] = {
    "settings with a Python tag": Case(settings(f"optim: {PYTHON_TAG}"), ConfigError, None, "tag !!python"),
    "settings with a tag for an object": Case(
        settings("model: !!python/object/new:type {}"), ConfigError, None, "tag !!python"
    ),
    "an override with a Python tag": Case(
        lambda folder: load_config(save_settings(folder), [f"optim.lr={PYTHON_TAG}"]), ConfigError, None, "tag"
    ),
    "weights as pytorch_model.bin": Case(
        model(lambda path: (written("pytorch_model.bin", hostile_pickle)(path), (path / SINGLE_FILE).unlink())),
        ModelError, "model.path", "pickle checkpoints are refused",
    ),
    "a pickle called model.safetensors": Case(
        model(written(SINGLE_FILE, hostile_pickle)), ModelError, "model.path", "no sound"
    ),
    "a pickle called config.json": Case(
        model(written("config.json", hostile_pickle)), ModelError, "model.path", "valid JSON"
    ),
    "an architecture of the folder's own": Case(
        config(model_type="evil", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
        ModelError, "model.path", "'evil'",
    ),
    "an auto_map that is no map": Case(config(auto_map=5), ModelError, "model.path", "transformers cannot make"),
    "a tokenizer of the folder's own": Case(tokenizer_code, ModelError, "model.path", "tokenizer"),
    "a chat template that reaches for the system": Case(
        template("{{ cycler.__init__.__globals__.os.system('touch CANARY') }}"), ConfigError, "prompt", "chat template"
    ),
    "a chat template that climbs through classes": Case(
        template("{{ ''.__class__.__mro__[1].__subclasses__()[0] }}"), ConfigError, "prompt", "chat template"
    ),
    "end tokens that are text": Case(end_tokens, ModelError, "model.path", "generation_config.json"),
    "a pickle for a rank's tensors, vouched for": Case(
        checkpoint(written("rank_00000.safetensors", lambda run: hostile_pickle(run.parent)), seal=True),
        CheckpointError, "path", "rank_00000.safetensors",
    ),
    "a pickle for a manifest": Case(
        checkpoint(written(MANIFEST, lambda run: hostile_pickle(run.parent))), CheckpointError, MANIFEST, "is not JSON"
    ),
    "metadata of a DCP folder": Case(dcp(hostile_pickle), CheckpointError, "path", "which torch does not write there"),
    "a tensor of a DCP folder": Case(dcp_tensor, CheckpointError, "path", "cannot be read"),
    "a pickle for a recorded batch": Case(batch(hostile_pickle), BatchError, None, "safetensors"),
    "a pickle for a calibration": Case(calibration(hostile_pickle), ConfigError, "batch.cost_model", "no calibration"),
    "a pickle for prompts": Case(prompts(hostile_pickle), ConfigError, "data.train", "p.jsonl"),
}  # fmt: skip
LEADS_OUT: dict[str, Case] = {
    **{
        f"an index that names {name}": Case(indexed(name), ModelError, "model.path", "outside the folder")
        for name in ("../secret.safetensors", "PARENT/secret.safetensors", "..\\secret.safetensors", "C:x.safetensors")
    },
    "a tokenizer file that is a link": Case(
        linked("tokenizer.json", "../secret"), ModelError, "model.path", "leads out of the folder"
    ),
    "a template that is an absolute link": Case(
        linked("chat_template.jinja", "PARENT/secret"), ModelError, "model.path", "leads out of the folder"
    ),
    "weights that are a link to a text": Case(linked(SINGLE_FILE, "../secret"), ModelError, "model.path", "header"),
    "a manifest that lists ../secret": Case(
        manifest(name="../secret"), CheckpointError, MANIFEST, "no plain file name"
    ),
    "a manifest that lists /etc/passwd": Case(
        manifest(name="/etc/passwd"), CheckpointError, MANIFEST, "no plain file name"
    ),
    "a rank's file that is a link": Case(
        checkpoint(moved_out), CheckpointError, "rank_00000.safetensors", "is not a plain file"
    ),
    "a lock that is a link": Case(lock_link, CheckpointError, "run.dir", LOCK),
}
EXPLODES: dict[str, Case] = {
    "settings with aliases of aliases": Case(settings(BOMB), ConfigError, None, "alias"),
    "settings that are nested without end": Case(settings("a: " + "[" * 50_000), ConfigError, None, "levels"),
    "settings with a number of 400 digits": Case(settings(f"a: {MANY_DIGITS}"), ConfigError, None, "400 digits"),
    "settings beyond floats": Case(settings("optim: {lr: 1e999}"), ConfigError, None, "beyond the range"),
    "settings without end": Case(lambda _: load_config(Path("/dev/zero")), ConfigError, None, "no plain file"),
    "settings that are a pipe": Case(settings_pipe, ConfigError, None, "no plain file"),
    "prompts without end": Case(
        lambda _: read_jsonl("/dev/zero", field="data.train"), ConfigError, "data.train", "no plain file"
    ),
    "prompts that are a pipe": Case(prompts_pipe, ConfigError, "data.train", "no plain file"),
    "prompts on one line of a terabyte": Case(prompts_sparse, ConfigError, "data.train", "p.jsonl:1: longer than"),
    "sample lengths without end": Case(lengths_sparse, BatchError, "--lengths", "larger than"),
    "a tokenizer that is a pipe": Case(model(pipe("tokenizer.json")), ModelError, "model.path", "no regular file"),
    "metrics that are a pipe": Case(metrics_pipe, ConfigError, "run.dir", "no plain file"),
    "metrics to append to that are a pipe": Case(metrics_log_pipe, ResourceError, "run.dir", "no plain file"),
    **{
        f"a model whose {name} is {value}": Case(config(**{name: value}), ModelError, "model.path", name)
        for name, value in (
            ("rms_norm_eps", float("nan")), ("rms_norm_eps", float("inf")), ("rms_norm_eps", -1e-6), ("rope_theta", 0),
            ("rope_theta", float("nan")), ("rope_theta", -1.0), ("num_attention_heads", 0), ("num_hidden_layers", 0),
            ("hidden_size", -8), ("vocab_size", 0), ("head_dim", -1), ("max_position_embeddings", 0),
            ("initializer_range", float("nan")),
        )
    },
    "a theta in the parameters that is no number": Case(
        config(rope_parameters={"rope_type": "default", "rope_theta": float("nan")}),
        ModelError, "model.path", "rope_theta",
    ),
    "a model of 10^9 layers": Case(config(num_hidden_layers=10**9), ModelError, "model.path", "num_hidden_layers"),
    "heads of 10^9": Case(config(head_dim=10**9), ModelError, "model.path", "head_dim"),
    "a vocabulary of 400 digits": Case(
        model(lambda path: replace_in(path / "config.json", '"vocab_size": 64', f'"vocab_size": {MANY_DIGITS}')),
        ModelError, "model.path", "vocab_size",
    ),
    "a theta of 400 digits": Case(config(rope_theta=int(MANY_DIGITS)), ModelError, "model.path", "rope_theta"),
    "a config.json that is nested": Case(model(written("config.json", DEEP)), ModelError, "model.path", "too deep"),
    "a config.json with a key twice": Case(
        model(written("config.json", '{"model_type": "qwen3", "model_type": "x"}')), ModelError, "model.path", "twice"
    ),
    "a config.json that is a pipe": Case(model(pipe("config.json")), ModelError, "model.path", "no config.json"),
    "weights that are a pipe": Case(model(pipe(SINGLE_FILE)), ModelError, "model.path", "no regular file"),
    "a header of 2^62 bytes": Case(
        model(written(SINGLE_FILE, header({}, 2**62))), ModelError, "model.path", "no sound"
    ),
    "a tensor of 2^124 numbers": Case(
        model(written(SINGLE_FILE, header({"a": tensor([2**62, 2**62], 8)}))), ModelError, "model.path", "no sound"
    ),
    "a tensor beyond the file": Case(
        model(written(SINGLE_FILE, header({"a": tensor([2**40], 2**42)}))), ModelError, "model.path", "no sound"
    ),
    "tensors that share bytes": Case(
        model(written(SINGLE_FILE, header({"a": tensor([2], 8), "b": tensor([2], 8)}))),
        ModelError, "model.path", "no sound",
    ),
    "a header that is nested": Case(
        model(written(SINGLE_FILE, header(DEEP.encode()))), ModelError, "model.path", "no sound"
    ),
    "a manifest that is nested": Case(checkpoint(written(MANIFEST, DEEP)), CheckpointError, MANIFEST, "is not JSON"),
    "a manifest with sizes of 400 digits": Case(
        manifest(bytes=int(MANY_DIGITS)), CheckpointError, MANIFEST, "not a manifest"
    ),
    "a manifest without end": Case(
        checkpoint(lambda step: ((step / MANIFEST).unlink(), (step / MANIFEST).symlink_to("/dev/zero"))),
        CheckpointError, MANIFEST, "plain file",
    ),
    "a manifest that is a pipe": Case(checkpoint(pipe(MANIFEST)), CheckpointError, MANIFEST, "plain file"),
    "a rank's index with a key twice": Case(
        checkpoint(written("rank_00000.json", '{"tensors": {}, "tensors": {}}'), seal=True),
        CheckpointError,
        "rank_00000.json",
        "'tensors' occurs twice",
    ),
    "rows of 400 digits": Case(index(rows=int(MANY_DIGITS)), CheckpointError, "path", "whole number"),
    "rows of 1e300": Case(index(rows=1e300), CheckpointError, "path", "whole number"),
    "a shape of 2^62 rows": Case(index(global_shape=[2**62, 3]), CheckpointError, "path", "lacks row"),
    "metadata with a far memo": Case(dcp(b"\x80\x04Nr\x00\x00\x00\x0c."), CheckpointError, "path", "torch writes none"),
    "metadata whose hash takes years": Case(
        dcp(b"\x80\x04}K\x01\x85" + b"2\x86" * 60 + b"K\x01s."), CheckpointError, "path", "torch writes none"
    ),
    "a batch of 2^62 tokens": Case(
        batch(header({"tokens": {"dtype": "I64", "shape": [2**62], "data_offsets": [0, 8]}})), BatchError, None, "read"
    ),
    "lengths that wrap round to few": Case(batch(batch_of([2**63 - 1, 2**63 - 1, 6])), BatchError, "tokens", "entries"),
    "a batch that is a pipe": Case(batch_pipe, BatchError, None, "no plain file"),
    "a calibration of 400 digits": Case(
        rates(matrix_tflops=int(MANY_DIGITS)), ConfigError, "batch.cost_model", "no rate"
    ),
    "a calibration of 1e300": Case(rates(comm_gbps=1e300), ConfigError, "batch.cost_model", "no rate"),
    "a calibration of 1e-300": Case(rates(attention_tflops=1e-300), ConfigError, "batch.cost_model", "no rate"),
    "a calibration from a list": Case(rates(source=["here"]), ConfigError, "batch.cost_model", "no source"),
    "a calibration in a dtype that is none": Case(rates(dtype="int3"), ConfigError, "batch.cost_model", "no dtype"),
    "a calibration that is nested": Case(
        calibration('{"rates": ' + DEEP), ConfigError, "batch.cost_model", "too deep"
    ),
    "a calibration with a key twice": Case(
        calibration('{"rates": {}, "rates": {}}'), ConfigError, "batch.cost_model", "twice"
    ),
    "a calibration that is a pipe": Case(calibration_pipe, ConfigError, "batch.cost_model", "no plain file"),
    "prompts that are nested": Case(prompts('{"prompt": ' + DEEP), ConfigError, "data.train", "too deep"),
    "prompts nested deeper than a record needs": Case(
        prompts('{"prompt": "a", "b": ' + "[" * 500 + "]" * 500 + "}"), ConfigError, "data.train", "nested more than"
    ),
    "prompts without end of their keys": Case(
        prompts(json.dumps({f"{n:01000}": 0 for n in range(300)})), ConfigError, "data.train", "no 'prompt' among"
    ),
    "a lock that is a pipe": Case(lock_pipe, CheckpointError, "run.dir", "no plain file"),
    "prompts with a key twice": Case(
        prompts('{"prompt": "a", "prompt": "b"}'), ConfigError, "data.train", "'prompt' occurs twice"
    ),
    "sample lengths of 400 digits": Case(lengths(f"[{MANY_DIGITS}]"), BatchError, "--lengths", "not a list of lengths"),
    "sample lengths that are nested": Case(lengths(DEEP), BatchError, "--lengths", "too deep"),
}  # fmt: skip
CASES = {**RUNS_CODE, **LEADS_OUT, **EXPLODES}


def save_settings(folder: Path) -> Path:
    (folder / "good.yaml").write_text("model: {path: x}\noptim: {total_updates: 1}\n")
    return folder / "good.yaml"


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("sound")
    save_tiny_model(folder / "model", vocab_size=64)
    (folder / "model" / "evil.py").write_text(code(folder))
    store = CheckpointStore(folder / "checkpoints")
    write_shard(store.begin(1), 0, {"model.w": ShardedTensor(torch.ones(2, 3), (2, 3), 0)}, {})
    store.commit(1, {})
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model" / "evil.py").write_text(code(tmp_path))
    (tmp_path / "checkpoints" / LOCK).unlink()
    return tmp_path


def test_the_table_is_no_shorter_than_it_was() -> None:
    assert len(CASES) == len(RUNS_CODE) + len(LEADS_OUT) + len(EXPLODES) >= 98  # no name twice


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_a_typed_error_that_runs_nothing_and_costs_little(name: str, folder: Path) -> None:
    case = CASES[name]
    with pytest.raises(case.error) as caught, bounded():
        case.read(folder)
    assert caught.value.field == case.field and caught.value.hint, caught.value
    assert case.words in str(caught.value) and len(str(caught.value)) < 1500, str(caught.value)
    assert not (folder / CANARY).exists()


def test_the_bounds_are_felt() -> None:
    """The control of what the errors cost."""
    with pytest.raises(MemoryError), bounded():
        bytearray(2 * SPARE_BYTES)
    with pytest.raises(AssertionError), bounded(0.01):
        began = time.process_time()
        while time.process_time() < began + 0.01:
            pass


def test_what_was_prepared_is_sound_until_somebody_changes_it(folder: Path) -> None:
    """The control of the errors above."""
    model(lambda path: None)(folder)
    (values,) = checkpoint(lambda step: None, seal=True)(folder)  # type: ignore[misc]
    assert torch.equal(values, torch.ones(2, 3))
    write_calibration(folder / "rates.json", Rates(**GOOD_RATES), {})
    assert asdict(read_calibration(folder / "rates.json", field="x")) == GOOD_RATES
    assert batch(batch_of([2, 2]))(folder).num_samples == 2  # type: ignore[attr-defined]


def test_the_same_files_run_code_in_readers_that_trust_them(folder: Path) -> None:
    """The control of the canary."""
    canary = folder / CANARY
    pickle.loads(hostile_pickle(folder))
    assert canary.exists()
    canary.unlink()
    yaml.unsafe_load(PYTHON_TAG.replace("CANARY", str(canary)))
    assert canary.exists()
    canary.unlink()
    asked = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (folder / "model" / "config.json").write_text(json.dumps(asked))
    with pytest.raises(Exception):  # noqa: B017 - what it makes is no configuration; by then it has run
        AutoConfig.from_pretrained(folder / "model", trust_remote_code=True)
    assert canary.exists()


KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "num_local_experts", "num_experts", "num_experts_per_tok"),
    *("sliding_window", "layer_types", "max_window_layers", "sliding_window_pattern", "use_sliding_window"),
    *("tie_word_embeddings", "n_positions", "n_inner", "n_embd", "n_head", "n_layer", "auto_map", "rope_parameters"),
    *("rope_scaling", "quantization_config", "attn_logit_softcapping", "use_bidirectional_attention"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, int(MANY_DIGITS), 1.5, 1e300, float("nan"), "", "x", "full_attention"),
    *([], [1], [[]], [{}], [None], ["full_attention"], ["sliding_attention"] * 3, {}, {"a": 1}),
    *({"rope_type": []}, {"a": {"type": {}}}, {"quant_method": []}),
)


@pytest.mark.parametrize("model_type", SUPPORTED_MODELS)
def test_no_value_in_config_json_leads_to_another_exception(model_type: str, tmp_path: Path) -> None:
    rng = random.Random(model_type)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = {"model_type": model_type, "intermediate_size": 64, **sizes}
    read = 0
    for _ in range(300):
        changes = {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
        (tmp_path / "config.json").write_text(json.dumps(plain | changes))
        try:
            found = read_model_folder(tmp_path, with_weights=False)
            check_architecture(found)
            model_spec = ModelSpec.from_config(found.config)
            choose_strategy("auto", AttentionShape.of_model_spec(model_spec), 2)
            assert 0 < model_spec.trained_parameters() <= model_spec.parameters < 2**200
            read += 1
        except SlimeError as error:
            assert error.field and error.hint
    assert read > 10, "the control: not every change is refused"


def test_code_beside_a_model_that_transformers_knows_is_left_alone(folder: Path) -> None:
    names = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    asked = {"auto_map": names, "attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel"}
    config(**asked)(folder)  # as for training
    policy = build_for_sampling(folder / "model", torch.float32, torch.device("cpu"))
    assert type(policy.hf).__module__.startswith("transformers.models.qwen3")
    assert policy.hf.config._attn_implementation == ATTENTION_NAME
    assert not (folder / CANARY).exists()


def test_an_engine_whose_tokenizer_would_need_code_does_not_start_and_says_why(
    cluster: None, make_config: Any, folder: Path
) -> None:
    with pytest.raises(ModelError):
        tokenizer_code(folder)
    with pytest.raises(WorkerDied, match=re.escape(str(folder / "model"))):
        EnginePool.launch(make_config(model={"path": str(folder / "model")}, rollout={"engines": 1}))
    assert not (folder / CANARY).exists()


def test_a_pointer_that_leads_out_of_the_folder_is_passed_over(folder: Path) -> None:
    shutil.copytree(folder / "checkpoints" / "step_00000001", folder / "outside" / "step_00000009")
    (folder / "checkpoints" / LATEST).write_text("../outside/step_00000009\n")
    manifest, found, skipped = CheckpointStore(folder / "checkpoints").newest_verified()
    step = manifest.step
    assert step == 1 and found.parent == folder / "checkpoints"
    assert "../outside" in skipped[0].message


def test_links_in_a_run_folder_are_replaced_and_what_they_lead_to_stays(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "secret").write_text("kept")
    for name in ("settings.yaml", ".settings.yaml.tmp"):
        (folder / "run" / name).symlink_to(folder / "secret")
    RunFolder(folder / "run").write_settings(config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}}))
    assert (folder / "secret").read_text() == "kept"
    assert not (folder / "run" / "settings.yaml").is_symlink()


# ---------------------------------------------------------------------- the source

ROOT = Path(__file__).parents[2]
# calls that run what they read, or leave a name for somebody else to take; by how they are written
UNSAFE = frozenset(
    [
        *("eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "marshal.load", "marshal.loads", "shelve.open"),
        *("pickle.load", "pickle.loads", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "joblib.load"),
    ]
)
MADE_HERE = {("slimefsdp/errors.py", "pickle.loads")}  # an error that the same process has just pickled


def unsafe_calls(source: str) -> Iterator[str]:
    """Calls of a file that may run what they are given."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in UNSAFE)
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
        last = name.rpartition(".")[2]
        is_automatic = name.split(".")[0].startswith("Auto") and last in ("from_pretrained", "from_config")
        if (
            name in UNSAFE
            or given.get("shell", "False") != "False"
            or given.get("allow_pickle", "False") != "False"
            or (name == "torch.load" and given.get("weights_only") != "True")
            or given.get("trust_remote_code", "None" if is_automatic else "False") != "False"
        ):
            yield name


def test_nothing_in_the_source_runs_what_it_reads() -> None:
    found = {
        (str(file.relative_to(ROOT)), name)
        for package in ("slimefsdp", "actors", "scripts", "examples")
        for file in (ROOT / package).rglob("*.py")
        for name in unsafe_calls(file.read_text())
    }
    assert found == MADE_HERE


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)", "from pickle import loads", "eval(x)", "exec(x)", "os.system(x)",
        "torch.load(x)", "torch.load(x, weights_only=False)", "yaml.load(x, Loader)", "from yaml import unsafe_load",
        "subprocess.run(x, shell=True)", "np.load(x, allow_pickle=True)", "tempfile.mktemp()",
        "AutoConfig.from_pretrained(x)", "AutoTokenizer.from_pretrained(x, trust_remote_code=True)",
        "AutoModelForCausalLM.from_config(x, trust_remote_code=flag)",
    ],
)  # fmt: skip
def test_a_call_that_would_run_what_it_reads_is_seen(source: str) -> None:
    assert list(unsafe_calls(source))


def test_no_setting_lets_a_model_folder_bring_code() -> None:
    tree = config_from_dict({"model": {"path": "x"}, "optim": {"total_updates": 1}}).model_dump()
    assert not [name for section in tree.values() if isinstance(section, dict) for name in section if "trust" in name]
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"model": {"path": "x", "trust_remote_code": True}, "optim": {"total_updates": 1}})
    assert caught.value.field == "model.trust_remote_code"
