"""Files from elsewhere run no code, do not lead out of their folder, and cost neither memory nor time to refuse.

Every kind of file is spoilt in every way that fits any file, and then in ways of its own format.
"""

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
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from actors.engines.pool import EnginePool
from actors.engines.tokenizer import encode_prompt, end_token_ids, load_tokenizer
from actors.rollout.records import read_records
from actors.run_dir import RunFolder
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.checkpoint.shards import SavedShards, ShardedTensor, write_shard
from slimefsdp.checkpoint.store import LATEST, CheckpointStore
from slimefsdp.config import config_from_dict, load_config
from slimefsdp.config.data import DataSettings
from slimefsdp.convert.dcp import Chunk, SavedTensor, read_dcp_folder, read_saved
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError, ConfigError, ModelError, ResourceError, SlimeError, WorkerDied
from slimefsdp.estimate.hardware import Rates, read_calibration
from slimefsdp.estimate.schedule import read_samples
from slimefsdp.io.files import LOCK, FolderLock
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.build import build_for_sampling, build_policy
from slimefsdp.models.decoder import ATTENTION_NAME
from slimefsdp.models.hf_folder import INDEX_FILE, SINGLE_FILE, SUPPORTED_MODELS, check_architecture, read_model_folder
from slimefsdp.monitoring.metrics_log import METRICS_FILE, MetricsLog, read_metrics
from tests.support.tiny_models import save_tiny_model

CANARY = "code_was_run"
SPARE_BYTES = 1 << 30  # of address space, beyond what the process has when a case begins
MOST_SECONDS = 2.0  # of the processor
MANY_DIGITS, DEEP = "9" * 400, "[" * 100_000
GOOD_RATES = asdict(Rates("here", 2.0, 0.5, 10.0, 4.0, 5.0))
STEP = "checkpoints/step_00000001"


class Payload:
    """Pickled, it is a call that leaves the canary when the pickle is read."""

    def __init__(self, folder: Path) -> None:
        self.canary = folder / CANARY

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def code(folder: Path) -> str:
    return f"import pathlib\npathlib.Path({str(folder / CANARY)!r}).touch()\nclass Evil: pass\n"


@contextmanager
def bounded(most_seconds: float = MOST_SECONDS) -> Iterator[None]:
    """Allows little more memory than is in use, and little time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert time.process_time() - began < most_seconds


# ---------------------------------------------------------------------- the kinds of file, and who reads them


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it lies in a sound folder, what reads it, and the error of one that is not sound."""

    file: str
    read: Callable[[Path], object]  # is given the folder
    error: type[SlimeError]
    field: str | None  # None: whichever it names
    is_sealed: bool = False  # a manifest vouches for what was written


def load_model(folder: Path) -> object:
    """Does all that a folder is asked for before and while its weights are loaded."""
    found = read_model_folder(folder / "model")
    check_architecture(found)
    return build_policy(found, torch.float32)


def load_checkpoint(folder: Path) -> list[torch.Tensor]:
    weights = SavedShards(CheckpointStore.find(folder / STEP).folder)
    return [weights.read(name) for name in weights.specs]


KINDS = {
    "settings": Kind("c.yaml", lambda folder: load_config(folder / "c.yaml"), ConfigError, None),
    "config.json": Kind("model/config.json", load_model, ModelError, "model.path"),
    "weights": Kind(f"model/{SINGLE_FILE}", load_model, ModelError, "model.path"),
    "index of weights": Kind(f"model/{INDEX_FILE}", load_model, ModelError, "model.path"),
    "manifest": Kind(f"{STEP}/{MANIFEST}", load_checkpoint, CheckpointError, MANIFEST),
    "rank's index": Kind(f"{STEP}/rank_00000.json", load_checkpoint, CheckpointError, None, is_sealed=True),
    "rank's tensors": Kind(f"{STEP}/rank_00000.safetensors", load_checkpoint, CheckpointError, None, True),
    "DCP metadata": Kind("dcp/.metadata", lambda folder: read_dcp_folder(folder / "dcp"), CheckpointError, "path"),
    "batch": Kind("batch.safetensors", lambda f: RolloutBatch.load(f / "batch.safetensors"), BatchError, None),
    "calibration": Kind(
        "rates.json", lambda f: read_calibration(f / "rates.json", field="rates"), ConfigError, "rates"
    ),
    "prompts": Kind(
        "p.jsonl",
        lambda folder: read_records(DataSettings(train=folder / "p.jsonl"), "train"),
        ConfigError,
        "data.train",
    ),
    "lengths": Kind("l.json", lambda f: read_samples(str(f / "l.json"), 4), BatchError, "--lengths"),
    "metrics": Kind(METRICS_FILE, read_metrics, ConfigError, "run.dir"),
    "metrics to append to": Kind(METRICS_FILE, MetricsLog, ResourceError, "run.dir"),
    "lock": Kind(f"run/{LOCK}", lambda folder: FolderLock(folder / "run").require_free(), CheckpointError, "run.dir"),
    "lock to take": Kind(
        f"run/{LOCK}", lambda folder: FolderLock(folder / "run").acquire(), CheckpointError, "run.dir"
    ),
}

