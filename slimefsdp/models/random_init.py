"""Random weights from a configuration alone: transformers' own rules, and the same bits on every mesh.

The model is drawn a decoder layer at a time, in full, on the host, on every rank alike; each rank keeps its rows. Every
module has a generator of its own, seeded by the run's seed and the module's name, so that no draw depends on how many
came before it. Values are drawn in float32 for every dtype of the masters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

import torch
from torch import nn

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ModelError
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.load_weights import local_rows


@torch.no_grad()
def draw_weights(model: DecoderModel, template: DecoderModel, seed: int) -> None:
    """Fills the local shards of `model` at random; no communication.

    Args:
        model: sharded or not, its parameters in memory.
        template: the same model, unsharded, its parameters on the meta device, where they are again afterwards.
        seed: the same on every rank.

    Raises:
        ModelError: transformers has no rule for a parameter.
    """
    mine = dict(model.named_weights())
    kept = torch.default_generator.get_state()  # the one that transformers' rules draw from
    try:
        for unit in _units(template, mine.keys()):
            _place(unit, "cpu")
            for name, module in unit.items():
                torch.default_generator.manual_seed(seed_of_module(seed, name))
                template.hf._init_weights(module)
            for name, parameter in _own_parameters(unit):
                if not torch.isfinite(parameter).all():
                    raise ModelError(
                        f"transformers has no rule to draw parameter {name!r} by",
                        field="model.init",
                        hint="set model.init=folder, and give a folder with weights",
                    )
                start, end = local_rows(mine[name])
                local_shard(mine[name]).copy_(parameter[start:end])
            _place(unit, "meta")
    finally:
        torch.default_generator.set_state(kept)


def _units(template: DecoderModel, wanted: Container[str]) -> list[dict[str, nn.Module]]:
    """Returns modules by name, children before parents, in groups: a rule may reach into children, but stays in its
    layer.

    Outside the layers, only those with a parameter in `wanted`: a head tied to the embedding is not drawn again.
    """
    layers = list(template.decoder_layers())
    units: list[dict[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in template.hf.named_modules():
        if module in layers:
            modules = [(f"{name}.{child}".rstrip("."), part) for child, part in module.named_modules()]
            units.append(dict(reversed(modules)))
            inside.update(module.modules())
        elif module not in inside and any(own in wanted for own, _ in _own_parameters({name: module})):
            units.append({name: module})
    return units


def _own_parameters(unit: dict[str, nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{name}.{own}", parameter)
        for name, module in unit.items()
        for own, parameter in module.named_parameters(recurse=False)
    ]


def _place(unit: dict[str, nn.Module], device: str) -> None:
    """Allocates new parameters for the unit on a device, NaN until something is drawn."""
    for module in unit.values():
        for own, parameter in module.named_parameters(recurse=False):
            blank = torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=device)
            module._parameters[own] = nn.Parameter(blank, requires_grad=False)


def seed_of_module(seed: int, name: str) -> int:
    """Returns the seed of the generator that draws the module of this name."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
