"""What a device holds and does in a second: as `slimefsdp plan --calibrate` measured it, or as data sheets say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp.batching.cost import ELEMENT_BYTES
from slimefsdp.errors import ConfigError, short_text
from slimefsdp.io.user_files import parse_json, read_plain

# TFLOP/s of dense bfloat16 products with float32 sums, as the makers state them; the first name that fits counts
_PEAK_TFLOPS = {
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "H20": 148.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
}
# GB of memory; GB/s of that memory, of links between devices of a node, and to the host
_STATED: dict[str, tuple[float, float, float, float]] = {
    "A100": (80, 2000, 200, 25),
    "H100": (80, 3350, 350, 50),
    "H200": (141, 4800, 350, 50),
    "B200": (180, 8000, 700, 50),
    "L40S": (48, 860, 20, 25),
    "RTX4090": (24, 1000, 20, 25),
    "CPU": (0, 5, 1, 5),
}
DEVICES = tuple(_STATED)
_CORE_TFLOPS = 0.05  # of one CPU core in float32
_REACHED = 0.6  # share of the stated peak that large products reach
HEADROOM = 0.9  # an estimate is right within a tenth, and allocators keep more than is in use

# no device is near either bound, and what is computed from rates between them stays a finite number
LEAST_RATE, MOST_RATE = 1e-9, 1e9
_MAX_BYTES = 1_000_000  # a calibration has one or two thousand


def peak_tflops(device_name: str) -> float | None:
    """Returns a device's stated half-precision TFLOP/s by the name that its driver gives; None where it is unknown."""
    if "Laptop" in device_name:  # the desktop's name, and another chip
        return None
    return next((rate for name, rate in _PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank does in a second."""

    source: str  # where the numbers come from
    matrix_tflops: float  # of products in the compute dtype; a multiply and an add are two operations
    attention_tflops: float  # of pairs of tokens, forward and backward
    memory_gbps: float  # 10^9 bytes read or written on the device
    comm_gbps: float  # 10^9 bytes that a rank sends in collectives
    host_gbps: float  # 10^9 bytes between device and host
    dtype: str | None = None  # of the products that were measured; None: the rates are for any

    @property
    def attention_slowdown(self) -> float:
        """Operations in products that take as long as one in attention."""
        return self.matrix_tflops / self.attention_tflops

    @property
    def flops_per_byte(self) -> float:
        """Operations in products that take as long as sending a byte."""
        return 1e3 * self.matrix_tflops / self.comm_gbps


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of one rank's device."""

    rates: Rates
    memory_bytes: int | None  # None: no limit is known
    named_by: str | None  # the flag that named the memory; None: it is a guess
    on_cpu: bool

    def has_room(self, held: int) -> bool:
        """Returns whether so many bytes fit with a tenth left free, as far as a limit is known."""
        return self.memory_bytes is None or fits(held, self.memory_bytes)


def fits(held: int, memory_bytes: int) -> bool:
    """Returns whether an estimate of `held` bytes leaves a tenth free."""
    return held <= HEADROOM * memory_bytes


def guessed_rates(device: str, compute_bytes: int) -> Rates:
    """Returns rates by a data sheet.

    Args:
        device: one of DEVICES.
        compute_bytes: of an element; what is wider than half precision is slower in proportion.
    """
    _, memory, comm, host = _STATED[device]
    tflops = _CORE_TFLOPS
    if device != "CPU":
        tflops = _PEAK_TFLOPS[device.replace("RTX", "RTX ")] * _REACHED * 2 / max(2, compute_bytes)
    return Rates(f"a guess for {device}", tflops, tflops / 2, memory, comm, host)


def device_bytes(device: str) -> int | None:
    """Returns the memory of one of DEVICES; None for a CPU, whose memory is the machine's."""
    return round(_STATED[device][0] * 1e9) or None


def write_calibration(path: Path, rates: Rates, details: Mapping[str, Any], *, field: str = "--calibrate") -> None:
    """Writes rates, and how they were measured, for `read_calibration`.

    Raises:
        ConfigError: under `field`; the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"rates": asdict(rates), **details}, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field=field, hint="name another file") from None


def read_calibration(path: Path, *, field: str) -> Rates:
    """Returns the rates of a file that `write_calibration` wrote.

    Raises:
        ConfigError: under `field`; there is no such file, or it holds something else.
    """

    def refused(problem: str) -> ConfigError:
        hint = f"write one with `slimefsdp plan CONFIG --calibrate {path}`"
        return ConfigError(f"{path} {problem}", field=field, hint=hint)

    try:
        rates = Rates(**parse_json(read_plain(path, _MAX_BYTES))["rates"])
    except OSError as error:
        raise refused(f"holds no calibration: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise refused(f"holds no calibration: {type(error).__name__}: {short_text(str(error))}") from None
    for name, value in asdict(rates).items():
        if name == "source":
            is_sound = isinstance(value, str) and value.isprintable() and len(value) <= 300
        elif name == "dtype":
            is_sound = value is None or (isinstance(value, str) and value in ELEMENT_BYTES)
        else:  # in a comparison of numbers, a bool would pass as one
            is_sound = type(value) in (int, float) and LEAST_RATE <= value <= MOST_RATE
        if not is_sound:
            raise refused(f"has {name}={short_text(value)}, which is no {'rate' if '_' in name else name}")
    return rates
