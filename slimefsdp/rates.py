"""What a device does in a second: as `slimefsdp calibrate` measured it, or as a stated guess."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp.errors import ConfigError

# of the matrix rate that a data sheet states, what large products reach
_REACHED = 0.6
# TFLOP/s in half precision; GB of memory; GB/s of that memory, of links between devices of a node, and to the host
_STATED: dict[str, tuple[float, float, float, float, float]] = {
    "A100": (312.0, 80, 2000, 200, 25),
    "H100": (989.4, 80, 3350, 350, 50),
    "H200": (989.4, 141, 4800, 350, 50),
    "B200": (2250.0, 180, 8000, 700, 50),
    "L40S": (362.0, 48, 860, 20, 25),
    "RTX4090": (165.2, 24, 1000, 20, 25),
    "CPU": (0.05, 0, 5, 1, 5),  # one core, in float32
}
DEVICES = tuple(_STATED)


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank."""

    source: str  # where the numbers are from
    matrix_tflops: float  # products in the compute dtype; a multiply and an add are two operations
    attention_tflops: float  # pairs of tokens, forward and backward
    memory_gbps: float  # 10^9 bytes read or written on the device
    wire_gbps: float  # 10^9 bytes that a rank sends in collectives
    host_gbps: float  # 10^9 bytes between device and host

    @property
    def attention_slowdown(self) -> float:
        """How many operations in matrices take as long as one in attention."""
        return self.matrix_tflops / self.attention_tflops

    @property
    def flops_per_byte(self) -> float:
        """Operations in matrices in the time that a byte is sent."""
        return 1e3 * self.matrix_tflops / self.wire_gbps


def guessed_rates(device: str, compute_bytes: int) -> Rates:
    """Rates of a device that nobody measured.

    Args:
        device: one of DEVICES.
        compute_bytes: of an element; what is wider than half precision is slower in proportion.
    """
    tflops, _, memory, wire, host = _STATED[device]
    if device != "CPU":
        tflops *= _REACHED * 2 / max(2, compute_bytes)
    return Rates(f"a guess for {device}", tflops, tflops / 2, memory, wire, host)


def device_bytes(device: str) -> int | None:
    """The memory of a device; None: it is the machine's."""
    return round(_STATED[device][1] * 1e9) or None


def write_calibration(path: Path, rates: Rates, details: Mapping[str, Any]) -> None:
    """Writes what `read_calibration` reads, and how it was found.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(json.dumps({"rates": asdict(rates), **details}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="--out", hint="name another file") from None


def read_calibration(path: Path, *, field: str) -> Rates:
    """The rates of a file of `slimefsdp calibrate`.

    Raises:
        ConfigError: under `field`; there is none, or it is of another kind.
    """
    try:
        found = json.loads(path.read_text())["rates"]
        rates = Rates(**found)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} holds no calibration: {type(error).__name__}: {error}",
            field=field,
            hint=f"write one with `slimefsdp calibrate --out {path}`",
        ) from None
    for name, value in asdict(rates).items():
        is_rate = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "source" and not (is_rate and math.isfinite(value) and value > 0):
            raise ConfigError(f"{path} has {name}={value!r}, which is no rate", field=field, hint="calibrate anew")
    return rates
