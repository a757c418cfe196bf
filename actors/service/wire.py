"""The JSON bodies of clients' requests, with the checks of their fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, StrictInt

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_LONGEST_S = 10**9  # limit of about 30 years, since much later dates cannot be formatted


def _is_json(value: dict[str, Any] | None) -> dict[str, Any] | None:
    json.dumps(value, allow_nan=False)  # raises ValueError for NaN and infinity, which JSON answers cannot have
    return value


Metadata = Annotated[dict[str, Any] | None, AfterValidator(_is_json)]
"""Data of a client, which the service returns unchanged."""


class Body(BaseModel):
    """A body that a client sent; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")
    _size: int = PrivateAttr(0)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parses a body.

        Raises:
            ValidationError: a field is missing or invalid.
        """
        body = cls.model_validate_json(data or b"{}")
        body._size = len(data)
        return body

    @property
    def size(self) -> int:
        """Returns the number of bytes of the received body."""
        return self._size


class CreateSession(Body):
    tags: list[str] = Field(default_factory=list, max_length=64)
    user_metadata: Metadata = None
    sdk_version: str = Field("", max_length=64)


class OfSession(Body):
    session_id: str


class LoraConfig(Body):
    """The adapter of a new run; with rank 0 the run trains all weights."""

    rank: int
    seed: int | None = Field(None, ge=0, lt=2**63)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=2**31)
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(Body):
    model_id: str


class OfRun(OfModel):
    """A numbered request of a run."""

    seq_id: int = Field(ge=1, lt=2**31)


class AdamParams(Body):
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(OfRun):
    adam_params: AdamParams


class SaveWeights(OfRun):
    path: str | None = Field(None, pattern=NAME)
    overwrite: bool = False
    ttl_seconds: int | None = Field(None, ge=1, le=_LONGEST_S)
    user_metadata: dict[str, str] | None = None


class SaveForSampler(OfRun):
    path: str | None = Field(None, pattern=NAME)
    sampling_session_seq_id: int | None = Field(None, ge=0, lt=2**63)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(None, ge=1, le=_LONGEST_S)
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    """A request to load a checkpoint into an existing run, or into a new run."""

    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1, lt=2**31)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0, lt=2**31)
    base_model: str | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0, lt=2**63)
    base_model: str | None = None
    model_path: str | None = None


class PromptChunk(Body):
    type: str
    tokens: list[StrictInt] = []


class Prompt(Body):
    chunks: list[PromptChunk] = Field(min_length=1, max_length=10_000)


class AskedParams(Body):
    """A client's settings for drawing samples."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | list[StrictInt] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0, lt=2**63)
    num_samples: int = Field(1, ge=1, le=4096)
    prompt: Prompt
    sampling_params: AskedParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=0)
    topk_prompt_logprobs: int = Field(0, ge=0, le=256)
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: bool | None = None


class Retrieve(Body):
    request_id: str


class WeightsInfo(Body):
    tinker_path: str
