"""Defines the sections `rollout`, `environment` and `evaluation`: how responses are sampled and rewarded."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slimefsdp.config.base import (
    LARGEST,
    PathSetting,
    PositiveInt,
    RankCount,
    Settings,
    broken_rule,
    class_name,
    function_name,
    is_text,
    keyword_arguments,
    list_of,
)
from slimefsdp.config.messages import BrokenRule
from slimefsdp.errors import short_text

Transport = Literal["object_store", "broadcast", "disk", "ipc"]
"""How weights reach engines: through Ray's object store, broadcast in a group that trainer and engines form, as a
folder, or in memory that processes of one machine share."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Describes what a kind of rollout server supports.

    Args:
        dialect: the class that implements the server's API, as `module:Class`.
        temperatures: the lowest and the highest temperature at which the server samples.
        transports: the transports by which the server can receive weights, the best first.
        adapter_transports: the transports by which the server can receive adapters.
        adapter_ranks: the possible values of the server's limit on adapters' ranks, ascending; None means any rank.
        compares_checksums: whether the server's workers can compare weights with checksums.
    """

    dialect: str
    temperatures: tuple[float, float]
    transports: tuple[Transport, ...]
    adapter_transports: tuple[Transport, ...]
    adapter_ranks: tuple[int, ...] | None = None
    compares_checksums: bool = False


SERVERS = {
    "vllm": ServerKind(
        "actors.engines.vllm:VllmDialect",
        (0.01, 2.0),  # vLLM refuses other temperatures, or silently replaces them
        ("broadcast", "disk", "ipc"),
        ("broadcast", "disk", "ipc"),
        (1, 8, 16, 32, 64, 128, 256, 320, 512),  # the values of --max-lora-rank
        compares_checksums=True,
    ),
    "sglang": ServerKind(
        "actors.engines.sglang:SglangDialect",
        (1e-6, math.inf),  # at lower temperatures SGLang samples greedily
        ("broadcast", "disk"),
        ("disk",),
    ),
}
"""The rollout servers that `rollout.engine` may name. A new server needs a row here, and the class that it names."""
ENGINES = ("embedded", *SERVERS)
_SPREADS = ("--tensor-parallel-size", "-tp", "--tp-size", "--tensor-model-parallel-size")


def _filter_name(value: str) -> str:
    if value != "mixed_groups" and ":" not in value:
        raise broken_rule("is not a filter", "write mixed_groups, or a function of your own as module:function")
    return value if value == "mixed_groups" else function_name(value)


def _reward_name(value: str) -> str:
    return value if re.fullmatch(r"https?://[^\s/]+\S*", value) else function_name(value)


def _engine_name(value: str) -> str:
    if value not in ENGINES and ":" not in value:
        raise broken_rule("is not an engine", f"write {', '.join(ENGINES)}, or a class of your own as module:Class")
    return value if value in ENGINES else function_name(value)


def _program(value: Any) -> Any:
    """Looks up a name without a folder on PATH, like a shell; a name that is not on PATH stays as it is."""
    is_name = isinstance(value, str) and "/" not in value and "\0" not in value
    return (shutil.which(value) if is_name else None) or value


def _without_end_slash(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(item.rstrip("/") for item in value)


def temperatures_of(engine: str) -> tuple[float, float]:
    """Returns the lowest and the highest temperature at which an engine can sample."""
    return SERVERS[engine].temperatures if engine in SERVERS else (0.0, math.inf)


class CurriculumStage(Settings):
    """Limits the lengths of samples, from a step until the next stage."""

    from_step: PositiveInt  # counted from 1, as in metrics.jsonl
    max_prompt_tokens: PositiveInt | None = None  # longest prompt to draw, with chat template; None means no limit
    max_new_tokens: PositiveInt | None = None  # longest response; None means rollout.max_new_tokens


_URLS = list_of(
    lambda item: isinstance(item, str) and re.fullmatch(r"https?://[^\s/]+/?", item),
    "servers' addresses",
    "['http://127.0.0.1:8000']",
)
_ARGUMENTS = list_of(is_text, "arguments", "['--max-num-seqs=64']", may_be_empty=True)
_STOP_TEXTS = list_of(lambda item: isinstance(item, str) and item, "texts", "['</answer>']", may_be_empty=True)
_STAGES = list_of(
    lambda item: isinstance(item, dict | CurriculumStage),
    "stages",
    "[{from_step: 1, max_prompt_tokens: 512}, {from_step: 100}]",
    may_be_empty=True,
)


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Holds the limits on lengths in a step, according to `rollout.curriculum`."""

    stage: int  # counted from 1
    prompt_tokens: int | None  # longest prompt to draw; None means no limit
    new_tokens: int  # longest response


