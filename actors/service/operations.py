"""What an operator sees of the service: a page for the browser, metrics for Prometheus, and a log of requests.

None of them holds a word of what clients send or get.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from slimefsdp.sampling.requests import SamplingStats

if TYPE_CHECKING:
    from actors.service.service import Service

_SHOWN = 10  # versions of the engine
_LOG_BYTES, _LOG_FILES = 16 * 2**20, 4
_BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0)  # seconds; a long poll takes 20


class Metrics:
    """Counters since the start, and what is there now, in Prometheus' names."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def made(kind: Any, name: str, text: str, *labels: str, **how: Any) -> Any:
            return kind(f"slimefsdp_{name}", text, labels, registry=self.registry, **how)

        self.requests = made(Counter, "requests", "Requests by path and status", "path", "status")
        self.seconds = made(Histogram, "request_seconds", "Seconds to an answer by path", "path", buckets=_BUCKETS)
        self._trained_tokens = made(Counter, "trained_tokens", "Tokens of forward and forward_backward")
        self.updates = made(Counter, "updates", "Optimiser updates of all runs")
        self.samples = made(Counter, "samples", "Samples that were drawn and answered")
        self._now = {
            "sessions": made(Gauge, "sessions", "Clients"),
            "runs": made(Gauge, "training_runs", "Training runs"),
            "samplers": made(Gauge, "samplers", "Sampling clients"),
            "waiting": made(Gauge, "waiting_requests", "Requests without an answer"),
            "waiting_bytes": made(Gauge, "waiting_request_bytes", "Bytes of their bodies"),
            "recoveries": made(Gauge, "recoveries", "Times that lost ranks were replaced"),
            "engine_restarts": made(Gauge, "engine_restarts", "Times that a lost sampling engine was replaced"),
            "sampling_is_up": made(Gauge, "sampling_is_up", "1 while the sampling engine answers, else 0"),
            "sampled_tokens": made(Gauge, "sampled_tokens", "Tokens that the engine has drawn"),
            "sampling_rows": made(Gauge, "sampling_rows", "Samples that are being drawn"),
            "version_bytes": made(Gauge, "engine_version_bytes", "Bytes of the engine's versions"),
            "cache_bytes": made(Gauge, "engine_cache_bytes", "Bytes of the engine's keys and values"),
        }

    def count_trained(self, tokens: int) -> None:
        """Adds those of a forward or forward_backward."""
        self._trained_tokens.inc(tokens)

    @property
    def trained_tokens(self) -> int:
        """Since the start."""
        return int(self.registry.get_sample_value("slimefsdp_trained_tokens_total") or 0)

    def text(self, now: dict[str, Any]) -> bytes:
        """Returns the metrics with these `counts` in Prometheus' format."""
        for name, gauge in self._now.items():
            gauge.set(now[name])
        return bytes(generate_latest(self.registry))


class _LogFile(RotatingFileHandler):
    """Says once that a line could not be written, as on a full disk, and not for each request."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._has_failed:
            self._has_failed = True
            print(f"{self.baseFilename} lacks requests: {sys.exc_info()[1]}", file=sys.stderr, flush=True)


class RequestLog:
    """JSON lines in a file that is kept small: when, what, for which run, how it ended, and how long it took."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._logger = logging.getLogger(f"slimefsdp.service.{id(self)}")
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._handler = _LogFile(path, maxBytes=_LOG_BYTES, backupCount=_LOG_FILES, delay=True)
        self._logger.addHandler(self._handler)

    def write(self, path: str, status: int, seconds: float, **ids: str | None) -> None:
        """Writes one line with the ids of session, run and request that are known."""
        known = {name: value for name, value in ids.items() if value is not None}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "path": path, "status": status, "seconds": round(seconds, 4), **known}
        self._logger.info(json.dumps(line))

    def close(self) -> None:
        """Closes the file."""
        self._logger.removeHandler(self._handler)
        self._handler.close()


def counts(service: Service, stats: SamplingStats) -> dict[str, Any]:
    """The numbers of `Metrics` that are there now."""
    return {
        "sessions": len(service.sessions),
        "runs": len(service.runs),
        "samplers": len(service.samplers.sessions),
        "waiting": service.results.waiting,
        "waiting_bytes": service.results.waiting_bytes,
        "recoveries": service.recoveries,
        "engine_restarts": service.engine.replacements,
        "sampling_is_up": int(service.engine.problem is None),
        "sampled_tokens": stats.tokens_drawn,
        "sampling_rows": stats.running_rows,
        "version_bytes": sum(stats.versions.values()),
        "cache_bytes": stats.cache_bytes,
    }


def status(service: Service, stats: SamplingStats) -> dict[str, Any]:
    """Returns what the page shows."""
    now = time.time()
    return {
        "model": service.model_name,
        "uptime_s": round(now - service.began, 1),
        "is_ending": service.is_ending,
        "problem": service.engine.problem,
        "counts": counts(service, stats),
        "trained_tokens": service.metrics.trained_tokens,
        "runs": [
            {
                "run": run.id,
                "rank": run.rank,
                "updates": run.updates,
                "tokens": run.tokens,
                "waiting": run.waiting,
                "idle_s": round(now - run.last_request, 1),
                "incomplete": run.incomplete is not None,
            }
            for run in list(service.runs.values())
        ],
        "sessions": [
            {"session": one.id, "client": one.sdk_version, "age_s": round(now - one.began, 1)}
            for one in list(service.sessions.values())
        ],
        "versions": [{"version": name, "bytes": size} for name, size in list(stats.versions.items())[-_SHOWN:]],
    }


PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
