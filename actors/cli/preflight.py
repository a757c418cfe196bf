"""Finds what would make a command fail, before any process is started; several commands share these checks.

`check_before_launch` makes all checks of a training run. Other commands that start ranks use `check_start`, which only
checks models, packages, servers and the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from actors.cluster.capacity import (
    check_gpus,
    check_machine,
    compute_capabilities_here,
    gpus_of_engines,
    has_nvidia_driver,
)
from actors.engines.server_client import ServerClient
from actors.model_folders import NotHere, models_to_look_at, with_model_folders
from actors.rollout.data_sets import DataSource, require_reader
from actors.rollout.groups import load_filter
from actors.rollout.prompt_files import (
    Prompts,
    data_to_look_at,
    read_prompts,
    read_set,
    with_data_commits,
    with_steps_left,
    without_overlong,
)
from actors.rollout.record_sets import RecordSet, record_sets, warn_of_shared_prompts
from actors.rollout.trials import try_environment, try_imports, try_reward
from actors.rollout.user_code import checked_code
from actors.run_dir import check_folders, check_leftovers
from actors.startup import stage
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.checkpoint.manifest import MANIFEST, check_identity, check_info
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.errors import ConfigError, SlimeError, short_repr
from slimefsdp.estimate.hardware import read_calibration
from slimefsdp.io.files import FolderLock
from slimefsdp.model_spec import ModelSpec, check_settings
from slimefsdp.models.hf_folder import check_architecture, check_tokenizer, is_shape, made_by, read_model_folder
from slimefsdp.models.peft_folder import read_peft_folder
from slimefsdp.rpc import ROLES, Role
from slimefsdp.training import advantages
from slimefsdp.training.identity import BASE_WEIGHTS, identity_of

_PYTHON_S, _SERVER_S = 60.0, 10.0  # timeouts of starting rollout.engine_python and of a server's answer


@dataclass(slots=True)
class Checked:
    """The result of checking a training run.

    Args:
        config: the settings, with local folders for models of the hub, and commits for data sets of the hub.
        prompts: the records, without overlong records if all data and the tokenizer are present. If some data is
            absent, only the records of data.train, if these are present.
        sets: a description of each set of records.
        absent: what is not on this machine yet, such as models and data; empty when a run starts.
    """

    config: RunConfig
    prompts: Prompts
    sets: list[RecordSet]
    absent: list[NotHere]


@contextmanager
def _kept(errors: list[SlimeError]) -> Iterator[None]:
    """Appends a typed error that the block raises to `errors`, so that all errors can be reported at once."""
    try:
        yield
    except SlimeError as error:
        errors.append(error)


def _raise(errors: list[SlimeError]) -> None:
    """Raises the first error, with the texts of all further errors in its `others`; does nothing without errors."""
    if errors:
        first, *rest = errors
        first.others = (*first.others, *(text for error in rest for text in str(error).split("\n  also ")))
        raise first


def check_before_launch(
    config: RunConfig, *, only_looks: bool = False, has_ranks: bool = False, is_own_loop: bool = False
) -> Checked:
    """Checks everything that a training run needs.

    Checks that take seconds (building models without weights, the lengths of all prompts, the trial of an environment
    and of a reward) run only if all other checks pass.

    Args:
        only_looks: whether to leave the machine unchanged, as `check` and `train --dry-run` do: run.dir is not locked,
            weights are not downloaded, and nothing is written. Models and data that a start would obtain are listed in
            `absent` instead of being refused.
        has_ranks: whether the ranks are already running, so that cores and GPUs are not checked.
        is_own_loop: whether the settings are for a user's own loop, which needs neither data nor run.dir.

    Raises:
        SlimeError: the first problem, in the class for settings, model folder, data, a user's function or the machine;
            `others` has the texts of all further problems.
    """
    errors: list[SlimeError] = []
    run = Checked(config, Prompts([], {}), [], absent_from_machine(config) if only_looks else [])
    with stage("checking settings and data", is_short=True):
        if not is_own_loop:
            with _kept(errors):
                check_ready_to_train(config)
        has_records = not (is_own_loop or errors)
        with _kept(errors):
            check_installed(config, run.absent)
        with _kept(errors):
            _check_models_of_run(run, only_looks=only_looks or bool(errors), has_tokenizer=not is_own_loop)
        if has_records:
            with _kept(errors):
                _read_records(run, only_looks=only_looks)
            with _kept(errors):
                check_folders(run.config)
            with _kept(errors):
                check_leftovers(run.config)
        with _kept(errors):
            if config.batch.cost_model is not None:
                read_calibration(config.batch.cost_model, field="batch.cost_model")
        with _kept(errors):
            check_functions(run.config)
        with _kept(errors):
            check_servers(run.config, run.absent)
        with _kept(errors):
            if not has_ranks:
                check_machine(run.config)
                check_gpus(run.config, engines=0 if is_own_loop else gpus_of_engines(run.config))
    _raise(errors)
    if not only_looks:
        assert config.run.dir is not None
        FolderLock(config.run.dir).acquire()  # kept until this process ends: no other run may begin while Ray starts
        check_leftovers(run.config)
    with _kept(errors):
        try_models(run.config)
    if not is_own_loop:
        with _kept(errors):
            _try_records(run)
        warn_of_shared_prompts(run.sets)
        warn_of_long_warmup(run.config)
    _raise(errors)
    return run


def warn_of_long_warmup(config: RunConfig) -> None:
    """Prints a note if the run ends before the learning rate has risen to optim.lr."""
    if config.run.steps is None:
        return
    steps_of_policy = config.run.steps - (config.critic.warmup_steps if config.algorithm == "ppo" else 0)
    updates, warmup = max(0, steps_of_policy) * config.updates_per_step, config.warmup_updates
    if updates < warmup:
        print(
            f"optim.warmup_updates: the run ends after {updates:,} of {warmup:,} warm-up updates, so the learning rate "
            f"rises to only {updates / warmup:.0%} of optim.lr",
            file=sys.stderr,
        )


def check_start(config: RunConfig, *, engines: int | None) -> RunConfig:
    """Checks what every command that starts ranks needs: models, packages, servers, and this machine's cores and GPUs.

    Args:
        engines: number of GPUs that only engines use; None means that no engines are started.

    Returns:
        The settings, with local folders for models of the hub.

    Raises:
        ConfigError, ModelError, ResourceError: something is missing or does not fit; the error names the setting.
    """
    check_installed(config)
    config = with_model_folders(config)
    check_models(config)
    try_models(config)
    if engines is not None:
        check_servers(config)
    check_machine(config)
    check_gpus(config, engines=engines or 0)
    return config


def absent_from_machine(config: RunConfig) -> list[NotHere]:
    """Lists the GPUs and the engines' Python environment, if the settings name them and this machine lacks them."""
    absent = []
    if config.mesh.device == "cuda" and config.cluster.address is None and not has_nvidia_driver():
        absent.append(NotHere("mesh.device", "cuda", "for a machine with NVIDIA GPUs; this one has no driver for them"))
    python = config.rollout.engine_python
    if python is not None and (command := made_by(python)) is not None:
        absent.append(NotHere("rollout.engine_python", str(python), f"`{command}` makes it"))
    return absent