@dataclass(frozen=True, slots=True)
class Sampling:
    """Holds how responses are sampled, for training or in evaluations."""

    temperature: float
    max_new_tokens: int
    top_p: float
    top_k: int | None
    min_p: float
    length_setting: str  # the setting that has the value of max_new_tokens


class RolloutSettings(Settings):
    """Chooses sampling, engines and rewards. Engines and trainer use the same temperature."""

    temperature: float = Field(1.0, ge=1e-30, le=LARGEST, description="temperature of sampling and of log-probs")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="sample only from the fewest likeliest tokens that together have this probability (nucleus "
        "sampling); log-probs remain those over all tokens (docs/rollouts.md)",
    )
    top_k: PositiveInt | None = Field(None, description="sample only from so many likeliest tokens; null means all")
    min_p: float = Field(
        0.0, ge=0, lt=1, description="sample only tokens with at least this share of the likeliest token's probability"
    )
    stop: Annotated[tuple[str, ...], _STOP_TEXTS] = Field(
        (), description="texts that end a response and are part of it, like an end token; also in evaluations"
    )
    prompts_per_step: PositiveInt = Field(32, description="prompts drawn per rollout step")
    samples_per_prompt: PositiveInt = Field(8, description="responses per prompt; they form a group")
    max_new_tokens: PositiveInt = Field(256, description="longest response; with an environment, in a turn")
    curriculum: Annotated[tuple[CurriculumStage, ...], _STAGES] = Field(
        (),
        description="stages of a curriculum of lengths: from the step `from_step` until the next stage, prompts of at "
        "most `max_prompt_tokens` tokens are drawn (null means all), and responses have at most `max_new_tokens` (null "
        "means rollout.max_new_tokens); not in evaluations (docs/rollouts.md)",
    )
    engine: Annotated[str, AfterValidator(_engine_name)] = Field(
        "embedded",
        description="the engine: embedded, vllm, sglang, or a class of your own as `module:Class` (docs/engines.md)",
    )
    engines: RankCount = Field(1, description="number of engines: processes, or servers with a process each")
    placement: Literal["own", "colocated"] = Field(
        "own",
        description="where the engines run. own: on separate GPUs; colocated: on the devices of the first ranks, which "
        "engines and trainer use in turns",
    )
    engine_python: Annotated[PathSetting, BeforeValidator(_program)] | None = Field(
        None,
        description="Python interpreter of the environment with the engine (vllm, sglang), for servers that the run "
        "starts; a name without a folder is looked up on PATH",
    )
    engine_args: Annotated[tuple[str, ...], _ARGUMENTS] = Field(
        (), description="more arguments for the servers that the run starts, such as --max-num-seqs=64"
    )
    gpus_per_engine: RankCount = Field(
        1,
        description="GPUs of each server that the run starts; the model is spread over them (tensor parallel)",
    )
    engine_urls: Annotated[tuple[str, ...], _URLS, AfterValidator(_without_end_slash)] | None = Field(
        None, description="URLs of running servers, one for each engine; null means that the run starts servers"
    )
    engine_logprob_bound: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="limit on the mean difference of sampled tokens' log-probs between trainer and engines that are "
        "not embedded, checked after the first weights; null means 0.001 under float32, else 0.05",
    )
    weight_transport: Literal["auto", "object_store", "broadcast", "disk", "ipc"] = Field(
        "auto",
        description="how weights reach the engines. object_store: through Ray; broadcast: in a group of trainer and "
        "engines (gloo on CPU, NCCL on CUDA); disk: as a folder below run.dir; ipc: in memory shared with engines on "
        "the machine, or the GPU, of the first rank; auto: broadcast for servers, else object_store",
    )
    weight_checksums: bool = Field(
        False, description="engines compare every bucket of weights with a checksum that is sent with it (not sglang)"
    )
    sync_interval_steps: PositiveInt = Field(
        1,
        description="the engines take the policy's weights after every so many steps, at a checkpoint, and before an "
        "evaluation",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=64,
        description="how many training steps the engines' weights may be behind when the sampling of a batch begins; "
        "above 0, batches are sampled while earlier batches are trained; 0 means that each batch is sampled with the "
        "weights that it trains",
    )
    on_update: Literal["wait", "continue", "abort"] = Field(
        "wait",
        description="what happens to unfinished samples when new weights arrive. wait: they are finished first; "
        "continue: they go on with the new weights; abort: they are dropped and sampled again",
    )
    reward: Annotated[str, AfterValidator(_reward_name)] | None = Field(
        None,
        description="reward function as `module:function`, or the URL of a server that takes its place; `train` needs "
        "this or rollout.environment, except under sft and dpo",
    )
    environment: Annotated[str, AfterValidator(class_name)] | None = Field(
        None,
        description="class that answers and rewards each response, turn by turn, instead of a reward function, as "
        "`module:Class` (docs/environments.md)",
    )
    reward_workers: int = Field(
        1,
        ge=0,
        le=4096,
        description="number of processes, on any node, that call the reward function or hold the environment's "
        "episodes; 0 means that the driver itself calls a plain function, without a deadline",
    )
    reward_timeout_s: float = Field(
        60.0,
        gt=0,
        le=LARGEST,
        description="limit on the time of one response's reward, or of one answer of an environment; a process that "
        "takes longer is replaced",
    )
    reward_concurrency: PositiveInt = Field(
        32, description="coroutines, or requests to a URL, that run at the same time in each process"
    )
    reward_failure: Literal["error", "skip"] = Field(
        "error",
        description="what happens if a reward function or an environment raises, is late or returns an unusable value. "
        "error: the run ends; skip: the response's group is left out, and counted in rollout/reward_failures",
    )
    filter: Annotated[str, AfterValidator(_filter_name)] | None = Field(
        None,
        description="which prompts are trained on. mixed_groups: those whose responses have different rewards (dynamic "
        "sampling of DAPO); `module:function`: a function of your own decides (docs/rollouts.md); null means all",
    )
    max_rounds: PositiveInt = Field(
        1, description="how often a step may draw prompts_per_step prompts until that many pass the filter"
    )
    overlong_buffer_tokens: PositiveInt | None = Field(
        None,
        description="number of tokens at the end of max_new_tokens in which a response loses reward: from 0 at the "
        "first of them to 1 where the response is cut (soft punishment of DAPO); null means no penalty",
    )
    mask_truncated: bool = Field(
        False, description="responses cut at max_new_tokens count in their group, but their tokens are not trained on"
    )

    def limits_at(self, step: int) -> LengthLimits:
        """Returns the limits on lengths in a step, which is counted from 1."""
        begun = [stage for stage in self.curriculum if stage.from_step <= step]
        if not begun:
            return LengthLimits(1, None, self.max_new_tokens)
        return LengthLimits(len(begun), begun[-1].max_prompt_tokens, begun[-1].max_new_tokens or self.max_new_tokens)

    @property
    def transport(self) -> Transport:
        """Returns `weight_transport`, with `auto` resolved."""
        if self.weight_transport == "auto":
            return "broadcast" if self.engine in SERVERS else "object_store"
        return self.weight_transport

    @model_validator(mode="after")
    def check_engine_servers(self) -> RolloutSettings:
        if self.engine in SERVERS and (self.engine_python is None) == (self.engine_urls is None):
            raise BrokenRule(
                "rollout.engine",
                f"rollout.engine={self.engine} needs either rollout.engine_python, to start servers, or "
                "rollout.engine_urls, if they already run",
                "set one of them",
            )
        urls = [url.lower() for url in self.engine_urls or ()]
        if self.engine_urls is not None and not len(urls) == len(set(urls)) == self.engines:
            raise BrokenRule(
                "rollout.engines",
                f"rollout.engines={self.engines} is not the number of different "
                f"rollout.engine_urls={list(self.engine_urls)}",
                "set it to their number",
            )
        return self

    @model_validator(mode="after")
    def check_server_arguments(self) -> RolloutSettings:
        for argument in self.engine_args:
            if argument.partition("=")[0] in _SPREADS:
                raise BrokenRule(
                    "rollout.engine_args",
                    f"rollout.engine_args={argument} spreads a server over GPUs that are not reserved for it",
                    "set rollout.gpus_per_engine, which adds the argument",
                )
        return self

    @model_validator(mode="after")
    def check_weights_of_servers(self) -> RolloutSettings:
        server = SERVERS.get(self.engine)
        if server is None:
            return self
        if self.weight_checksums and not server.compares_checksums:
            raise BrokenRule(
                "rollout.weight_checksums",
                f"rollout.weight_checksums does nothing with rollout.engine={self.engine}, which compares none",
                "remove it",
            )
        if self.transport not in server.transports:
            raise BrokenRule(
                "rollout.engine",
                f"rollout.engine={self.engine} takes no weights by rollout.weight_transport={self.weight_transport}",
                f"set it to {' or '.join(server.transports)}",
            )
        return self

    @model_validator(mode="after")
    def check_overlong_buffer(self) -> RolloutSettings:
        if self.overlong_buffer_tokens is not None and self.overlong_buffer_tokens > self.max_new_tokens:
            raise BrokenRule(
                "rollout.overlong_buffer_tokens",
                f"rollout.overlong_buffer_tokens={self.overlong_buffer_tokens} is more than a response of "
                f"rollout.max_new_tokens={self.max_new_tokens} has",
                "lower it, or raise rollout.max_new_tokens",
            )
        return self

    @model_validator(mode="after")
    def check_curriculum(self) -> RolloutSettings:
        first_steps = [stage.from_step for stage in self.curriculum]
        if first_steps and (first_steps[0] != 1 or first_steps != sorted(set(first_steps))):
            raise BrokenRule(
                "rollout.curriculum",
                f"rollout.curriculum has stages from the steps {short_text(first_steps)}",
                "begin with from_step=1, and let each later stage begin after the one before",
            )
        for stage in self.curriculum:
            most = stage.max_new_tokens
            if most is not None and most > self.max_new_tokens:
                raise BrokenRule(
                    "rollout.curriculum",
                    f"rollout.curriculum allows max_new_tokens={most} from step {stage.from_step} on, which is more "
                    f"than rollout.max_new_tokens={self.max_new_tokens}, for which packs and engines have room",
                    "lower it, or raise rollout.max_new_tokens",
                )
            if most is not None and most < (self.overlong_buffer_tokens or 0):
                raise BrokenRule(
                    "rollout.curriculum",
                    f"rollout.curriculum allows max_new_tokens={most} from step {stage.from_step} on, which is less "
                    f"than rollout.overlong_buffer_tokens={self.overlong_buffer_tokens}",
                    "raise it, or lower rollout.overlong_buffer_tokens",
                )
        return self


