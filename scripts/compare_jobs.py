"""The jobs of scripts/compare_commits.py, run in the environment of one commit.

    python compare_jobs.py REQUEST.json

Both commits run this same file. It imports only the names in NAMES from a commit, and uses only documented methods of
these objects. When a name moves, its new import path is added to NAMES. Standard output gets a JSON line per finished
job, and standard error all output of libraries.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

# ---------------------------------------------------------------------- imports from a commit

NAMES = {  # name -> possible import paths; the first that exists is used
    "Trainer": ("slimefsdp:Trainer",),
    "RolloutBatch": ("slimefsdp:RolloutBatch",),
    "load_config": ("slimefsdp:load_config",),
    "SlimeError": ("slimefsdp.errors:SlimeError",),
    "plan_training": ("slimefsdp.training.plan:plan_training", "slimefsdp.preparation.plan:plan_training"),
    "submit": ("actors:submit",),
    "with_present_names": ("slimefsdp.config.earlier:with_present_names",),
    "SupervisedGroup": ("actors.fault_tolerance.supervisor:SupervisedGroup", "actors.supervisor:SupervisedGroup"),
}
REPLAY = ("-m", "slimefsdp.replay")  # CONFIG --batch FILE --export DIR, prints the metrics as JSON
TRAIN = ("-m", "actors.cli", "train")  # CONFIG, the command `slimefsdp train`
COST_OF_A_TRAINER = ("policy.attention.cost",)  # attribute paths of the cost model that balances a Trainer's own plans
PLAN_FIELDS = ("num_dropped", "num_skipped_updates", "num_first_epoch_updates", "max_pack_tokens")

# parts of the names of metrics that are measured and not computed from the batch
UNSTEADY = ("seconds", "per_second", "tflops", "mfu", "bytes", "memory", "time")


def taken(name: str) -> Any:
    """Imports a name from the commit; raises a LookupError with all tried paths."""
    for place in NAMES[name]:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise LookupError(f"{name} is in none of {', '.join(NAMES[name])}; add its place to NAMES in {__file__}")


def cost_of(trainer: Any) -> Any:
    """Returns the cost model that balances the trainer's own plans."""
    for path in COST_OF_A_TRAINER:
        value = trainer
        for name in path.split("."):
            value = getattr(value, name, None)
        if value is not None:
            return value
    raise LookupError(f"a Trainer has none of {COST_OF_A_TRAINER}; add the place to COST_OF_A_TRAINER in {__file__}")


def float64_throughout() -> Any:
    """Returns a context in which float64 models stay in float64, though transformers casts some parts to float32."""
    import torch
    from torch.autograd.graph import _engine_run_backward
    from torch.overrides import TorchFunctionMode

    class KeepFloat64(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function is torch.Tensor.backward and args[0].ndim == 0:
                # modes are off during backward, but recomputation in backward must cast like the forward pass
                with KeepFloat64():
                    ones = (torch.ones_like(args[0]),)
                    return _engine_run_backward(
                        (args[0],), ones, False, False, (), allow_unreachable=True, accumulate_grad=True
                    )
            to_float32 = function is torch.Tensor.float or (
                function is torch.Tensor.to and torch.float32 in (*args[1:], *kwargs.values())
            )
            if to_float32 and args[0].dtype == torch.float64:
                return args[0]
            if kwargs.get("dtype") == torch.float32 and args and getattr(args[0], "dtype", None) == torch.float64:
                kwargs = {**kwargs, "dtype": None}
            return function(*args, **kwargs)

    return KeepFloat64()


# ---------------------------------------------------------------------- the jobs


@dataclass(frozen=True)
class Job:
    """Describes a job: settings, a kind of batches, and the calls to make.

    `calls` names methods in `CALLS`, which run one after another; each `train` uses the next batch.
    """

    name: str
    settings: dict[str, Any]
    calls: tuple[str, ...] = ("train", "train")
    batches: str = "groups"
    model: str = "qwen3"
    ranks: int = 1
    is_quick: bool = False
    runs: str = "trainer"  # what runs the job: trainer, supervised, replay or train

    @property
    def parts(self) -> tuple[str, ...]:
        return (UNDISTURBED, KILLED) if self.runs == "supervised" else (self.name,)


UNDISTURBED, KILLED = "supervised/undisturbed", "supervised/a rank killed"
EQUALS = {KILLED: UNDISTURBED}  # record -> another record that it must equal in the other commit

BASE: dict[str, Any] = {
    "mesh": {"device": "cpu"},
    "precision": {"compute_dtype": "float32"},
    "batch": {"max_tokens_per_rank": 96, "samples_per_update": 8},
    "optim": {"lr": 1e-2, "betas": [0.9, 0.95], "total_updates": 1000},
    "rollout": {"temperature": 0.8},
}
KL = {"kl_coefficient": 0.1}
POLICIES: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 3.0, "clip_high": 0.28},
    "gspo": {"reduction": "sequence_mean", "clip_low": 3e-3, "clip_high": 4e-3},
    "gspo_token": {"clip_low": 3e-3, "clip_high": 4e-3},
    "cispo": {"clip_low": 0.99, "clip_high": 4.0},
    "sapo": {},
    "gmpo": {"reduction": "sequence_mean", "clip_low": 0.4, "clip_high": 0.4},
    "reinforce": {},
    "importance_sampling": {},
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {"gamma": 0.95},
    "reinforce_pp_baseline": {},
    "remax": {},
    "opo": {},
    "maxrl": {},
    "pass_at_k": {"pass_k": 2},
    "gae": {"gamma": 0.97, "gae_lambda": 0.9},
    "raw": {"whiten": True},
}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "importance": {"high": 2.0},
    "tis": {"high": 1.2},
    "mis": {"low": 0.7, "high": 1.4},
    "icepop": {"low": 0.7, "high": 1.4},
    "sequence_tis": {"high": 1.2},
    "sequence_mis": {"low": 0.5, "high": 2.0},
    "geometric_mis": {"low": 0.9, "high": 1.1},
}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "token_mean": {},
    "sequence_mean": {},
    "constant": {"constant_length": 24},
    "prompt_mean": {},
}
MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "dp2": {"dp": 2},
    "cp2": {"cp": 2},
    "dp2 cp2": {"dp": 2, "cp": 2},
    "dp4": {"dp": 4},
    "replicate2": {"dp_replicate": 2},
    "replicate2 dp2": {"dp_replicate": 2, "dp": 2},
    "replicate2 cp2": {"dp_replicate": 2, "cp": 2},
}
SHARDINGS = ("full", "keep_parameters", "optimizer", "replicate")
PRECISIONS = ("float32", "bfloat16", "float16", "float64")
STRATEGIES = ("ring", "ulysses", "all_gather")


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for tree in trees:
        for name, value in tree.items():
            result[name] = {**result.get(name, {}), **value} if isinstance(value, dict) else value
    return result