def _is_absent(absent: Iterable[NotHere], field: str) -> bool:
    """Returns whether `absent` has this setting, or, for a `field` with a dot at the end, a setting of that section."""
    return any(item.field == field or (field.endswith(".") and item.field.startswith(field)) for item in absent)


def _check_models_of_run(run: Checked, *, only_looks: bool, has_tokenizer: bool) -> None:
    if only_looks:  # True also if the settings are refused anyway, for which no model is downloaded
        run.config, models = models_to_look_at(run.config)
        run.absent += models
    else:
        run.config = with_model_folders(run.config)
    check_models(run.config, run.absent)
    if has_tokenizer and not is_shape(run.config.model.path):  # a shape is a config.json without a tokenizer
        check_tokenizer(run.config.model.path)
    check_checkpoint_fits(run.config)


def _read_records(run: Checked, *, only_looks: bool) -> None:
    """Reads the records that the settings name, and adds commits of data sets to the settings."""
    if only_looks:
        run.config, data = data_to_look_at(run.config)
        run.absent += data
    else:
        for field, name in run.config.data.sources.items():
            require_reader(DataSource.of(name), field)
        run.config = with_data_commits(run.config)
    if not _is_absent(run.absent, "data."):
        run.prompts = read_prompts(run.config)
        return
    present = [field for field in run.config.data.sources if not _is_absent(run.absent, field)]
    records = {field: read_set(run.config, field) for field in present}
    run.prompts = Prompts(records.get("data.train", []), {})


