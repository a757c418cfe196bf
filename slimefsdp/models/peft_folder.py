"""Reads a folder of LoRA adapters written by peft, and refuses adapters that cannot be trained exactly as saved.

The folder has adapter_config.json, and adapter_model.safetensors with an A and a B for every module with an adapter.
The tensors decide which modules have adapters; target_modules and the keys that narrow it must agree with the tensors.
A stack is a parameter that holds one matrix for each expert; target_parameters names the adapted stacks. peft wraps the
module of experts once for every stack, the last parameter outermost, and tensors are named after the wrappers. The A of
a stack is [experts * rank, in], its B is [out, rank * experts]. As in `slimefsdp.models.hf_folder`, torch is not
imported, only headers are read, and nothing in a folder is trusted. Format:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimefsdp.errors import ModelError, short_repr
from slimefsdp.io.safetensors_header import COPY_AGAIN, TensorEntry, read_header, read_json_object

FIELD = "lora.path"
CONFIG_FILE, TENSOR_FILE, PICKLE_FILE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
BASE_DIGEST, BASE_DTYPE = "slimefsdp.base_digest", "slimefsdp.base_dtype"
"""Metadata keys of adapter_model.safetensors: a digest of the adapters' base weights, and their dtype."""
ADAPTER_FOLDER = "adapter"  # subfolder of a folder of weights; slimefsdp.weight_sync.vllm_plugin reads it too
MATRICES = ("lora_A", "lora_B")  # ends of the names of an adapter's matrices in memory
FLOATS = ("F64", "F32", "BF16", "F16")

