"""Cuts a decoder over tensor-parallel ranks, with sequence and vocabulary parallelism, before FSDP shards it.

Between the blocks of a layer (attention, MLP) each tp rank has its own tokens. A block gathers the tokens of all tp
ranks, computes with this rank's part of the matrices, and returns partial sums. These are added up over the ranks, and
each rank gets the totals of its own tokens (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). So gradients of
everything that is not cut, such as norms, are partial sums over tokens, and FSDP's sum over all ranks completes them.

A cut parameter is a DTensor, which has the whole tensor's shape, and tells which part of it this rank holds. In the
block's forward, the module's attribute is this rank's part as a plain tensor, so modules compute as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from slimefsdp.distributed.mesh import CutMesh
from slimefsdp.distributed.token_shares import gather_tokens, local_part, scatter_tokens
from slimefsdp.errors import ConfigError

if TYPE_CHECKING:  # slimefsdp.models imports this package
    from slimefsdp.models.decoder import DecoderModel

_BLOCKS = ("self_attn", "mlp")
# linear modules whose outputs are cut (rows of the weight, and the bias), and whose inputs are cut (columns)
_OUTPUTS_CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "c_fc")
_INPUTS_CUT = ("o_proj", "down_proj", "dense", "fc2")
_KEYS_AND_VALUES = ("k_proj", "v_proj")
_PER_HEAD = ("sinks",)  # parameters of an attention block with one number per head
_WHOLE = ("q_norm", "k_norm")  # norms of single heads, which every rank applies to its own heads

LocalPart = Callable[[], Tensor]
"""A function that returns this rank's part of a parameter; the module computes with this part instead."""


def cut_over_tp(model: DecoderModel, mesh: CutMesh, *, compile_blocks: bool = False) -> None:
    """Cuts the model's blocks, embedding and head over tp ranks, in place; parameters may be on the meta device.

    Modules of experts are not cut: each tp rank computes the experts of its own tokens.

    Args:
        compile_blocks: compile what a block computes between its collectives.

    Raises:
        ConfigError: tp cannot cut the heads, rows or vocabulary, or a block has a module that this file does not know.
    """
    model.tp = mesh
    config = model.hf.config
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    _require_divisible(config.num_attention_heads, "attention heads", mesh.size)
    if kv_heads % mesh.size and mesh.size % kv_heads:
        raise _cannot_cut(f"{kv_heads} key-value heads over mesh.tp={mesh.size} ranks", "a divisor or a multiple of it")
    for layer in model.decoder_layers():
        for name in _BLOCKS:
            block = getattr(layer, name, None)
            if block is None:
                raise _cannot_cut(f"a {config.model_type} model, whose layers have no {name}", "1")
            if not hasattr(block, "experts"):
                _cut_block(block, kv_heads, mesh, compile_blocks)
    embedding, head = model.hf.get_input_embeddings(), getattr(model.hf, "lm_head", None)  # a critic has none
    assert isinstance(embedding, nn.Embedding)
    is_tied = model.has_tied_embeddings
    _require_divisible(len(embedding.weight), "words of the vocabulary", mesh.size)
    _cut_embedding(embedding, mesh)
    if head is not None and is_tied:
        head.weight = embedding.weight
    elif head is not None:
        for name, parameter in head.named_parameters(recurse=False):
            if name != "lora_A":
                cut_parameter(head, name, parameter, 0, mesh)