def _try_records(run: Checked) -> None:
    """Leaves out records that are too long, and tries the environment and the reward on the first records."""
    if not _is_absent(run.absent, "data."):
        if not is_shape(run.config.model.path):
            run.prompts = without_overlong(run.config, run.prompts)
            run.config = with_steps_left(run.config, run.prompts)
            try_environment(run.config, run.prompts)
        run.sets = record_sets(run.config.data, run.prompts.heldout, run.prompts.train)
    if not _is_absent(run.absent, "data.train"):
        try_reward(run.config, run.prompts)


def check_installed(config: RunConfig, absent: Sequence[NotHere] = ()) -> None:
    """Checks that the packages, the compiler and the device that settings ask for are on this machine.

    Only wandb is required here if the ranks will run elsewhere: cluster.address is set, or mesh.device is in `absent`.

    Raises:
        ConfigError: something is missing, or does not fit mesh.device; the error names the setting.
    """
    if config.run.wandb_project is not None and find_spec("wandb") is None:  # the driver, on this machine, uses wandb
        raise ConfigError(
            f"run.wandb_project={config.run.wandb_project!r} needs the package wandb, which is not installed",
            field="run.wandb_project",
            hint="install the `wandb` extra, or leave run.wandb_project out",
        )
    runs_elsewhere = config.cluster.address is not None or _is_absent(absent, "mesh.device")
    has_gpu = has_nvidia_driver()
    if config.mesh.device == "cuda" and not (has_gpu or runs_elsewhere):
        raise ConfigError(
            "mesh.device=cuda, and this machine has no NVIDIA driver",
            field="mesh.device",
            hint="use auto or cpu, or name a cluster.address with GPUs",
        )
    on_cuda = config.mesh.device != "cpu" and (has_gpu or runs_elsewhere)
    dtype, attention = config.precision.compute_dtype, config.attention
    packages: dict[str, tuple[str, ...]] = {}  # setting -> the packages that it needs
    if attention.kernel == "flash_attn":
        packages["attention.kernel=flash_attn"] = ("flash_attn",)
    if attention.kernel == "flash_attn_3":
        packages["attention.kernel=flash_attn_3"] = ("flash_attn_interface",)
    if attention.strategy == "ring_flash_attn" and config.mesh.cp > 1:
        packages["attention.strategy=ring_flash_attn"] = ("flash_attn", "ring_flash_attn")
    for setting, names in packages.items():
        field = setting.partition("=")[0]
        if not on_cuda or dtype not in ("bfloat16", "float16"):
            device = "CUDA" if on_cuda else "a CPU"
            problem = f"{setting} computes bfloat16 and float16 on CUDA, not {dtype} on {device}"
            raise ConfigError(problem, field=field, hint=f"leave {field} at its default")
        missing = [name.replace("_", "-") for name in names if find_spec(name) is None]
        if missing and not runs_elsewhere:
            extra = "FlashAttention 3" if names == ("flash_attn_interface",) else "the `cuda` extra"
            hint = f"install {extra}, or leave {field} at its default, which needs no package"
            raise ConfigError(f"{setting} needs {' and '.join(missing)}, not installed here", field=field, hint=hint)
    if runs_elsewhere:
        return
    if config.mesh.tp > 1 or config.mesh.ep > 1:
        from slimefsdp.distributed.fsdp import require_mesh_per_parameter  # imports torch

        require_mesh_per_parameter()
    if config.model.compile:
        from slimefsdp.distributed.fsdp import require_compiler  # imports torch

        require_compiler("cuda" if on_cuda else "cpu")
    if attention.kernel == "flash_attn_3":
        from slimefsdp.attention.backends import flash_attn_3  # imports torch

        flash_attn_3.require_installed()
        if capabilities := compute_capabilities_here():
            flash_attn_3.require_capability(capabilities, "this machine")
    if (recipe := config.precision.float8) != "none":
        from slimefsdp.distributed.float8 import require_capability, require_torchao  # imports torch

        require_torchao(recipe)
        if not on_cuda:
            print(f"precision.float8={recipe} is emulated on a CPU", file=sys.stderr)
        elif capabilities := compute_capabilities_here():
            require_capability(recipe, capabilities, "this machine")


