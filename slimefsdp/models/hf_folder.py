"""Reads the configuration and tensor locations of a local Hugging Face model folder, and refuses malformed folders.

This module does not import torch and reads only headers of tensor files, so that the command line can check a model in
a fraction of a second. Nothing in a folder is trusted: every length, offset and file name is checked before use.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from slimefsdp.errors import ModelError, short_repr
from slimefsdp.io.hub import HubId
from slimefsdp.io.safetensors_header import COPY_AGAIN, TensorEntry, read_header, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))  # one of these sets is enough
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# upper limits far above any real model: larger values would cost memory or hours before reading weights fails
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2**10),
    **dict.fromkeys(("num_local_experts", "num_experts", "head_dim", "num_attention_heads", "n_head"), 2**16),
    **dict.fromkeys(("hidden_size", "n_embd", "n_positions"), 2**20),
    **dict.fromkeys(("vocab_size", "intermediate_size", "moe_intermediate_size", "n_inner"), 2**31),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "sliding_window"), 2**31),
}
_NOT_NEGATIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
_POSITIVE = (
    *(key for key in _MOST if "expert" not in key and key not in ("sliding_window", "moe_intermediate_size")),
    *("rope_theta", "rope_local_base_freq", "factor", "max_position_embeddings", "query_pre_attn_scalar"),
)
_MOST_WHOLE = 10**40  # upper limit of any other integer; some files have 10^30 for "no limit"

# model types whose packed computation was verified against plain Hugging Face; add a test with every new one
SUPPORTED_MODELS = (
    *("qwen3", "qwen2", "llama", "mistral", "gemma3_text", "gemma2", "gpt2", "phi3", "olmo2", "glm4"),
    *("qwen3_moe", "mixtral", "gpt_oss"),
)
# rotary frequencies that depend on the longest position of a batch: a sample's log-probs would depend on its pack
_PACK_DEPENDENT_ROPE = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Holds a checked local folder: absolute path, config.json, the location of every tensor, and tokenizer files."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    extra_files: tuple[Path, ...]
    has_weights: bool = True  # False if `read_model_folder` ignored the weight files

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def max_sample_tokens(self) -> int | None:
        """Returns the number of learned positions, which limits sample lengths; None if positions are not learned."""
        return self.config.get("n_positions", 1024) if self.model_type == "gpt2" else None  # transformers' default


def check_tokenizer(path: Path) -> None:
    """Checks that a folder has the files of a tokenizer; otherwise transformers would make an empty tokenizer.

    Raises:
        ModelError: files are missing.
    """
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        wanted = ", nor ".join(" with ".join(names) for names in _TOKENIZERS)
        raise ModelError(
            f"{path} has no tokenizer: neither {wanted}",
            field="model.path",
            hint="copy the tokenizer's files of the same model into the folder",
        )


def check_architecture(folder: ModelFolder, *, field: str = "model.path") -> None:
    """Checks that models of this type can be trained here.

    Raises:
        ModelError: the model type is not supported, the weights are quantised, or `refuse_unpackable` raises.
    """
    _check_model_type(folder.model_type, folder.path, field)
    quantization = folder.config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelError(
            f"{folder.path / 'config.json'} has a quantization_config ({short_repr(method)}): "
            "quantised weights cannot be trained",
            field=field,
            hint="load it with transformers asking for dequantised bfloat16 weights (for mxfp4: "
            "quantization_config=Mxfp4Config(dequantize=True)), save_pretrained() that, and give the new folder",
        )
    refuse_unpackable(folder.config, folder.path / "config.json", field=field)


def refuse_unpackable(config: Mapping[str, Any], file: Path, *, field: str = "model.path") -> None:
    """Checks that the model of a configuration can be computed exactly on packed samples.

    Raises:
        ModelError: a key of the configuration prevents it.
    """

    def refused(problem: str, hint: str = "restore the model's own config.json") -> ModelError:
        return ModelError(f"{file} has {problem}", field=field, hint=hint)

    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise refused(f"rope_parameters={short_repr(rope)}")
    window, layer_types = config.get("sliding_window"), config.get("layer_types")
    if window is not None and (type(window) is not int or window < 1):
        raise refused(f"sliding_window={short_repr(window)}")
    known = ("full_attention", "sliding_attention")
    unknown = [kind for kind in layer_types if kind not in known] if isinstance(layer_types, list | tuple) else []
    if unknown:
        problem = f"{short_repr(sorted(map(str, unknown))[0])} in layer_types, neither full nor sliding attention"
        raise refused(problem, "other layers carry a state, or a mask, that does not end with a sample of a pack")
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if type(heads) is int and type(kv_heads) is int and kv_heads > 0 and heads % kv_heads:
        raise refused(f"num_attention_heads={heads}, which is no multiple of num_key_value_heads={kv_heads}")
    kinds = [value.get("rope_type", value.get("type")) for value in (rope, *rope.values()) if isinstance(value, dict)]
    for name, value in (
        ("rope_type", next((kind for kind in kinds if kind in _PACK_DEPENDENT_ROPE), None)),
        ("use_bidirectional_attention", config.get("use_bidirectional_attention")),
        ("add_cross_attention", config.get("add_cross_attention")),
        # transformers ignores this setting for gemma3_text
        ("attn_logit_softcapping", config.get("model_type") == "gemma3_text" and config.get("attn_logit_softcapping")),
    ):
        if value:
            hint = f"use a model without {name}"
            if name == "rope_type":
                hint = (
                    "its frequencies follow the longest sample of a pack; use default, linear, yarn or llama3, or "
                    "drop the scaling from a copy of config.json, for lengths that the model was first trained on"
                )
            raise refused(f"{name}={value!r}, which cannot be computed exactly on packed sequences", hint)


def _check_model_type(model_type: str, path: Path, field: str | None) -> None:
    if model_type not in SUPPORTED_MODELS:
        raise ModelError(
            f"model_type {short_repr(model_type)} of {path} is not supported",
            field=field,
            hint=f"use one of {', '.join(SUPPORTED_MODELS)}, each verified against plain Hugging Face. Layers that "
            "carry a state from token to token would mix the samples of a pack",
        )


def read_model_folder(path: str | Path, *, field: str = "model.path", with_weights: bool = True) -> ModelFolder:
    """Reads a folder's configuration and the location of every tensor, without reading any tensor.

    Weights are read from the files that `model.safetensors.index.json` names. Without an index, they are read from
    `model.safetensors` if it exists, like transformers does, else from all `*.safetensors` files.

    Args:
        path: a local folder; `~` is expanded. `actors.model_folders` resolves ids of the hub.
        field: the setting that errors name.
        with_weights: if False, weight files are not read and need not exist; `tensors` is empty.

    Raises:
        ModelError: something is missing or malformed.
    """
    try:
        return _read(path, with_weights)
    except ModelError as error:
        error.field = field
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of an unknown user
        raise ModelError(f"{path} cannot be read: {error}", field=field, hint="make the folder readable") from error


def _read(path: str | Path, with_weights: bool) -> ModelFolder:
    folder = Path(path).expanduser().absolute()
    if not folder.exists():
        command = made_by(Path(path))
        hint = "give an existing folder, or the id of a model on the hub (`hf download ID --local-dir FOLDER`)"
        raise ModelError(f"{str(path)!r} does not exist", hint=f"make it first: `{command}`" if command else hint)
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file", hint="give the folder that holds it and config.json")
    config = _read_config(folder / "config.json")
    tensors = _read_tensors(folder) if with_weights else {}
    return ModelFolder(folder, config, tensors, _extra_files(folder), with_weights)


def lacks_weights(folder: Path) -> bool:
    """Returns whether a folder, which may be a partial download, lacks weight files."""
    try:
        _weight_files(folder, _read_index(folder / INDEX_FILE))
    except ModelError:
        return True
    return False


def _extra_files(folder: Path) -> tuple[Path, ...]:
    """Returns the EXTRA_FILES that exist.

    Exports copy these files, so none of them may be a link to a file outside of the folder.
    """
    files = tuple(folder / name for name in EXTRA_FILES if (folder / name).exists())
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is no regular file", hint=COPY_AGAIN)
    own = folder.resolve()
    for file in files:
        target = file.resolve()
        if not (target.is_relative_to(own) or _is_blob_of(own, target)):
            raise ModelError(
                f"{file} is a link that leads out of the folder, to {target}",
                hint="copy that file into the folder if it belongs to the model: exports would carry it along",
            )
    return files


def _is_blob_of(snapshot: Path, target: Path) -> bool:
    """Returns whether a file is in the hub cache that a snapshot folder belongs to.

    Files of a snapshot, cache/models--owner--name/snapshots/revision/name, link to ../../blobs/hash. This may again be
    a link to cache/blobs/ab/hash, if several models share the file.
    """
    repository = snapshot.parent.parent
    is_of_cache = snapshot.parent.name == "snapshots" and repository.name.startswith("models--")
    return target.parent == repository / "blobs" or (
        is_of_cache and target.parent.parent == repository.parent / "blobs"
    )


def _read_tensors(folder: Path) -> dict[str, TensorEntry]:
    index = _read_index(folder / INDEX_FILE)
    tensors: dict[str, TensorEntry] = {}
    for file in _weight_files(folder, index):
        for name, entry in read_header(file).tensors.items():
            if name in tensors:
                raise ModelError(
                    f"tensor {name!r:.200} is in two files, {tensors[name].file} and {file}",
                    hint="keep the files of one checkpoint only",
                )
            tensors[name] = entry
    for name, file_name in (index or {}).items():
        if name not in tensors or tensors[name].file != folder / file_name:
            raise ModelError(
                f"{folder / INDEX_FILE} places tensor {name!r:.200} in {file_name!r}, which does not hold it",
                hint="download the index and its files again, from one revision",
            )
    return tensors


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(
            f"{file.parent} has no config.json",
            hint="give the folder that `save_pretrained` or `hf download` wrote, not its parent",
        )
    config = _read_json(file)
    if type(config.get("model_type")) is str and "vocab_size" not in config:
        # multimodal models have the vocabulary size in a nested configuration; the error should name the model type
        # instead
        _check_model_type(config["model_type"], file.parent, None)
    expected: tuple[tuple[str, type, bool], ...] = (
        ("model_type", str, True),
        ("vocab_size", int, True),
        ("tie_word_embeddings", bool, False),
        ("n_positions", int, False),
    )
    for key, kind, is_required in expected:
        value = config.get(key)
        # type(), not isinstance, because True is an int
        if type(value) is not kind and (is_required or value is not None):
            raise _wrong_value(file, key, value, f", where {kind.__name__} is needed")
    _refuse_nonsense(file, config)
    for key, value in config.items():
        most = _MOST.get(key, _MOST_WHOLE)
        if type(value) is int and abs(value) > most:
            raise _wrong_value(file, key, value, f"; the largest accepted value is {short_repr(most)}")
    return config


def _wrong_value(file: Path, key: str, value: Any, rule: str = "") -> ModelError:
    problem = f"{file} has {short_repr(key)} = {short_repr(value)}{rule}"
    return ModelError(problem, hint="restore the model's own config.json")


def _refuse_nonsense(file: Path, values: Mapping[str, Any]) -> None:
    """Refuses numbers, including nested numbers, that would make log-probs NaN."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _refuse_nonsense(file, value)
            continue
        for number in value if isinstance(value, list) else [value]:
            is_below = type(number) in (int, float) and (
                (key in _NOT_NEGATIVE and number < 0) or (key in _POSITIVE and number <= 0)
            )
            if is_below or (type(number) is float and not math.isfinite(number)):
                raise _wrong_value(file, key, number)


