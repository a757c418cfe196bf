"""Reads samples for `plan`: a saved batch, a list of lengths in a file, or lengths drawn from a distribution."""

from __future__ import annotations

import re

import numpy as np

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.io.user_files import NoPath, parse_json, path_of, read_plain

MAX_LENGTH = 2**40  # the sum of a million such lengths fits int64

_MAX_BYTES = 100_000_000  # about ten million lengths
_HINT = (
    "write fixed(512), uniform(16, 4096) or lognormal(1000, 0.8, 16, 8192) (mean in tokens, sigma of the logarithm, "
    "shortest, longest), or name a file: of RolloutBatch.save, or a JSON list of lengths"
)


def sample_lengths(text: str, num_samples: int, *, seed: int = 0, field: str = "--lengths") -> np.ndarray:
    """Returns the lengths of the samples of `read_samples`, int64 [samples]."""
    samples = read_samples(text, num_samples, seed=seed, field=field)
    return samples.lengths if isinstance(samples, RolloutBatch) else samples


def read_samples(text: str, num_samples: int, *, seed: int = 0, field: str = "--lengths") -> np.ndarray | RolloutBatch:
    """Returns the batch in a file, or lengths in tokens, int64: all lengths of a file, or `num_samples` draws.

    Args:
        text: a distribution, or the path of a saved RolloutBatch or of a JSON list. The mean of
            lognormal(mean, sigma, min, max) is that of the distribution before values are clipped to [min, max].
        seed: seed of the draws.

    Raises:
        ConfigError: the text is neither a distribution nor a file.
        BatchError: the file is not a RolloutBatch or a list of lengths.
    """
    named = re.fullmatch(r"\s*(fixed|uniform|lognormal)\s*\(([^()]*)\)\s*", text)
    if named is None:
        return _read_file(text, field)
    try:
        numbers = [float(part) for part in named[2].split(",")]
    except ValueError:
        numbers = []
    rng = np.random.default_rng(seed)
    match named[1], numbers:
        case "fixed", [length] if _are_bounds(length, length) and length.is_integer():
            return np.full(num_samples, int(length), dtype=np.int64)
        case "uniform", [low, high] if _are_bounds(low, high) and low.is_integer() and high.is_integer():
            return rng.integers(int(low), int(high), num_samples, endpoint=True)
        case "lognormal", [mean, sigma, *bounds] if 1 <= mean <= MAX_LENGTH and 0 <= sigma <= 10 and len(bounds) <= 2:
            low, high = [*bounds, *(1.0, float(MAX_LENGTH))[len(bounds) :]]
            if _are_bounds(low, high):
                drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, num_samples)
                return np.rint(np.clip(drawn, low, high)).astype(np.int64)
    raise ConfigError(f"{field}={text!r} cannot be drawn from", field=field, hint=_HINT)


def _are_bounds(low: float, high: float) -> bool:
    return 1 <= low <= high <= MAX_LENGTH


def _read_file(text: str, field: str) -> np.ndarray | RolloutBatch:
    try:
        path = path_of(text)
        is_file = path.is_file()
    except NoPath as error:
        raise ConfigError(f"{field}={text!r} {error.rule}", field=field, hint=error.hint) from None
    except OSError:  # the name is too long
        is_file = False
    if not is_file:
        raise ConfigError(f"{field}={text!r} is neither a distribution nor a file", field=field, hint=_HINT)
    if path.suffix != ".json":
        return RolloutBatch.load(path)
    try:
        values = parse_json(read_plain(path, _MAX_BYTES))
    except (OSError, ValueError) as error:
        raise BatchError(f"{path} cannot be read as JSON: {error}", field=field, hint=_HINT) from None
    are_lengths = isinstance(values, list) and values and all(type(n) is int and 1 <= n < MAX_LENGTH for n in values)
    if not are_lengths:
        raise BatchError(f"{path} is not a list of lengths in tokens", field=field, hint=_HINT)
    return np.array(values, dtype=np.int64)
