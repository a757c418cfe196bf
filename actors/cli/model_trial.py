"""Models are built before anything starts: without weights, in a process of its own, where settings name parts of them.

`python -m actors.cli.model_trial` is that process. It does what every rank does first, and so refuses what ranks would
refuse: adapters on modules that are not there or of too high a rank, units of FSDP and frozen parameters by names that
the model does not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from actors.rollout.tokenizer import end_with_parent, run_beside, stream_of_answer
from actors.startup import stage
from slimefsdp.config import RunConfig
from slimefsdp.config.run import config_from_dict
from slimefsdp.errors import ConfigError, ModelError, ResourceError, SlimeError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.peft_folder import read_peft_folder
from slimefsdp.rpc import Role


def try_models(config: RunConfig) -> None:
    """Builds the models that are trained, unless the settings name no part of them, or such as every model has.

    Their folders need config.json alone.

    Raises:
        ConfigError, ModelError: as `slimefsdp.models.build.choose_what_trains` and
            `slimefsdp.distributed.fsdp.choose_units`.
        ResourceError: it took longer than cluster.launch_timeout_s, or its process ended.
    """
    if not (config.model.frozen or config.fsdp.wrap or _may_lack_targets(config)):
        return
    timeout_s = config.cluster.launch_timeout_s
    with stage("building the model without its weights", is_short=True):
        try:
            done = run_beside("actors.cli.model_trial", config.model_dump(mode="json", exclude_unset=True), timeout_s)
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"building the model without its weights took more than cluster.launch_timeout_s={timeout_s:g}",
                field="cluster.launch_timeout_s",
                hint="raise it",
            ) from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-500:]
        raise ResourceError(
            f"the process that builds the model without its weights ended with status {done.returncode}: {said}",
            field="model.path",
            hint="look at what it said, and at the memory that is left",
        )
    if (answer := json.loads(done.stdout)) is not None:
        kind = ModelError if answer["code"] == ModelError.code else ConfigError
        raise kind(answer["error"], field=answer["field"], hint=answer["hint"])


def _may_lack_targets(config: RunConfig) -> bool:
    """Whether it takes the model to know that it has all that adapters are asked for."""
    if not config.lora.are_trained:
        return False
    if config.lora.rank is None or config.lora.path is not None:
        return True
    path, field = config.folder_of("actor")
    model_config = read_model_folder(path, field=field, with_weights=False).config
    spec = ModelSpec.from_config(model_config, field=field)
    # every decoder has these, but gpt2's are no nn.Linear, and a mixture may have no MLP beside its experts
    known = {"attention", "all-linear"} | ({"mlp"} if spec.experts == 1 else set())
    is_known = model_config["model_type"] != "gpt2" and known.issuperset(config.lora.targets)
    return not is_known or config.lora.rank > spec.highest_rank


def build_models(config: RunConfig) -> None:
    """Builds the models in this process, without memory for their parameters."""
    import torch

    from slimefsdp.distributed.fsdp import choose_units
    from slimefsdp.models.build import Trains, build_model, choose_what_trains
    from slimefsdp.models.decoder import DecoderModel, PolicyModel, ValueModel
    from slimefsdp.training.build import compute_dtype, lora_of

    adapters = None if config.lora.path is None else read_peft_folder(config.lora.path)
    trained: list[tuple[Role, type[DecoderModel]]] = [("actor", PolicyModel)]
    trained += [("critic", ValueModel)] if config.algorithm == "ppo" else []
    for role, kind in trained:
        path, field = config.folder_of(role)
        folder = read_model_folder(path, field=field, with_weights=False)
        model = build_model(kind, folder, torch.float32)
        frozen = (config.model.frozen or ()) if role == "actor" else ()
        of_folder = adapters if role == "actor" else None
        choose_what_trains(model, folder, Trains(frozen, lora_of(config), of_folder), base_dtype=compute_dtype(config))
        choose_units(model, config.fsdp.wrap)


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    answer = None
    try:
        build_models(config_from_dict(json.load(sys.stdin.buffer)))
    except SlimeError as error:
        answer = {"error": error.message, "code": error.code, "field": error.field, "hint": error.hint}
    with os.fdopen(stream, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    _main()
