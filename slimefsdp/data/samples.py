"""Per-sample records, and slime's rollout dict, as the flat fields of a rollout batch; and the records back from those.

Either source becomes columns first: for a field the caller's name of it, for errors, and one entry per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slimefsdp.data.fields import PER_RESPONSE_TOKEN, PER_SAMPLE, as_array, refuse, refuse_unknown

Columns = Mapping[str, tuple[str, Sequence[Any]]]  # field -> (the caller's name of it, one entry per sample)

_SAMPLE_KEYS = {  # key of one sample -> field of the batch
    "tokens": "tokens",
    "response_length": "response_lengths",
    "reward": "rewards",
    "group_id": "group_ids",
    "baseline_reward": "baseline_rewards",
    **{name: name for name in PER_RESPONSE_TOKEN},
}

_SLIME_KEYS = {  # key of slime's rollout dict -> field of the batch; of two keys for one field the later one counts
    "tokens": "tokens",
    "response_lengths": "response_lengths",
    "rewards": "rewards",
    "raw_reward": "rewards",
    "group_index": "group_ids",
    "group_ids": "group_ids",
    "loss_masks": "loss_mask",
    "log_probs": "old_log_probs",
    **{name: name for name in ("rollout_log_probs", "ref_log_probs", "values", "advantages", "returns")},
}
_SLIME_IGNORED = (  # bookkeeping, and slime's own schedule and denominators
    *("total_lengths", "truncated", "sample_indices", "prompt", "round_number", "metadata", "weight_versions"),
    *("rollout_ids", "rollout_mask_sums", "max_seq_lens", "dynamic_global_batch_size", "global_batch_sizes"),
    *("num_microbatches", "micro_batch_indices"),
)
_SLIME_REFUSED = {  # leaving these out in silence would train something else than was sampled
    "partition": "the dict is one rank's share, whose raw_reward is still that of all ranks",
    "pixel_values": "images are not supported",
    "multimodal_train_inputs": "inputs other than tokens are not supported",
    "teacher_log_probs": "distillation is not supported",
    "rollout_routed_experts": "routing replay is not supported",
    "rollout_indexer_topk": "indexer replay is not supported",
    "rollout_top_p_token_ids": "log-probs over a truncated vocabulary are not supported",
    "rollout_top_p_token_offsets": "log-probs over a truncated vocabulary are not supported",
}


def fields_from_samples(samples: Iterable[Mapping[str, Any] | object]) -> dict[str, npt.NDArray[Any]]:
    """The array fields of a batch of these samples; `RolloutBatch.from_samples` says what a sample is."""
    if not isinstance(samples, Iterable):
        refuse("samples", f"samples is a {type(samples).__name__}", "pass a list with one mapping or object per sample")
    rows = [s if isinstance(s, Mapping) else {key: getattr(s, key, None) for key in _SAMPLE_KEYS} for s in samples]
    for i, row in enumerate(rows):
        for key in row.keys() - _SAMPLE_KEYS.keys():
            refuse_unknown(key, _SAMPLE_KEYS, f"a key of sample {i}")
    return _joined({field: (key, [row.get(key) for row in rows]) for key, field in _SAMPLE_KEYS.items()})


def samples_from_fields(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per sample, with a key for each field that is present; the inverse of `fields_from_samples`."""
    columns: dict[str, Sequence[Any]] = {}
    for key, field in _SAMPLE_KEYS.items():
        if field in PER_SAMPLE and field in fields:
            columns[key] = fields[field].tolist()
        elif field in fields:
            sizes = fields["lengths" if field == "tokens" else "response_lengths"]
            columns[key] = np.split(fields[field], np.cumsum(sizes)[:-1])
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def fields_from_slime(
    data: Mapping[str, Any], samples_per_group: int | None, reward_key: str | None
) -> dict[str, npt.NDArray[Any]]:
    """The array fields of a batch of slime's rollout dict; `RolloutBatch.from_slime` says what the arguments mean.

    Source: `_convert_samples_to_train_data` in slime/ray/rollout.py.
    - Taken as they are: `tokens`, `response_lengths`, `rollout_log_probs`, `ref_log_probs`, `values`, `advantages`,
      `returns`. Renamed: `loss_masks` to loss_mask, `log_probs` (of slime's trainer) to old_log_probs.
    - Ignored: `total_lengths`, `truncated`, `sample_indices`, `prompt`, `round_number`, `metadata`, `rollout_ids`,
      `weight_versions` (one list per sample: give `weight_version`), and slime's schedule and denominators.
    - Refused, since leaving them out would train something else: inputs that are not tokens, teacher log-probs, replay
      data of the engine, one rank's share (`partition`), and keys that are not known.
    """
    if not isinstance(data, Mapping):
        refuse("data", f"data is a {type(data).__name__}", "pass the dict that slime's RolloutManager builds")
    given = {key: value for key, value in data.items() if value is not None}
    for key, value in given.items():
        entries = value if isinstance(value, Iterable) else [value]
        if key in _SLIME_REFUSED and any(entry is not None for entry in entries):
            message = f"{key} in slime's dict cannot be honoured: {_SLIME_REFUSED[key]}"
            refuse(key, message, f"pass a dict without {key}")
        if key not in (*_SLIME_KEYS, *_SLIME_REFUSED, *_SLIME_IGNORED):
            refuse_unknown(key, _SLIME_KEYS, "a key of slime's dict", "; remove it if it can be ignored")
        if key in _SLIME_KEYS and not hasattr(value, "__len__"):
            refuse(key, f"{key} in slime's dict is {value!r}; it must be a list", "pass one entry per sample")
    columns = {field: (key, given[key]) for key, field in _SLIME_KEYS.items() if key in given}
    if reward_key is not None:
        if not isinstance(reward_key, str) or _SLIME_KEYS.get(reward_key) != "rewards" or reward_key not in given:
            refuse(
                "rewards", f"slime's dict has no rewards {reward_key!r}", "pass reward_key='raw_reward' or 'rewards'"
            )
        columns["rewards"] = (reward_key, given[reward_key])
    if samples_per_group is not None:
        num_samples = len(given.get("tokens", ()))
        if type(samples_per_group) is not int or samples_per_group < 1 or num_samples % samples_per_group:
            message = f"samples_per_group={samples_per_group} does not cut {num_samples} samples into whole groups"
            refuse("group_ids", message, "pass whole groups, or name each sample's group in a list group_index")
        columns["group_ids"] = ("samples_per_group", [i // samples_per_group for i in range(num_samples)])
    return _joined(columns)


def _joined(columns: Columns) -> dict[str, npt.NDArray[Any]]:
    """The array fields of a batch, `lengths` included: each column's entries end to end, columns of None left out."""
    num_samples = len(columns["tokens"][1]) if "tokens" in columns else 0
    if num_samples == 0:
        refuse("tokens", "there are no samples; a batch has at least one", "skip the update when nothing was sampled")
    parts = {field: _parts(field, key, entries, num_samples) for field, (key, entries) in columns.items()}
    for field in ("tokens", "response_lengths"):
        if not parts.get(field):
            key = columns[field][0] if field in columns else field
            refuse(field, f"sample 0 has no {key}, nor has any other", f"give {key} on every sample")
    for field in PER_RESPONSE_TOKEN:
        for i, part in enumerate(parts.get(field, ())):
            needed = int(parts["response_lengths"][i][0])
            if part.size != needed:
                message = f"{columns[field][0]} of sample {i} has {part.size} entries; its response has {needed} tokens"
                refuse(field, message, "pass one each")
    fields = {field: np.concatenate(pieces) for field, pieces in parts.items() if pieces}
    return fields | {"lengths": np.array([part.size for part in parts["tokens"]])}


def _parts(field: str, key: str, entries: Sequence[Any], num_samples: int) -> list[npt.NDArray[Any]]:
    """One array per sample; empty when every entry is None."""
    if len(entries) != num_samples:
        refuse(field, f"{key} has {len(entries)} entries for {num_samples} samples", "pass one entry per sample")
    lacking = [i for i, entry in enumerate(entries) if entry is None]
    if len(lacking) == num_samples:
        return []
    if lacking:
        refuse(field, f"sample {lacking[0]} has no {key}, others have one", f"give {key} on every sample or on none")

    def array_of(i: int) -> npt.NDArray[Any]:
        if field in PER_SAMPLE:
            return as_array(field, [entries[i]], label=f"{key} of sample {i}", place=lambda _: f"sample {i}")
        return as_array(field, entries[i], label=f"{key} of sample {i}", place=lambda j: f"sample {i}, entry {j}")

    return [array_of(i) for i in range(num_samples)]