def _read_index(file: Path) -> dict[str, str] | None:
    """Returns tensor name -> file name, or None if there is no index. All files must be in the folder."""
    if not file.is_file():
        return None
    weight_map = _read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{file} has no weight_map, or an empty one", hint=COPY_AGAIN)
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise ModelError(
                f"{file} places tensor {name!r:.200} in {short_repr(file_name)}, which is no .safetensors file",
                hint="give a safetensors checkpoint",
            )
        # only names are checked, because files in Hugging Face caches are links to ../../blobs
        parts = PurePosixPath(file_name.replace("\\", "/")).parts
        if ".." in parts or file_name.startswith(("/", "\\")) or PureWindowsPath(file_name).drive:
            raise ModelError(
                f"{file} places tensor {name!r:.200} in {short_repr(file_name)}, outside the folder",
                hint="do not use this folder unless you wrote it: a sound index names files in its own folder",
            )
    return weight_map


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    single = folder / SINGLE_FILE
    if index is not None:
        if single.is_file() and SINGLE_FILE not in index.values():
            raise ModelError(
                f"{folder} has {SINGLE_FILE} and an index that does not name it",
                hint="remove the one that is not the model: readers differ in which they take",
            )
        files = sorted({folder / name for name in index.values()})
    elif single.is_file():
        files = [single]
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    for file in files:
        if not file.is_file():
            reason = (
                "is a link to nothing" if file.is_symlink() else "is no regular file" if file.exists() else "is missing"
            )
            raise ModelError(f"{file} {reason}", hint="finish the download, or copy the folder with its links resolved")
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise ModelError(
                f"{folder} has no .safetensors file, only {pickles[0]!r}: pickle checkpoints are refused",
                hint="convert it with `save_pretrained` if you trust it: loading it can run code",
            )
        raise ModelError(f"{folder} has no .safetensors file", hint="finish the download, or give another folder")
    return files


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", hint=COPY_AGAIN) from error


