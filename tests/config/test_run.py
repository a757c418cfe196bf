"""The settings tree: bad settings are answered with name, value and way out; every rule has both sides tested; the
reference document is current; nothing is settable that nobody reads."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, get_args

import pytest
import yaml
from annotated_types import Gt, Le
from pydantic import Field

from actors.run_dir import settings_text
from slimefsdp.algorithms import advantages, objective
from slimefsdp.algorithms.registry import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.config.algorithm import CorrectionSettings
from slimefsdp.config.base import kinds_of
from slimefsdp.config.conditions import CONFLICTS, ONLY_WITH, REQUIRED_WITH
from slimefsdp.config.earlier import STORED, with_present_names
from slimefsdp.config.launch import check_ready_to_train
from slimefsdp.config.messages import MAX_FINDINGS, NAMES_ELSEWHERE
from slimefsdp.errors import ConfigError
from tests.support.refusals import names

ROOT = Path(__file__).parents[2]
LEAST = {"model": {"path": "m"}, "optim": {"total_updates": 10}}
VLLM = {"rollout__engine": "vllm", "rollout__engine_python": "x"}
SGLANG = {
    "rollout__engine": "sglang",
    "rollout__engine_python": "x",
    "rollout__weight_transport": "disk",
    "run__dir": "x",
}
SECTIONS = {  # name -> kinds -> settings
    name: kinds for name, info in RunConfig.model_fields.items() if (kinds := kinds_of(info.annotation))
}


def settings(**values):
    """The least legal settings with `section__name=value`, or `section.name`, on top."""
    tree = {section: dict(names) for section, names in LEAST.items()}
    for key, value in values.items():
        section, _, name = key.replace(".", "__", 1).partition("__")
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


def unnamed(parts: list[str], error: ConfigError) -> list[str]:
    """What the error's text does not hold; a name or number counts only where it is not part of a longer one."""
    bounded = {part: rf"(?<![\w.]){re.escape(part)}(?!\w)" for part in parts if re.fullmatch(r"[\w.-]+", part)}
    return [part for part in parts if not re.search(bounded.get(part, re.escape(part)), str(error))]


BAD_OVERRIDES = {
    # the wrong type
    "run.seed=": ["run.seed=null"],
    "mesh.dp=automatic": ["mesh.dp='automatic'", "auto"],
    "mesh.dp=-1": ["mesh.dp=-1", "1"],
    "fsdp.wrap=Qwen3MLP": ["fsdp.wrap='Qwen3MLP'", "[Qwen3DecoderLayer"],
    "fsdp.wrap=[a.b]": ["fsdp.wrap=['a.b']"],
    "model.frozen='*.mlp.*'": ["model.frozen='*.mlp.*'", "['model.embed_tokens.*'"],
    "lora.targets=mlp": ["lora.targets='mlp'", "[attention"],
    "profile.updates=3": ["profile.updates=3", "[3, 100]"],
    "profile.updates=[0]": ["profile.updates=[0]", "1"],
    "fsdp.sharding=ddp": ["fsdp.sharding='ddp'", "'full'", "'keep_parameters'", "'optimizer'", "'replicate'", "'auto'"],
    "model.activation_checkpointing=1": ["model.activation_checkpointing=1", "'none'", "'full'", "'offload'"],
    "optim.lr=1e-6,": ["optim.lr='1e-6,'"],
    "optim.lr.peak=3": ["optim.lr={'peak': 3}"],
    "optim.lr=.inf": ["optim.lr=.inf"],
    "optim.lr=.nan": ["optim.lr=.nan"],
    "cluster.call_timeout_s=.inf": ["cluster.call_timeout_s=.inf"],
    "checkpoint.resume=yes": ["checkpoint.resume='yes'"],
    "model.path=": ["model.path=null"],
    "model.path='  '": ["model.path='  '"],
    "run.dir=~no_such_user_/x": ["run.dir='~no_such_user_/x'"],
    "algorithm=kto": ["algorithm='kto'", "'grpo'", "'ppo'", "'sft'", "'dpo'"],
    "loss.reduction=token-mean": ["loss.reduction='token-mean'", "token_mean"],
    "loss.kl_estimator=3": ["loss.kl_estimator=3", "'k1'", "'k2'", "'k3'", "'abs'", "'full'"],
    "correction.method=tiss": ["correction.method='tiss'", "tis"],
    # names of functions
    "advantage.estimator=gpro": ["advantage.estimator='gpro'", "grpo", "module:function"],
    "advantage.estimator=zzz": ["advantage.estimator='zzz'", "grpo", "dr_grpo", "rloo", "module:function"],
    "advantage.estimator='m:'": ["advantage.estimator='m:'", "module:function"],
    "loss.policy=gsop": ["loss.policy='gsop'", "gspo", "module:function"],
    "loss.policy='a/b.py:'": ["loss.policy='a/b.py:'", "module:function"],
    # out of range
    "run.seed=2147483648": ["run.seed=2147483648", "2147483648"],
    "loss.clip_low=1": ["loss.clip_low=1", "1"],
    "run.wandb_project=''": ["run.wandb_project=''"],
    "precision.loss_scale_init=3": ["precision.loss_scale_init=3", "65536"],
    # betas
    **{
        f"optim.betas={value}": [f"optim.betas={value}", "[0, 1)", "[0.9, 0.95]"]
        for value in ("[0.9]", "[0.9, 1]", "[-0.1, 0.9]", "[.nan, 0.9]", "[true, false]", "0.9")
    },
    # the form of a reward's name
    **{
        f"rollout.reward='{value}'": [f"rollout.reward='{value}'", "module:function", "actors.rollout.rewards:"]
        for value in ("f", "m:", "m:f:g", "..:f", "3m:f", "a/b.txt:f")
    },
    "rollout.filter=mixed": ["rollout.filter='mixed'", "mixed_groups", "module:function"],
    # stages
    "rollout.stop=x": ["rollout.stop='x'"],
    "rollout.stop=['']": ["rollout.stop=['']"],
    "rollout.curriculum=[3]": ["rollout.curriculum=[3]", "from_step: 1"],
    "rollout.curriculum={from_step: 1}": ["rollout.curriculum={'from_step': 1}", "a list of stages"],
    "rollout.curriculum=[{from_step: 0}]": ["rollout.curriculum.0.from_step=0", "at least 1"],
    "rollout.curriculum=[{max_new_tokens: 3}]": ["rollout.curriculum.0.from_step"],
    "rollout.curriculum=[{from_step: 1, max_prompt_tokens: x}]": ["rollout.curriculum.0.max_prompt_tokens='x'"],
    "rollout.curriculum=[{from_step: 1, until: 3}]": ["rollout.curriculum.0.until=3"],
    # sections
    "rollout=[a]": ["rollout=['a']"],
    "data.prompt_column=one {a!r}": ["data.prompt_column='one {a!r}'", "{a}"],
    # unknown names
    "mesh.dpp=3": ["mesh.dpp=3", "mesh.dp"],
    "optim.learnig_rate=3": ["optim.learnig_rate=3", "optim.lr"],
    "optim.zzz=3": ["optim.zzz=3", "betas", "eps", "schedule"],
    "optim.name=adam": ["optim.name='adam'", "adamw"],
    "optim.momentum=0.5": ["optim.momentum=0.5", "adamw", "muon", "sgd"],
    "optim.nesterov=false": ["optim.nesterov=false", "always true now"],
    "loss.kl_unbiased=true": ["loss.kl_unbiased=true", "loss.kl_estimator=k3_unbiased"],
    "fsdp.wrap_layers=[A]": ["fsdp.wrap_layers=['A']", "fsdp.wrap"],
    "lr=3": ["lr=3", "critic.lr", "optim.lr"],
    "loss.estimator=grpo": ["loss.estimator='grpo'", "advantage.estimator"],
    "optim.temperature=1": ["optim.temperature=1", "rollout.temperature"],
    "samples_per_prompt=2": ["rollout.samples_per_prompt", "evaluation.samples_per_prompt"],
    "opt.lr=3": ["opt={'lr': 3}", "optim"],
    "zzz=3": ["zzz=3", "advantage", "algorithm", "attention", "batch"],
    "__class__.x=3": ["__class__={'x': 3}"],
    "model.model_config=3": ["model.model_config=3"],
    "run.zzz=" + "x" * 5000: ["run.zzz='xxx"],
    # not an override at all
    "optim": ["override 'optim'", "section.name=value", "optim.lr=1e-6"],
    "=3": ["override '=3'", "section.name=value"],
    "--optim.lr=3": ["override '--optim.lr=3'", "section.name=value"],
    "run.seed=" + "9" * 5000: ["override 'run.seed=999", "5000"],
    "optim.lr=1e999": ["override 'optim.lr=1e999'"],
    "algorithm.x=3": ["algorithm={'x': 3}", "'grpo'", "'ppo'", "'sft'", "'dpo'"],
}  # fmt: skip