def ranks_of(mesh: dict[str, int]) -> int:
    return mesh.get("dp_replicate", 1) * mesh.get("dp", 1) * mesh.get("cp", 1)


def job(name: str, *trees: dict[str, Any], mesh: str = "1", **fields: Any) -> Job:
    """Makes a Job on one of MESHES, with the settings in BASE and in `trees`."""
    settings = merged(BASE, {"mesh": MESHES[mesh]}, *trees)
    return Job(name, settings, ranks=ranks_of(MESHES[mesh]), **fields)


def jobs() -> list[Job]:
    """Returns all jobs, with cheap and informative ones first; the same for every commit."""
    all_jobs = [
        *algorithm_jobs(),
        *mesh_jobs(),
        *attention_jobs(),
        *critic_and_supervised_jobs(),
        *state_jobs(),
        *model_jobs(),
        *mixed_jobs(),
        *process_jobs(),
    ]
    assert len({entry.name for entry in all_jobs}) == len(all_jobs)
    return all_jobs


def algorithm_jobs() -> Iterator[Job]:
    """Yields jobs that cover every name in the tables of docs/algorithms.md."""
    for name, loss in POLICIES.items():
        yield job(f"policy/{name}", {"loss": {"policy": name, **KL, **loss}}, is_quick=True)
    pairs = {"loss": {"policy": "dpo", "dpo_beta": 0.2, "reduction": "sequence_mean"}}
    yield job("policy/dpo", pairs, batches="pairs", is_quick=True)
    yield job("policy/dro", {"loss": {"policy": "dro", "dro_beta": 0.3, **KL}}, is_quick=True)
    yield job("policy/dpo dp2", pairs, mesh="dp2", batches="pairs")
    for name, options in ESTIMATORS.items():
        advantage = {"advantage": {"estimator": name, **options}}
        yield job(f"estimator/{name}", advantage, batches="all fields", is_quick=True)
        yield job(f"estimator/{name} dp2 cp2", advantage, mesh="dp2 cp2", batches="all fields")
    for whiten in (None, True):
        tree = {"loss": KL, "advantage": {"whiten": whiten}}
        yield job(f"callers/whiten {whiten}", tree, batches="callers", is_quick=True)
        yield job(f"callers/whiten {whiten} dp2 cp2", tree, mesh="dp2 cp2", batches="callers")
    for name, options in CORRECTIONS.items():
        correction = {"correction": {"method": name, **options}}
        yield job(f"correction/{name}", correction, batches="engine", is_quick=True)
        yield job(f"correction/{name} dp2", correction, mesh="dp2", batches="engine")
    yield job("correction/veto", {"correction": {"veto_below": 0.6}}, batches="engine")
    yield job("correction/opsm", {"correction": {"opsm_threshold": 0.01}}, batches="engine", is_quick=True)
    yield job("old log-probs/rollout", {"loss": {"old_log_probs": "rollout"}}, batches="engine")
    yield job("old log-probs/recompute", {"loss": {"old_log_probs": "recompute"}, "batch": {"samples_per_update": 16}})
    for name in ("k1", "k2", "k3", "abs", "full"):
        for kl_in in ("loss", "reward"):
            if (name, kl_in) == ("full", "reward"):
                continue
            loss = {"loss": {**KL, "kl_estimator": name, "kl_in": kl_in}}
            yield job(f"kl/{name} in {kl_in}", loss, is_quick=kl_in == "loss")
            yield job(f"kl/{name} in {kl_in} dp2 cp2", loss, mesh="dp2 cp2")
    yield job("kl/unbiased", {"loss": {**KL, "kl_unbiased": True}}, is_quick=True)
    yield job("kl/target", {"loss": {**KL, "kl_target": 0.05}}, calls=("train",) * 3, is_quick=True)
    for name, options in REDUCTIONS.items():
        loss = {"loss": {"reduction": name, "entropy_coefficient": 0.01, **options}}
        yield job(f"reduction/{name}", loss, is_quick=True)
        yield job(f"reduction/{name} dp4", loss, mesh="dp4")
    for name in REDUCTIONS:
        loss = {"loss": {"reduction": name, **REDUCTIONS[name]}}
        yield job(f"zero variance/{name}", loss, batches="level groups", is_quick=True)
        yield job(f"zero variance/{name} float64", loss, {"precision": {"compute_dtype": "float64"}},
                  batches="level groups")  # fmt: skip
    yield job("zero variance/with a kl", {"loss": KL}, batches="level groups", is_quick=True)
    yield job("epochs/2 with max_kl", {"loss": {"epochs": 2, "max_kl": 1e-3}, "optim": {"lr": 3e-2}}, is_quick=True)
    yield job("epochs/3 dp2", {"loss": {"epochs": 3}, "batch": {"samples_per_update": 5}}, mesh="dp2")