# ---------------------------------------------------------------------- the parameters of a model and its tensors
#
# In memory the experts of a layer are one parameter, [experts, rows, columns]. Folders on the hub and those that
# `save_pretrained` writes have one tensor per projection of each expert. Only readers and writers of folders use the
# folder's names. They come from transformers' `conversion_mapping.py`, and a test compares them with what transformers
# writes.

# model type -> suffix of a parameter of all experts -> the projections stacked in the parameter, in order
_EXPERT_TENSORS = {
    "qwen3_moe": {
        ".experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
        ".experts.down_proj": ("down_proj.weight",),
    },
    "mixtral": {
        ".experts.gate_up_proj": ("w1.weight", "w3.weight"),
        ".experts.down_proj": ("w2.weight",),
    },
}
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}  # module name in memory, module name in the folder
_GPT2_PREFIX = "transformer."  # missing in the oldest folders, which hold only the decoder
# causal masks that old folders store like weights
_GPT2_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a tensor of a folder, which fills a whole parameter, or rows [start, end) of one expert."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    end: int = 0


def hub_parts(model_type: str, parameter: str, shape: Sequence[int]) -> list[Part]:
    """Returns the tensors of a newly written folder for a parameter of this name and full shape, in order."""
    old, new = _RENAMED.get(model_type, ("", ""))
    name = parameter.replace(old, new) if old else parameter
    for suffix, tensors in _EXPERT_TENSORS.get(model_type, {}).items():
        if parameter.endswith(suffix):
            experts, rows, columns = shape
            height = rows // len(tensors)
            stem = name.removesuffix(suffix) + ".experts."
            return [
                Part(f"{stem}{expert}.{tensor}", (height, columns), expert, i * height, (i + 1) * height)
                for expert in range(experts)
                for i, tensor in enumerate(tensors)
            ]
    return [Part(name, tuple(shape))]