@pytest.mark.parametrize("override", BAD_OVERRIDES, ids=lambda override: override[:40])
def test_a_bad_value_is_answered_with_its_name_the_value_and_a_way_out(least_file, override):
    error, expected, name = (
        refusal(load_config, least_file, [override]),
        BAD_OVERRIDES[override],
        override.split("=")[0],
    )
    assert unnamed(expected, error) == [], str(error)
    if expected[0].startswith("override "):
        assert error.field is None, "there is no such setting yet"
    else:
        assert error.field is not None and (name.startswith(error.field) or error.field.startswith(name))
    assert len(str(error).splitlines()) == 1


def test_an_override_below_an_override_that_is_no_section_names_both(least_file):
    error = refusal(load_config, least_file, ["model=3", "model.path=x"])
    assert error.field == "model.path" and unnamed(["model.path='x'", "model=3"], error) == []


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(least_file):
    config = load_config(
        least_file, ["optim.lr=1e-3", "mesh={dp: 2}", "mesh.device=cpu", "optim.lr=2e-3", "run.steps=null"]
    )
    assert (config.optim.lr, config.mesh.dp, config.mesh.device, config.run.steps) == (2e-3, 2, "cpu", None)
    assert config.optim.total_updates == 10


GRPO = {
    **LEAST,
    "data": {"train": "t.jsonl", "heldout": {"sums": "h.jsonl"}, "max_prompt_tokens": 64},
    "rollout": {"reward": "m:f", "samples_per_prompt": 4},
    "environment": {"arguments": {}},
    "evaluation": {"interval_steps": 5},
    "reference": {"offload": "none"},
    "loss": {"clip_high": 0.3, "reduction": "token_mean"},
}  # fmt: skip