def mesh_jobs() -> Iterator[Job]:
    """Yields jobs for meshes x sharding x precision, with a reference model."""
    telling = {
        ("1", "full", "float64"), ("dp2", "full", "float32"), ("dp2", "optimizer", "bfloat16"),
        ("dp2 cp2", "full", "float64"), ("dp2", "keep_parameters", "float16"), ("cp2", "replicate", "float32"),
        ("replicate2 dp2", "full", "float32"),
    }  # fmt: skip
    for mesh, sharding, precision in itertools.product(MESHES, SHARDINGS, PRECISIONS):
        tree = {"fsdp": {"sharding": sharding}, "precision": {"compute_dtype": precision}, "loss": KL}
        quick = (mesh, sharding, precision) in telling
        yield job(f"mesh/{mesh} {sharding} {precision}", tree, mesh=mesh, is_quick=quick)


def attention_jobs() -> Iterator[Job]:
    """Yields jobs for strategies x meshes x precision, with and without shared prefixes."""
    for strategy, mesh, precision in itertools.product(STRATEGIES, ("cp2", "dp2 cp2"), PRECISIONS):
        tree = {"attention": {"strategy": strategy}, "precision": {"compute_dtype": precision}}
        quick = mesh == "cp2" and precision == "float32"
        yield job(f"attention/{strategy} {mesh} {precision}", tree, mesh=mesh, batches="long", is_quick=quick)
    for strategy, mesh, kind in itertools.product(STRATEGIES, ("1", "dp2", "cp2", "dp2 cp2"), ("prompts", "turns")):
        if "cp" not in mesh and strategy != "ring":
            continue
        tree = {"attention": {"strategy": strategy}, "batch": {"share_prefixes": "always", "max_tokens_per_rank": 160}}
        name = f"shared {kind}/{mesh}" + (f" {strategy}" if "cp" in mesh else "")
        yield job(name, tree, mesh=mesh, batches=kind, is_quick=kind == "prompts" and mesh in ("1", "cp2"))
        float64 = {"precision": {"compute_dtype": "float64"}}
        yield job(f"{name} float64", tree, float64, mesh=mesh, batches=kind)
    for choice in ("auto", "never"):
        tree = {"batch": {"share_prefixes": choice, "max_tokens_per_rank": 160}}
        yield job(f"shared prompts/{choice} dp2", tree, mesh="dp2", batches="prompts")


def critic_and_supervised_jobs() -> Iterator[Job]:
    """Yields jobs of PPO with a critic, and of supervised training."""
    for mesh, precision in itertools.product(("1", "dp2", "cp2", "dp2 cp2"), ("float32", "float64")):
        tree = {
            "algorithm": "ppo",
            "advantage": {"gae_lambda": 0.95},
            "critic": {"lr": 2e-2, "clip": 0.3},
            "precision": {"compute_dtype": precision},
        }
        quick = (mesh, precision) in (("1", "float32"), ("dp2", "float64"))
        yield job(f"critic/{mesh} {precision}", tree, mesh=mesh, calls=("ppo", "ppo"), is_quick=quick)
    shaped = {"algorithm": "ppo", "loss": {**KL, "kl_in": "reward"}, "batch": {"share_prefixes": "always"}}
    yield job("critic/kl in reward, shared prompts", shaped, {"batch": {"max_tokens_per_rank": 160}},
              batches="prompts", calls=("ppo", "ppo"))  # fmt: skip
    for mesh, precision in itertools.product(("1", "dp2", "cp2", "dp2 cp2"), PRECISIONS):
        tree = {"algorithm": "sft", "precision": {"compute_dtype": precision}}
        quick = (mesh, precision) in (("1", "float64"), ("dp2", "float32"))
        yield supervised(f"sft/{mesh} {precision}", tree, mesh=mesh, is_quick=quick)
    constant = {"loss": {"reduction": "constant", "constant_length": 20, "entropy_coefficient": 0.02}}
    yield supervised("sft/constant length with entropy", {"algorithm": "sft"}, constant)


def supervised(name: str, *trees: dict[str, Any], **fields: Any) -> Job:
    """Makes a job of algorithm sft, which has no rollout settings."""
    result = job(name, *trees, batches="demonstrations", **fields)
    result.settings.pop("rollout")
    return result