_LARGEST = 1e30  # upper limit of lora.alpha
_WRAPPER = ".base_layer"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_READ = {"peft_type", "task_type", "r", "lora_alpha", "bias", "init_lora_weights", "use_rslora"}
_READ |= {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"}
# keys without effect on the computed numbers
_WITHOUT_EFFECT = {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version"}
_WITHOUT_EFFECT |= {"runtime_config", "megatron_core", "qalora_group_size"}
# accepted initialisations of A and B; others change the base weights or the set of trained parameters
_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """Holds a checked folder of adapters: absolute path, adapter_config.json, and the location of every tensor."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        return float(self.config["lora_alpha"])

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Returns name -> (rows, columns) of the weight, for the linear modules with an adapter."""
        names = sorted({_matched(name)[1] for name in self.tensors})
        names = [name for name in names if not self.parameters_of(_unwrapped(name)[0])]
        return {
            name: (self.tensors[tensor_name(name, "B")].shape[0], self.tensors[tensor_name(name, "A")].shape[1])
            for name in names
        }

    @property
    def stacks(self) -> dict[str, list[str]]:
        """Returns name -> adapted parameters in alphabetical order, for the modules of experts with adapters."""
        owners = sorted({_unwrapped(_matched(name)[1])[0] for name in self.tensors})
        return {owner: parameters for owner in owners if (parameters := self.parameters_of(owner))}

    @property
    def targets(self) -> list[str]:
        """Returns the names, for lora.targets, of the adapted linear modules and of the adapted stacks of experts."""
        stacks = [f"{owner}.{parameter}" for owner, parameters in self.stacks.items() for parameter in parameters]
        return [*self.modules, *stacks]

    def parameters_of(self, module: str) -> list[str]:
        """Returns the names of a module's parameters that target_parameters lists."""
        keys = [key.rpartition(".") for key in self.config.get("target_parameters") or ()]
        return sorted({own for owner, _, own in keys if module == owner or module.endswith(f".{owner}")})

    def chooses(self, module: str) -> bool:
        """Returns whether target_modules, and the keys that narrow it, select a linear module by peft's own rule.

        Under `all-linear` the result is True for every module, so the caller must exclude the head.
        """
        excluded = self.config.get("exclude_modules")
        if excluded and _is_one_of(module, excluded):
            return False
        targets = self.config["target_modules"] or ()
        if isinstance(targets, str):
            return self.chooses_all_linear or re.fullmatch(targets, module) is not None
        if module in targets:
            return True
        return _is_one_of(module, targets) and self._is_in_a_chosen_layer(module)

    @property
    def chooses_all_linear(self) -> bool:
        """Returns whether target_modules is peft's keyword for all linear modules except the head."""
        targets = self.config["target_modules"]
        return isinstance(targets, str) and targets.lower() == "all-linear"

    def _is_in_a_chosen_layer(self, module: str) -> bool:
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.config.get("layers_pattern") or []
        before = [rf"(?:^|.*?\.){pattern}" for pattern in ([patterns] if isinstance(patterns, str) else patterns)]
        for expression in before or [r".*?\.[^.]*"]:
            if found := re.match(rf"{expression}\.(?P<layer>\d+)\.", module):
                return int(found["layer"]) in ([layers] if isinstance(layers, int) else layers)
        return False

    def check_room(self, rank: int, targets: Collection[str]) -> None:
        """Checks that the adapters have at most this rank, and belong only to these modules and stacks of experts.

        Raises:
            ModelError: the adapters have a larger rank, or belong to another module or stack.
        """
        if self.rank > rank:
            raise ModelError(
                f"the adapters of {self.path} have rank {self.rank}, and there is room for lora.rank={rank}",
                hint=f"set lora.rank={self.rank}, or train adapters of a smaller rank",
            )
        if surplus := [name for name in self.targets if name not in targets]:
            raise ModelError(
                f"{self.path} has an adapter of {surplus[0]}, which lora.targets does not choose",
                hint="choose it in lora.targets",
            )

    def check_base(self, shapes: Mapping[str, Sequence[int]], base: Path) -> None:
        """Checks that a model has the adapted linear modules; `slimefsdp.models.lora.check_is_of` also checks experts.

        Args:
            shapes: names of weights -> (rows, columns, ..).
            base: the model's folder, for errors.

        Raises:
            ModelError: the model lacks an adapted module, the module has another shape, or the adapters' rank exceeds
                the rank of a matrix.
        """
        for module, (rows, columns) in self.modules.items():
            shape = shapes.get(f"{module}.weight")
            if shape is not None and tuple(shape) == (rows, columns):
                if self.rank <= min(rows, columns):
                    continue
                raise ModelError(
                    f"r={self.rank} in {self.path / CONFIG_FILE} is more than the rank of {module}.weight, a matrix of "
                    f"{rows} x {columns}",
                    field=FIELD,
                    hint=f"name adapters of rank {min(rows, columns)} at most",
                )
            problem = "has no such matrix" if shape is None else f"has one of {' x '.join(map(str, shape))}"
            raise wrong_tensor(
                tensor_name(module, "A"),
                f"of {self.path} is for {module}.weight of {rows} x {columns}, and the model at {base} {problem}",
                "name the model that the adapters were trained on as model.path",
            )


def tensor_name(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def stack_modules(stacks: Iterable[str]) -> dict[str, str]:
    """Returns for each stack of experts the module name that peft uses in tensor names.

    Args:
        stacks: full names of parameters; the stacks of one module have the module's order.
    """
    by_owner: dict[str, list[str]] = {}
    for stack in stacks:
        by_owner.setdefault(stack.rpartition(".")[0], []).append(stack)
    return {
        stack: owner + _WRAPPER * (len(own) - 1 - index)
        for owner, own in by_owner.items()
        for index, stack in enumerate(own)
    }


def read_peft_folder(path: Path) -> PeftFolder:
    """Reads the adapters of a folder, without reading any tensor.

    Raises:
        ModelError: a file is missing or malformed, a setting of peft is not supported, or a tensor is missing, surplus,
            or has a wrong shape or dtype.
    """
    try:
        return _read(path)
    except ModelError as error:
        error.field = FIELD
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of an unknown user
        raise ModelError(f"{path} cannot be read: {error}", field=FIELD, hint="make the folder readable") from error


def wrong_tensor(name: str, problem: str, hint: str) -> ModelError:
    return ModelError(f"tensor {name!r:.200} {problem}", field=FIELD, hint=hint)


def _read(path: Path) -> PeftFolder:
    folder = path.expanduser().absolute()
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{str(path)!r} {problem}", hint=f"name the folder that holds {CONFIG_FILE}")
    config_file, tensor_file = folder / CONFIG_FILE, folder / TENSOR_FILE
    if not config_file.is_file():
        raise ModelError(f"{folder} has no {CONFIG_FILE}", hint="name a folder that peft's save_pretrained wrote")
    if not tensor_file.is_file():
        if (folder / PICKLE_FILE).exists():
            raise ModelError(
                f"{folder} has no {TENSOR_FILE}, only {PICKLE_FILE!r}: pickles are refused",
                hint="open it with peft if you trust it, and save_pretrained() it again: loading it can run code",
            )
        raise ModelError(f"{folder} has no {TENSOR_FILE}", hint=COPY_AGAIN)
    config = read_json_object(config_file)
    for key, rule, hint in _config_problems(config):  # only the first: the checks of later ones rely on it
        raise ModelError(f"{key}={short_repr(config.get(key))} in {config_file} {rule}", hint=hint)
    header = read_header(tensor_file)
    adapters = PeftFolder(folder, config, header.tensors, header.metadata)
    _check_tensors(adapters, tensor_file)
    _check_stacks(adapters, tensor_file)
    return adapters


def _config_problems(config: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yields (key, what is wrong with its value, the way out) for each key that is not supported."""

    def are_texts(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)

    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    initialisation = config.get("init_lora_weights")
    own = "restore the adapters' own value"
    if config.get("peft_type") != "LORA":
        yield "peft_type", "is not LORA", "name a folder of LoRA adapters"
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield "task_type", "is another task than CAUSAL_LM", "name adapters of a causal language model"
    if config.get("bias") not in (None, "none"):
        yield "bias", "trains biases, which are not adapters", "train with bias='none'"
    name = initialisation.lower() if isinstance(initialisation, str) else initialisation
    if name not in _INITIALISATIONS or type(name) not in (bool, str, type(None)):
        hint = "convert it to plain LoRA (peft: save_pretrained(path_initial_model_for_weight_conversion=..))"
        yield "init_lora_weights", "may have changed the base weights of the adapters", hint
    if type(rank) is not int or rank < 1:
        yield "r", "is no whole number from 1 on", own
    elif type(alpha) not in (int, float) or not 0 < alpha <= _LARGEST:
        yield "lora_alpha", f"is no number above 0, of at most {_LARGEST:g}", own
    elif config.get("use_rslora"):
        equal = f"{alpha * math.sqrt(rank)!r}, which computes the same"
        hint = f"in a copy of the folder set use_rslora to false and lora_alpha to {equal}"
        yield "use_rslora", "scales by alpha / sqrt(r), which no setting here does", hint
    if config.get("lora_dropout"):
        hint = "in a copy of the folder set lora_dropout to 0, which does not change what the adapters compute"
        yield "lora_dropout", "is noise in training, of which there is none here", hint
    for key, value in config.items():
        if key not in _READ | _WITHOUT_EFFECT and value:
            yield key, "cannot be honoured", "name adapters that were trained without it"

    hint = "restore what peft wrote"
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern")
    stacks = config.get("target_parameters")
    if stacks and not are_texts(stacks):
        yield "target_parameters", "is no list of names", hint
    for stack in stacks or ():
        owner, _, parameter = stack.rpartition(".")
        if not owner or parameter == "weight":
            rule = f"has {stack!r}, which does not name a module and its stack of experts"
            names = "names such as mlp.experts.down_proj there, and with linear modules in target_modules"
            yield "target_parameters", rule, f"train with {names}"
    if (targets or not stacks) and not (targets and (isinstance(targets, str) or are_texts(targets))):
        yield "target_modules", "is neither a list of names nor a pattern", hint
    if excluded and not (isinstance(excluded, str) or are_texts(excluded)):
        yield "exclude_modules", "is neither a list of names nor a pattern", hint
    are_layers = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if layers is not None and not (type(layers) is int or are_layers):
        yield "layers_to_transform", "is no list of layers", hint
    if layers is not None and isinstance(targets, str):
        yield "layers_to_transform", "does not go with a target_modules that is one pattern, in peft neither", hint
    if patterns and not (isinstance(patterns, str) or are_texts(patterns)):
        yield "layers_pattern", "is no list of names", hint
    if patterns and layers is None:
        yield "layers_pattern", "has no effect without layers_to_transform, in peft neither", hint
    of_layers = [patterns] if isinstance(patterns, str) else patterns or []
    for key, texts in {"target_modules": [targets], "exclude_modules": [excluded], "layers_pattern": of_layers}.items():
        for text in texts:
            try:
                re.compile(text if isinstance(text, str) else "")
            except re.error as error:
                yield key, f"is no regular expression ({error})", hint


def _check_tensors(folder: PeftFolder, file: Path) -> None:
    if not folder.tensors:
        raise ModelError(f"{file} holds no tensor", hint=COPY_AGAIN)
    for name, entry in folder.tensors.items():
        match = _TENSOR.fullmatch(name)
        owner, wrapped = _unwrapped(match[1]) if match else ("", 0)
        stacks = folder.parameters_of(owner)
        if not match or wrapped >= max(len(stacks), 1):
            raise wrong_tensor(
                name,
                f"in {file} is no A or B of a linear module or a stack of experts",
                "name adapters of these alone, saved by save_pretrained(save_embedding_layers=False)",
            )
        module, matrix = match[1], match[2]
        other = tensor_name(module, "B" if matrix == "A" else "A")
        inner = [tensor_name(owner + _WRAPPER * index, "A") for index in range(len(stacks))]
        for needed in (other, *inner):
            if needed not in folder.tensors:
                raise wrong_tensor(needed, f"is missing from {file}", COPY_AGAIN)
        if entry.dtype not in FLOATS:
            raise wrong_tensor(name, f"is {entry.dtype} in {file}, no float", "save the adapters as floats")
        counted = entry.shape[0 if matrix == "A" else -1] if len(entry.shape) == 2 else 0
        if not counted or counted % folder.rank or (not stacks and counted != folder.rank):
            ranks = f"a multiple of {folder.rank}" if stacks else str(folder.rank)
            wanted = f"[{ranks}, columns]" if matrix == "A" else f"[rows, {ranks}]"
            raise wrong_tensor(
                name, f"has shape {list(entry.shape)} in {file}, where r={folder.rank} means {wanted}", COPY_AGAIN
            )
        if not stacks and not folder.chooses(module):
            targets = short_repr(folder.config["target_modules"])
            raise wrong_tensor(
                name,
                f"is in {file}, but target_modules={targets} and what narrows it do not choose {module}",
                "restore the adapter_config.json that was saved with it",
            )


def _check_stacks(folder: PeftFolder, file: Path) -> None:
    """Checks that every parameter in target_parameters has tensors."""
    stacks = [f".{owner}.{parameter}" for owner, parameters in folder.stacks.items() for parameter in parameters]
    for key in folder.config.get("target_parameters") or ():
        if not any(stack.endswith(f".{key}") for stack in stacks):
            raise ModelError(
                f"target_parameters={short_repr(folder.config['target_parameters'])} in {folder.path / CONFIG_FILE} "
                f"names {key}, and {file.name} has no tensor of it",
                hint=COPY_AGAIN,
            )


def _unwrapped(module: str) -> tuple[str, int]:
    """Returns the name of the module inside peft's wrappers, and the number of wrappers in `module`."""
    owner = module
    while owner.endswith(_WRAPPER):
        owner = owner.removesuffix(_WRAPPER)
    return owner, (len(module) - len(owner)) // len(_WRAPPER)


def _matched(name: str) -> re.Match[str]:
    match = _TENSOR.fullmatch(name)
    assert match
    return match


def _is_one_of(module: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return module in targets or any(module.endswith(f".{target}") for target in targets)
