"""Checks settings for `slimefsdp train` and `slimefsdp serve`; loops that users write do not need these rules."""

from __future__ import annotations

from typing import Any

from slimefsdp.algorithms.registry import GROUPED
from slimefsdp.config.rollout import SERVERS
from slimefsdp.config.run import RunConfig
from slimefsdp.errors import ConfigError, short_text

MOST_SAMPLES = 10_000_000
"""Limit on the samples of one step; planning more samples would take too long."""


def check_ready_to_train(config: RunConfig) -> None:
    """Checks that `slimefsdp train` can run with these settings.

    Raises:
        ConfigError: a setting is missing, or is not supported by `train`; the error names the first such setting.
    """
    needed = ["run.dir", *([] if config.run.epochs is not None else ["run.steps"]), "data.train"]
    needed += [config.rewards_by] if config.has_rollouts else ["batch.samples_per_update"]
    needed += ["data.heldout"] if config.evaluation.interval_steps is not None else []
    for field in needed:
        if config.value_of(field) is None:
            raise ConfigError(f"{field} is not set, and `train` needs it", field=field, hint=f"add {field} to the YAML")
    if config.samples_per_step > MOST_SAMPLES:
        field = "rollout.prompts_per_step" if config.has_rollouts else "batch.samples_per_update"
        raise ConfigError(
            f"{field}={config.value_of(field)} makes a step of more than {MOST_SAMPLES:,} samples, which are in one "
            "batch",
            field=field,
            hint="lower it",
        )
    if not config.has_rollouts:
        _check_demonstrations(config)
        return
    if config.rollout.max_new_tokens >= config.max_pack_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt in packs of "
            f"{config.max_pack_tokens} tokens",
            field="rollout.max_new_tokens",
            hint="raise batch.max_tokens_per_rank, or lower rollout.max_new_tokens",
        )
    _check_estimator(config)
    _check_effects(config)
    _check_is_evaluated(config)
    if config.loss.policy == "dpo":
        _check_pairs(config)


def check_ready_to_serve(config: RunConfig) -> None:
    """Checks that `slimefsdp serve` can run with these settings. What requests choose must have its default.

    Raises:
        ConfigError: a setting is missing, or is not supported by `serve`; the error names the first such setting.
    """
    if config.run.dir is None:
        raise ConfigError(
            "run.dir is not set, and `serve` needs it", field="run.dir", hint="name the folder of the service"
        )
    if config.lora.path is not None:
        raise ConfigError(
            "lora.path is set, and clients' adapters cannot begin from a folder",
            field="lora.path",
            hint="set lora.rank=32 alone, or no lora setting for a server that trains all weights",
        )
    if config.algorithm != "grpo":
        raise ConfigError(
            f"algorithm={config.algorithm} cannot be chosen for a service, whose requests decide what is computed",
            field="algorithm",
            hint="leave it out",
        )
    wanted: dict[str, Any] = {
        "optim.name": "adamw",
        "rollout.temperature": 1.0,
        "loss.kl_coefficient": 0.0,
        "loss.entropy_coefficient": 0.0,
        "loss.routing_replay": "none",
        "correction.method": "none",
        "correction.veto_below": None,
        "correction.opsm_threshold": None,
        "reference.dp": None,
    }
    for field, value in wanted.items():
        found = config.value_of(field)
        if found != value:
            raise ConfigError(
                f"{field}={short_text(found)} cannot be chosen for a service, whose requests decide what is computed",
                field=field,
                hint=f"leave it at {short_text(value)}",
            )
    if config.rollout.engine != "embedded":
        _check_server_that_samples(config)
    is_loopback = config.service.host in ("127.0.0.1", "localhost", "::1")
    if not is_loopback and config.service.api_key_env is None:
        raise ConfigError(
            f"service.address={config.service.address} can be reached by others, and requests need no key",
            field="service.api_key_env",
            hint="name an environment variable that holds a key, or listen at 127.0.0.1",
        )


def _check_server_that_samples(config: RunConfig) -> None:
    """Checks that a service can sample with an engine that is not `embedded`."""
    rollout, lora = config.rollout, config.lora
    embedded = "set rollout.engine=embedded"
    experts = [target for target in lora.targets if "experts" in target.split(".")]
    field, problem, hint = "", "", ""
    if rollout.engine != "vllm":
        field, hint = "rollout.engine", f"{embedded}, or vllm"
        problem = f"rollout.engine={rollout.engine} does not sample for a service"
    elif lora.rank is None:
        field, hint = "rollout.engine", f"set lora.rank=32, or {embedded}"
        problem = "rollout.engine=vllm samples for a service only from adapters, and lora.rank is null"
    elif lora.rank > (most := (SERVERS["vllm"].adapter_ranks or (lora.rank,))[-1]):
        field, hint = "lora.rank", f"lower it, or {embedded}"
        problem = f"lora.rank={lora.rank}, and vLLM takes adapters of rank {most} at most"
    elif experts:
        field, hint = "lora.targets", f"leave experts out, or {embedded}"
        problem = f"lora.targets has {experts[0]}, and rollout.engine=vllm is sent no adapters of experts"
    elif config.model.init == "random":
        field, hint = "model.init", f"write the model to a folder, or {embedded}"
        problem = "model.init=random, and rollout.engine=vllm reads the model's folder by itself"
    elif rollout.engines != 1:
        field, hint = "rollout.engines", "set it to 1"
        problem = f"rollout.engines={rollout.engines}, and a service samples with one"
    elif rollout.placement != "own":
        field, hint = "rollout.placement", "set it to own"
        problem = f"rollout.placement={rollout.placement}, and a service trains and samples at the same time"
    if field:
        raise ConfigError(problem, field=field, hint=hint)


