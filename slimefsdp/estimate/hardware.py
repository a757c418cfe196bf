"""Provides the memory and rates of devices, from data sheets or measured by `slimefsdp plan --calibrate`."""

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

# vendors' TFLOP/s of dense bfloat16 products with float32 accumulation; the first name that matches is used
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
# GB of memory; GB/s of the memory, of links between the devices of a node, and of the link to the host
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
_CORE_TFLOPS = 0.05  # float32 rate of one CPU core
_REACHED = 0.6  # share of the vendor's peak that large matrix products reach
HEADROOM = 0.9  # usable share of memory: estimates may be off by a tenth, and allocators reserve unused memory

# accepted rates, far beyond those of any device; within these bounds all results are finite
LEAST_RATE, MOST_RATE = 1e-9, 1e9
_MAX_BYTES = 1_000_000  # a calibration has about two thousand bytes


def peak_tflops(device_name: str) -> float | None:
    """Returns the vendor's half-precision TFLOP/s of a device by its driver's name; None if unknown."""
    if "Laptop" in device_name:  # laptop chips have the same names as faster desktop chips
        return None
    return next((rate for name, rate in _PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True, slots=True)
class Rates:
    source: str  # where the numbers come from
    matrix_tflops: float  # TFLOP/s of matrix products in the compute dtype; a multiply and an add are two operations
    attention_tflops: float  # TFLOP/s of attention, forward and backward
    memory_gbps: float  # 10^9 bytes per second read or written on the device
    comm_gbps: float  # 10^9 bytes per second that a rank sends in collectives
    host_gbps: float  # 10^9 bytes per second between device and host
    dtype: str | None = None  # dtype of the measured products; None means that the rates are for any dtype

    @property
    def attention_slowdown(self) -> float:
        """Returns the FLOPs of matrix products that take as long as one FLOP of attention."""
        return self.matrix_tflops / self.attention_tflops

    @property
    def flops_per_byte(self) -> float:
        """Returns the FLOPs of matrix products that take as long as sending a byte."""
        return 1e3 * self.matrix_tflops / self.comm_gbps


@dataclass(frozen=True, slots=True)
class Device:
    rates: Rates
    memory_bytes: int | None  # None means unknown
    named_by: str | None  # the flag that gave the memory; None means a guess
    on_cpu: bool

    def has_room(self, held: int) -> bool:
        """Returns whether `held` bytes leave a tenth of the memory free; True if the memory is not known."""
        return self.memory_bytes is None or fits(held, self.memory_bytes)


def fits(held: int, memory_bytes: int) -> bool:
    """Returns whether `held` bytes leave a tenth of the memory free."""
    return held <= HEADROOM * memory_bytes


def guessed_rates(device: str, compute_bytes: int) -> Rates:
    """Returns a device's rates according to its data sheet.

    Args:
        device: one of DEVICES.
        compute_bytes: bytes of an element; dtypes wider than half precision are proportionally slower.
    """
    _, memory, comm, host = _STATED[device]
    tflops = _CORE_TFLOPS
    if device != "CPU":
        tflops = _PEAK_TFLOPS[device.replace("RTX", "RTX ")] * _REACHED * 2 / max(2, compute_bytes)
    return Rates(f"a guess for {device}", tflops, tflops / 2, memory, comm, host)


def device_bytes(device: str) -> int | None:
    """Returns the bytes of memory of one of DEVICES; None for a CPU."""
    return round(_STATED[device][0] * 1e9) or None


def write_calibration(path: Path, rates: Rates, details: Mapping[str, Any]) -> None:
    """Writes rates, and details of their measurement, to a file that `read_calibration` can read.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"rates": asdict(rates), **details}, indent=1) + "\n")
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror}"
        raise ConfigError(problem, field="--calibrate", hint="name another file") from None


def read_calibration(path: Path, *, field: str) -> Rates:
    """Returns the rates in a file that `write_calibration` wrote.

    Raises:
        ConfigError: there is no such file, or it is not a calibration; the error names `field`.
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
        else:  # type(), not isinstance, because a bool is an int
            is_sound = type(value) in (int, float) and LEAST_RATE <= value <= MOST_RATE
        if not is_sound:
            raise refused(f"has {name}={short_text(value)}, which is no {'rate' if '_' in name else name}")
    return rates
