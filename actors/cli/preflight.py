"""Would this run? All that can be known to fail by looking, for `train`, its `--dry-run` and `check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from actors.cli.model_trial import try_models
from actors.cli.run_folders import check_folders, check_leftovers
from actors.cluster.capacity import (
    check_gpus,
    check_machine,
    compute_capabilities_here,
    gpus_of_engines,
    has_nvidia_driver,
)
from actors.cluster.connect import require_answer
from actors.engines.server_client import ServerClient
from actors.model_folders import NotHere, models_to_look_at, with_model_folders
from actors.rollout.data_sets import DataSource, require_reader
from actors.rollout.environment_trial import try_environment, try_reward
from actors.rollout.filters import load_filter
from actors.rollout.import_trial import try_imports
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
from actors.rollout.tokenizer import run_beside
from actors.rollout.user_code import checked_code
from actors.startup import stage
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.config import RunConfig
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.distributed.compiler import require_compiler
from slimefsdp.errors import ConfigError, ResourceError, SlimeError, short_repr
from slimefsdp.estimate.hardware import read_calibration
from slimefsdp.io.files import FolderLock
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import check_architecture, check_tokenizer, read_model_folder
from slimefsdp.models.named_shapes import is_shape, made_by
from slimefsdp.models.peft_folder import read_peft_folder
from slimefsdp.rpc import ROLES
from slimefsdp.training import advantages

_PYTHON_S, _SERVER_S = 60.0, 10.0  # for the python of servers to start, and for a server to answer
_CLUSTER_S = 60.0  # for a cluster of Ray's


@dataclass(frozen=True, slots=True)
class Checked:
    """Settings with which a run can start, with folders of this machine for models of the hub and commits for data.

    Args:
        prompts: the records that are short enough; where data is absent, those of data.train as they are, if any.
        sets: of these records.
        absent: what a run needs that is not on this machine yet; nothing where a run starts.
    """

    config: RunConfig
    prompts: Prompts
    sets: list[RecordSet]
    absent: list[NotHere]


class Problems:
    """Collects what is wrong, so that all of it can be told at once."""

    def __init__(self) -> None:
        self._errors: list[SlimeError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps a typed error that the block raises; the rest of the block is skipped then."""
        try:
            yield
        except SlimeError as error:
            self._errors.append(error)

    def raise_all(self) -> None:
        """Raises the first error with the texts of the others in its `others`; returns where there is none."""
        if self._errors:
            first, *rest = self._errors
            first.others = (*first.others, *(text for error in rest for text in str(error).split("\n  also ")))
            raise first


def check_before_launch(
    config: RunConfig, *, only_looks: bool = False, has_ranks: bool = False, is_own_loop: bool = False
) -> Checked:
    """Finds all that can be known to fail without starting anything: the one answer to "would this run?".

    What takes seconds (building models without weights, the lengths of all prompts, the trial of an environment and of
    a reward) is done only where nothing else is wrong.

    Args:
        only_looks: for `check` and `train --dry-run`. run.dir is not locked, weights are not downloaded, nothing is
            written; and what is not on this machine yet, but will be by the time of a start, is listed. Otherwise its
            absence is an error.
        has_ranks: the ranks are running already, on whatever machines; False: this machine, or a cluster, starts them.
        is_own_loop: the settings are for a loop of the user's own: what `train` needs, data and run.dir are left out.

    Raises:
        SlimeError: the first problem, of the class that fits (settings, model folder, data files, functions of the
            user's own, machine); `others` has all further ones.
    """
    problems = Problems()
    prompts = Prompts([], {})
    absent = absent_from_machine(config) if only_looks else []
    with stage("checking settings and data", is_short=True):
        if not is_own_loop:
            with problems.collected():
                check_ready_to_train(config)
        has_records = not (is_own_loop or problems)
        with problems.collected():
            check_installed(config, absent)
        with problems.collected():
            if only_looks or problems:  # a model is not downloaded for settings that are refused
                config, models = models_to_look_at(config)
                absent += models
            else:
                config = with_model_folders(config)
            check_models(config, absent, builds=False)
            if not (is_own_loop or is_shape(config.model.path)):  # a shape has no tokenizer
                check_tokenizer(config.model.path)
        if has_records:
            with problems.collected():
                config, prompts = _records(config, absent, only_looks=only_looks)
            with problems.collected():
                check_folders(config)
        if config.batch.cost_model is not None:
            with problems.collected():
                read_calibration(config.batch.cost_model, field="batch.cost_model")
        with problems.collected():
            check_functions(config)
        with problems.collected():
            check_servers(config, absent)
        if not has_ranks:
            with problems.collected():
                check_machine(config)
                if not is_own_loop:
                    check_gpus(config, engines=gpus_of_engines(config))
    problems.raise_all()
    if not only_looks:
        assert config.run.dir is not None
        FolderLock(config.run.dir).acquire()  # held until this process ends: no other may begin while Ray starts
        check_leftovers(config)
    with problems.collected():
        try_models(config)
    if is_own_loop:
        problems.raise_all()
        return Checked(config, prompts, [], absent)
    sets: list[RecordSet] = []
    with problems.collected():
        if not _is_absent(absent, "data."):
            if not is_shape(config.model.path):
                prompts = without_overlong(config, prompts)
                config = with_steps_left(config, prompts)
                try_environment(config, prompts)
            sets = record_sets(config.data, prompts.heldout, prompts.train)
        if not _is_absent(absent, "data.train"):
            try_reward(config, prompts)
    warn_of_shared_prompts(sets)
    if only_looks:
        with problems.collected():
            check_leftovers(config)
    problems.raise_all()
    return Checked(config, prompts, sets, absent)


