"""The state of a service for its operators: the gauges of its metrics, and the data of its status page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from actors.service.service import Service
from slimefsdp.sampling.params import SamplingStats

_SHOWN = 10  # versions of the engine to show
PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")


def counts(service: Service, stats: SamplingStats) -> dict[str, Any]:
    """Returns the values of the gauges of `Metrics`."""
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
    """Returns the data of the operator's page."""
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
            {"session": session.id, "client": session.sdk_version, "age_s": round(now - session.began, 1)}
            for session in list(service.sessions.values())
        ],
        "versions": [{"version": name, "bytes": size} for name, size in list(stats.versions.items())[-_SHOWN:]],
    }
