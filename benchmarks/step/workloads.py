"""The recorded batches of the train-step benchmark, made from a seed, and the random model that they are trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from slimefsdp.data.rollout_batch import RolloutBatch

Group = tuple[int, list[int]]  # tokens of the prompt, tokens of each of its responses

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "bias": "none",
    "base_model_name_or_path": "",
}
INITIALIZER_STD = 0.02
FEWEST_TOKENS = 8  # of a skewed response


@dataclass(frozen=True)
class Workload:
    """What is trained on.

    Args:
        groups: draws the lengths.
    """

    title: str
    vocab: int
    groups: Callable[[np.random.Generator], list[Group]]


def _skewed(generator: np.random.Generator) -> list[Group]:
    """Eight groups of eight; log-normal responses, stretched until padding to the longest is 58 % of everything."""
    prompts = generator.integers(12, 25, size=8).tolist()
    shape = np.sort(generator.standard_normal(64))
    order = generator.permutation(64)

    def responses(sigma: float) -> np.ndarray:
        return np.maximum(np.round(170 * np.exp(sigma * shape - sigma**2 / 2)), FEWEST_TOKENS).astype(int)[order]

    def padding(sigma: float) -> float:
        lengths = responses(sigma) + np.repeat(prompts, 8)
        return 1 - float(lengths.mean() / lengths.max())

    sigma = next(sigma for sigma in np.arange(0.2, 2.0, 0.005) if padding(sigma) >= 0.58)
    return [(prompt, row.tolist()) for prompt, row in zip(prompts, responses(sigma).reshape(8, 8), strict=True)]


WORKLOADS = {
    "skewed": Workload("log-normal lengths, 58 % padding", 512, _skewed),
    "uniform": Workload("64 x (32 + 128) tokens", 512, lambda _: [(32, [128] * 8)] * 8),
    "prompt_heavy": Workload("2 prompts of 1,024, 16 responses of 128 each", 512, lambda _: [(1024, [128] * 16)] * 2),
    "vocab152k": Workload("16 x (128 + 128) tokens, vocabulary 152k", 152_000, lambda _: [(128, [128] * 4)] * 4),
    "long": Workload("one sequence of 8,192", 512, lambda _: [(64, [8128])]),
    "smoke": Workload("4 x (4 + 6) tokens, to try an installation", 64, lambda _: [(4, [6, 3, 6, 5])]),
}
DEFAULT_WORKLOADS = tuple(name for name in WORKLOADS if name != "smoke")


def build_batch(workload: Workload, seed: int) -> RolloutBatch:
    """The batch: groups share their prompt, tokens and rewards are random, advantages are GRPO's.

    The advantage of a sample that is alone in its group is its reward.
    """
    generator = np.random.default_rng(seed)
    samples: list[dict[str, Any]] = []
    for group, (prompt_length, responses) in enumerate(workload.groups(generator)):
        prompt = generator.integers(2, workload.vocab, prompt_length)
        rewards = generator.standard_normal(len(responses))
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) if len(responses) > 1 else rewards
        for length, reward, advantage in zip(responses, rewards, advantages, strict=True):
            response = generator.integers(2, workload.vocab, length)
            samples.append(
                {
                    "tokens": np.concatenate([prompt, response]),
                    "response_length": length,
                    "reward": float(reward),
                    "group_id": group,
                    "advantages": np.full(length, advantage, np.float32),
                }
            )
    return RolloutBatch.from_samples(samples)


def padding(batch: RolloutBatch) -> float:
    """The share of padding if every sample were padded to the longest."""
    return 1 - float(batch.lengths.mean() / batch.lengths.max())


def write_model(folder: Path, vocab: int, seed: int) -> None:
    """A Hugging Face folder of a tiny Qwen3 with random weights: 0.85 million parameters at a vocabulary of 512."""
    generator = np.random.default_rng(seed)
    hidden, head = MODEL["hidden_size"], MODEL["head_dim"]
    matrices = {"model.embed_tokens": (vocab, hidden)}
    norms = {"model.norm": hidden}
    for layer in range(MODEL["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        matrices |= {f"{name}.{part}": size for part, size in _linear_sizes().items()}
        norms |= {f"{name}.input_layernorm": hidden, f"{name}.post_attention_layernorm": hidden}
        norms |= {f"{name}.self_attn.q_norm": head, f"{name}.self_attn.k_norm": head}
    weights = {
        f"{name}.weight": generator.standard_normal(size, dtype=np.float32) * np.float32(INITIALIZER_STD)
        for name, size in matrices.items()
    }
    weights |= {f"{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**MODEL, "vocab_size": vocab, "dtype": "float32"}, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(folder: Path, seed: int) -> None:
    """A PEFT folder for such a model: every linear module but the head, with a B that is not 0."""
    generator = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for layer in range(MODEL["num_hidden_layers"]):
        for part, (rows, columns) in _linear_sizes().items():
            name = f"base_model.model.model.layers.{layer}.{part}"
            a = generator.uniform(-1, 1, (ADAPTER["r"], columns)) / np.sqrt(columns)
            b = generator.standard_normal((rows, ADAPTER["r"])) * INITIALIZER_STD
            weights |= {f"{name}.lora_A.weight": a.astype(np.float32), f"{name}.lora_B.weight": b.astype(np.float32)}
    folder.mkdir(parents=True)
    targets = sorted(part.rpartition(".")[2] for part in _linear_sizes())
    (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER, "target_modules": targets}, indent=1))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _linear_sizes() -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's linear modules, in the order in which their weights are drawn."""
    hidden, head, inner = MODEL["hidden_size"], MODEL["head_dim"], MODEL["intermediate_size"]
    queries, keys = MODEL["num_attention_heads"] * head, MODEL["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