def _cut_block(block: nn.Module, kv_heads: int, mesh: CutMesh, compile_blocks: bool) -> None:
    local: dict[tuple[nn.Module, str], LocalPart] = {}
    for path, module in block.named_modules():
        kind = path.rpartition(".")[2]
        for name, parameter in list(module.named_parameters(recurse=False)):
            if kind in _KEYS_AND_VALUES and kv_heads % mesh.size:
                if name != "lora_A":
                    local[module, name] = _own_head_of(module, name, kv_heads, mesh)
            elif (kind in _OUTPUTS_CUT and name != "lora_A") or (module is block and name in _PER_HEAD):
                local[module, name] = cut_parameter(module, name, parameter, 0, mesh)
            elif kind in _INPUTS_CUT and name in ("weight", "lora_A"):
                local[module, name] = cut_parameter(module, name, parameter, 1, mesh)
            elif kind in _INPUTS_CUT and name == "bias":
                local[module, name] = _of_first_rank(module, name, mesh)
            elif kind not in (*_OUTPUTS_CUT, *_INPUTS_CUT, *_WHOLE):
                raise _cannot_cut(f"{path}.{name} of {type(block).__name__}", "1")
    forward = torch.compile(block.forward, dynamic=True) if compile_blocks else block.forward

    @torch.compiler.disable
    def forward_of_all_tokens(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (gather_tokens(args[0], mesh), *args[1:])
        else:
            kwargs["hidden_states"] = gather_tokens(kwargs["hidden_states"], mesh)
        with local_parameters(local):
            output = forward(*args, **kwargs)
        if isinstance(output, tuple):
            return scatter_tokens(output[0], mesh), *output[1:]
        return scatter_tokens(output, mesh)

    block.forward = forward_of_all_tokens


@contextmanager
def local_parameters(local: dict[tuple[nn.Module, str], LocalPart]) -> Iterator[None]:
    """Has modules compute with this rank's parts of their parameters inside the `with` statement."""
    for (module, name), part in local.items():
        module.__dict__[name] = part()  # an attribute of the instance takes precedence over the parameter
    try:
        yield
    finally:
        for module, name in local:
            module.__dict__.pop(name, None)  # modules with adapters remove the attribute themselves


def cut_parameter(module: nn.Module, name: str, parameter: nn.Parameter, dim: int, mesh: CutMesh) -> LocalPart:
    """Replaces a parameter by a DTensor that is cut over tp or ep ranks; returns a function for this rank's part."""
    _require_divisible(parameter.shape[dim], f"{'rows' if dim == 0 else 'columns'} of {name}", mesh.size)
    own = parameter.detach().chunk(mesh.size, dim)[mesh.rank].contiguous()
    whole = DTensor.from_local(own, mesh.axis, [Shard(dim)], run_check=False)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    return lambda: local_part(module._parameters[name])  # type: ignore[arg-type]


def _own_head_of(module: nn.Module, name: str, kv_heads: int, mesh: CutMesh) -> LocalPart:
    """Returns a function for the rows of the key-value head that this rank's queries read; the parameter is not cut."""
    head = mesh.rank * kv_heads // mesh.size

    def rows() -> Tensor:
        whole = module._parameters[name]
        assert whole is not None
        size = whole.shape[0] // kv_heads
        return whole[head * size : (head + 1) * size]

    return rows


def _of_first_rank(module: nn.Module, name: str, mesh: CutMesh) -> LocalPart:
    """Returns a function for the bias of a partial sum: the bias on the first tp rank, 0 on the others.

    The 0 is a product with the bias, since FSDP needs a gradient on every rank, here of 0.
    """

    def bias() -> Tensor:
        whole = module._parameters[name]
        assert whole is not None
        return whole if mesh.rank == 0 else 0.0 * whole

    return bias


def _cut_embedding(embedding: nn.Embedding, mesh: CutMesh) -> None:
    words = len(embedding.weight) // mesh.size
    start = mesh.rank * words
    weight = embedding.get_parameter("weight")
    local: dict[tuple[nn.Module, str], LocalPart] = {
        (embedding, "weight"): cut_parameter(embedding, "weight", weight, 0, mesh)
    }
    padding = embedding.padding_idx
    # only the rank that owns the padding word's row keeps its gradient at 0
    embedding.padding_idx = padding - start if padding is not None and start <= padding < start + words else None
    forward = embedding.forward

    @torch.compiler.disable
    def forward_of_own_words(tokens: Tensor) -> Tensor:
        columns = tokens - start
        is_here = (columns >= 0) & (columns < words)
        with local_parameters(local):
            rows = forward(columns.clamp(0, words - 1))
        return scatter_tokens(rows * is_here[..., None], mesh)

    embedding.forward = forward_of_own_words  # type: ignore[method-assign]


def _require_divisible(count: int, what: str, size: int) -> None:
    if count % size:
        raise _cannot_cut(f"{count} {what} over mesh.tp={size} ranks", "a divisor of it")


def _cannot_cut(what: str, way_out: str) -> ConfigError:
    return ConfigError(
        f"tensor parallelism cannot cut {what}", field="mesh.tp", hint=f"set mesh.tp to {way_out}, or to 1"
    )
