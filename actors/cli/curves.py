"""`slimefsdp curves RUN_DIR`: draws the picture of a run from the metrics that it has written so far."""

from __future__ import annotations

import sys
from pathlib import Path

from slimefsdp.config import load_config
from slimefsdp.errors import ConfigError
from slimefsdp.io.files import io_reported
from slimefsdp.monitoring.metrics_log import read_metrics

_SETTINGS = "settings.yaml"


def curves_command(run_dir: Path) -> int:
    """Draws curves.png into the run's folder, in the place of one that is there, and prints its path.

    Raises:
        ConfigError: the folder is none of a run, or no step of it has ended.
        CheckpointError: metrics.jsonl is damaged, or the folder cannot be written.
    """
    rows = read_metrics(run_dir)
    if not rows:
        problem = f"{run_dir} has no metrics: no step is finished there yet, or it is no run.dir"
        raise ConfigError(problem, field="RUN_DIR", hint="wait for the first step, or name the run.dir of a run")
    try:
        config = load_config(run_dir / _SETTINGS)
        title, heldout_sets = f"{run_dir.resolve().name}: {config.algorithm_title}", tuple(config.data.heldout_sets)
    except ConfigError as error:  # of an earlier version, or removed: the metrics can be drawn all the same
        problem = f"{run_dir / _SETTINGS} is not read ({error.message}): held-out sets share their panels"
        print(problem, file=sys.stderr)
        title, heldout_sets = run_dir.resolve().name, ()
    from slimefsdp.monitoring.curves import CURVES, draw_curves  # matplotlib takes half a second to import

    target = run_dir / CURVES
    with io_reported(target, "curves"):
        draw_curves(rows, target, title=title, heldout_sets=heldout_sets)
    print(f"{target}: {len(rows)} rows, to step {max(int(row['step'] or 0) for row in rows)}")
    return 0
