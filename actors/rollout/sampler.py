"""A batched sampler over any Hugging Face causal LM: tokens, and the log-prob of each at the moment it was drawn.

Prompts are left-padded, prefilled once, and their key-value cache is repeated for the samples of each prompt. A row
that has drawn an end token leaves the batch, so the cost follows the tokens drawn and not the longest response.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from slimefsdp import heartbeat
from slimefsdp.errors import BatchError, ModelError, StateError

# Exact types: layers that keep a recurrent state inherit these methods but leave that state unrepeated
_REPEATABLE_CACHE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)

_Draw = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response; `log_probs[i]` belongs to `tokens[i]`, the end token included when there is one."""

    tokens: list[int]
    log_probs: list[float]  # of the tempered distribution log_softmax(logits / temperature), in float32
    finished: bool  # the last token is an end token; False: cut at max_new_tokens


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    samples_per_prompt: int,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    generator: torch.Generator,
    greedy: bool = False,
    max_batch: int = 256,
) -> list[Completion]:
    """`samples_per_prompt` completions of each prompt, prompt-major: prompt 0's first, in the order of `prompts`.

    The same generator state, weights and arguments give the same completions; `max_batch` is one of the arguments.

    Args:
        model: in eval mode; a causal LM whose cache is attention keys and values, sliding windows included.
        prompts: token ids, none empty, without padding.
        temperature: > 0; `greedy` takes the likeliest token, and still reports log-probs at this temperature.
        eos_token_ids: a token in here ends its row; may be empty.
        pad_token_id: any id the model can embed; masked out.
        generator: on the model's device; advances, unless `greedy`.
        max_batch: the most sequences decoded at once, which bounds the cache. A prompt with more samples than this is
            prefilled again for each further `max_batch` of them.

    Raises:
        BatchError: a prompt has no tokens.
        ModelError: the model keeps a state that cannot be repeated per sample.
        StateError: the model is in training mode, or its logits are not finite.
    """
    assert samples_per_prompt > 0 and max_new_tokens > 0 and temperature > 0 and max_batch > 0
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise BatchError(f"prompt {index} has no tokens", field="prompts", hint="drop it or give it text")
    if model.training:
        raise StateError(
            "the model is in training mode: dropout would change the log-probs, and checkpointing drops the cache",
            field="model",
            hint="call model.eval() first",
        )
    draw = partial(_draw, temperature=temperature, generator=generator, greedy=greedy)
    completions: list[Completion] = []
    for batch, repeats in _batches(prompts, samples_per_prompt, max_batch):
        completions += _sample_batch(
            model, batch, repeats, max_new_tokens, frozenset(eos_token_ids), pad_token_id, draw
        )
    return completions


def _batches(
    prompts: Sequence[Sequence[int]], samples_per_prompt: int, max_batch: int
) -> Iterator[tuple[Sequence[Sequence[int]], int]]:
    """Pairs of (prompts, samples of each) with at most `max_batch` sequences, whose results join up prompt-major."""
    if samples_per_prompt <= max_batch:
        prompts_per_batch = max_batch // samples_per_prompt
        for start in range(0, len(prompts), prompts_per_batch):
            yield prompts[start : start + prompts_per_batch], samples_per_prompt
        return
    for prompt in prompts:
        for start in range(0, samples_per_prompt, max_batch):
            yield [prompt], min(max_batch, samples_per_prompt - start)


def _sample_batch(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    repeats: int,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    pad_token_id: int,
    draw: _Draw,
) -> list[Completion]:
    tokens, mask = _left_padded(prompts, pad_token_id, model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = _empty_cache(model)
    logits = _last_logits(model, tokens, mask, positions, cache)  # [prompts, vocab]
    _check_cache_was_filled(model, cache, tokens.shape[1])
    if repeats > 1:
        cache.batch_repeat_interleave(repeats)
    logits, mask = logits.repeat_interleave(repeats, 0), mask.repeat_interleave(repeats, 0)
    position = positions[:, -1].repeat_interleave(repeats, 0)  # [rows], of the last token each row holds

    completions = [Completion([], [], False) for _ in range(len(prompts) * repeats)]
    rows = list(range(len(completions)))  # the completion each row of the batch belongs to
    for step in range(max_new_tokens):
        drawn, log_probs = draw(logits)
        drawn_ids = drawn.tolist()
        for row, token, log_prob in zip(rows, drawn_ids, log_probs.tolist(), strict=True):
            completions[row].tokens.append(token)
            completions[row].log_probs.append(log_prob)
        unfinished = [index for index, token in enumerate(drawn_ids) if token not in eos_token_ids]
        if not unfinished or step == max_new_tokens - 1:
            break
        if len(unfinished) < len(rows):
            rows = [rows[index] for index in unfinished]
            keep = torch.tensor(unfinished, device=drawn.device)
            cache.batch_select_indices(keep)
            mask, position, drawn = mask[keep], position[keep], drawn[keep]
        position = position + 1
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        logits = _last_logits(model, drawn[:, None], mask, position[:, None], cache)
        heartbeat.tick()
    return [Completion(c.tokens, c.log_probs, c.tokens[-1] in eos_token_ids) for c in completions]


def _left_padded(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both int64 [prompts, longest]; padding on the left, where no token follows it."""
    longest = max(map(len, prompts))
    tokens = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _empty_cache(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _REPEATABLE_CACHE_LAYERS})
    if others:
        raise ModelError(
            f"{type(model).__name__} keeps {', '.join(others)} in its cache, which cannot be repeated per sample",
            field="model",
            hint="sample this model with a rollout server instead of the embedded engine",
        )
    return cache


def _check_cache_was_filled(model: PreTrainedModel, cache: DynamicCache, length: int) -> None:
    # a model that swallows past_key_values in **kwargs would decode each token without its prompt
    if cache.get_seq_length() != length:
        raise ModelError(
            f"{type(model).__name__} left {cache.get_seq_length()} tokens in the key-value cache after {length}",
            field="model",
            hint="sample this model with a rollout server instead of the embedded engine",
        )


def _last_logits(
    model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
) -> torch.Tensor:
    """Float32 logits [rows, vocab] after the last of `tokens` [rows, new]; `mask` is [rows, cached + new]."""
    outputs = model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return outputs.logits[:, -1].float()


def _draw(
    logits: torch.Tensor, *, temperature: float, generator: torch.Generator, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob, both [rows], from logits [rows, vocab]."""
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    # log_softmax spreads one NaN or +inf over its row; greedy would take it for a token, multinomial would not name it
    broken = int(log_probs[:, 0].isnan().sum())
    if broken:
        raise StateError(
            f"{broken} of {len(logits)} rows have logits that are not finite",
            field="logits",
            hint="check the weights of the last update, e.g. its gradient norm",
        )
    drawn = log_probs.argmax(-1) if greedy else torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return drawn, log_probs.gather(1, drawn[:, None]).squeeze(1)