def check_models(config: RunConfig, absent: Sequence[NotHere] = ()) -> None:
    """Checks that the models of all roles can be loaded and trained on this mesh, and that adapters fit their base.

    Args:
        absent: models whose weights are not on this machine yet, and are not checked.

    Raises:
        ModelError: a folder cannot be loaded. ConfigError: attention.strategy or attention.kernel does not support the
            model on this mesh.
    """
    for path, field in dict.fromkeys(config.folder_of(role) for role in ROLES):
        with_weights = field != "model.path" or config.model.init == "folder"
        folder = read_model_folder(path, field=field, with_weights=with_weights and not _is_absent(absent, field))
        check_architecture(folder, field=field)
        check_settings(folder.config, config, field)
        shape = AttentionShape.of_model_spec(ModelSpec.from_config(folder.config)).over(config.mesh.tp)
        check_kernel(config.attention.kernel, shape, deterministic=config.run.deterministic)
        choice = choose_strategy(config.attention.strategy, shape, config.mesh.cp)
        if config.mesh.cp > 1:
            # a shape's folder is in this package; the end of the path is the model's hub name
            name = "/".join(folder.path.parts[-2:]) if is_shape(folder.path) else folder.path
            print(f"attention of {name} over {config.mesh.cp} ranks by {choice}", file=sys.stderr)
        if field == "model.path" and folder.has_weights and config.lora.path is not None:
            shapes = {name: entry.shape for name, entry in folder.tensors.items()}
            read_peft_folder(config.lora.path).check_base(shapes, folder.path)


def check_checkpoint_fits(config: RunConfig) -> None:
    """Compares the models of a resumed run with its newest checkpoint; ranks do the same when they load a checkpoint.

    The base weights of adapters are compared only by the ranks. A missing checkpoint is reported by `check_folders`.

    Raises:
        CheckpointError: a setting differs; the error names the first one.
    """
    if config.run.dir is None or not config.checkpoint.resume:
        return
    roles: tuple[Role, ...] = ("actor", "critic") if config.algorithm == "ppo" else ("actor",)
    for role in roles:
        store = CheckpointStore.of_job(config.run.dir, role)
        if (manifest := next(store.manifests(), None)) is None:
            continue
        path, field = config.folder_of(role)
        own = identity_of(config, role, read_model_folder(path, field=field, with_weights=False))
        file = store.path_of(manifest.step) / (store.part or "") / MANIFEST
        check_info(manifest.info, file)
        saved = manifest.info["identity"]
        check_identity({name: value for name, value in saved.items() if name != BASE_WEIGHTS[role]}, own, file)


def try_models(config: RunConfig) -> None:
    """Builds the models without their weights, if config.json cannot confirm what the settings say about modules.

    These settings are model.frozen, fsdp.wrap, and those of adapters.

    Raises:
        ConfigError, ModelError: as `slimefsdp.models.build.choose_what_trains` and
            `slimefsdp.distributed.fsdp.choose_units`, which every rank calls first.
    """
    if config.model.frozen or config.fsdp.wrap or _may_lack_targets(config):
        with stage("building the model without its weights", is_short=True), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about its own code
            build_models(config)


