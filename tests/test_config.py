"""The settings tree: bad settings are answered with name, value and way out; every rule has both sides tested; the
reference document is current; nothing is settable that nobody reads."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from annotated_types import Gt, Le
from pydantic import Field

from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.config_messages import MAX_FINDINGS
from slimefsdp.errors import ConfigError

ROOT = Path(__file__).parents[1]
LEAST = {"model": {"path": "m"}, "optim": {"total_updates": 10}}
SECTIONS = {name: info.annotation for name, info in RunConfig.model_fields.items() if name != "algorithm"}


def settings(**values):
    """The least legal settings with `section__name=value` on top."""
    tree = {section: dict(names) for section, names in LEAST.items()}
    for key, value in values.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return config_from_dict(tree)


@pytest.fixture
def least_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(LEAST))
    return path


def refusal(action, *arguments, **keywords) -> ConfigError:
    """The error of the call, which a person can read: no class names, no pydantic phrases, bounded lines."""
    with pytest.raises(ConfigError) as caught:
        action(*arguments, **keywords)
    text = str(caught.value)
    assert not any(word in text for word in ("pydantic", "<class", "nput should", "instance of", "PosixPath")), text
    assert not any(word in text for word in ("None", "True", "False")), text
    assert all(len(line) < 400 for line in text.splitlines()) and text.isascii(), text
    assert caught.value.hint, text
    return caught.value


NUMBER, WHOLE, BOOLEAN, TEXT = "must be a number", "must be a whole number", "must be true or false", "must be text"
BAD_OVERRIDES = {
    # the wrong type
    "run.seed=x": ["run.seed='x'", WHOLE, "digits only"],
    "run.seed='3'": ["run.seed='3'", WHOLE, "without quotes"],
    "run.seed=3.0": ["run.seed=3.0", WHOLE],
    "run.seed=1e3": ["run.seed=1000.0", WHOLE],
    "run.seed=1_000": ["run.seed='1_000'", WHOLE],
    "run.seed=2020-01-01": ["run.seed='2020-01-01'", WHOLE],
    "run.seed=true": ["run.seed=true", WHOLE],
    "run.seed=": ["run.seed=null", WHOLE],
    "run.seed=[1]": ["run.seed=[1]", WHOLE],
    "run.steps=x": ["run.steps='x'", WHOLE],
    "mesh.dp=.inf": ["mesh.dp=.inf", WHOLE],
    "mesh.dp=automatic": ["mesh.dp='automatic'", WHOLE, "or auto"],
    "mesh.dp=true": ["mesh.dp=true", WHOLE],
    "mesh.dp=-1": ["mesh.dp=-1 must be at least 1", "raise it"],
    "mesh.dp_replicate=auto": ["mesh.dp_replicate='auto'", WHOLE],
    "fsdp.wrap_layers=Qwen3MLP": ["fsdp.wrap_layers='Qwen3MLP'", "list of module class names", "[Qwen3DecoderLayer"],
    "fsdp.wrap_layers=[]": ["fsdp.wrap_layers=[]", "list of module class names"],
    "fsdp.wrap_layers=[a.b]": ["fsdp.wrap_layers=['a.b']", "list of module class names"],
    "model.frozen='*.mlp.*'": ["model.frozen='*.mlp.*'", "list of name patterns", "['model.embed_tokens.*'"],
    "model.frozen=[]": ["model.frozen=[]", "list of name patterns"],
    "model.frozen=[' ']": ["model.frozen=[' ']", "list of name patterns"],
    "model.frozen=[3]": ["model.frozen=[3]", "list of name patterns"],
    "fsdp.sharding=ddp": ["fsdp.sharding='ddp'", "'full', 'keep_parameters' or 'replicate'"],
    "model.activation_checkpointing=1": ["model.activation_checkpointing=1", "'none', 'full' or 'selective'"],
    "optim.lr=": ["optim.lr=null", NUMBER, "1e-6"],
    "optim.lr=1e": ["optim.lr='1e'", NUMBER],
    "optim.lr=1e-6,": ["optim.lr='1e-6,'", NUMBER],
    "optim.lr==3": ["optim.lr='=3'", NUMBER],
    "optim.lr='1e-6'": ["optim.lr='1e-6'", NUMBER, "without quotes"],
    "optim.lr=false": ["optim.lr=false", NUMBER],
    "optim.lr=nan": ["optim.lr='nan'", NUMBER],
    "optim.lr.peak=3": ["optim.lr={'peak': 3}", NUMBER],
    "optim.lr=.inf": ["optim.lr=.inf", "finite"],
    "optim.lr=-.inf": ["optim.lr=-.inf", "finite"],
    "optim.lr=.nan": ["optim.lr=.nan", "finite"],
    "cluster.call_timeout_s=.inf": ["cluster.call_timeout_s=.inf", "finite"],
    "checkpoint.resume=yes": ["checkpoint.resume='yes'", BOOLEAN, "true or false"],
    "checkpoint.resume=1": ["checkpoint.resume=1", BOOLEAN],
    "loss.normalize_by_std=null": ["loss.normalize_by_std=null", BOOLEAN],
    "run.wandb_project=3": ["run.wandb_project=3", TEXT, "quotes"],
    "run.wandb_project=true": ["run.wandb_project=true", TEXT],
    "rollout.reward=[a]": ["rollout.reward=['a']", TEXT],
    "model.path=3": ["model.path=3", "must be a path"],
    "model.path=": ["model.path=null", "must be a path"],
    "model.path=''": ["model.path=''", "must be a path"],
    "model.path='  '": ["model.path='  '", "must be a path"],
    "model.path=[a]": ["model.path=['a']", "must be a path"],
    "run.dir=~no_such_user_/x": ["run.dir='~no_such_user_/x'", "unknown user"],
    "algorithm=ppo": ["algorithm='ppo'", "'grpo' or 'sft'", "choose"],
    "loss.reduction=token-mean": ["loss.reduction='token-mean'", "'token_mean', 'sequence_mean' or 'constant'"],
    "loss.kl_estimator=3": ["loss.kl_estimator=3", "'k1', 'k2' or 'k3'"],
    "mesh.device=tpu": ["mesh.device='tpu'", "'auto', 'cpu' or 'cuda'"],
    "precision.compute_dtype=fp16": ["precision.compute_dtype='fp16'", "'bfloat16', 'float16', 'float32' or"],
    # out of range
    "run.seed=-1": ["run.seed=-1 must be at least 0", "raise it"],
    "run.seed=2147483648": ["run.seed=2147483648 must be below 2147483648", "lower it"],
    "mesh.dp=0": ["mesh.dp=0 must be at least 1;"],
    "batch.max_tokens_per_rank=1": ["batch.max_tokens_per_rank=1 must be at least 2"],
    "optim.lr=0": ["optim.lr=0 must be above 0;", "raise it"],
    "loss.clip_low=1": ["loss.clip_low=1 must be below 1;", "lower it"],
    "optim.min_lr_ratio=1.5": ["optim.min_lr_ratio=1.5 must be at most 1;", "lower it"],
    "run.wandb_project=''": ["run.wandb_project='' must not be empty"],
    "precision.loss_scale_init=0": ["precision.loss_scale_init=0 must be at least 1"],
    "precision.loss_scale_init=3": ["precision.loss_scale_init=3", "power of two", "65536"],
    # betas
    **{
        f"optim.betas={value}": [f"optim.betas={value}", "two numbers in [0, 1)", "[0.9, 0.95]"]
        for value in ("[]", "[0.9]", "[0.9, 0.9, 0.9]", "[0.9, 1]", "[-0.1, 0.9]", "[.nan, 0.9]", "[true, false]",
                      "['a', 'b']", "0.9", "{}", "null", "[[0.9], 0.9]", "'0.9,0.9'")
    },
    # the form of a reward's name
    **{
        f"rollout.reward='{value}'": [f"rollout.reward='{value}'", "module:function", "actors.rollout.rewards:"]
        for value in ("f", ":f", "m:", "m:f:g", "..:f", "m.:f", "m f:g", "3m:f", "m:f.g", "a/b.py:f")
    },
    # sections
    "model=3": ["model=3", "must be a section", "indented lines"],
    "optim=null": ["optim=null", "must be a section"],
    "rollout=[a]": ["rollout=['a']", "must be a section"],
    "optim={}": ["optim.total_updates is required", "add it"],
    # unknown names
    "mesh.dpp=3": ["mesh.dpp=3 is not a setting", "did you mean mesh.dp?"],
    "optim.learnig_rate=3": ["optim.learnig_rate=3 is not a setting", "use one of betas, eps, implementation, log_"],
    "optim.max_grad_nrm=1": ["did you mean optim.max_grad_norm"],
    "lr=3": ["lr=3 is not a setting", "did you mean optim.lr?"],
    "optim.temperature=1": ["optim.temperature=1 is not a setting", "did you mean rollout.temperature"],
    "samples_per_prompt=2": ["did you mean rollout.samples_per_prompt or evaluation.samples_per_prompt?"],
    "opt.lr=3": ["opt={'lr': 3} is not a setting", "did you mean optim?"],
    "zzz=3": ["zzz=3 is not a setting", "use one of algorithm, attention, batch, "],
    "__class__.x=3": ["__class__={'x': 3} is not a setting"],
    "model.model_config=3": ["model.model_config=3 is not a setting"],
    "run.zzz=" + "x" * 5000: ["run.zzz='xxx", "is not a setting"],
    # not an override at all
    "optim": ["override 'optim'", "section.name=value", "optim.lr=1e-6"],
    "=3": ["override '=3'", "section.name=value"],
    "a..b=1": ["override 'a..b=1'", "section.name=value"],
    "--optim.lr=3": ["override '--optim.lr=3'", "section.name=value"],
    "run.seed=" + "9" * 5000: ["override 'run.seed=999", "5000 digits"],
    "run.seed=010": ["override 'run.seed=010'", "'010'", "plain decimal"],
    "optim.lr=1e999": ["override 'optim.lr=1e999'", "beyond the range"],
    "algorithm.x=3": ["algorithm={'x': 3}", "'grpo' or 'sft'"],
}  # fmt: skip


@pytest.mark.parametrize("override", BAD_OVERRIDES, ids=lambda override: override[:40])
def test_a_bad_value_is_answered_with_its_name_the_value_and_a_way_out(least_file, override):
    error = refusal(load_config, least_file, [override])
    assert [part for part in BAD_OVERRIDES[override] if part not in str(error)] == [], str(error)
    assert len(str(error).splitlines()) == 1


def test_an_override_below_an_override_that_is_no_section_names_both(least_file):
    error = refusal(load_config, least_file, ["model=3", "model.path=x"])
    assert str(error).startswith("model.path='x' needs the section model, but model=3; ")


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(least_file):
    config = load_config(
        least_file, ["optim.lr=1e-3", "mesh={dp: 2}", "mesh.device=cpu", "optim.lr=2e-3", "run.steps="]
    )
    assert (config.optim.lr, config.mesh.dp, config.mesh.device, config.run.steps) == (2e-3, 2, "cpu", None)
    assert config.optim.total_updates == 10


def test_an_unknown_name_is_told_before_what_is_missing_because_of_it():
    error = refusal(config_from_dict, {"modle": {"path": "m"}, "optim": {"total_updates": 3}})
    assert str(error).splitlines() == [
        "modle={'path': 'm'} is not a setting; did you mean model?",
        "  also model is required and not set; add model.path",
    ]
    assert error.field == "modle"


def test_several_faults_are_told_at_once_but_not_without_end():
    error = refusal(settings, mesh__dp=0, mesh__cp=-1, optim__lr="x")
    assert len(error.others) == 2
    error = refusal(config_from_dict, {**LEAST, **{f"k{i}": i for i in range(1000)}})
    assert len(error.others) == MAX_FINDINGS and error.others[-1] == f"{1000 - MAX_FINDINGS} more like these"


@pytest.mark.parametrize("tree", [None, [], 3, "model", {}, {3: 4}, {**LEAST, "x": 1}, {**LEAST, "": 1}])
def test_a_tree_that_is_no_tree_of_settings_is_refused(tree):
    refusal(config_from_dict, tree)


def test_values_no_yaml_file_can_hold_are_refused_all_the_same():
    nested: dict[str, object] = {}
    nested["run"] = nested
    for tree in (nested, {**LEAST, "run": {"seed": 10**5000}}, {**LEAST, "run": {"wandb_project": "\ud800"}},
                 {**LEAST, "run": {"dir": "a\0b"}}, {**LEAST, "run": {"dir": b"a"}},
                 {"model": {"path": "m"}, "optim": {"total_updates": 3, "lr": 10**400}}):  # fmt: skip
        refusal(config_from_dict, tree)


WRONG_FOR_ALL = object()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_refuses_the_wrong_type_under_its_own_name(section):
    for name in SECTIONS[section].model_fields:
        for wrong in ({"x": 1}, [1, 2, 3], WRONG_FOR_ALL):
            error = refusal(settings, **{f"{section}__{name}": wrong})
            assert error.field == f"{section}.{name}" and str(error).startswith(f"{section}.{name}=")


# the name of a validator, settings it accepts, settings it refuses, and what it then says
_REFERENCE_GROUP = {
    "reference__placement": "group",
    "reference__update_interval_steps": 5,
    "loss__kl_coefficient": 0.1,
}
RULES = [
    (
        "every_nth_layer_belongs_to_activation_checkpointing",
        {"model__activation_checkpointing": True, "model__checkpoint_every_n_layers": 2},
        {"model__activation_checkpointing": False, "model__checkpoint_every_n_layers": 2},
        ["model.checkpoint_every_n_layers=2", "model.activation_checkpointing=none", "remove it"],
    ),
    (
        "export_dtype_belongs_to_an_export",
        {"run__export_dtype": "bfloat16", "run__export_dir": "x"},
        {"run__export_dtype": "bfloat16"},
        ["run.export_dtype=bfloat16", "without run.export_dir", "remove it"],
    ),
    (
        "compiled_layers_are_recomputed_whole",
        {"model__activation_checkpointing": "full", "model__compile": True},
        {"model__activation_checkpointing": "selective", "model__compile": True},
        ["model.activation_checkpointing=selective", "model.compile=true", "use full or none"],
    ),
    (
        "units_are_chosen_in_one_way",
        {"fsdp__wrap_layers": ["Qwen3MLP"]},
        {"fsdp__wrap_layers": ["Qwen3MLP"], "fsdp__wrap_min_parameters": 1000},
        ["fsdp.wrap_min_parameters=1000", "fsdp.wrap_layers=['Qwen3MLP']", "remove one"],
    ),
    (
        "a_group_of_its_own_leaves_auto_a_number",
        {"mesh__dp": "auto", "reference__placement": "group", "reference__dp": 1},
        {"mesh__dp": "auto", "reference__placement": "group"},
        ["mesh.dp=auto", "reference.placement=group", "set reference.dp"],
    ),
    (
        "constant_length_belongs_to_reduction_constant",
        {"loss__reduction": "constant", "loss__constant_length": 5},
        {"loss__reduction": "constant"},
        ["loss.reduction=constant", "loss.constant_length", "set it"],
    ),
    (
        "constant_length_belongs_to_reduction_constant",
        {"loss__reduction": "sequence_mean"},
        {"loss__reduction": "sequence_mean", "loss__constant_length": 5},
        ["loss.constant_length=5", "loss.reduction=sequence_mean", "remove it"],
    ),
    (
        "warmup_ends_before_training_does",
        {"optim__warmup_updates": 9},
        {"optim__warmup_updates": 10},
        ["optim.warmup_updates=10", "optim.total_updates=10", "lower"],
    ),
    (
        "only_adamw_is_fused",
        {"optim__implementation": "fused"},
        {"optim__implementation": "fused", "optim__name": "sgd"},
        ["optim.implementation=fused", "optim.name=sgd", "use foreach"],
    ),
    (
        "a_constant_schedule_has_no_floor",
        {"optim__schedule": "cosine", "optim__min_lr_ratio": 0.1},
        {"optim__schedule": "constant", "optim__min_lr_ratio": 0.1},
        ["optim.min_lr_ratio=0.1", "optim.schedule=constant", "remove it"],
    ),
    (
        "sft_takes_no_rollout_settings",
        {"algorithm": "sft", "loss__reduction": "sequence_mean", "loss__entropy_coefficient": 0.1, "data__train": "x"},
        {"algorithm": "sft", "rollout__engines": 2, "loss__clip_low": 0.1, "data__heldout": "h"},
        ["rollout.engines=2, loss.clip_low=0.1, data.heldout='h' are not read", "algorithm=sft", "remove them"],
    ),
    (
        "sft_takes_no_rollout_settings",
        {"algorithm": "sft", "batch__samples_per_update": 4},
        {"algorithm": "sft", "reference__path": "r"},
        ["reference.path='r' is not read", "remove it, or set algorithm=grpo"],
    ),
    (
        "a_group_of_its_own_has_nothing_to_make_room_for",
        {"reference__offload": "sleep"},
        {"reference__placement": "group", "reference__offload": "sleep"},
        ["reference.offload=sleep", "remove it", "set reference.placement=colocated"],
    ),
    (
        "a_reference_that_nothing_reads_is_not_updated",
        {"reference__update_interval_steps": 5, "loss__kl_coefficient": 0.1},
        {"reference__update_interval_steps": 5},
        ["reference.update_interval_steps=5", "loss.kl_coefficient=0", "remove it"],
    ),
    (
        "a_reference_group_can_be_restored_at_every_checkpoint",
        {**_REFERENCE_GROUP, "checkpoint__interval_steps": 10},
        {**_REFERENCE_GROUP, "checkpoint__interval_steps": 7},
        ["checkpoint.interval_steps=7", "reference.update_interval_steps=5", "make it a multiple"],
    ),
    (
        "cpu_offload_keeps_no_reference_on_the_device",
        {"reference__offload": "fsdp", "fsdp__cpu_offload": True},
        {"reference__offload": "none", "fsdp__cpu_offload": True},
        ["reference.offload=none", "fsdp.cpu_offload=true", "remove one"],
    ),
    (
        "reference_group_size_belongs_to_a_group",
        {"reference__placement": "group", "reference__dp": 2},
        {"reference__dp": 2},
        ["reference.dp=2", "set reference.placement=group"],
    ),
    (
        "loss_scaling_belongs_to_float16",
        {"precision__compute_dtype": "float16", "precision__loss_scale_init": 1024},
        {"precision__compute_dtype": "bfloat16", "precision__loss_scale_growth_interval": 5},
        ["precision.loss_scale_growth_interval=5", "precision.compute_dtype=bfloat16", "remove it"],
    ),
    (
        "the_schedule_covers_the_run",
        {"run__steps": 5, "loss__epochs": 2},
        {"run__steps": 6, "loss__epochs": 2},
        ["optim.total_updates=10", "run.steps=6", "set optim.total_updates=12"],
    ),
    (
        "the_schedule_covers_the_run",
        {"run__steps": 2, "batch__samples_per_update": 60},  # 256 samples a step, 5 updates
        {"run__steps": 3, "batch__samples_per_update": 60},
        ["run.steps=3 x 5 updates", "set optim.total_updates=15"],
    ),
    (
        "the_schedule_covers_the_run",
        {"algorithm": "sft", "run__steps": 10, "batch__samples_per_update": 60},
        {"algorithm": "sft", "run__steps": 11, "batch__samples_per_update": 60},
        ["run.steps=11", "set optim.total_updates=11"],
    ),
]


@pytest.mark.parametrize(("rule", "accepted", "refused", "expected"), RULES, ids=[rule[0] for rule in RULES])
def test_a_rule_between_settings_accepts_one_side_and_refuses_the_other(rule, accepted, refused, expected):
    settings(**accepted)
    error = refusal(settings, **refused)
    assert [part for part in expected if part not in str(error)] == [], str(error)
    assert error.field in error.message and error.field.replace(".", "__") in {**refused, "optim__total_updates": 0}


def test_every_rule_between_settings_is_in_the_table_above():
    models = [RunConfig, *SECTIONS.values()]
    assert {name for model in models for name in model.__pydantic_decorators__.model_validators} == {
        rule[0] for rule in RULES
    }


def test_good_values_of_every_kind_are_accepted_as_they_are():
    config = settings(
        model__path=Path("m"), run__dir="~/x", run__seed=2**31 - 1, optim__lr=1, optim__betas=(0, 0.5),
        rollout__reward="my_rewards.maths:exact", run__wandb_project="3", loss__clip_high=28,
    )  # fmt: skip
    assert config.run.dir == Path.home() / "x"  # no shell has expanded it
    assert config.optim.betas == (0.0, 0.5) and config.optim.lr == 1.0
    assert config.model.path == Path("m") and config.rollout.reward == "my_rewards.maths:exact"


def test_settings_are_frozen_and_plain_json_gives_them_back():
    config = settings(optim__schedule="cosine", optim__min_lr_ratio=0.1, rollout__reward="m:f", run__dir="d")
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0
    assert config_from_dict(config.model_dump(mode="json")) == config


def test_auto_becomes_what_the_ranks_leave_and_the_settings_stay_frozen():
    config = settings(mesh__dp="auto", mesh__cp=2, mesh__dp_replicate=2)
    for wanted in ("ranks", "data_ranks", "actor_mesh"):
        assert refusal(getattr, config, wanted).field == "mesh.dp"
    resolved = config.with_ranks(12)
    assert (resolved.mesh.dp, resolved.data_ranks, resolved.ranks, resolved.actor_mesh) == (3, 6, 12, (2, 3))
    assert config.mesh.dp == "auto" and resolved.with_ranks(4) is resolved
    assert config_from_dict(resolved.model_dump(mode="json", exclude_unset=True)) == resolved
    for ranks in (0, 2, 6, 7):
        error = refusal(config.with_ranks, ranks)
        assert (
            error.field == "mesh.dp"
            and f"{ranks} ranks" in str(error)
            and "mesh.dp_replicate=2 x mesh.cp=2" in str(error)
        )


def test_a_reference_group_has_the_actors_mesh_unless_it_has_a_size_of_its_own():
    config = settings(mesh__dp=3, mesh__cp=2, mesh__dp_replicate=2, reference__placement="group")
    assert config.reference_mesh == (2, 3) and config.reference_ranks == config.ranks == 12
    config = settings(mesh__dp=3, mesh__cp=2, mesh__dp_replicate=2, reference__placement="group", reference__dp=1)
    assert config.reference_mesh == (1, 1) and config.reference_ranks == 2


READY = {"run__dir": "d", "run__steps": 1, "data__train": "t"}
READY_GRPO = {**READY, "rollout__reward": "m:f"}
READY_SFT = {**READY, "algorithm": "sft", "batch__samples_per_update": 4}


@pytest.mark.parametrize("ready", [READY_GRPO, READY_SFT], ids=["grpo", "sft"])
def test_training_names_each_setting_it_needs(ready):
    settings(**ready).check_ready_to_train()
    for key in set(ready) - {"algorithm"}:
        config = settings(**{name: value for name, value in ready.items() if name != key})
        error = refusal(config.check_ready_to_train)
        assert error.field == key.replace("__", ".") and f"{error.field} is not set" in str(error)


def test_training_refuses_evaluation_without_prompts_and_groups_of_one():
    settings(**READY_GRPO, evaluation__interval_steps=1, data__heldout="h").check_ready_to_train()
    error = refusal(settings(**READY_GRPO, evaluation__interval_steps=1).check_ready_to_train)
    assert error.field == "data.heldout"
    for normalize in (True, False):  # r - mean is zero in a group of one, too
        alone = settings(**READY_GRPO, rollout__samples_per_prompt=1, loss__normalize_by_std=normalize)
        assert "rollout.samples_per_prompt=1" in str(refusal(alone.check_ready_to_train))


def test_loading_settings_imports_nothing_heavy(least_file):
    program = (
        "import sys, slimefsdp\n"
        f"slimefsdp.load_config({str(least_file)!r}, ['optim.lr=1e-3'])\n"
        f"try: slimefsdp.load_config({str(least_file)!r}, ['optim.lrr=1'])\n"
        "except Exception as error: print(type(error).__name__)\n"
        "print(sorted({'torch', 'ray', 'transformers', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == ["ConfigError", "[]"]


# the reference document


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("settings_reference", ROOT / "scripts" / "settings_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_document_of_all_settings_is_current(script):
    assert script.DOCUMENT == ROOT / "docs" / "settings.md"
    current = script.DOCUMENT.read_text(encoding="utf-8") == script.settings_reference()
    assert current, "docs/settings.md is stale: run `python scripts/settings_reference.py --write`"


def test_the_document_has_a_described_row_for_every_setting(script):
    text = script.settings_reference()
    for section, model in {"": RunConfig, **SECTIONS}.items():
        part = text.split(f"## `{section}`\n" if section else "## Top level\n")[1].split("\n## ")[0]
        rows = {row.split("|")[1].strip(): row for row in part.splitlines() if row.startswith("| `")}
        assert set(rows) == {f"`{name}`" for name in model.model_fields if not (section == "" and name in SECTIONS)}
        for row in rows.values():
            cells = [cell.strip() for cell in row.replace("\\|", "/").strip("|").split("|")]
            assert len(cells) == 4 and all(cells), row


@pytest.mark.parametrize(
    ("annotation", "constraints", "text"),
    [
        (Annotated[int, Field(ge=1, lt=2**31)] | None, [], "integer >= 1, < 2^31 \\| `null`"),
        (float, [Gt(0), Le(1)], "number > 0, <= 1"),
        (Literal["bfloat16", "float32"], [], "`bfloat16` \\| `float32`"),
        (tuple[float, float], [], "[number, number]"),
        (Annotated[str, Field(min_length=1)] | None, [], "text \\| `null`"),
        (bool, [], "`true` \\| `false`"),
        (Path, [], "path"),
        (tuple[str, ...], [], "[text, ...]"),
    ],
)
def test_types_are_rendered_for_people(script, annotation, constraints, text):
    assert script.type_text(annotation, constraints) == text


def test_the_script_prints_the_document():
    command = [sys.executable, "scripts/settings_reference.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("# Settings\n") and "| `lr` | number > 0 | `1e-06` | peak learning rate |" in printed


# nothing is settable that nobody reads


def settings_read_in(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Full names read as `config.section.name`, or `x = config.section` then `x.name`; and other names of config."""

    def is_config(node: ast.AST, names: set[str]) -> bool:
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        return name in names

    read: set[str] = set()
    direct: set[str] = set()
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        arguments = [] if isinstance(scope, ast.ClassDef) else scope.args.args + scope.args.kwonlyargs
        configs = {"config", "_config"} | {
            argument.arg
            for argument in arguments
            if argument.annotation and "RunConfig" in ast.unparse(argument.annotation)
        }
        nodes = list(ast.walk(scope))
        sections: dict[str, str] = {}
        for node in nodes:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Attribute)
                and is_config(node.value.value, configs)
            ):
                sections.update({t.id: node.value.attr for t in node.targets if isinstance(t, ast.Name)})
        for node in (node for node in nodes if isinstance(node, ast.Attribute)):
            owner = node.value
            if is_config(owner, configs):
                direct.add(node.attr)
            elif isinstance(owner, ast.Attribute) and is_config(owner.value, configs):
                read.add(f"{owner.attr}.{node.attr}")
            elif isinstance(owner, ast.Name) and owner.id in sections:
                read.add(f"{sections[owner.id]}.{node.attr}")
    return read, direct


