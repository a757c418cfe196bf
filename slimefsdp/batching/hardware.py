"""What a device does in a second: as `slimefsdp plan --calibrate` measured it, or as a stated guess."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.errors import ConfigError, short_text
from slimefsdp.io.user_files import parse_json, read_plain

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
# in their units; no device is near either, and what is computed from rates between them stays a number
LEAST_RATE, MOST_RATE = 1e-9, 1e9
_MAX_BYTES = 1_000_000  # of a calibration, which has one or two thousand


@dataclass(frozen=True, slots=True)
class Rates:
    """The measured rates of one rank."""

    source: str  # where the numbers are from
    matrix_tflops: float  # products in the compute dtype; a multiply and an add are two operations
    attention_tflops: float  # pairs of tokens, forward and backward
    memory_gbps: float  # 10^9 bytes read or written on the device
    comm_gbps: float  # 10^9 bytes that a rank sends in collectives
    host_gbps: float  # 10^9 bytes between device and host
    dtype: str | None = None  # in which products were measured; None: the rates are for any

    @property
    def attention_slowdown(self) -> float:
        """The time of an operation in attention, in operations of a matrix product."""
        return self.matrix_tflops / self.attention_tflops

    @property
    def flops_per_byte(self) -> float:
        """Operations of a matrix product in the time that one byte takes to be sent."""
        return 1e3 * self.matrix_tflops / self.comm_gbps


def guessed_rates(device: str, compute_bytes: int) -> Rates:
    """Returns the rates of a device that has not been measured.

    Args:
        device: one of DEVICES.
        compute_bytes: of an element; what is wider than half precision is slower in proportion.
    """
    tflops, _, memory, comm, host = _STATED[device]
    if device != "CPU":
        tflops *= _REACHED * 2 / max(2, compute_bytes)
    return Rates(f"a guess for {device}", tflops, tflops / 2, memory, comm, host)


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
    """Returns the rates of a file of `slimefsdp plan --calibrate`.

    Raises:
        ConfigError: under `field`; there is none, or it is of another kind.
    """

    def refused(problem: str) -> ConfigError:
        hint = f"write one with `slimefsdp plan --calibrate {path}`"
        return ConfigError(f"{path} {problem}", field=field, hint=hint)

    try:
        values = parse_json(read_plain(path, _MAX_BYTES))["rates"]
        values |= {"comm_gbps": values.pop("wire_gbps")} if "wire_gbps" in values else {}  # as earlier files name it
        rates = Rates(**values)
    except OSError as error:
        raise refused(f"holds no calibration: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise refused(f"holds no calibration: {type(error).__name__}: {short_text(str(error))}") from None
    for name, value in asdict(rates).items():
        if name == "source":
            is_sound = isinstance(value, str) and value.isprintable() and len(value) <= 300
        elif name == "dtype":
            is_sound = value is None or (isinstance(value, str) and value in ELEMENT_BYTES)
        else:  # as numbers are compared, a bool would be one
            is_sound = type(value) in (int, float) and LEAST_RATE <= value <= MOST_RATE
        if not is_sound:
            raise refused(f"has {name}={short_text(value)}, which is no {'rate' if '_' in name else name}")
    return rates
