"""Provides metrics for Prometheus and a log of requests, for the operator of the service.

The metrics and the log contain no text that clients send or get.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LOG_BYTES, _LOG_FILES = 16 * 2**20, 4
_BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0)  # upper bounds in seconds; a long poll takes up to 20
_GAUGES = {
    "sessions": "Clients",
    "training_runs": "Training runs",
    "samplers": "Sampling clients",
    "waiting_requests": "Requests without an answer",
    "waiting_request_bytes": "Bytes of the bodies of requests without an answer",
    "recoveries": "Times that lost ranks were replaced",
    "engine_restarts": "Times that a lost sampling engine was replaced",
    "sampling_is_up": "1 while the sampling engine answers, else 0",
    "sampled_tokens": "Tokens that the engine has drawn",
    "sampling_rows": "Samples that are being drawn",
    "engine_version_bytes": "Bytes of the engine's versions",
    "engine_cache_bytes": "Bytes of the engine's keys and values",
}


class Metrics:
    """The metrics for Prometheus: counters since the start, and gauges of the current state."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"slimefsdp_{name}", text, labels, registry=self.registry, **options)

        self.requests = metric(Counter, "requests", "Requests by path and status", "path", "status")
        self.seconds = metric(Histogram, "request_seconds", "Seconds to an answer by path", "path", buckets=_BUCKETS)
        self._trained_tokens = metric(Counter, "trained_tokens", "Tokens of forward and forward_backward")
        self.updates = metric(Counter, "updates", "Optimiser updates of all runs")
        self.samples = metric(Counter, "samples", "Samples that were drawn and answered")
        self._gauges = {name: metric(Gauge, name, text) for name, text in _GAUGES.items()}

    def count_trained(self, tokens: int) -> None:
        self._trained_tokens.inc(tokens)

    @property
    def trained_tokens(self) -> int:
        return int(self.registry.get_sample_value("slimefsdp_trained_tokens_total") or 0)

    def text(self, counts: dict[str, int]) -> bytes:
        """Returns all metrics in Prometheus' format; `counts` has the values of the gauges."""
        for name, gauge in self._gauges.items():
            gauge.set(counts[name])
        return bytes(generate_latest(self.registry))


class _LogFile(RotatingFileHandler):
    """A log file that reports failed writes (for example on a full disk) only once."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            print(f"{self.baseFilename} lacks requests: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class RequestLog:
    """Writes a JSON line for each request into a rotating file: time, path, status, duration and ids."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._logger = logging.getLogger(f"slimefsdp.service.{id(self)}")
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._handler = _LogFile(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, delay=True)
        self._logger.addHandler(self._handler)

    def write(self, path: str, status: int, seconds: float, **ids: str | None) -> None:
        """Writes one line; `ids` that are None are left out."""
        known = {name: value for name, value in ids.items() if value is not None}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "path": path, "status": status, "seconds": round(seconds, 4), **known}
        self._logger.info(json.dumps(line))

    def close(self) -> None:
        self._logger.removeHandler(self._handler)
        self._handler.close()