# ---------------------------------------------------------------------- how files are spoilt

Damage = Callable[[Path], object]  # is given the file, of which nothing is there


def contains(content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda file: file.write_bytes(raw.replace(b"CANARY", str(canary_of(file)).encode()))


def canary_of(file: Path) -> Path:
    return next(parent for parent in file.parents if (parent / "checkpoints").exists()) / CANARY


def is_a_pickle(file: Path) -> None:
    file.write_bytes(pickle.dumps(Payload(canary_of(file).parent)))


def links_to(target: str) -> Damage:
    return lambda file: file.symlink_to(target)


ANY_FILE: dict[str, Damage] = {
    "is a pickle": is_a_pickle,
    "is a pipe": os.mkfifo,
    "has no end": links_to("/dev/zero"),
    "is a terabyte of zeros": lambda file: (file.touch(), os.truncate(file, 10**12)),
    "is nested": contains('{"prompt": ' + DEEP),
    "has a key twice": contains('{"prompt": "a", "prompt": "b"}'),
    "has 400 digits": contains('{"prompt": ' + MANY_DIGITS + "}"),
}
PIPE_ALONE = {"metrics", "metrics to append to", "lock", "lock to take"}  # whose content plays no part
NO_FILES = {"is a pipe", "has no end"}
PASSED_OVER = {  # by the side of a sound file, or a text that is no path
    *(("index of weights", name) for name in NO_FILES), *(("lengths", name) for name in NO_FILES),
    ("batch", "is a terabyte of zeros"),  # safetensors maps it, which the limit on addresses does not allow
}  # fmt: skip


def header(content: object, length: int | None = None, data: bytes = b"\0" * 8) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def tensor(shape: list[int], end: int, begin: int = 0) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def batch_of(lengths: list[int]) -> bytes:
    """A batch that is sound field by field, but for what the lengths add up to."""
    fields = {"lengths": lengths, "response_lengths": [1] * len(lengths), "tokens": [1] * 4}
    described, data = {}, b""
    for name, values in fields.items():
        raw = b"".join(value.to_bytes(8, "little") for value in values)
        offsets = [len(data), len(data) + len(raw)]
        described[name] = {"dtype": "I64", "shape": [len(values)], "data_offsets": offsets}
        data += raw
    return header(described, data=data)


def rates(**changes: Any) -> Damage:
    return contains(json.dumps({"rates": GOOD_RATES | changes}))


PYTHON_TAG = "!!python/object/apply:os.system ['touch CANARY']"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
OF_FORMATS: dict[str, list[Damage]] = {
    "settings": [
        contains(text)
        for text in (
            f"optim: {PYTHON_TAG}", "model: !!python/object/new:type {}", BOMB, "a: " + "[" * 50_000,
            f"a: {MANY_DIGITS}", "optim: {lr: 1e999}",
        )
    ],
    "weights": [
        links_to("../secret"), contains(header({}, 2**62)), contains(header({"a": tensor([2**62, 2**62], 8)})),
        contains(header({"a": tensor([2**40], 2**42)})), contains(header({"a": tensor([2], 8), "b": tensor([2], 8)})),
        contains(header(DEEP.encode())),
    ],
    "index of weights": [
        contains(json.dumps({"weight_map": {"model.norm.weight": name}}))
        for name in ("../secret.safetensors", "/etc/secret.safetensors", "..\\secret.safetensors", "C:x.safetensors")
    ],
    "DCP metadata": [
        contains(b"\x80\x04Nr\x00\x00\x00\x0c."),  # a memo of 200 million places
        contains(b"\x80\x04}K\x01\x85" + b"2\x86" * 60 + b"K\x01s."),  # a key whose hash takes 2^60 steps
    ],
    "batch": [
        contains(header({"tokens": {"dtype": "I64", "shape": [2**62], "data_offsets": [0, 8]}})),
    ],
    "calibration": [
        rates(matrix_tflops=int(MANY_DIGITS)), rates(comm_gbps=1e300), rates(attention_tflops=1e-300),
        rates(source=["here"]), rates(dtype="int3"),
    ],
    "prompts": [
        contains('{"prompt": "a", "b": ' + "[" * 500 + "]" * 500 + "}"),
        contains(json.dumps({f"{n:01000}": 0 for n in range(300)})),
    ],
    "lengths": [contains(f"[{MANY_DIGITS}]")],
    "lock to take": [links_to("../secret")],
}  # fmt: skip
CASES: dict[str, tuple[str, Damage]] = {
    f"{kind} {name}": (kind, damage)
    for kind in KINDS
    for name, damage in [
        *(
            (name, damage)
            for name, damage in ANY_FILE.items()
            if (name == "is a pipe" or kind not in PIPE_ALONE) and (kind, name) not in PASSED_OVER
        ),
        *((f"of its format {number}", damage) for number, damage in enumerate(OF_FORMATS.get(kind, []))),
    ]
}


def seal(step: Path) -> None:
    """Writes a manifest that vouches for the files as they are."""
    document = json.loads((step / MANIFEST).read_text())
    for record in document["files"]:
        file = step / record["name"]
        data = file.read_bytes() if file.is_file() and file.stat().st_size < 1 << 20 else b""
        record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    write_sealed(step, document)


def write_sealed(step: Path, document: dict[str, Any]) -> None:
    document.pop("sha256", None)
    own = hashlib.sha256((json.dumps(document, indent=1) + "\n").encode()).hexdigest()
    (step / MANIFEST).write_text(json.dumps(document | {"sha256": own}, indent=1) + "\n")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which nothing is wrong."""
    folder = tmp_path_factory.mktemp("sound")
    save_tiny_model(folder / "model", vocab_size=64)
    store = CheckpointStore(folder / "checkpoints")
    records = write_shard(store.begin(1), 0, {"model.w": ShardedTensor(torch.ones(2, 3), (2, 3), 0)}, {})
    store.commit(1, {}, records)
    (folder / "secret").write_text('{"password": 1}')
    for name in ("dcp", "run"):
        (folder / name).mkdir()
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model" / "evil.py").write_text(code(tmp_path))
    (tmp_path / "checkpoints" / LOCK).unlink()
    return tmp_path


def require_refused(read: Callable[[], object], error: type[SlimeError], field: str | None, folder: Path) -> None:
    with pytest.raises(error) as caught, bounded():
        read()
    assert (field is None or caught.value.field == field) and caught.value.hint, caught.value
    assert len(str(caught.value)) < 1500, str(caught.value)
    assert not (folder / CANARY).exists() and (folder / "secret").read_text() == '{"password": 1}'


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_a_typed_error_that_runs_nothing_and_costs_little(name: str, folder: Path) -> None:
    kind, damage = KINDS[CASES[name][0]], CASES[name][1]
    (folder / kind.file).unlink(missing_ok=True)
    damage(folder / kind.file)
    if kind.is_sealed:
        seal((folder / kind.file).parent)
    require_refused(lambda: kind.read(folder), kind.error, kind.field, folder)


# ---------------------------------------------------------------------- sound files with another value in them


def changed(file: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
        {"auto_map": 5}, {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
        {"num_hidden_layers": 10**9}, {"head_dim": 10**9}, {"vocab_size": int(MANY_DIGITS)},
        {"rope_theta": int(MANY_DIGITS)}, {"rope_theta": 0}, {"rms_norm_eps": float("inf")}, {"rms_norm_eps": -1e-6},
        {"num_attention_heads": 0}, {"hidden_size": -8}, {"max_position_embeddings": 0},
        {"initializer_range": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_a_model_that_cannot_be_is_refused_by_its_config(folder: Path, changes: dict[str, Any]) -> None:
    changed(folder / "model/config.json", lambda config: config.update(changes))
    require_refused(partial(load_model, folder), ModelError, "model.path", folder)


@pytest.mark.parametrize(
    "changes",
    [{"bytes": int(MANY_DIGITS)}, {"name": "../secret"}, {"name": "/etc/passwd"}],
    ids=["digits", "out", "absolute"],
)
def test_a_manifest_that_is_sealed_is_checked_all_the_same(folder: Path, changes: dict[str, Any]) -> None:
    document = json.loads((folder / STEP / MANIFEST).read_text())
    document["files"][0] |= changes
    write_sealed(folder / STEP, document)
    require_refused(partial(load_checkpoint, folder), CheckpointError, MANIFEST, folder)


@pytest.mark.parametrize(
    "changes",
    [{"rows": int(MANY_DIGITS)}, {"rows": 1e300}, {"global_shape": [2**62, 3]}, {"dtype": "F99"}, {"start": -1}],
    ids=["digits", "float", "shape", "dtype", "start"],
)
def test_an_index_of_a_rank_that_is_sealed_is_checked_all_the_same(folder: Path, changes: dict[str, Any]) -> None:
    changed(folder / STEP / "rank_00000.json", lambda index: index["tensors"]["model.w"].update(changes))
    seal(folder / STEP)
    field = "model.w" if "global_shape" in changes else "tensors"
    require_refused(partial(load_checkpoint, folder), CheckpointError, field, folder)


def test_a_file_that_is_moved_out_of_a_checkpoint_is_refused_although_every_byte_is_there(folder: Path) -> None:
    file = folder / STEP / "rank_00000.safetensors"
    shutil.move(file, folder / "elsewhere")
    file.symlink_to(folder / "elsewhere")
    require_refused(partial(load_checkpoint, folder), CheckpointError, file.name, folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_of_a_model_that_would_be_copied_lead_to_no_secret_and_wait_for_no_pipe(folder: Path, name: str) -> None:
    for spoil in (lambda file: file.symlink_to(folder / "secret"), os.mkfifo):
        (folder / "model" / name).unlink(missing_ok=True)
        spoil(folder / "model" / name)
        require_refused(partial(load_model, folder), ModelError, "model.path", folder)


def test_weights_that_are_a_pickle_of_torch_are_refused(folder: Path) -> None:
    (folder / "model" / SINGLE_FILE).unlink()
    (folder / "model/pytorch_model.bin").write_bytes(pickle.dumps(Payload(folder)))
    require_refused(partial(load_model, folder), ModelError, "model.path", folder)


def test_a_tensor_of_a_dcp_folder_runs_nothing(folder: Path) -> None:
    stream = io.BytesIO()
    torch.save(Payload(folder), stream)
    (folder / "0.distcp").write_bytes(stream.getvalue())
    chunk = Chunk((0,), (2,), folder / "0.distcp", 0, len(stream.getvalue()))
    saved = SavedTensor("w", torch.float32, (2,), (chunk,))
    require_refused(lambda: read_saved(saved), CheckpointError, "path", folder)


def test_lengths_that_wrap_round_to_few_are_refused(folder: Path) -> None:
    (folder / "batch.safetensors").write_bytes(batch_of([2**63 - 1, 2**63 - 1, 6]))
    require_refused(lambda: RolloutBatch.load(folder / "batch.safetensors"), BatchError, "tokens", folder)


def test_an_override_of_a_setting_runs_nothing(folder: Path) -> None:
    (folder / "good.yaml").write_text("model: {path: x}\noptim: {total_updates: 1}\n")
    override = f"optim.lr={PYTHON_TAG.replace('CANARY', str(folder / CANARY))}"
    require_refused(lambda: load_config(folder / "good.yaml", [override]), ConfigError, None, folder)


@pytest.mark.parametrize(
    "text",
    [
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__()[0] }}",
    ],
)
def test_a_chat_template_reaches_for_nothing_outside(folder: Path, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.chat_template = text.replace("CANARY", str(folder / CANARY))
    require_refused(lambda: encode_prompt(tokenizer, "a"), ConfigError, "prompt", folder)


def tokenizer_code(folder: Path) -> object:
    """Reads a tokenizer that only code in the folder could make."""
    asked = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(asked))
    (folder / "model" / "tokenizer.json").write_text("{}")
    return load_tokenizer(str(folder / "model"))


def test_a_tokenizer_of_the_folders_own_and_end_tokens_that_are_text_are_refused(folder: Path) -> None:
    require_refused(lambda: tokenizer_code(folder), ModelError, "model.path", folder)
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": "__import__(1)"}')
    require_refused(lambda: end_token_ids(str(folder / "model"), 0), ModelError, "model.path", folder)


# ---------------------------------------------------------------------- the controls


def test_the_bounds_are_felt() -> None:
    """The control of what the errors cost."""
    with pytest.raises(MemoryError), bounded():
        bytearray(2 * SPARE_BYTES)
    with pytest.raises(AssertionError), bounded(0.01):
        began = time.process_time()
        while time.process_time() < began + 0.01:
            pass


def test_the_same_files_run_code_in_readers_that_trust_them(folder: Path) -> None:
    """The control of the canary."""
    canary = folder / CANARY
    pickle.loads(pickle.dumps(Payload(folder)))
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
    changed(folder / "model/config.json", lambda config: config.update(asked))
    load_model(folder)  # as for training
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
    assert manifest.step == 1 and found.parent == folder / "checkpoints"
    assert "../outside" in skipped[0].message


def test_links_in_a_run_folder_are_replaced_and_what_they_lead_to_stays(folder: Path) -> None:
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
MADE_HERE = {
    ("slimefsdp/errors.py", "pickle.loads"),  # an error that the same process has just pickled
    # a batch that the same process wrote into a file without a name, after its sha256 was compared
    ("actors/fault_tolerance/call_log.py", "pickle.loads"),
    # a call to a process that this one started, and its answer through a pipe that nobody else has
    ("actors/side_process.py", "pickle.load"),
    ("actors/side_process.py", "pickle.loads"),
}


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