def _records(config: RunConfig, absent: list[NotHere], *, only_looks: bool) -> tuple[RunConfig, Prompts]:
    """Reads the records that the settings name; returns the settings with commits of data sets, too.

    Args:
        absent: where data sets that are not here yet are added, if this only looks.
    """
    if only_looks:
        config, data = data_to_look_at(config)
        absent += data
    else:
        for field, named in config.data.sources.items():
            require_reader(DataSource.of(named), field)
        config = with_data_commits(config)
    if not _is_absent(absent, "data."):
        return config, read_prompts(config)
    present = [field for field in config.data.sources if not _is_absent(absent, field)]
    found = {field: read_set(config, field) for field in present}
    return config, Prompts(found.get("data.train", []), {})


def _is_absent(absent: Iterable[NotHere], field: str) -> bool:
    """Whether a setting, or with a dot in the end one of a section, names something that is not here yet."""
    return any(one.field == field or (field.endswith(".") and one.field.startswith(field)) for one in absent)


def absent_from_machine(config: RunConfig) -> list[NotHere]:
    """GPUs and environments of engines that settings name and this machine does not have, though another one may."""
    absent = []
    if config.mesh.device == "cuda" and config.cluster.address is None and not has_nvidia_driver():
        where = "for a machine with NVIDIA GPUs; this one has no driver of theirs"
        absent.append(NotHere("mesh.device", "cuda", where))
    python = config.rollout.engine_python
    if python is not None and (command := made_by(python)) is not None:
        absent.append(NotHere("rollout.engine_python", str(python), f"`{command}` makes it"))
    return absent


def cluster_line(config: RunConfig) -> str | None:
    """Returns what the cluster at cluster.address has, as a line to print; None: the settings name none.

    Raises:
        ResourceError: it does not answer, may not be joined, or has fewer GPUs than the settings take.
    """
    cluster, address = config.cluster, config.cluster.address
    if address is None:
        return None
    require_answer(address)
    asked = {"address": address, "allow_without_token": cluster.allow_without_token}
    with stage(f"looking at the cluster at {address}", is_short=True):
        try:
            done = run_beside("actors.cluster.connect", asked, _CLUSTER_S)
        except subprocess.TimeoutExpired:
            raise ResourceError(
                f"no Ray cluster answered at {address} within {_CLUSTER_S:g} s",
                field="cluster.address",
                hint="look at what listens there, or name another",
            ) from None
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {"error": short_repr(done.stderr.decode(errors="replace")), "hint": "look at the cluster's logs"}
    if "error" in found:
        raise ResourceError(found["error"], field="cluster.address", hint=found["hint"])
    check_gpus(config, engines=gpus_of_engines(config), of_cluster=found["gpus"])
    return f"cluster   {found['nodes']} nodes with {found['cores']} CPUs and {found['gpus']} GPUs at {address}"


