"""Which modules of a model are FSDP units: gathered, computed with, and freed together.

A unit's parameters are whole only inside its forward and backward, so it must be a module that the model calls. The
root, which is not listed here, keeps what is in no unit: the final norm, the head, and an embedding tied to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from slimefsdp.errors import ConfigError

if TYPE_CHECKING:  # a name for mypy only: models lie above this package
    from slimefsdp.models.decoder import DecoderModel


def choose_units(
    policy: DecoderModel, *, wrap_layers: Sequence[str] | None = None, min_parameters: int | None = None
) -> list[nn.Module]:
    """The units, outer ones before those inside them, otherwise in the order in which the model registers them.

    Args:
        wrap_layers: class names; all modules of these classes are units.
        min_parameters: instead, modules with at least so many parameters that are in no smaller unit.
            Neither: decoder layers, and the embedding unless it is tied to the head.

    Raises:
        ConfigError: a class of `wrap_layers` has no module here; the candidates are named.
    """
    candidates = _candidates(policy)
    if wrap_layers is not None:
        known = {_class_name(module) for module in candidates}
        for name in wrap_layers:
            if name not in known:
                raise ConfigError(
                    f"fsdp.wrap_layers names {name}, and no module of this {policy.hf.config.model_type} model "
                    "that can be a unit is one",
                    field="fsdp.wrap_layers",
                    hint=f"use some of {', '.join(sorted(known))}",
                )
        return [module for module in candidates if _class_name(module) in wrap_layers]
    if min_parameters is not None:
        chosen: set[nn.Module] = set()
        _choose_by_size(policy.hf.get_decoder(), set(candidates), min_parameters, chosen)
        return [module for module in candidates if module in chosen]
    chosen = {*policy.decoder_layers(), policy.hf.get_input_embeddings()}
    return [module for module in candidates if module in chosen]


def _candidates(policy: DecoderModel) -> list[nn.Module]:
    """Modules with parameters that the decoder calls, in its order; a list of modules is never called."""
    decoder = policy.hf.get_decoder()
    in_root = {decoder, policy.hf.get_input_embeddings()} if policy.has_tied_embeddings else {decoder}
    return [
        module
        for module in decoder.modules()
        if module not in in_root
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        and any(True for _ in module.parameters())
    ]


def _choose_by_size(module: nn.Module, candidates: set[nn.Module], least: int, chosen: set[nn.Module]) -> int:
    """Adds to `chosen` from the inside out; returns the parameters of `module` that are in no unit."""
    rest = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    rest += sum(_choose_by_size(child, candidates, least, chosen) for child in module.children())
    if module in candidates and rest >= least:
        chosen.add(module)
        return 0
    return rest


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