@pytest.mark.parametrize("way", ["overrides", "a derived file"])
def test_null_withdraws_what_a_file_of_another_algorithm_has_set(tmp_path, way):
    """The settings of GRPO become those of a supervised run; no rule sees what is null."""
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(GRPO))
    given = {"algorithm": "sft", "data.heldout": None, "rollout": None, "environment": None, "evaluation": None}
    given |= {"reference.offload": None, "loss.clip_high": None}
    assert refusal(load_config, tmp_path / "grpo.yaml", ["algorithm=sft"]).field == "rollout.reward"
    if way == "overrides":
        config = load_config(
            tmp_path / "grpo.yaml", [f"{name}={'null' if v is None else v}" for name, v in given.items()]
        )
    else:
        text = "base: grpo.yaml\nalgorithm: sft\ndata: {heldout: null}\nreference: {offload: }\nloss: {clip_high: ~}\n"
        (tmp_path / "sft.yaml").write_text(text + "rollout:\nenvironment: null\nevaluation: null\n")
        config = load_config(tmp_path / "sft.yaml")
    assert config.algorithm == "sft" and config.data.train == Path("t.jsonl") and config.loss.clip_high == 0.2
    assert config.loss.model_fields_set == {"reduction"} and not config.rollout.model_fields_set


def test_null_withdraws_unless_it_is_a_value_of_its_own():
    assert settings(optim__lr=None, run__seed=None, rollout__curriculum=None) == settings()
    assert settings().critic.clip == 0.2 and settings(algorithm="ppo", critic__clip=None).critic.clip is None
    assert settings(algorithm="ppo", critic=None).critic.clip == 0.2


def test_null_among_arguments_of_the_users_own_is_a_value():
    arguments = {"limit": None, "level": 3}
    config = settings(rollout__environment="m:C", environment__arguments=arguments)
    assert config.environment.arguments == arguments