def stored_parts(model_type: str, parameter: str, shape: Sequence[int], stored: Container[str]) -> list[Part]:
    """Returns the tensors to fill a parameter from, given the names that a folder stores.

    A folder may also have the parameter under the model's own name, with all experts in one tensor, or for GPT-2
    without the prefix. If the folder has neither, the result is that of `hub_parts`.
    """
    whole = [parameter]
    if model_type == "gpt2":
        whole.append(parameter.removeprefix(_GPT2_PREFIX))
    for name in whole:
        if name in stored:
            return [Part(name, tuple(shape))]
    return hub_parts(model_type, parameter, shape)


def is_no_weight(model_type: str, tensor: str) -> bool:
    """Returns whether a tensor of a folder is a constant that the model computes itself."""
    return model_type == "gpt2" and _GPT2_MASK.fullmatch(tensor) is not None


# ---------------------------------------------------------------------- models that are not on this machine
#
# `shapes/owner/name/config.json` holds the architecture part of config.json of a model on the Hugging Face hub;
# `shapes/examples` holds those of models that this project's scripts write. There are no weights and no tokenizers.

_SHAPES = Path(__file__).parent / "shapes"
# path in presets -> (the command that makes this path and everything below it, the model's folder in `shapes`)
_COMMANDS: dict[str, tuple[str, str]] = {
    "data/sort_digits": ("python scripts/make_sort_digits.py data/sort_digits", "examples/sort_digits"),
    "data/sort_digits_untied": (
        "python scripts/make_sort_digits.py data/sort_digits_untied --untied",
        "examples/sort_digits_untied",
    ),
    "runs/sort_digits_sft/model": ("slimefsdp train configs/sort_digits_sft.yaml", "examples/sort_digits"),
    "data/calculator": ("python scripts/make_calculator.py data/calculator", "examples/calculator"),
    "runs/calculator_sft/model": ("slimefsdp train configs/calculator_sft.yaml", "examples/calculator"),
    "runs/demo_llm/smollm2": ("bash scripts/demo_llm.sh", "examples/smollm2"),
    "runs/demo_llm/seed_0": ("bash scripts/demo_llm.sh", ""),
    ".venv-vllm": ("bash scripts/setup_vllm.sh", ""),
}


def made_by(path: Path) -> str | None:
    """Returns the command that makes the file or folder at a path; None if it exists or no script makes it."""
    entry = _entry(path)
    return None if entry is None else entry[0]


def shape_of(path: Path) -> Path | None:
    """Returns a folder that has only config.json, for a hub id or a model that `made_by` knows; otherwise None."""
    hub_id = HubId.of(path)
    entry = _entry(path)
    name = hub_id.name if hub_id is not None and entry is None else entry[1] if entry is not None else ""
    return _SHAPES / name if name and (_SHAPES / name / "config.json").is_file() else None


def is_shape(folder: Path) -> bool:
    return folder.is_relative_to(_SHAPES)


def _entry(path: Path) -> tuple[str, str] | None:
    for target, entry in _COMMANDS.items():
        if path.is_relative_to(target) and not os.path.lexists(target):
            return entry
    return None