def read_through_properties(used: set[str]) -> set[str]:
    """Settings that RunConfig's properties read, for those properties that others use."""
    run_config = next(
        node for node in ast.parse((ROOT / "slimefsdp/config.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "RunConfig"
    )  # fmt: skip
    bodies = {
        node.name: [item for item in ast.walk(node) if isinstance(item, ast.Attribute)]
        for node in run_config.body
        if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "property" for d in node.decorator_list)
    }
    reached, todo = set(), [name for name in bodies if name in used]
    while todo:
        reached.add(name := todo.pop())
        todo += [node.attr for node in bodies[name] if node.attr in bodies and node.attr not in reached]
    return {
        f"{node.value.attr}.{node.attr}"
        for name in reached
        for node in bodies[name]
        if isinstance(node.value, ast.Attribute)
    }


def test_every_setting_is_read_by_the_program():
    read, direct = set(), set()
    for folder in ("slimefsdp", "actors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "config.py":
                found = settings_read_in(ast.parse(path.read_text()))
                read |= found[0]
                direct |= found[1]
    read |= read_through_properties(direct) | direct
    known = {"algorithm"} | {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    assert sorted(known - read) == [], "no code reads these as config.section.name: honour or remove them"


def test_a_setting_counts_as_read_only_through_the_settings():
    source = """
def f(config, batch, mesh, other: RunConfig):
    loss = config.loss
    mesh.dp, batch.samples_per_update, loss.epochs, other.run.seed, self._config.data.train, config.ranks
"""
    read, direct = settings_read_in(ast.parse(source))
    assert read == {"loss.epochs", "run.seed", "data.train"} and direct == {"loss", "run", "data", "ranks"}
    assert read_through_properties({"updates_per_step"}) >= {"loss.epochs", "rollout.prompts_per_step"}
    assert "loss.epochs" not in read_through_properties({"ranks"})