def _may_lack_targets(config: RunConfig) -> bool:
    """Returns whether the adapters might not fit the policy's modules, as far as config.json shows."""
    if not config.lora.are_trained:
        return False
    if config.lora.rank is None or config.lora.path is not None:
        return True
    path, field = config.folder_of("actor")
    model_config = read_model_folder(path, field=field, with_weights=False).config
    spec = ModelSpec.from_config(model_config, field=field)
    # every decoder has these modules, but in gpt2 they are no nn.Linear, and a mixture of experts may have no dense MLP
    known = {"attention", "all-linear"} | ({"mlp"} if spec.experts == 1 else set())
    is_known = model_config["model_type"] != "gpt2" and known.issuperset(config.lora.targets)
    return not is_known or config.lora.rank > spec.highest_rank


def build_models(config: RunConfig) -> None:
    """Builds the models that are trained, from config.json alone and without memory for their parameters."""
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
        is_actor = role == "actor"
        trains = Trains(
            (config.model.frozen or ()) if is_actor else (), lora_of(config), adapters if is_actor else None
        )
        choose_what_trains(model, folder, trains, base_dtype=compute_dtype(config))
        choose_units(model, config.fsdp.wrap)


def check_functions(config: RunConfig) -> None:
    """Imports every function and class that the settings name as `module:function`.

    Raises:
        ConfigError: a function cannot be imported or does not exist, or its import hangs or ends the process.
    """
    fields = ("advantage.estimator", "loss.policy", "rollout.reward", "rollout.environment", "rollout.filter")
    names = {field: config.value_of(field) for field in fields}
    try_imports({field: name for field, name in names.items() if name is not None}, config.cluster.launch_timeout_s)
    advantages.check_functions(config)
    if config.rollout.reward is not None or config.rollout.environment is not None:
        checked_code(config)
    if config.rollout.filter is not None:
        load_filter(config.rollout.filter)
    if config.rollout.engine != "embedded":
        from actors.engines.processes import engine_class

        engine_class(config)


def _is_on_cpu(config: RunConfig) -> bool:
    from actors.engines.dialect import is_on_cpu  # imports ray

    return is_on_cpu(config)


def check_servers(config: RunConfig, absent: Sequence[NotHere] = ()) -> None:
    """Checks that engines' servers can be started on this machine, and that running servers answer.

    With cluster.address, only the path in rollout.engine_python is checked, since engines run on other machines. If
    rollout.engine_python is in `absent`, nothing is checked.

    Raises:
        ConfigError: the interpreter cannot be used, a server does not answer, or rollout.gpus_per_engine needs GPUs.
    """
    engine, python, urls = config.rollout.engine, config.rollout.engine_python, config.rollout.engine_urls
    hint = "name the python of the engine's environment; scripts/setup_vllm.sh makes one for vLLM on CPU"
    if _is_absent(absent, "rollout.engine_python"):
        return
    if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
        problem = f"rollout.engine_python={python} is not a program"
        raise ConfigError(problem, field="rollout.engine_python", hint=hint)
    if config.cluster.address is not None:
        return
    if config.rollout.gpus_per_engine > 1 and _is_on_cpu(config):
        problem = f"rollout.gpus_per_engine={config.rollout.gpus_per_engine}: there is no GPU here"
        raise ConfigError(problem, field="rollout.gpus_per_engine", hint="remove it, or run where there are some")
    if python is not None:
        code = f"from importlib.util import find_spec; print('has', find_spec({engine!r}) is not None)"
        try:
            output = subprocess.run(
                [python, "-c", code], capture_output=True, text=True, timeout=_PYTHON_S, stdin=subprocess.DEVNULL
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            output = str(error)
        if output != "has True":
            problem = f"has no {engine}" if output == "has False" else f"is no Python: {short_repr(output)}"
            problem = f"rollout.engine_python={python} {problem}"
            raise ConfigError(problem, field="rollout.engine_python", hint=hint)
    if urls is None:
        return
    from actors.engines.dialect import dialect_class

    alive = dialect_class(engine).ALIVE
    for index, url in enumerate(urls):
        if not ServerClient(url, index, alive=alive).answers(_SERVER_S):
            raise ConfigError(
                f"rollout.engine_urls[{index}]={url} does not answer as a server of {engine} that is ready "
                f"(GET {alive})",
                field="rollout.engine_urls",
                hint="start the server first (docs/engines.md), or correct the URL",
            )