def check_installed(config: RunConfig, absent: Sequence[NotHere] = ()) -> None:
    """Whether the packages, the compiler and the device that settings ask for are here; another cluster's nodes have
    their own.

    Args:
        absent: where mesh.device is among them, the machine is another one, too.

    Raises:
        ConfigError: naming the setting.
    """
    if config.run.wandb_project is not None and find_spec("wandb") is None:  # the driver's, wherever ranks are
        raise ConfigError(
            f"run.wandb_project={config.run.wandb_project!r} needs the package wandb, which is not installed",
            field="run.wandb_project",
            hint="install the `wandb` extra, or leave run.wandb_project out",
        )
    asked = _attention_packages(config)
    _check_attention_device(asked, config, on_cuda=config.mesh.device != "cpu")  # wherever ranks are
    if config.cluster.address is not None or _is_absent(absent, "mesh.device"):
        return
    has_gpu = has_nvidia_driver()
    if config.mesh.device == "cuda" and not has_gpu:
        raise ConfigError(
            "mesh.device=cuda, and this machine has no NVIDIA driver",
            field="mesh.device",
            hint="use auto or cpu, or name a cluster.address with GPUs",
        )
    on_cuda = config.mesh.device != "cpu" and has_gpu
    if config.model.compile:
        require_compiler("cuda" if on_cuda else "cpu")
    _check_attention_device(asked, config, on_cuda=on_cuda)
    _check_attention_packages(asked)