def state_jobs() -> Iterator[Job]:
    """Yields jobs with features that must not change results, such as recomputation, offloading and checkpoints."""
    for choice in ("full", "selective"):
        tree = {"model": {"activation_checkpointing": choice}, "loss": KL}
        yield job(f"recomputed/{choice}", tree, is_quick=choice == "full")
        yield job(f"recomputed/{choice} dp2 cp2 bfloat16", tree, {"precision": {"compute_dtype": "bfloat16"}},
                  mesh="dp2 cp2")  # fmt: skip
    yield job("recomputed/every second layer", {
        "model": {"activation_checkpointing": "full", "checkpoint_every_n_layers": 2}})  # fmt: skip
    yield job("offloaded/cpu_offload", {"fsdp": {"cpu_offload": True}, "loss": KL}, mesh="dp2")
    for choice in ("sleep", "fsdp", "none"):
        yield job(f"offloaded/reference {choice}", {"reference": {"offload": choice}, "loss": KL}, mesh="dp2")
    slept = ("train", "sleep", "wake_up", "log_probs", "forward_backward", "sleep", "optimizer_step", "train")
    yield job("asleep/between calls", {"loss": KL}, calls=slept, mesh="dp2", is_quick=True)
    yield job("asleep/between calls dp2 cp2 float64", {"loss": KL, "precision": {"compute_dtype": "float64"}},
              calls=slept, mesh="dp2 cp2")  # fmt: skip
    saved = ("train", "save", "train", "load", "train", "update_ref", "train")
    for mesh in ("1", "dp2", "dp2 cp2", "replicate2 dp2"):
        yield job(f"checkpoint/{mesh}", {"loss": KL, "run": {"dir": "run"}}, calls=saved, mesh=mesh,
                  is_quick=mesh == "dp2")  # fmt: skip
    yield job("checkpoint/in the background", {"checkpoint": {"async_save": True}, "run": {"dir": "run"}},
              calls=("train", "save", "train", "finish_save", "load", "train"), mesh="dp2")  # fmt: skip
    yield job("checkpoint/float16", {"precision": {"compute_dtype": "float16"}, "run": {"dir": "run"}},
              calls=saved[:5], mesh="dp2")  # fmt: skip
    yield job("checkpoint/a critic's", {"algorithm": "ppo", "run": {"dir": "run"}}, mesh="dp2",
              calls=("ppo", "save", "ppo", "load", "ppo"))  # fmt: skip
    halves = ("log_probs", "reference_log_probs", "forward_backward", "forward_backward", "optimizer_step", "train")
    yield job("calls/two gradients an update", {"loss": KL}, calls=halves, mesh="dp2", is_quick=True)
    yield job("calls/a recorded batch", {}, calls=("train_recorded", "train_recorded"), is_quick=True)
    yield job("model/frozen", {"model": {"frozen": ["*.mlp.*", "*embed_tokens*"]}}, mesh="dp2")
    yield job("model/random, read by the first rank", {"model": {"read": "first_rank"}}, mesh="dp2")
    yield job("optimizer/adamw", {"optim": {"weight_decay": 0.1, "max_grad_norm": 0.1}}, mesh="dp2")
    yield job("optimizer/sgd", {"optim": {"name": "sgd"}}, mesh="dp2", is_quick=True)
    for schedule in ("linear", "cosine"):
        tree = {"optim": {"schedule": schedule, "warmup_updates": 2, "total_updates": 6, "min_lr_ratio": 0.1,
                          "log_layer_norms": True}}  # fmt: skip
        yield job(f"optimizer/{schedule}", tree, is_quick=schedule == "cosine")
    yield job("numerics/deterministic", {"run": {"deterministic": True, "seed": 7}}, mesh="dp2")
    yield job("numerics/float16 that overflows",
              {"precision": {"compute_dtype": "float16", "loss_scale_init": 2**30}}, calls=("train",) * 6,
              mesh="dp2")  # fmt: skip
    yield job("numerics/bfloat16 reduced in bfloat16",
              {"precision": {"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}, mesh="dp2")  # fmt: skip
    yield job("units/by size", {"fsdp": {"wrap_min_parameters": 2000, "prefetch_layers": 1}}, mesh="dp2")


def model_jobs() -> Iterator[Job]:
    """Yields jobs for architectures whose attention or experts differ from a plain decoder."""
    for model in MODELS:
        if model == "qwen3":
            continue
        tree = {"model": {"init": "random"}, "run": {"seed": 3}}
        yield job(f"model/{model}", tree, model=model)
        strategy = "all_gather" if MODELS[model].get("sliding_window") else "auto"
        yield job(f"model/{model} dp2 cp2", tree, {"attention": {"strategy": strategy}}, model=model, mesh="dp2 cp2")


def mixed_jobs(count: int = 120) -> Iterator[Job]:
    """Yields jobs with random combinations of settings; both commits must refuse the same combinations."""
    rng = random.Random(20261123)
    for number in range(count):
        policy = rng.choice([*POLICIES, "dpo"])
        estimator, correction = rng.choice(list(ESTIMATORS)), rng.choice(list(CORRECTIONS))
        reduction, mesh = rng.choice(list(REDUCTIONS)), rng.choice(list(MESHES))
        kl_in = rng.choice([None, "loss", "reward"])
        kl = {} if kl_in is None else {**KL, "kl_in": kl_in, "kl_estimator": rng.choice(["k1", "k2", "k3", "abs"])}
        tree = {
            "loss": {"policy": policy, **POLICIES.get(policy, {}), "reduction": reduction, **REDUCTIONS[reduction],
                     "entropy_coefficient": rng.choice([0.0, 0.01]), "epochs": rng.choice([1, 2]), **kl},
            "advantage": {"estimator": estimator, **ESTIMATORS[estimator]},
            "correction": {"method": correction, **CORRECTIONS[correction]},
            "precision": {"compute_dtype": rng.choice(PRECISIONS)},
            "fsdp": {"sharding": rng.choice(SHARDINGS)},
            "attention": {"strategy": rng.choice(STRATEGIES)},
            "batch": {"share_prefixes": rng.choice(["auto", "always", "never"]), "max_tokens_per_rank": 160,
                      "samples_per_update": rng.choice([4, 8, 16])},
        }  # fmt: skip
        batches = "pairs" if policy == "dpo" else rng.choice(["engine", "engine prompts"])
        what = f"{policy} {estimator} {correction} {reduction} {mesh}"
        yield job(f"mixed/{number:03} {what}", tree, mesh=mesh, batches=batches, is_quick=number < 6)


def process_jobs() -> Iterator[Job]:
    """Yields jobs of whole processes: a replayed batch without Ray, supervised ranks with a kill, a run of the loop."""
    yield job("command/replay", {"loss": {**KL, "epochs": 2}}, runs="replay")
    clock = {"call_timeout_s": 240.0, "launch_timeout_s": 240.0, "max_ranks_per_core": 64, "max_restarts": 10}
    supervised_run = {"loss": KL, "cluster": clock, "checkpoint": {"keep_last": 3}}
    yield job("supervised", supervised_run, mesh="dp2", runs="supervised", is_quick=True)
    loop = {
        "run": {"steps": 3, "export_dir": "exported", "dir": "run"},
        "loss": {**KL, "clip_high": 0.28},
        "batch": {"samples_per_update": 16, "max_tokens_per_rank": 512},
        "optim": {"lr": 1e-3, "schedule": "linear", "total_updates": 6},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 6, "engines": 2,
                    "reward": "actors.rollout.rewards:sorted_digits"},
        "evaluation": {"interval_steps": 3},
        "checkpoint": {"interval_steps": 2},
        "cluster": clock,
    }  # fmt: skip
    yield job("command/train", loop, mesh="dp2", model=SORT_DIGITS, runs="train")


# ---------------------------------------------------------------------- models and batches

VOCABULARY = 96
SORT_DIGITS = "sort_digits"  # made by scripts/make_sort_digits.py, with its data
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that differences become visible
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
        "truncate": False}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "llama_tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "gemma2": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 8,
               "query_pre_attn_scalar": 16, "layer_types": ALTERNATING, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 2.0},
    "qwen3_moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5,
                  "norm_topk_prob": True, **EXPERTS},
    "gpt_oss": {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_local_experts": 5,
                "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 8, "layer_types": ALTERNATING,
                "rope_parameters": YARN},
}  # fmt: skip