def _whole_numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
        raise broken_rule("must be a list of whole numbers", "write it like [1, 8]")
    return tuple(sorted(set(value)))


class EnvironmentSettings(Settings):
    """Configures episodes with `rollout.environment`."""

    arguments: Annotated[dict[str, Any], BeforeValidator(keyword_arguments)] = Field(
        {}, description="keyword arguments of the class, the same for each episode"
    )
    max_turns: PositiveInt = Field(8, description="responses after which an episode ends even if it is not done")
    max_tokens: PositiveInt | None = Field(
        None,
        description="longest episode (prompt, responses, observations); a full episode ends; null means what fits into "
        "a pack (batch.max_tokens_per_rank x mesh.cp), the model's learned positions and the engines",
    )


class EvaluationSettings(Settings):
    """Configures evaluation on held-out prompts."""

    interval_steps: PositiveInt | None = Field(None, description="evaluate every so many steps, and at start and end")
    samples_per_prompt: PositiveInt = Field(1, description="responses sampled per held-out prompt")
    temperature: float | None = Field(
        None,
        ge=0,
        le=LARGEST,
        description="temperature of sampling; 0 means greedy (the likeliest token); null means rollout.temperature",
    )
    max_new_tokens: PositiveInt | None = Field(None, description="longest response; null means rollout.max_new_tokens")
    top_p: float | None = Field(None, gt=0, le=1, description="as rollout.top_p; null means rollout.top_p")
    top_k: PositiveInt | None = Field(None, description="as rollout.top_k; null means rollout.top_k")
    min_p: float | None = Field(None, ge=0, lt=1, description="as rollout.min_p; null means rollout.min_p")
    pass_at: Annotated[tuple[PositiveInt, ...], BeforeValidator(_whole_numbers)] = Field(
        (),
        description="values of k for which eval/pass@k is logged: how likely at least one of k responses solves a "
        "prompt, with the ends of its 95 % interval (_low, _high); also logs eval/finished and eval/solved_of_finished",
    )

    @model_validator(mode="after")
    def check_greedy(self) -> EvaluationSettings:
        if self.temperature == 0 and self.samples_per_prompt > 1:
            raise BrokenRule(
                "evaluation.samples_per_prompt",
                f"evaluation.samples_per_prompt={self.samples_per_prompt} asks for several responses, and "
                "evaluation.temperature=0 gives each prompt one, the likeliest",
                "remove it, or sample at a temperature",
            )
        for name in ("top_p", "top_k", "min_p"):
            value = getattr(self, name)
            if self.temperature == 0 and value is not None:
                raise BrokenRule(
                    f"evaluation.{name}",
                    f"evaluation.{name}={value:g} does nothing with evaluation.temperature=0, which draws nothing",
                    "remove it, or sample at a temperature",
                )
        return self

    @model_validator(mode="after")
    def check_pass_at(self) -> EvaluationSettings:
        most = max(self.pass_at, default=0)
        if most > self.samples_per_prompt:
            raise BrokenRule(
                "evaluation.pass_at",
                f"evaluation.pass_at={list(self.pass_at)} needs {most} responses to each prompt, and "
                f"evaluation.samples_per_prompt is {self.samples_per_prompt}",
                f"set evaluation.samples_per_prompt={most} or more, or lower evaluation.pass_at",
            )
        return self