def _attention_packages(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """The settings of attention that take packages, and which."""
    asked: dict[str, tuple[str, ...]] = {}
    if config.attention.kernel == "flash_attn":
        asked["attention.kernel=flash_attn"] = ("flash_attn",)
    if config.attention.kernel == "flash_attn_3":
        asked["attention.kernel=flash_attn_3"] = ("flash_attn_interface",)
    if config.attention.strategy == "ring_flash_attn" and config.mesh.cp > 1:
        asked["attention.strategy=ring_flash_attn"] = ("flash_attn", "ring_flash_attn")
    return asked


def _check_attention_device(asked: Iterable[str], config: RunConfig, *, on_cuda: bool) -> None:
    dtype = config.precision.compute_dtype
    for setting in asked:
        if not on_cuda or dtype not in ("bfloat16", "float16"):
            field = setting.partition("=")[0]
            raise ConfigError(
                f"{setting} computes bfloat16 and float16 on CUDA, not {dtype} on {'CUDA' if on_cuda else 'a CPU'}",
                field=field,
                hint=f"leave {field} at its default",
            )


def _check_attention_packages(asked: Mapping[str, tuple[str, ...]]) -> None:
    for setting, packages in asked.items():
        field = setting.partition("=")[0]
        missing = [name.replace("_", "-") for name in packages if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"{setting} needs {' and '.join(missing)}, not installed here",
                field=field,
                hint=f"install {'FlashAttention 3' if packages == ('flash_attn_interface',) else 'the `cuda` extra'}, "
                f"or leave {field} at its default, which needs no package",
            )
    if "attention.kernel=flash_attn_3" in asked:
        from slimefsdp.attention.backends import flash_attn_3  # takes torch, which nothing else here does

        flash_attn_3.require_installed()
        if here := compute_capabilities_here():
            flash_attn_3.require_capability(here, "this machine")


def check_models(config: RunConfig, absent: Sequence[NotHere] = (), *, builds: bool = True) -> None:
    """Whether the model folders of all roles can be loaded, adapters be of the policy, and attention be shared.

    Args:
        absent: models whose weights are not looked at.
        builds: also does what `try_models` does, which may take seconds.

    Raises:
        ModelError: a folder. ConfigError: attention.strategy cannot serve the model on this mesh, or attention.kernel
            not compute it; or a setting names parts that a model does not have. ResourceError: as `try_models`.
    """
    for path, field in dict.fromkeys(config.folder_of(role) for role in ROLES):
        with_weights = field != "model.path" or config.model.init == "folder"
        with_weights = with_weights and not _is_absent(absent, field)
        folder = read_model_folder(path, field=field, with_weights=with_weights)
        check_architecture(folder, field=field)
        shape = AttentionShape.of_model_spec(ModelSpec.from_config(folder.config))
        check_kernel(config.attention.kernel, shape, deterministic=config.run.deterministic)
        choice = choose_strategy(config.attention.strategy, shape, config.mesh.cp)
        if config.mesh.cp > 1:
            # of a shape, which lies in a folder of this package, its id
            named = "/".join(folder.path.parts[-2:]) if is_shape(folder.path) else folder.path
            print(f"attention of {named} over {config.mesh.cp} ranks by {choice}", file=sys.stderr)
        if field == "model.path" and folder.has_weights and config.lora.path is not None:
            shapes = {name: entry.shape for name, entry in folder.tensors.items()}
            read_peft_folder(config.lora.path).check_base(shapes, folder.path)
    if builds:
        try_models(config)


def check_functions(config: RunConfig) -> None:
    """Imports every function and class that the settings name as `module:function`.

    Raises:
        ConfigError: one of them cannot be imported, or is not there, or its import hangs or ends the process.
    """
    rollout = config.rollout
    named = {
        "advantage.estimator": config.advantage.estimator,
        "loss.policy": config.loss.policy,
        "rollout.reward": rollout.reward,
        "rollout.environment": rollout.environment,
        "rollout.filter": rollout.filter,
    }
    try_imports({field: name for field, name in named.items() if name is not None}, config.cluster.launch_timeout_s)
    advantages.check_functions(config)
    if config.rollout.reward is not None or config.rollout.environment is not None:
        checked_code(config)
    if config.rollout.filter is not None:
        load_filter(config.rollout.filter)
    if config.rollout.engine != "embedded":
        from actors.engines.processes import engine_class

        engine_class(config)


def _is_on_cpu(config: RunConfig) -> bool:
    from actors.engines.server_launch import is_on_cpu  # takes ray, which nothing else here does

    return is_on_cpu(config)


def check_servers(config: RunConfig, absent: Sequence[NotHere] = ()) -> None:
    """Whether engines' servers could be started, or are there; on another cluster its nodes alone could tell.

    Args:
        absent: where rollout.engine_python is among them, it is not looked at.

    Raises:
        ConfigError: an interpreter cannot be used, or nobody answers at a URL.
    """
    engine, python = config.rollout.engine, config.rollout.engine_python
    hint = "name the python of the engine's environment; scripts/setup_vllm.sh makes one for vLLM on CPU"
    if _is_absent(absent, "rollout.engine_python"):
        return
    if python is not None and not (python.is_file() and os.access(python, os.X_OK)):
        raise ConfigError(f"rollout.engine_python={python} is no program", field="rollout.engine_python", hint=hint)
    if config.cluster.address is not None:
        return
    if config.rollout.gpus_per_engine > 1 and _is_on_cpu(config):
        raise ConfigError(
            f"rollout.gpus_per_engine={config.rollout.gpus_per_engine}: there is no GPU here",
            field="rollout.gpus_per_engine", hint="remove it, or run where there are some",
        )  # fmt: skip
    if python is not None:
        looks = f"from importlib.util import find_spec; print('has', find_spec({engine!r}) is not None)"
        try:
            said = subprocess.run(
                [python, "-c", looks],
                capture_output=True, text=True, timeout=_PYTHON_S, stdin=subprocess.DEVNULL,
            ).stdout.strip()  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            said = str(error)
        if said != "has True":
            what = f"has no {engine}" if said == "has False" else f"is no Python: {short_repr(said)}"
            problem = f"rollout.engine_python={python} {what}"
            raise ConfigError(problem, field="rollout.engine_python", hint=hint)
    if config.rollout.engine_urls is None:
        return
    from actors.engines.dialect import dialect_class

    alive = dialect_class(engine).ALIVE
    for place, url in enumerate(config.rollout.engine_urls):
        if not ServerClient(url, place, alive=alive).answers(_SERVER_S):
            raise ConfigError(
                f"nobody answers at rollout.engine_urls[{place}]={url}, or not as a server of {engine} that is ready "
                f"(GET {alive})",
                field="rollout.engine_urls",
                hint="start the server first (docs/engines.md), or correct the URL",
            )