def _check_demonstrations(config: RunConfig) -> None:
    if config.loss.reduction == "prompt_mean":
        raise ConfigError(
            "loss.reduction=prompt_mean counts groups, and the records of algorithm=sft are in none",
            field="loss.reduction",
            hint="choose sequence_mean, which counts each record once",
        )


def _check_estimator(config: RunConfig) -> None:
    if config.estimator == "gae" and config.algorithm != "ppo":
        raise ConfigError(
            f"advantage.estimator=gae reads values, and algorithm={config.algorithm} has no critic to give them",
            field="advantage.estimator",
            hint="set algorithm=ppo, or choose another estimator",
        )
    if config.estimator in ("maxrl", "pass_at_k") and config.rollout.overlong_buffer_tokens is not None:
        raise ConfigError(
            f"rollout.overlong_buffer_tokens={config.rollout.overlong_buffer_tokens} takes a penalty off the "
            f"rewards, and advantage.estimator={config.estimator} counts them",
            field="rollout.overlong_buffer_tokens",
            hint="remove it, or choose another estimator",
        )
    smallest = 2 if config.estimator in GROUPED else 1
    if config.estimator == "pass_at_k":
        smallest = (config.advantage.pass_k or 1) + 1  # a group of k has only one subset of k, nothing to compare
    if config.rollout.samples_per_prompt < smallest:
        raise ConfigError(
            f"rollout.samples_per_prompt={config.rollout.samples_per_prompt} makes groups in which advantage.estimator="
            f"{config.estimator} finds no advantage",
            field="rollout.samples_per_prompt",
            hint=f"sample at least {smallest} responses per prompt, or choose an estimator without groups",
        )


def _check_effects(config: RunConfig) -> None:
    """Checks that the policy is trained in some step, and that loss.max_kl and loss.routing_replay have an effect."""
    assert config.run.steps is not None
    if config.critic.warmup_steps >= config.run.steps:
        raise ConfigError(
            f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of run.steps={config.run.steps}",
            field="critic.warmup_steps",
            hint="lower it, or raise run.steps",
        )
    moves_before = config.updates_per_step > 1 or config.loss.old_log_probs == "rollout"
    if config.loss.max_kl is not None and not moves_before:
        raise ConfigError(
            f"loss.max_kl={config.loss.max_kl} does nothing in steps of one update, before which the "
            "policy is the old one",
            field="loss.max_kl",
            hint="remove it, or lower batch.samples_per_update or raise loss.epochs",
        )
    computes_old = moves_before or config.loss.old_log_probs == "recompute" or config.has_kl_in_reward
    if config.loss.routing_replay == "old_log_probs" and not computes_old:
        raise ConfigError(
            "loss.routing_replay=old_log_probs does nothing in steps of one update, before which no old log-probs are "
            "computed",
            field="loss.routing_replay",
            hint="set loss.old_log_probs=recompute, or remove it",
        )


def _check_is_evaluated(config: RunConfig) -> None:
    evaluation = config.evaluation
    if evaluation.pass_at and evaluation.interval_steps is None:
        raise ConfigError(
            f"evaluation.pass_at={short_text(evaluation.pass_at)} does nothing without evaluations",
            field="evaluation.pass_at",
            hint="set evaluation.interval_steps, or remove it",
        )


def _check_pairs(config: RunConfig) -> None:
    """Checks that every sampled group will be a pair of a better and a worse response."""
    rollout = config.rollout
    if rollout.samples_per_prompt != 2:
        field, problem, hint = "samples_per_prompt", "makes no pairs", "set it to 2"
    elif rollout.filter is None:
        field, problem, hint = "filter", "lets pairs of equal reward through", "set it to mixed_groups"
    elif rollout.mask_truncated:
        field, problem, hint = "mask_truncated", "leaves pairs with one response", "remove it"
    elif rollout.filter == "mixed_groups" and rollout.overlong_buffer_tokens is not None:
        field, problem = "overlong_buffer_tokens", "can make rewards equal that rollout.filter=mixed_groups saw differ"
        hint = "remove it, or write a filter of your own"
    else:
        return
    raise ConfigError(
        f"rollout.{field}={short_text(getattr(rollout, field))} {problem}, and loss.policy=dpo compares the two "
        "responses of a pair",
        field=f"rollout.{field}",
        hint=hint,
    )
