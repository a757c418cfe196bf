"""The metrics log: strict JSON lines that survive a kill, a resume, and numbers that are none."""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slimefsdp.errors import CheckpointError, ResourceError
from slimefsdp.monitoring.metrics_log import METRICS_FILE, TENSORBOARD_FOLDER, MetricsLog, read_metrics
from tests.support.refusals import refused


def strict_rows(run_dir):
    """A second reader: every line is JSON in the strict sense."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def scalars(run_dir, name):
    events = EventAccumulator(str(run_dir / TENSORBOARD_FOLDER))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(name)}


class FakeWandb:
    """Stands in for the wandb module; keeps what each start of a run was given."""

    def __init__(self):
        self.runs = []

    def init(self, **settings):
        run = SimpleNamespace(settings=settings, rows=[], exit_code=None, metrics=[])
        run.log = run.rows.append
        run.define_metric = lambda name, step_metric: run.metrics.append((name, step_metric))
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        self.runs.append(run)
        return run


def test_what_is_written_is_read_back_and_is_on_disk_at_once(tmp_path):
    before = time.time()
    with MetricsLog(tmp_path / "new" / "run") as log:
        log.write(1, {"loss": 0.5, "eval/exact": 1})
        rows = read_metrics(tmp_path / "new" / "run")  # while the log is open
        assert before <= rows[0].pop("time") <= time.time()
        assert rows == [{"step": 1, "loss": 0.5, "eval/exact": 1.0}]
        assert scalars(tmp_path / "new" / "run", "loss") == {1: 0.5}


def test_nan_and_infinities_stay_strict_json_and_reach_tensorboard(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(3, {"loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "entropy": 2.0})
    (row,) = strict_rows(tmp_path)
    assert (row["loss"], row["grad_norm"], row["lr"], row["entropy"]) == (None, None, None, 2.0)
    assert scalars(tmp_path, "grad_norm") == {3: math.inf}


@given(cut=st.integers(0, 200), steps=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_a_line_cut_anywhere_is_left_out_and_the_next_one_is_whole(tmp_path_factory, cut, steps):
    folder = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": step, "time": 0.5, "loss": 1.25}) + "\n" for step in steps]
    torn = lines[-1][: max(0, len(lines[-1]) - 1 - cut)]
    (folder / METRICS_FILE).write_text("".join(lines[:-1]) + torn)
    is_whole = cut == 0  # only the newline is missing
    expected = steps if is_whole else steps[:-1]
    assert [row["step"] for row in read_metrics(folder)] == expected
    with MetricsLog(folder) as log:
        log.write(9, {"loss": 0.0})
    assert [row["step"] for row in strict_rows(folder)] == [*expected, 9]


@pytest.mark.parametrize("damaged", ['{"step": 1, "lo', "[1]", '{"loss": 1.0}', ""])
def test_a_damaged_line_before_the_last_is_named_and_nothing_is_changed(tmp_path, damaged):
    content = f'{{"step": 1}}\n{damaged}\n{{"step": 3}}\n'
    (tmp_path / METRICS_FILE).write_text(content)
    for use in (read_metrics, MetricsLog):
        with refused(CheckpointError, METRICS_FILE, tmp_path / METRICS_FILE, "line 2"):
            use(tmp_path)
    assert (tmp_path / METRICS_FILE).read_text() == content


def test_truncating_forgets_later_steps_everywhere_and_keeps_earlier_lines_byte_for_byte(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, {"loss": float(step)})
    kept = (tmp_path / METRICS_FILE).read_bytes().splitlines(keepends=True)[:3]
    with MetricsLog(tmp_path) as log:
        log.truncate_after(3)
        assert (tmp_path / METRICS_FILE).read_bytes() == b"".join(kept)
        log.write(4, {"loss": -4.0})
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 2.0, 3.0, -4.0]
    assert scalars(tmp_path, "loss") == {1: 1.0, 2: 2.0, 3: 3.0, 4: -4.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == [METRICS_FILE, TENSORBOARD_FOLDER]


def test_the_old_file_stays_whole_when_the_rewrite_dies(tmp_path, monkeypatch):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 2.0})
        before = (tmp_path / METRICS_FILE).read_bytes()

        def die(path, data):
            path.write_bytes(data[:5])
            raise OSError("disk full")

        monkeypatch.setattr("slimefsdp.monitoring.metrics_log.write_synced", die)
        with pytest.raises(OSError, match="disk full"):
            log.truncate_after(1)
        assert (tmp_path / METRICS_FILE).read_bytes() == before


def test_a_full_disk_is_one_typed_error(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda failed: None)  # of TensorBoard's own thread
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = MetricsLog(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # scalars reach it before the lines do
    try:
        with pytest.raises(ResourceError) as caught:
            for step in range(1, 200):
                log.write(step, {"a": 1.0, "b": 2.0})
        with pytest.raises(ResourceError), log:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.field == "run.dir"
    assert (tmp_path / METRICS_FILE).stat().st_size < 4000, "it was TensorBoard's file that was refused"


def test_a_resumed_run_goes_on_in_its_wandb_run_and_another_start_in_one_of_its_own(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    given = {"project": "p", "name": "run7", "group": "seeds", "config": {"optim": {"lr": 0.5}}}
    with pytest.raises(KeyError), MetricsLog(tmp_path, wandb=given) as log:
        log.write(1, {"loss": 1.0})
        log.write(2, {"loss": 2.0})
        raise KeyError
    with MetricsLog(tmp_path, wandb=given, resumes=True) as log:
        log.truncate_after(1)
        log.write(2, {"loss": 3.0})
    with MetricsLog(tmp_path, wandb=given):
        pass
    first, resumed, other = wandb.runs
    assert [run.rows for run in wandb.runs] == [
        [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}], [{"step": 2, "loss": 3.0}], []
    ]  # fmt: skip
    assert [run.exit_code for run in wandb.runs] == [1, 0, 0]
    assert all(given.items() <= run.settings.items() for run in wandb.runs)
    assert first.settings["id"] == resumed.settings["id"] != other.settings["id"]
    assert resumed.settings["resume"] == "allow"
    assert all(run.metrics == [("*", "step")] for run in wandb.runs), "steps that are taken again are not refused"