def test_files_that_build_on_others_are_read_as_one(tmp_path):
    """The nearest file wins, mappings are merged, and the settings that a run leaves behind are the result."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "first.yaml").write_text(yaml.safe_dump({**GRPO, "optim": {"total_updates": 9, "lr": 1e-5}}))
    (tmp_path / "shared" / "second.yaml").write_text("base: first.yaml\noptim: {lr: 1e-4, eps: 1e-7}\nrollout: null\n")
    (tmp_path / "own.yaml").write_text(
        "base: shared/second.yaml\noptim: {lr: 1e-3, total_updates: null}\nrollout: {reward: m:g}\n"
        "data: {heldout: {products: p.jsonl}}\n"
    )
    config = load_config(tmp_path / "own.yaml", ["optim.total_updates=7"])
    assert (config.optim.total_updates, config.optim.lr, config.optim.eps) == (7, 1e-3, 1e-7)
    assert config.rollout.reward == "m:g" and config.rollout.samples_per_prompt == 8  # withdrawn in the second
    assert config.data.heldout_sets == {"sums": Path("h.jsonl"), "products": Path("p.jsonl")}
    (tmp_path / "settings.yaml").write_text(settings_text(config))
    assert load_config(tmp_path / "settings.yaml") == config
    assert "base" not in yaml.safe_load(settings_text(config))
    dictionary = {"base": str(tmp_path / "own.yaml"), "optim": {"total_updates": 7}}
    assert load_config(dictionary) == config and dictionary["optim"] == {"total_updates": 7}
    assert load_config(dictionary, ["optim.total_updates=8"]).optim.total_updates == 8


def test_functions_are_found_in_files_beside_the_settings_that_name_them(tmp_path, monkeypatch):
    for name in ("own/mine.py", "shared/theirs.py", "here/here.py", "here/mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("def f(record, response, finished): return 1.0")
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "shared" / "base.yaml").write_text(yaml.safe_dump({**LEAST, "loss": {"policy": "theirs.py:f"}}))
    file = tmp_path / "own" / "own.yaml"
    file.write_text("base: ../shared/base.yaml\nrollout: {reward: mine.py:f, filter: here.py:f}\n")
    config = load_config(file)
    assert config.rollout.reward == f"{tmp_path / 'own' / 'mine.py'}:f"  # not the one in the present folder
    assert config.rollout.filter == f"{tmp_path / 'here' / 'here.py'}:f"
    assert Path(config.loss.policy.partition(":")[0]).samefile(tmp_path / "shared" / "theirs.py")
    again = load_config(file, ["rollout.reward=mine.py:f", "loss.policy=null", "rollout.filter=null"])
    assert again.rollout.reward == f"{tmp_path / 'here' / 'mine.py'}:f"  # which an override names
    assert load_config({**LEAST, "rollout": {"reward": "mine.py:f"}}).rollout == again.rollout


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ("own.yaml", ["own.yaml"]), ("round.yaml", ["round.yaml", "own.yaml"]), ("none.yaml", ["none.yaml"]),
        ("[a]", ["['a']"]), ("$NO_SUCH_VARIABLE/x", ["NO_SUCH_VARIABLE"]),
    ],
)  # fmt: skip
def test_a_base_that_cannot_be_is_refused(tmp_path, base, named):
    (tmp_path / "own.yaml").write_text(f"base: {base}\n")
    (tmp_path / "round.yaml").write_text("base: ./own.yaml\n")
    error = refusal(load_config, tmp_path / "own.yaml")
    assert all(name in error.message for name in named) and error.field in ("base", None)
    assert refusal(config_from_dict, {**LEAST, "base": "x.yaml"}).field == "base"


def test_a_tower_of_bases_is_refused(tmp_path):
    for floor in range(30):
        (tmp_path / f"{floor}.yaml").write_text(f"base: {floor + 1}.yaml\n")
    assert refusal(load_config, tmp_path / "0.yaml").field == "base"


def test_an_unknown_name_is_told_before_what_is_missing_because_of_it():
    error = refusal(config_from_dict, {"modell": {"path": "m"}, "optim": {"total_updates": 3}})
    unknown, missing = str(error).splitlines()
    assert error.field == "modell" and "modell={'path': 'm'}" in unknown and "model.path" in missing
    assert error.others == (missing.removeprefix("  also "),)


def test_names_that_other_trainers_have_lead_to_those_of_this_one():
    error = refusal(settings, optim__learning_rate=1e-5)
    assert error.field == "optim.learning_rate" and "optim.lr" in error.hint
    tree = config_from_dict(LEAST)
    for name, hint in NAMES_ELSEWHERE.items():
        for one in re.findall(r"[a-z]+\.[a-z_]+", hint):
            section, own = one.split(".")
            assert hasattr(getattr(tree, section), own), name
        elsewhere = refusal(config_from_dict, {**LEAST, "rollout": {name: 1}})
        assert hint in elsewhere.hint, name


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("loss.policy=grpo", ["advantage.estimator=grpo"]),
        ("advantage.estimator=gspo", ["loss.policy=gspo"]),
        ("mesh.pp=2", [NAMES_ELSEWHERE["pp"]]),
        ("lora.r=8", ["lora.rank"]),
        ("per_device_train_batch_size=1", ["batch.samples_per_update"]),
        ("train={learning-rate: 1e-5, lora: {lora_alpha: 3}}", ["optim.lr", "lora.alpha"]),
        ("actor_rollout_ref.actor.ppo_epochs=3", ["loss.epochs"]),
        ("fsdp_config.fsdp_offload_params=true", ["fsdp.cpu_offload"]),
        ("fsdp_state_dict_type=x", ["fsdp.sharding"]),
        ("advantage.estimator=GRPO", ["did you mean grpo?"]),
        ("loss.policy=dapo", ["loss.clip_high=0.28", "rollout.filter=mixed_groups"]),
        ("algorithm=dapo", ["loss.clip_high=0.28", "rollout.filter=mixed_groups"]),
        ("algorithm=GSPO", ["loss.policy=gspo"]),
        ("algorithm.adv_estimator=grpo", ["advantage.estimator"]),
        ("algorithm={kl_ctrl: {kl_coef: 0.1}}", ["loss.kl_coefficient with loss.kl_in=reward"]),
        ("algorithm.kl_ctrl.kl_coef=0.1", ["loss.kl_coefficient with loss.kl_in=reward"]),
        ("actor_rollout_ref.actor.optim.lr=1", ["lr: here it is optim.lr"]),
        ("warmup_ratio=0.1", ["optim.warmup_updates"]),
        ("seed=1", ["did you mean run.seed?"]),
        ("rollout-batch-size=1", ["rollout.prompts_per_step"]),
        ("optim={total_updates: 9, lr: 10}", ["optim.lr=10", "optim.name=adamw"]),
        ("batch.samples_per_update=7", ["optim.total_updates=3700", "per_update (now 7; a step has 256 samples)"]),
    ],
)  # fmt: skip
def test_what_others_would_have_written_is_answered_with_what_to_write(least_file, override, named):
    overrides = ["run.steps=100", "optim.total_updates=100"] if "7" in override else ["algorithm=grpo"]
    text = str(refusal(load_config, least_file, [*overrides, override]))
    assert [one for one in named if one not in text] == [], text


def test_a_program_is_found_on_path_unless_it_is_written_with_its_folder(monkeypatch, tmp_path):
    (tmp_path / "python-of-engine").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {"python-of-engine": tmp_path / "python-of-engine", "./python-of-engine": Path("python-of-engine")}
    for written, path in found.items():
        assert settings(**{**VLLM, "rollout__engine_python": written}).rollout.engine_python == path


def test_several_faults_are_told_at_once_but_not_without_end():
    error = refusal(settings, mesh__dp=0, mesh__cp=-1, optim__lr="x")
    assert len(error.others) == 2
    error = refusal(config_from_dict, {**LEAST, **{f"k{i}": i for i in range(1000)}})
    assert len(error.others) == MAX_FINDINGS and names(error.others[-1], 1000 - MAX_FINDINGS)


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
    choice = {"optim": "name"}.get(section)
    for kind, name in ((kind, name) for kind, model in SECTIONS[section].items() for name in model.model_fields):
        if name == choice:
            continue
        given = {f"{section}.{choice}": kind} if choice else {}
        for wrong in ({"x y": 1} if name == "chat_template_kwargs" else {"x": 1}, [1, 2, 3], WRONG_FOR_ALL):
            error = refusal(settings, **given, **{f"{section}.{name}": wrong})
            assert error.field == f"{section}.{name}" and str(error).startswith(f"{section}.{name}=")


RULES = yaml.safe_load((Path(__file__).parent / "rules.yaml").read_text())


@pytest.mark.parametrize(("rule", "accepted", "refused"), RULES, ids=[rule[0] for rule in RULES])
def test_a_rule_between_settings_accepts_one_side_and_refuses_the_other(rule, accepted, refused):
    settings(**accepted)
    error = refusal(settings, **refused)
    assert error.field in error.message and error.field in {**refused, "optim.total_updates": 0}


def test_every_rule_between_settings_is_in_the_table():
    models = [RunConfig, *(kind for section in SECTIONS.values() for kind in section.values())]
    validators = [model.__pydantic_decorators__.model_validators.items() for model in models]
    assert {name for found in validators for name, one in found if one.info.mode == "after"} == {
        rule[0] for rule in RULES
    }


def test_evaluations_sample_as_they_say_and_else_as_training_does():
    rollout = {"rollout__temperature": 0.7, "rollout__top_k": 5, "rollout__max_new_tokens": 9}
    both = {settings(**rollout).sampling(evaluates=one) for one in (False, True)}
    assert len(both) == 1 and both.pop().length_setting == "rollout.max_new_tokens"
    config = settings(
        **rollout, evaluation__temperature=0.5, evaluation__max_new_tokens=99, evaluation__top_p=0.9,
        evaluation__min_p=0.0,
    )  # fmt: skip
    assert config.sampling(evaluates=False) == settings(**rollout).sampling(evaluates=False)
    own = config.sampling(evaluates=True)
    assert (own.temperature, own.max_new_tokens, own.length_setting) == (0.5, 99, "evaluation.max_new_tokens")
    assert (own.top_p, own.top_k, own.min_p) == (0.9, 5, 0.0)


def test_good_values_of_every_kind_are_accepted_as_they_are():
    config = settings(
        model__path=Path("m"), run__dir="~/x", run__seed=2**31 - 1, optim__lr=1, optim__betas=(0, 0.5),
        rollout__reward="my_rewards.maths:exact", run__wandb_project="3", loss__clip_high=28,
    )  # fmt: skip
    assert config.run.dir == Path.home() / "x"  # no shell has expanded it
    assert config.optim.betas == (0.0, 0.5) and config.optim.lr == 1.0
    assert config.model.path == Path("m") and config.rollout.reward == "my_rewards.maths:exact"


def test_held_out_sets_are_one_without_a_name_or_several_with_names():
    one = settings(data__train="t", data__heldout="h.jsonl").data
    assert one.heldout_sets == {"": Path("h.jsonl")}
    assert one.sources == {"data.train": Path("t"), "data.heldout": Path("h.jsonl")}
    several = settings(data__heldout={"math": "a/$$b", "co-de_2": "owner/name:main#test"})
    assert several.data.sources == {
        "data.heldout.math": Path("a/$b"), "data.heldout.co-de_2": Path("owner/name:main#test"),
    }  # fmt: skip
    assert type(several.data).model_validate(several.data.model_dump(mode="json")) == several.data
    moved = several.data.with_sources({"data.heldout.math": Path("c")})
    assert moved.heldout_sets == {"math": Path("c"), "co-de_2": Path("owner/name:main#test")}
    assert one.with_sources({"data.heldout": Path("c")}).sources == {**one.sources, "data.heldout": Path("c")}
    assert settings().data.heldout_sets == {} == settings().data.with_sources({}).sources


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({}, []), (["a.jsonl", "b.jsonl"], ["a.jsonl"]), ({"": "x"}, ["''"]), ({"a b": "x"}, ["a b"]),
        ({"ok": "x", "a/b": "y"}, ["a/b"]), ({"a.b": "x"}, ["a.b"]), ({"a\n": "x"}, []),
        ({"a" * 65: "x"}, ["64"]), ({3: "x"}, ["3"]), ({"math": 3}, ["3", "math"]), ({"math": None}, ["null", "math"]),
        ({"math": {"x": "y"}}, ["math", "{'x': 'y'}"]),
        ({"ok": "x", "math": "s3://bucket/x"}, ["s3://bucket/x", "math", "address"]),
    ],
    ids=repr,
)  # fmt: skip
def test_held_out_sets_that_are_none_are_refused_with_the_name_and_the_value(value, named):
    error = refusal(settings, data__heldout=value)
    assert error.field == "data.heldout" and unnamed(named, error) == [], str(error)


def test_the_name_of_a_held_out_set_is_ascii():
    with pytest.raises(ConfigError) as caught:
        settings(data__heldout={"é": "x"})
    assert caught.value.field == "data.heldout" and "é" in caught.value.message and caught.value.hint


def test_an_override_adds_a_held_out_set_by_name(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**LEAST, "data": {"heldout": {"math": "m.jsonl"}}}))
    added = load_config(tmp_path / "c.yaml", ["data.heldout.2-digits=d.jsonl", "data.heldout.math=n.jsonl"])
    assert added.data.heldout_sets == {"math": Path("n.jsonl"), "2-digits": Path("d.jsonl")}
    one = load_config(tmp_path / "c.yaml", ["data.heldout=x.jsonl"])
    assert one.data.heldout_sets == {"": Path("x.jsonl")}
    other = load_config(tmp_path / "c.yaml", ["data.heldout.code=c.jsonl", "data.heldout.math=null"])
    assert other.data.heldout_sets == {"code": Path("c.jsonl")}
    error = refusal(load_config, tmp_path / "c.yaml", ["data.heldout=x.jsonl", "data.heldout.math=m.jsonl"])
    assert error.field == "data.heldout.math" and unnamed(["data.heldout='x.jsonl'"], error) == []
    assert refusal(load_config, tmp_path / "c.yaml", ["data.heldout.a b=x"]).hint
    assert refusal(load_config, tmp_path / "c.yaml", ["data.held-out=x"]).hint


def test_settings_are_frozen_and_plain_json_gives_them_back():
    config = settings(
        optim__schedule="cosine", optim__min_lr_ratio=0.1, rollout__reward="m:f", run__dir="d",
        rollout__curriculum=[{"from_step": 1, "max_prompt_tokens": 9}, {"from_step": 5, "max_new_tokens": 3}],
    )  # fmt: skip
    for name in SECTIONS:
        section = getattr(config, name)
        setting = next(iter(type(section).model_fields))
        assert refusal(setattr, section, setting, 1.0).field == f"{name}.{setting}"
        assert refusal(delattr, section, setting).field == f"{name}.{setting}"
    assert refusal(setattr, config, "algorithm", "sft").field == "algorithm" and config.algorithm == "grpo"
    assert config_from_dict(config.model_dump(mode="json")) == config


@pytest.mark.parametrize(
    ("share", "total", "updates"), [(0.07, 100, 7), (0.1, 25, 3), (0.0, 10, 0), (0.001, 10, 1), (0.5, 1, 0)]
)
def test_a_warm_up_is_a_number_of_updates_or_a_share_of_all(share, total, updates):
    assert settings(optim__warmup_updates=share, optim__total_updates=total).warmup_updates == updates
    assert settings(optim__warmup_updates=updates, optim__total_updates=total).warmup_updates == updates


def test_settings_are_shown_on_a_short_line():
    config = settings(run__dir="runs/x", mesh__dp=4, rollout__reward="m:f")
    for text in (repr(config), str(config)):
        assert len(text) < 200 and names(text, "runs/x") and names(text, 4) and names(text, "grpo") and names(text, 5)


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
        assert error.field == "mesh.dp" and unnamed([str(ranks), "mesh.dp_replicate=2", "mesh.cp=2"], error) == []


def test_auto_leaves_no_fewer_ranks_than_there_are_colocated_engines():
    config = settings(mesh__dp="auto", rollout__placement="colocated", rollout__engines=3)
    assert config.with_ranks(3).ranks == 3
    error = refusal(config.with_ranks, 2)
    assert error.field == "rollout.engines" and unnamed(["rollout.engines=3", "2 ranks"], error) == []


@pytest.mark.parametrize("name", ["reference", "critic"])
def test_a_model_has_the_actors_mesh_unless_it_has_a_group_of_its_own(name):
    mesh = {"algorithm": "ppo", "mesh__dp": 3, "mesh__cp": 2, "mesh__dp_replicate": 2}
    role = {"reference": "ref"}.get(name, name)
    for dp, expected, ranks in ((None, (2, 3), 12), (1, (1, 1), 2)):
        config = settings(**mesh, **{f"{name}__dp": dp})
        assert config.mesh_of(role) == expected
        assert config.ranks_of(role) == ranks and config.mesh_of("actor") == (2, 3) and config.ranks == 12


def test_each_role_has_the_policys_folder_unless_it_has_its_own():
    for role, field in (("ref", "reference.path"), ("critic", "critic.path")):
        assert settings(algorithm="ppo").folder_of(role) == (Path("m"), "model.path")
        own = settings(algorithm="ppo", **{field.replace(".", "__"): "x"})
        assert own.folder_of(role) == (Path("x"), field) and own.folder_of("actor") == (Path("m"), "model.path")


def test_the_estimator_is_what_the_algorithm_is_known_by_or_the_one_that_is_named():
    assert [settings(algorithm=algorithm).estimator for algorithm in ("grpo", "ppo")] == ["grpo", "gae"]
    assert settings(advantage__estimator="opo").estimator == "opo"


def test_dpo_is_the_mean_over_pairs_against_a_reference():
    config = settings(algorithm="dpo", loss__beta=0.5)
    assert (config.loss.policy, config.loss.reduction, config.loss.beta) == ("dpo", "sequence_mean", 0.5)
    assert config.needs_reference and not config.has_rollouts


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_can_be_named(name):
    k = {"advantage__pass_k": 2} if name == "pass_at_k" else {}
    assert settings(advantage__estimator=name, **k).estimator == name


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_can_be_named_and_only_pairs_read_a_reference_without_a_kl(name):
    config = settings(loss__policy=name)
    assert config.loss.policy == name and config.needs_reference == (name == "dpo")


def test_the_methods_of_correction_are_those_that_are_implemented():
    methods = get_args(CorrectionSettings.model_fields["method"].annotation)
    assert set(methods) == {"none", *CORRECTIONS} == {"none", *objective.CORRECTIONS}


def test_conditions_name_settings_and_values_that_there_are():
    fields = {
        f"{section}.{name}"
        for section, kinds in SECTIONS.items()
        for one in kinds.values()
        for name in one.model_fields
    }
    conditions = [*ONLY_WITH.items(), *REQUIRED_WITH.items()]
    assert {field for field, _ in conditions} <= fields | SECTIONS.keys()
    others = [condition for _, condition in conditions] + [conflict for conflict, _, _ in CONFLICTS]
    assert {other for condition in others for other in condition} <= fields | {"algorithm"}
    for field, condition in REQUIRED_WITH.items():  # what must be set is read
        assert all(set(values) <= set(ONLY_WITH[field][other]) for other, values in condition.items())
    assert set(ONLY_WITH["correction.high"]["correction.method"]) == CORRECTIONS.keys()


def test_every_name_of_a_kl_and_of_a_reduction_can_be_chosen():
    for name in KL_ESTIMATORS:
        assert settings(loss__kl_coefficient=0.1, loss__kl_estimator=name).loss.kl_estimator == name
    for name in REDUCTIONS:
        length = {"loss__constant_length": 5} if name == "constant" else {}
        assert settings(loss__reduction=name, **length).loss.reduction == name


READY = {"run__dir": "d", "run__steps": 1, "data__train": "t"}
READY_GRPO = {**READY, "rollout__reward": "m:f"}
READY_SFT = {**READY, "algorithm": "sft", "batch__samples_per_update": 4}
READY_PAIRS = {**READY_SFT, "algorithm": "dpo"}


@pytest.mark.parametrize("ready", [READY_GRPO, READY_SFT, READY_PAIRS], ids=["grpo", "sft", "dpo"])
def test_training_names_each_setting_it_needs(ready):
    check_ready_to_train(settings(**ready))
    for key in set(ready) - {"algorithm"}:
        config = settings(**{name: value for name, value in ready.items() if name != key})
        error = refusal(check_ready_to_train, config)
        assert error.field == key.replace("__", ".") and error.message.startswith(error.field)


def test_an_evaluation_that_never_is_is_refused():
    error = refusal(check_ready_to_train, settings(**READY_GRPO, evaluation__pass_at=[1]))
    assert error.field == "evaluation.pass_at" and "does nothing" in error.message
    asked = {"evaluation__pass_at": [1], "evaluation__interval_steps": 5, "data__heldout": "h"}
    check_ready_to_train(settings(**READY_GRPO, **asked))


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("0.0.0.0:80", "0.0.0.0", 80), ("localhost:0", "localhost", 0), ("[::1]:8000", "::1", 8000),
     ("8000", None, 0), ("::1:8000", None, 0), ("a:65536", None, 0), ("a b:1", None, 0), (":1", None, 0)],
)  # fmt: skip
def test_a_service_listens_at_a_host_and_a_port(address, host, port):
    if host is None:
        assert refusal(settings, service__address=address).field == "service.address"
    else:
        service = settings(service__address=address).service
        assert (service.host, service.port) == (host, port)


def test_settings_of_earlier_runs_are_read_under_the_names_that_they_have_now():
    earlier = {
        "mesh": {"dp": 3, "dp_replicate": 2},
        "critic": {"placement": "group", "offload": "sleep"},
        "reference": {"placement": "colocated"},
        "evaluation": {"greedy": True, "samples_per_prompt": 0},
        "service": {"host": "::1", "port": 0, "session_timeout_s": 9.0},
        "fsdp": {"prefetch_layers": 2},
    }
    assert with_present_names(earlier) == {
        "mesh": {"dp": 3, "dp_replicate": 2},
        "critic": {"dp": 6},
        "reference": {},
        "evaluation": {"samples_per_prompt": 1, "temperature": 0.0},
        "service": {"address": "[::1]:0"},
        "fsdp": {},
    }
    also_greedy = {"evaluation": {"greedy": True, "samples_per_prompt": 4}, "service": {"port": 9}}
    expected = {"evaluation": {"samples_per_prompt": 4}, "service": {"address": "127.0.0.1:9"}}
    assert with_present_names(also_greedy) == expected


def test_null_withdraws_settings_of_another_kind():
    muon = LEAST | {"optim": {"name": "muon", "adamw_lr": 1e-4, "momentum": 0.9}}
    overrides = ["optim.name=adamw", "optim.adamw_lr=null", "optim.momentum=null"]
    assert load_config(muon, overrides).optim == load_config(LEAST, ["optim={}"]).optim
    assert refusal(load_config, muon, [*overrides, "optim.adamw_lrr=null"]).field == "optim.adamw_lrr"


@pytest.mark.parametrize(
    ("stored", "momentum"),
    [({"state_dtype": "auto"}, 0.9), ({"eps": 1e-5}, 0.9), ({"betas": [0.5, 0.9], "momentum": 0.95}, 0.5)],
)
def test_sgd_of_earlier_runs_has_no_settings_of_adamw(stored, momentum):
    optim = with_present_names({"optim": {"name": "sgd", "adamw_lr": None} | stored})["optim"]
    assert settings(optim=optim).optim.momentum == momentum


def test_stored_settings_that_are_constants_now_are_named_where_they_had_other_values(tmp_path):
    optim = {"name": "muon", "ns_steps": 3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    tree = LEAST | {"optim": optim, "precision": {"tf32": True, "buffer_dtype": "auto"}}
    (file := tmp_path / "settings.yaml").write_text(f"{STORED}\n{yaml.safe_dump(tree)}")
    with pytest.warns(UserWarning) as warned:
        load_config(file)
    assert [str(one.message).removeprefix(f"{file}: ") for one in warned] == [
        "optim.nesterov was false and is always true now",
        "optim.ns_steps was 3 and is always 5 now",
        "precision.tf32 was true and is always false now",
    ]


def test_tools_are_of_a_prompt_and_not_of_all():
    error = refusal(settings, data__chat_template_kwargs={"tools": []})
    assert error.field == "data.chat_template_kwargs" and "tools" in error.message


READY_DPO = {
    **READY_GRPO, "loss__policy": "dpo", "rollout__samples_per_prompt": 2, "rollout__filter": "mixed_groups"
}  # fmt: skip
NOT_READY = {
    "no prompts to evaluate": (READY_GRPO, {"evaluation__interval_steps": 1}, "data.heldout", []),
    "no room for a prompt": (
        READY_GRPO, {"batch__max_tokens_per_rank": 256}, "rollout.max_new_tokens",
        ["rollout.max_new_tokens=256", "or lower rollout.max_new_tokens"],
    ),
    "no critic": (
        READY_GRPO, {"advantage__estimator": "gae"}, "advantage.estimator", ["algorithm=grpo", "algorithm=ppo"],
    ),
    "no prompts under sft": (
        READY_SFT, {"loss__reduction": "prompt_mean"}, "loss.reduction", ["algorithm=sft", "sequence_mean"],
    ),
    "one subset of k": (
        READY_GRPO, {"advantage__estimator": "pass_at_k", "advantage__pass_k": 8}, "rollout.samples_per_prompt",
        ["rollout.samples_per_prompt=8", "9"],
    ),
    "rewards that are counted": (
        READY_GRPO, {"advantage__estimator": "maxrl", "rollout__overlong_buffer_tokens": 8},
        "rollout.overlong_buffer_tokens", ["advantage.estimator=maxrl"],
    ),
    "a policy that never moves": (
        {**READY_GRPO, "algorithm": "ppo"}, {"critic__warmup_steps": 10, "run__steps": 10},
        "critic.warmup_steps", ["=10", "run.steps=10"],
    ),
    "an end that never comes": (
        READY_GRPO, {"loss__max_kl": 0.1}, "loss.max_kl", ["loss.max_kl=0.1", "loss.epochs"],
    ),
    "no pairs": (READY_DPO, {"rollout__samples_per_prompt": 4}, "rollout.samples_per_prompt", ["=4", "2"]),
    "equal pairs": (READY_DPO, {"rollout__filter": None}, "rollout.filter", ["rollout.filter=null", "mixed_groups"]),
    "half pairs": (READY_DPO, {"rollout__mask_truncated": True}, "rollout.mask_truncated", ["=true"]),
    "pairs made equal": (
        READY_DPO, {"rollout__overlong_buffer_tokens": 8}, "rollout.overlong_buffer_tokens", ["=8"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_READY)
def test_training_refuses_what_its_loop_cannot_serve(case):
    ready, wrong, field, expected = NOT_READY[case]
    check_ready_to_train(settings(**ready))
    error = refusal(check_ready_to_train, settings(**{**ready, **wrong}))
    assert error.field == field and unnamed(expected, error) == [], str(error)


def test_what_a_function_of_the_users_own_sees_to_is_not_refused():
    check_ready_to_train(settings(**READY_GRPO, loss__max_kl=0.1, loss__old_log_probs="rollout"))
    check_ready_to_train(settings(**READY_GRPO, loss__max_kl=0.1, batch__samples_per_update=128))
    own = {"rollout__filter": "m:f", "rollout__overlong_buffer_tokens": 8}
    check_ready_to_train(settings(**{**READY_DPO, **own}))
    check_ready_to_train(settings(**READY_GRPO, advantage__estimator="m:f", rollout__samples_per_prompt=1))
    check_ready_to_train(settings(**READY_GRPO, evaluation__interval_steps=1, data__heldout="h"))


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"pass_at_k"}))
def test_training_refuses_groups_of_one_exactly_where_the_estimator_compares(name):
    algorithm = "ppo" if name == "gae" else "grpo"
    alone = {"algorithm": algorithm, "advantage__estimator": name, "rollout__samples_per_prompt": 1}
    config = settings(**READY_GRPO, **alone)
    if "group_ids" in advantages.ESTIMATORS[name].reads:
        error = refusal(check_ready_to_train, config)
        assert error.field == "rollout.samples_per_prompt"
        assert unnamed(["rollout.samples_per_prompt=1", f"advantage.estimator={name}"], error) == []
    else:
        check_ready_to_train(config)
    check_ready_to_train(settings(**READY_GRPO, **{**alone, "rollout__samples_per_prompt": 2}))


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
    for section, kinds in {"": {"": RunConfig}, **SECTIONS}.items():
        part = text.split(f"## `{section}`\n" if section else "## Top level\n")[1].split("\n## ")[0]
        rows = {row.split("|")[1].strip(): row for row in part.splitlines() if row.startswith("| `")}
        known = {name for model in kinds.values() for name in model.model_fields}
        assert set(rows) == {f"`{name}`" for name in known if not (section == "" and name in SECTIONS)}
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
        (Path | dict[str, Path] | None, [], "path \\| {name: path, ...} \\| `null`"),
    ],
)
def test_types_are_rendered_for_people(script, annotation, constraints, text):
    assert script.type_text(annotation, constraints) == text


def test_the_script_prints_the_document():
    command = [sys.executable, "scripts/settings_reference.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed == (ROOT / "docs" / "settings.md").read_text()


# nothing is settable that nobody reads


def attributes_read(tree: ast.AST) -> Iterator[str]:
    """Names read as `something.name`, but for what a rule among the settings reads."""
    if isinstance(tree, ast.FunctionDef) and any("validator" in ast.unparse(d) for d in tree.decorator_list):
        return
    if isinstance(tree, ast.Attribute) and isinstance(tree.ctx, ast.Load):
        yield tree.attr
    for child in ast.iter_child_nodes(tree):
        yield from attributes_read(child)


def test_every_setting_is_read_by_the_program():
    paths = [path for folder in ("slimefsdp", "actors") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in paths for name in attributes_read(ast.parse(path.read_text()))}
    known = {name for kinds in SECTIONS.values() for model in kinds.values() for name in model.model_fields}
    assert sorted(known - read) == [], "no code reads these: honour or remove them"


def test_what_only_a_rule_looks_at_is_not_read():
    source = """