def write_models(folder: Path) -> None:
    """Writes a Hugging Face folder for each of MODELS; only qwen3 has weights, the others have random ones."""
    from safetensors.numpy import save_file

    for name, fields in MODELS.items():
        (folder / name).mkdir(parents=True)
        config = {**SIZES, **fields, "dtype": "float32"}
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(0)
    hidden, inner, head = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * head, SIZES["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for layer in range(SIZES["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (queries, hidden),
            f"{attention}.k_proj.weight": (keys, hidden),
            f"{attention}.v_proj.weight": (keys, hidden),
            f"{attention}.o_proj.weight": (hidden, queries),
            f"{attention}.q_norm.weight": (head,),
            f"{attention}.k_norm.weight": (head,),
            f"{mlp}.gate_proj.weight": (inner, hidden),
            f"{mlp}.up_proj.weight": (inner, hidden),
            f"{mlp}.down_proj.weight": (hidden, inner),
            f"model.layers.{layer}.input_layernorm.weight": (hidden,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (VOCABULARY, hidden)}
    tensors = {name: rng.normal(0, 0.2, shape) + (len(shape) == 1) for name, shape in shapes.items()}
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    save_file(tensors, folder / "qwen3" / "model.safetensors", metadata={"format": "pt"})


def samples_of(kind: str, number: int) -> list[dict[str, Any]]:
    """Returns 16 samples of different lengths with gaps in their masks; equal arguments give equal samples.

    Args:
        kind: the purpose: "groups" are groups of four with different rewards, "level groups" include groups with equal
            rewards, "pairs" are groups of two; "callers" have advantages and log-probs; the samples of a "prompts"
            group share a prompt; each sample of a "turns" group continues the previous sample.
        number: the number of the batch in its job.
    """
    rng = np.random.default_rng([zlib.crc32(kind.encode()), number])
    group_size = 2 if kind == "pairs" else 4
    longest = 120 if kind == "long" else 40
    samples: list[dict[str, Any]] = []
    history: list[int] = []
    for index in range(16):
        position = index % group_size
        if position == 0:
            history = rng.integers(3, VOCABULARY, int(rng.integers(20, 40))).tolist()
        if kind in ("prompts", "turns", "engine prompts"):
            response = int(rng.integers(2, 16))
            tokens = history + rng.integers(3, VOCABULARY, response).tolist()
            if kind == "turns":
                history = tokens
        else:
            length = int(rng.integers(3, longest))
            response = int(rng.integers(1, length))
            tokens = rng.integers(3, VOCABULARY, length).tolist()
        mask = rng.random(response) > 0.3
        mask[0] = True
        sample = {"tokens": tokens, "response_length": response, "loss_mask": mask.tolist()}
        if kind != "demonstrations":
            # rewards in a group have two values, which estimators that count successes need
            level = kind == "level groups" and index // group_size in (1, 2)
            sample |= {"reward": 1.0 if level else float(position % 2), "group_id": index // group_size}
        if kind == "callers":  # fields that are usually computed, but that a caller may pass
            sample |= {name: -3 * rng.random(response) for name in ("old_log_probs", "ref_log_probs")}
            sample |= {"advantages": rng.normal(0, 1, response)}
        if kind == "all fields":
            rewarded = rng.integers(-1, 2, response).astype(np.float64)
            rewarded[0] -= rewarded.sum()  # whole numbers, so that a sample's score is exactly one of the two values
            sample |= {
                "values": rng.normal(0, 0.5, response),
                "baseline_reward": float(rng.random()),
                "token_rewards": rewarded,
            }
        if kind == "engine" or kind == "engine prompts":
            sample |= {"values": rng.normal(0, 0.5, response), "baseline_reward": float(rng.random())}
        samples.append(sample)
    return samples


# ---------------------------------------------------------------------- records


@dataclass
class Record:
    """Holds the results of a job: `kind name` -> hex, sha256 or number; equal texts mean equal bits."""

    values: dict[str, str] = field(default_factory=dict)

    def metrics(self, step: str, values: dict[str, float]) -> None:
        """Records every metric except measured times, rates and bytes."""
        for name, value in values.items():
            if not any(word in name for word in UNSTEADY):
                self.values[f"{step}: metric {name}"] = float(value).hex()

    def array(self, what: str, values: np.ndarray) -> None:
        digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
        self.values[what] = f"{digest} {values.dtype} {list(values.shape)}"

    def plan(self, step: str, plan: Any) -> None:
        packs = [[[pack.tolist() for pack in packs] for packs in update] for update in plan.updates]
        for name, value in {
            "updates": hashlib.sha256(json.dumps(packs).encode()).hexdigest(),
            "samples": json.dumps([[sum(map(len, packs)) for packs in update] for update in packs]),
            **{name: str(getattr(plan, name)) for name in PLAN_FIELDS},
        }.items():
            self.values[f"{step}: plan {name}"] = value
        shared = getattr(plan, "shared", None)
        for name in ("place", "shared"):
            if shared is not None:
                self.array(f"{step}: plan shared {name}", getattr(shared, name))

    def weights(self, what: str, folder: Path) -> None:
        for name, values in exported_tensors(folder).items():
            self.array(f"{what} {name}", values)


def exported_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    files = sorted(folder.glob("*.safetensors"))
    assert files, f"{folder} has no weights"
    return {name: values for file in files for name, values in load_file(file).items()}


# ---------------------------------------------------------------------- jobs on gloo ranks


class TrainerJob:
    """Runs a job on one rank; has a method for each name in `CALLS`."""

    def __init__(self, job: Job, config: Any, folder: Path) -> None:
        import torch

        make = taken("Trainer")
        self.job, self.config, self.folder = job, config, folder
        self.trainers = {"actor": make(config, device=torch.device("cpu"))}
        if "ppo" in job.calls:
            self.trainers["critic"] = make(config, "critic", device=torch.device("cpu"))
        self.trainer = self.trainers["actor"]
        self.record = Record()
        self.step, self.number = "", 0

    def run(self) -> dict[str, str]:
        for number, name in enumerate(self.job.calls, start=1):
            self.step = f"{number} {name}"
            CALLS[name](self)
        self.record.values["end: ranks in sync"] = str(self.trainer.check_sync().is_in_sync)
        for role, trainer in self.trainers.items():
            exported = self.folder / role
            trainer.export_hf(exported)
            kind = "weight" if role == "actor" else f"weight {role}"
            self.record.weights(f"end: {kind}", exported)
        return self.record.values

    def next_batch(self) -> Any:
        """Returns the next batch of the job's kind; log-probs of an engine are those of the policy plus noise."""
        kind, self.number = self.job.batches, self.number + 1
        batch = taken("RolloutBatch").from_samples(samples_of(kind, self.number))
        if kind.startswith("engine"):
            log_probs = self.trainer.compute_log_probs(batch).log_probs
            noise = np.random.default_rng(self.number).normal(0, 0.2, log_probs.shape)
            batch = batch.replace(rollout_log_probs=np.minimum(log_probs + noise, 0).astype(np.float32))
        return batch

    def train(self, batch: Any | None = None, role: str = "actor") -> None:
        batch = self.next_batch() if batch is None else batch
        trainer = self.trainers[role]
        loss = "value" if role == "critic" else self.config.loss_name
        plan = taken("plan_training")(self.config, batch, cost_of(trainer), loss=loss)
        step = f"{self.step} {role}" if role == "critic" else self.step
        self.record.plan(step, plan)
        self.record.metrics(step, trainer.train_step(batch))

    def train_recorded(self) -> None:
        file = self.folder / f"batch_{os.getpid()}.safetensors"
        self.next_batch().save(file)
        batch = taken("RolloutBatch").load(file)
        file.unlink()
        self.train(batch)

    def ppo(self) -> None:
        critic, batch = self.trainers["critic"], self.next_batch()
        values = critic.compute_values(batch)
        self.record.array(f"{self.step}: values", values)
        batch = batch.replace(values=values)
        if self.config.loss.kl_in == "reward" and self.config.loss.kl_coefficient:
            old = self.trainer.compute_log_probs(batch).log_probs
            batch = batch.replace(
                old_log_probs=old, ref_log_probs=self.trainer.compute_log_probs(batch, model="ref").log_probs
            )
        self.train(batch)
        self.train(batch, "critic")

    def log_probs(self, model: str = "actor") -> None:
        outputs = self.trainer.compute_log_probs(self.next_batch(), model=model)
        self.record.array(f"{self.step}: log-probs", outputs.log_probs)
        self.record.array(f"{self.step}: entropy", outputs.entropy)

    def forward_backward(self) -> None:
        metrics = self.trainer.forward_backward(self.next_batch(), denominator=100.0)
        self.record.metrics(self.step, metrics)

    def optimizer_step(self) -> None:
        self.record.metrics(self.step, self.trainer.optimizer_step())
        health = self.trainer.gradient_health()
        norms = {f"norm of {name}": norm for name, norm in health.group_norms.items()}
        self.record.metrics(self.step, {"norm": health.norm, **norms})

    def save(self) -> None:
        for trainer in reversed(self.trainers.values()):
            trainer.save(1, {"cursor": 17})

    def load(self) -> None:
        for trainer in self.trainers.values():
            self.record.values[f"{self.step}: state of the loop"] = json.dumps(trainer.load(1))


CALLS: dict[str, Callable[[TrainerJob], Any]] = {
    "train": TrainerJob.train,
    "train_recorded": TrainerJob.train_recorded,
    "ppo": TrainerJob.ppo,
    "log_probs": TrainerJob.log_probs,
    "reference_log_probs": lambda run: run.log_probs("ref"),
    "forward_backward": TrainerJob.forward_backward,
    "optimizer_step": TrainerJob.optimizer_step,
    "sleep": lambda run: run.trainer.sleep(),
    "wake_up": lambda run: run.trainer.wake_up(),
    "update_ref": lambda run: run.trainer.update_ref(),
    "save": TrainerJob.save,
    "finish_save": lambda run: run.trainer.finish_save(),
    "load": TrainerJob.load,
}


class RankPool:
    """A pool of rank processes that are reused between jobs, forked from a process that has imported everything."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Job, config_file: Path, folder: Path, timeout_s: float) -> dict[str, str]:
        """Returns rank 0's record; raises a RuntimeError with the traceback of a rank that failed."""
        while len(self._ranks) < job.ranks:
            own_end, rank_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank_end,), daemon=True)
            process.start()
            rank_end.close()
            self._ranks.append((process, own_end))
        store = folder / "store"
        waiting = {}
        for rank, (_, connection) in enumerate(self._ranks[: job.ranks]):
            connection.send((rank, job, config_file, folder, store))
            waiting[connection] = rank
        result: dict[str, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            answered = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            problem = "" if answered else f"no answer of ranks {sorted(waiting.values())} within {timeout_s:.0f} s"
            for connection in answered:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    values, error = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    values, error = {}, f"rank {rank} ended"
                result = values if rank == 0 else result
                problem = problem or error
            if problem:  # the other ranks may wait for the failed rank in a collective
                self.close()
                raise RuntimeError(problem)
        return result

    def close(self) -> None:
        """Kills the processes; the next job starts new ones."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []


def _serve(connection: Connection) -> None:
    import torch.distributed as dist

    is_frozen = False
    while True:
        try:
            rank, job, config_file, folder, store = connection.recv()
        except EOFError:
            os._exit(0)
        values, problem = {}, ""
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.ranks)
            values = _record_of(job, config_file, folder)
            dist.barrier()
        except Exception:
            problem = f"rank {rank}: {traceback.format_exc()}"
        if problem:
            connection.send(({}, problem))
            os._exit(1)
        dist.destroy_process_group()
        _forget_meshes()
        connection.send((values, ""))
        gc.collect()  # frees reference cycles with process groups, whose threads would use CPU time
        if not is_frozen:
            gc.freeze()
            is_frozen = True


def _record_of(job: Job, config_file: Path, folder: Path) -> dict[str, str]:
    import contextlib

    import torch

    is_float64 = job.settings["precision"]["compute_dtype"] == "float64"
    trained: TrainerJob | None = None
    try:
        with float64_throughout() if is_float64 else contextlib.nullcontext():
            torch.manual_seed(0)
            config = taken("load_config")(config_file)
            trained = TrainerJob(job, config, folder)
            return trained.run()
    except taken("SlimeError") as error:  # all ranks raise this, before the first or after the last collective
        if not job.name.startswith("mixed/"):
            raise
        before = {} if trained is None else trained.record.values
        return before | {"end: refused": f"{type(error).__name__} {error.field}"}


def _forget_meshes() -> None:
    """Clears torch's caches of DTensor redistributions, which refer to process groups that no longer exist."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    for name in ("_gen_transform_infos", "clear_redistribute_planner_cache"):
        cached = getattr(_redistribute, name, None)
        if cached is not None:
            getattr(cached, "cache_clear", cached)()


# ---------------------------------------------------------------------- jobs in processes of their own


def replay(job: Job, config_file: Path, folder: Path) -> dict[str, str]:
    """Runs a recorded batch through the replay command, without Ray."""
    taken("RolloutBatch").from_samples(samples_of(job.batches, 1)).save(folder / "batch.safetensors")
    arguments = [str(config_file), "--batch", str(folder / "batch.safetensors"), "--export", str(folder / "actor")]
    printed = _output([*REPLAY, *arguments], folder)
    record = Record()
    record.metrics("1 replay", {name: value for name, value in json.loads(printed).items() if value is not None})
    record.weights("end: weight", folder / "actor")
    return record.values


def train(job: Job, config_file: Path, folder: Path) -> dict[str, str]:
    """Runs the loop with engines; returns its metrics, and the exported weights."""
    _output([*TRAIN, str(config_file)], folder)
    record = Record()
    for number, line in enumerate((folder / "run" / "metrics.jsonl").read_text().splitlines()):
        row = {name: value for name, value in json.loads(line).items() if isinstance(value, int | float)}
        record.metrics(f"row {number}", row)
    record.weights("end: weight", folder / "exported")
    return record.values


def _output(arguments: Sequence[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def supervised_records(job: Job, config_file: Path, folder: Path) -> dict[str, dict[str, str]]:
    """Runs the same steps on supervised ranks twice; the second time, a rank is killed during a step."""
    group = taken("SupervisedGroup").launch(taken("load_config")(config_file))
    try:
        group.save(0, {"cursor": 0})
        records = {name: _supervised_steps(job, group, folder / name, name == KILLED) for name in (UNDISTURBED, KILLED)}
        if len(group.recoveries) != 1:
            raise RuntimeError(f"a rank was killed, and there were {len(group.recoveries)} recoveries")
    finally:
        group.shutdown()
    return records


def _supervised_steps(job: Job, group: Any, folder: Path, is_killed: bool) -> dict[str, str]:
    record = Record()
    record.values["load: state of the loop"] = json.dumps(group.load(0))
    for number in (1, 2, 3):
        batch = taken("RolloutBatch").from_samples(samples_of(job.batches, number))
        record.array(f"{number} log-probs", group.compute_log_probs(batch).log_probs)
        is_old = hasattr(group, "train_step_async")  # a commit before `submit`
        training = group.train_step_async(batch) if is_old else taken("submit")(group.train_step, batch)
        if is_killed and number == 3:
            os.kill(group.health()[1].pid, signal.SIGKILL)
        record.metrics(f"{number} train", training.result())
        if number == 1:
            group.update_ref()
        group.sleep()
        group.wake_up()
        if number == 2:
            group.save(2, {"cursor": 2})
    record.values["end: ranks in sync"] = str(group.check_sync().is_in_sync)
    folder.parent.mkdir(parents=True, exist_ok=True)
    record.weights("end: weight", group.export_hf(folder))
    return record.values


# ---------------------------------------------------------------------- a request


@dataclass(frozen=True)
class Request:
    """Holds a request of compare_commits.py, read from JSON.

    Args:
        checkout: the folder that all imports must come from.
        shared: the folder of models and data, the same for both commits.
        folder: the folder into which this commit's jobs write.
        jobs: the names of the jobs.
        settings: `section.name=value` (JSON values) to set in every job that accepts it.
    """

    checkout: str
    shared: str
    folder: str
    jobs: tuple[str, ...]
    settings: tuple[str, ...]
    timeout_s: float = 300.0


def main() -> int:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to standard error
    request = Request(**json.loads(Path(sys.argv[1]).read_text()))
    _require_checkout(Path(request.checkout))
    chosen = [job for job in jobs() if job.name in set(request.jobs)]
    if any(job.runs == "trainer" for job in chosen):  # imported before the ranks are forked, which then have it
        import torch
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401

        torch.set_num_threads(1)
        taken("Trainer")
    pool = RankPool()
    for number, job in enumerate(chosen):
        start, problem, records, unread = time.perf_counter(), "", {}, []
        folder = Path(request.folder) / f"{number:03}"
        folder.mkdir(parents=True)
        try:
            config_file, unread = _write_config(job, request, folder)
            if job.runs == "supervised":
                records = supervised_records(job, config_file, folder)
            elif job.runs == "trainer":
                records = {job.name: pool.run(job, config_file, folder, request.timeout_s)}
            else:
                run = {"replay": replay, "train": train}[job.runs]
                records = {job.name: run(job, config_file, folder)}
        except Exception:
            problem = traceback.format_exc()
        shutil.rmtree(folder / "run", ignore_errors=True)
        line = {"job": job.name, "records": records, "problem": problem, "unread": unread, "folder": str(folder),
                "seconds": time.perf_counter() - start}  # fmt: skip
        print(json.dumps(line), file=lines, flush=True)
    pool.close()
    lines.flush()
    os._exit(0)  # gloo may abort at interpreter exit


def _require_checkout(checkout: Path) -> None:
    import actors
    import slimefsdp

    for package in (slimefsdp, actors):
        assert package.__file__ is not None
        if checkout not in Path(package.__file__).parents:
            raise SystemExit(f"{package.__name__} comes from {package.__file__}, not from {checkout}")


def _write_config(job: Job, request: Request, folder: Path) -> tuple[Path, list[str]]:
    """Writes a job's settings to a file; returns the file, and those settings of the request that the job refuses."""
    shared = Path(request.shared)
    model = shared / job.model / ("model" if job.model == SORT_DIGITS else "")
    tree = merged(job.settings, {"model": {"path": str(model)}})
    if job.runs == "supervised":
        tree = merged(tree, {"run": {"dir": str(folder / "run")}})
    if job.runs == "train":
        data = {name: str(shared / job.model / f"{name}.jsonl") for name in ("train", "heldout")}
        tree = merged(tree, {"data": data})
    for section, name in (("run", "dir"), ("run", "export_dir")):
        if name in tree.get(section, {}):
            tree = merged(tree, {section: {name: str(folder / tree[section][name])}})
    file, unread = folder / "settings.yaml", []

    def is_refused(tree: dict[str, Any]) -> bool:
        file.write_text(json.dumps(_in_names_of_the_commit(tree)))  # JSON is YAML
        try:
            taken("load_config")(file)
        except taken("SlimeError"):
            return True
        return False

    if is_refused(tree):  # the job itself is refused, so it cannot use the request's settings
        unread = list(request.settings)
    for setting in request.settings if not unread else ():
        name, _, value = setting.partition("=")
        section, _, key = name.rpartition(".")
        parsed = json.loads(value)
        changed = merged(tree, {section: {key: parsed}} if section else {key: parsed})
        if is_refused(changed):
            unread.append(setting)
        else:
            tree = changed
    file.write_text(json.dumps(_in_names_of_the_commit(tree)))
    return file, unread


def _in_names_of_the_commit(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns settings with this commit's names; jobs use old names, which a table of the commit translates."""
    try:
        renamed: dict[str, Any] = taken("with_present_names")(tree)
    except LookupError:
        return tree
    return renamed


def described() -> list[dict[str, Any]]:
    return [asdict(entry) for entry in jobs()]


if __name__ == "__main__":
    sys.exit(main())
