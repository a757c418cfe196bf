"""What a report holds of a run: all that the page shows, of bounded size, whatever the run's files are."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from actors.report.data import read_report
from slimefsdp.errors import CheckpointError, ConfigError
from tests.support.report_runs import write_run


def append(file: Path, *rows: object) -> None:
    with file.open("a") as lines:
        lines.writelines((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def test_prompts_stand_beside_their_evaluations_and_responses(tmp_path: Path) -> None:
    report = read_report([write_run(tmp_path / "run")])
    (run,) = report.runs
    (held_out,) = run.held_out
    assert run.title == "run: GRPO" and (run.step, run.steps_planned, run.state) == (12, 12, "ended")
    assert held_out.steps == [0, 6, 12] and [prompt.place for prompt in held_out.prompts][1] == "heldout.jsonl:2"
    prompt = held_out.prompts[1]
    assert prompt.text == "[user] sort 15281" and json.loads(prompt.record) == {"answer": "12581"}
    assert prompt.cells == [
        ([0.25, 0.0], [0.0, 0.0], 30, 0), ([1.0, 1.0], [1.0, 1.0], 30, 0), ([1.0, 1.0], [1.0, 1.0], 30, 2),
    ]  # fmt: skip
    assert held_out.scores == ["reward", "exact"]
    assert prompt.responses[2][0] == ("the answer is 2 2", 30, False, {"reward": 1.0, "exact": 1.0})
    assert [step for step, _ in run.training] == list(range(1, 13)) and run.left_out == held_out.left_out == []
    assert run.settings["optim.lr"] == "0.001" and "optim.lr" in run.given and "loss.policy" not in run.given


def test_charts_are_those_of_the_curves_with_a_line_for_each_run(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", settings={"optim": {"lr": 0.01}})]
    report = read_report(runs)
    charts = {chart.heading: chart for chart in report.charts}
    assert [line.run for line in charts["Training reward"].lines] == [0, 1]
    assert charts["Held-out evaluation"].kind == "evaluations" and charts["Clipped tokens"].is_share
    assert charts["Where the time goes: a"].kind == "stacked" and len(charts["Where the time goes: a"].lines) == 3
    assert charts["Training speed"].lines[0].steps == list(range(1, 13))


def test_a_long_run_is_thinned_but_keeps_its_peaks_and_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", prompts=2)
    lines = [{"step": step, "time": 0.0, "loss": 1.0 + (step == 7777)} for step in range(13, 20_000)]
    append(folder / "metrics.jsonl", *lines)
    (run,) = (report := read_report([folder])).runs
    (loss,) = next(chart for chart in report.charts if chart.heading == "Loss").lines
    assert len(loss.steps) <= 2000 and loss.values[loss.steps.index(7777)] == 2.0
    assert run.left_out


def test_many_long_responses_are_bounded_and_the_first_last_and_best_evaluation_remain(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=60, prompts=200, samples=4, evaluations=31, text="long " * 400)
    append(folder / "metrics.jsonl", {"step": 22, "time": 0.0, "eval/reward": 0.99})
    (held_out,) = read_report([folder]).runs[0].held_out
    texts = [one[0] for prompt in held_out.prompts for group in prompt.responses.values() for one in group]
    assert sum(map(len, texts)) < 2_500_000 and all(texts)
    assert len(held_out.steps) in (23, 24) and {0, 22, 60} <= set(held_out.steps)
    with_texts = {held_out.steps[index] for index in held_out.prompts[0].responses}
    assert len(with_texts) in (5, 6) and {0, 22, 60} <= with_texts
    assert len(held_out.left_out) >= 3


def test_starts_recoveries_and_warnings_are_events_with_their_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=4)
    start = {"time": 0, "machine": "Linux, 2 CPUs", "versions": {"torch": "2.13"}}
    append(folder / "starts.jsonl", start | {"step": 0}, start | {"step": 2, "versions": {"torch": "2.14"}})
    lost = {"rank": 1, "call": "train_step", "message": "killed", "noticed_at": 1.8e9 + 35, "seconds": 2.5}
    append(folder / "recoveries.jsonl", lost)
    idle = {"time": 2e9, "updates": 0.0, "zero_variance_groups": 1.0}
    append(folder / "metrics.jsonl", *(idle | {"step": step} for step in (5, 6, 7)), {"step": 8, "loss": None})
    append(folder / "skipped_prompts.jsonl", {"place": "a"})
    (run,) = read_report([folder]).runs
    assert [(event.step, event.kind) for event in run.events] == [
        (0, "start"), (2, "start"), (4, "recovery"), (0, "warning"), (5, "warning"), (8, "warning"),
    ]  # fmt: skip
    assert "to step 7" in run.events[4].text and "loss" in run.events[5].text and "killed" in run.events[2].text
    assert run.environment == {"machine": "Linux, 2 CPUs", "torch": "2.14"}


def test_a_run_goes_on_while_a_process_holds_its_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert read_report([folder], 5.0).refresh_s is None
    (folder / ".lock").write_text("{}")
    with (folder / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report = read_report([folder], 5.0)
    assert report.refresh_s == 5.0 and report.runs[0].state == "running"


def test_an_unreadable_settings_file_costs_only_the_settings(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "settings.yaml").write_text("model: [")
    (run,) = read_report([folder]).runs
    assert run.settings == {} and run.title == "run" and len(run.left_out) == 1 and run.held_out


def test_a_torn_last_line_is_left_out_everywhere(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations/step_00000012.jsonl", "recoveries.jsonl", "starts.jsonl"):
        with (folder / name).open("a") as lines:
            lines.write('{"step": 13, "pla')
    (run,) = read_report([folder]).runs
    assert run.step == 12 and len(run.held_out[0].prompts) == 6


@pytest.mark.parametrize("value", ['"high"', "true", "[1]", "1" + "0" * 400])
def test_metrics_that_are_no_numbers_are_refused(value: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    append(folder / "metrics.jsonl", f'{{"step": 13, "loss": {value}}}', {"step": 14})
    with pytest.raises(CheckpointError) as caught:
        read_report([folder])
    assert caught.value.field == "metrics.jsonl"


@pytest.mark.parametrize(
    "change", [{"prompt": 5}, {"prompt": ["a"]}, {"response": None}, {"scores": []}, {"tokens": "3"}]
)
def test_foreign_responses_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    file = folder / "evaluations" / "step_00000012.jsonl"
    append(file, json.loads(file.read_text().splitlines()[0]) | change)
    with pytest.raises(CheckpointError) as caught:
        read_report([folder])
    assert caught.value.field == file.name


def test_numbers_that_json_lacks_are_left_out_of_scores(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", prompts=1, samples=1)
    file = folder / "evaluations" / "step_00000012.jsonl"
    row = json.loads(file.read_text())
    scores = {"reward": float("nan"), "exact": 1.0, "huge": 10**400}
    file.write_text(json.dumps(row | {"scores": scores}) + "\n")
    (prompt,) = read_report([folder]).runs[0].held_out[0].prompts
    assert prompt.cells[2] == ([None, 1.0], [0.0, 1.0], 20, 0) and prompt.responses[2][0][3] == {"exact": 1.0}


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read_report([tmp_path])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError):
        read_report([tmp_path])
