"""Reads the configuration and tensor locations of a local Hugging Face model folder, and refuses malformed folders.

It imports only the standard library and reads only headers, so that the command line can check a model in a fraction
of a second. Nothing in a folder is trusted: every length, offset and file name is checked before use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from slimefsdp.errors import ModelError, short_repr
from slimefsdp.io.safetensors_header import COPY_AGAIN, TensorEntry, read_header, read_json_object
from slimefsdp.models.named_shapes import made_by

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
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))  # any of these will do
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
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "gemma3_text",
    "gemma2",
    "gpt2",
    "phi3",
    "olmo2",
    "glm4",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
)
# model types with layers that carry a state from token to token (linear attention, state spaces, recurrences, short
# convolutions), which would leak from one sample of a pack into the next
STATEFUL_MODELS = frozenset(
    [
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    ]
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
    has_weights: bool = True  # False: weight files were not read

    @property
    def model_type(self) -> str:
        model_type: str = self.config["model_type"]
        return model_type

    @property
    def vocab_size(self) -> int:
        size: int = self.config["vocab_size"]
        return size

    @property
    def max_sample_tokens(self) -> int | None:
        """Returns the number of learned positions, which limits sample lengths; None if positions are not learned."""
        if self.model_type != "gpt2":
            return None
        positions: int = self.config.get("n_positions", 1024)  # transformers' default
        return positions


def check_tokenizer(path: Path, *, field: str = "model.path") -> None:
    """Checks that a folder has the files of a tokenizer; without them transformers would make an empty one.

    Raises:
        ModelError: files are missing.
    """
    if not any(all((path / name).is_file() for name in names) for names in _TOKENIZERS):
        wanted = ", nor ".join(" with ".join(names) for names in _TOKENIZERS)
        raise ModelError(
            f"{path} has no tokenizer: neither {wanted}",
            field=field,
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
    """Checks that a configuration can be computed exactly on packed samples.

    Raises:
        ModelError: a setting of the configuration cannot.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(
            f"rope_parameters={short_repr(rope)} in {file}", field=field, hint="restore the model's own value"
        )
    kinds = [value.get("rope_type", value.get("type")) for value in (rope, *rope.values()) if isinstance(value, dict)]
    refused: dict[str, Any] = {
        "rope_type": next((kind for kind in kinds if kind in _PACK_DEPENDENT_ROPE), None),
        "use_bidirectional_attention": config.get("use_bidirectional_attention"),
        "add_cross_attention": config.get("add_cross_attention"),
    }
    if config.get("model_type") == "gemma3_text":  # transformers ignores this setting for gemma3_text
        refused["attn_logit_softcapping"] = config.get("attn_logit_softcapping")
    window, layer_types = config.get("sliding_window"), config.get("layer_types")
    if window is not None and (type(window) is not int or window < 1):
        raise ModelError(
            f"sliding_window={short_repr(window)} in {file}", field=field, hint="restore the model's own value"
        )
    known = ("full_attention", "sliding_attention")
    unknown = [kind for kind in layer_types if kind not in known] if isinstance(layer_types, list | tuple) else []
    if unknown:
        raise ModelError(
            f"layer_types in {file} has {short_repr(sorted(map(str, unknown))[0])}, neither full nor sliding attention",
            field=field,
            hint="other layers carry a state, or a mask, that does not end with a sample of a pack",
        )
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if type(heads) is int and type(kv_heads) is int and kv_heads > 0 and heads % kv_heads:
        raise ModelError(
            f"num_attention_heads={heads} in {file} is no multiple of num_key_value_heads={kv_heads}",
            field=field,
            hint="restore the model's own config.json",
        )
    for name, value in refused.items():
        if value:
            hint = f"use a model without {name}"
            if name == "rope_type":
                hint = (
                    "its frequencies follow the longest sample of a pack; use default, linear, yarn or llama3, or "
                    "drop the scaling from a copy of config.json, for lengths that the model was first trained on"
                )
            raise ModelError(
                f"{name}={value!r} in {file} cannot be computed exactly on packed sequences", field=field, hint=hint
            )


def _check_model_type(model_type: str, path: Path, field: str | None) -> None:
    if model_type in SUPPORTED_MODELS:
        return
    reason = (
        "carries a recurrent state across the tokens of a row, which would leak from sample to sample in a pack"
        if model_type in STATEFUL_MODELS
        else "is not supported"
    )
    raise ModelError(
        f"model_type {short_repr(model_type)} of {path} {reason}",
        field=field,
        hint=f"use one of {', '.join(SUPPORTED_MODELS)}, each verified against plain Hugging Face",
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
        raise ModelError(
            f"{str(path)!r} does not exist",
            hint=f"make it first: `{command}`"
            if command
            else "give an existing folder; settings also take the id of a model on the hub, owner/name, which "
            "`hf download ID --local-dir FOLDER` makes a folder of",
        )
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
        # models of several parts have the vocabulary size in one of them; the error to report is their type
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
            raise ModelError(
                f"{file} has {key} = {short_repr(value)}, where {kind.__name__} is needed",
                hint="restore the model's own config.json",
            )
    _refuse_nonsense(file, config)
    for key, value in config.items():
        most = _MOST.get(key, _MOST_WHOLE)
        if type(value) is int and abs(value) > most:
            raise ModelError(
                f"{file} has {short_repr(key)} = {short_repr(value)}; {short_repr(most)} is the most that is taken",
                hint="restore the model's own config.json",
            )
    return config


def _refuse_nonsense(file: Path, values: Mapping[str, Any]) -> None:
    """Refuses numbers, also nested ones, that no model can have and that would only show as NaN in log-probs."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _refuse_nonsense(file, value)
            continue
        for number in value if isinstance(value, list) else [value]:
            is_below = type(number) in (int, float) and (
                (key in _NOT_NEGATIVE and number < 0) or (key in _POSITIVE and number <= 0)
            )
            if is_below or (type(number) is float and not math.isfinite(number)):
                raise ModelError(
                    f"{file} has {short_repr(key)} = {short_repr(number)}", hint="restore the model's own config.json"
                )


def _read_index(file: Path) -> dict[str, str] | None:
    """Returns tensor name -> file name from the index, after checking that all files are in the folder; None without an
    index.
    """
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
