"""Draws random weights by transformers' own rules, with the same bits on every mesh.

Every rank draws the whole model on the host, one decoder layer at a time, and keeps its own rows. The generator is
seeded for every module from the run's seed and the module's name, so no draw depends on earlier ones. Values are drawn
in float32, whatever the dtype of the parameters.
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
        template: the same model, unsharded, with parameters on the meta device before and after the call.
        seed: the same on every rank.

    Raises:
        ModelError: transformers has no rule for a parameter.
    """
    own_weights = dict(model.named_weights())
    saved_state = torch.default_generator.get_state()  # the one that transformers' rules draw from
    try:
        for unit in _units(template, own_weights.keys()):
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
                start, end = local_rows(own_weights[name])
                local_shard(own_weights[name]).copy_(parameter[start:end])
            _place(unit, "meta")
    finally:
        torch.default_generator.set_state(saved_state)


def _units(template: DecoderModel, wanted: Container[str]) -> list[dict[str, nn.Module]]:
    """Returns groups of modules by name, children before parents, that must be drawn together.

    A group is a decoder layer, because initialisation rules may change children but stay in their layer, or a single
    module outside of the layers. The latter needs a parameter in `wanted`, so that a head that is tied to the embedding
    is not drawn twice.
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
        (f"{name}.{own_name}", parameter)
        for name, module in unit.items()
        for own_name, parameter in module.named_parameters(recurse=False)
    ]


def _place(unit: dict[str, nn.Module], device: str) -> None:
    """Allocates new parameters for the unit on a device, filled with NaN to detect parameters that no rule draws."""
    for module in unit.values():
        for own_name, parameter in module.named_parameters(recurse=False):
            blank = torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=device)
            module._parameters[own_name] = nn.Parameter(blank, requires_grad=False)


def seed_of_module(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