class Section:
    @model_validator(mode="after")
    def rule(self):
        return self.checked

    def value(self):
        self.written = 1
        return self.honoured
"""
    assert list(attributes_read(ast.parse(source))) == ["honoured"]


@pytest.mark.parametrize(
    ("rank", "target"), [(513, "model.layers.0.self_attn.q_proj"), (8, "model.layers.0.mlp.experts.down_proj")]
)
def test_what_a_folder_says_of_adapters_is_looked_at_as_what_settings_say(rank, target):
    config = settings(lora__path="x", lora__sync="adapters", **VLLM)
    assert config.with_adapters(8, 16.0, ["model.layers.0.self_attn.q_proj"]).lora.rank == 8
    error = refusal(config.with_adapters, rank, 16.0, [target])
    assert error.field == "lora.sync" and names(error.message, rank if rank > 512 else target)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("[q_proj, mlp, lm_head, '*.0.*.o_proj']", ("*.q_proj", "mlp", "lm_head", "*.0.*.o_proj")),
        ("all-linear", ("all-linear",)),
    ],
)
def test_targets_of_adapters_are_taken_as_peft_names_them(tmp_path: Path, written: str, read: tuple[str, ...]) -> None:
    (tmp_path / "c.yaml").write_text("{model: {path: m}, optim: {total_updates: 1}, lora: {rank: 4}}")
    config = load_config(tmp_path / "c.yaml", [f"lora.targets={written}"])
    assert config.lora.targets == read
    assert config_from_dict(config.model_dump(mode="json", exclude_unset=True)).lora.targets == read
