"""Reads runs into the data of a report: plain values of bounded size, which become the page's JSON.

A long run has more points, evaluations and responses than a page can hold. What is left out is said in `left_out`.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actors.report.findings import Finding, findings_of
from actors.rollout.sample_files import prompt_text, shortened
from actors.run_dir import EVALUATIONS, RECOVERIES, SAMPLES, SETTINGS, SKIPPED, STARTS
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig, load_config
from slimefsdp.errors import CheckpointError, ConfigError
from slimefsdp.io.files import LOCK, FolderLock, io_reported
from slimefsdp.io.user_files import open_plain
from slimefsdp.monitoring.metrics_log import read_metrics
from slimefsdp.monitoring.panels import DIFFERENCE, Panel, Row, Series, all_series_of, panels_of
from slimefsdp.monitoring.progress import reason_without_update

_MOST_POINTS = 2000  # of a line
_MOST_CHARTS = 60  # of a run
_MOST_EVENTS = 300  # of a run
_MOST_EVALUATIONS, _MOST_WITH_TEXTS = 24, 6  # of a held-out set
_MOST_PROMPTS, _MOST_SCORES = 1000, 8  # of a held-out set
_MOST_CHARACTERS = 2_000_000  # of the responses of all runs
_MOST_GROUPS, _MOST_OF_GROUPS = 12, 12_000  # steps whose training groups are shown, and characters of each
_MOST_LINE_BYTES = 16 * 1024 * 1024
# (characters of a text, responses of a prompt in an evaluation): the first that fits into _MOST_CHARACTERS is used
_TEXT_LIMITS = ((4000, 8), (2000, 8), (1000, 4), (500, 4), (250, 2), (120, 1), (40, 1))

_DELETE = "delete the file, or give the folder that a run wrote"

Response = tuple[str, int, bool, Mapping[str, float]]  # text, tokens, whether it ended by itself, scores
# of each score the mean and the share of responses with at least 1; most tokens; number of cut responses
Cell = tuple[list[float | None], list[float], int, int]


@dataclass(slots=True)
class Line:
    run: int
    label: str
    steps: list[int]
    values: list[float]
    low: list[float | None] | None = None  # bounds of a band
    high: list[float | None] | None = None


@dataclass(slots=True)
class Chart:
    heading: str
    unit: str
    kind: str  # steps, evaluations (few points) or stacked (parts of a sum)
    is_share: bool
    has_symmetric_log: bool
    lines: list[Line] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    step: int
    kind: str  # start, recovery or warning
    text: str


@dataclass(slots=True)
class Prompt:
    place: str
    text: str
    record: str
    cells: list[Cell | None]  # of each evaluation; None if the prompt was not in it
    responses: dict[int, list[Response]]  # index of an evaluation -> responses


@dataclass(slots=True)
class HeldOut:
    name: str
    steps: list[int]
    scores: list[str]
    prompts: list[Prompt]
    left_out: list[str] = field(default_factory=list)


@dataclass(slots=True)
class RunData:
    name: str
    title: str
    state: str  # running, ended or stopped
    step: int
    steps_planned: int | None
    settings: dict[str, str]
    given: list[str]  # names of the settings that the run's file or command line gave
    environment: dict[str, str]
    events: list[Event]
    findings: list[Finding]
    held_out: list[HeldOut]
    training: list[tuple[int, str]]  # step, texts of some of its groups
    left_out: list[str]


@dataclass(slots=True)
class Report:
    made_at: float
    refresh_s: float | None
    runs: list[RunData]
    charts: list[Chart]


def read_report(folders: Sequence[Path], refresh_s: float | None = None) -> Report:
    """Reads the folders of runs.

    Args:
        refresh_s: how often the page is written anew; the page loads itself again if one of the runs goes on.

    Raises:
        ConfigError: a folder is not that of a run, or has no metrics yet.
        CheckpointError: a file of a run is damaged or not of this project.
    """
    charts: dict[str, Chart] = {}
    runs = []
    for index, (folder, name) in enumerate(zip(folders, _names(folders), strict=True)):
        rows = read_metrics(folder)
        if not rows:
            problem = f"{folder} has no metrics: no step is finished there yet, or it is no run.dir"
            raise ConfigError(problem, field="RUN", hint="wait for the first step, or name the run.dir of a run")
        runs.append(
            _run(folder, name, rows, _MOST_CHARACTERS // len(folders), charts, index, is_alone=len(folders) == 1)
        )
    goes_on = any(run.state == "running" for run in runs)
    return Report(time.time(), refresh_s if goes_on else None, runs, list(charts.values()))


def _names(folders: Sequence[Path]) -> list[str]:
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def _run(
    folder: Path, name: str, rows: Sequence[Row], most: int, charts: dict[str, Chart], index: int, *, is_alone: bool
) -> RunData:
    """Reads one run, and adds its lines to the charts."""
    left_out = []
    try:
        config = load_config(folder / SETTINGS)
    except ConfigError as error:
        config = None
        left_out.append(f"the settings, since settings.yaml is missing or of another version: {error.message}")
    sets = _heldout_sets(folder, config)
    series = all_series_of(rows)
    panels = list(panels_of(series, sets))
    if len(panels) > _MOST_CHARTS:
        left_out.append(f"{len(panels) - _MOST_CHARTS} of {len(panels)} charts")
    for panel in panels[:_MOST_CHARTS]:
        heading = panel.heading if is_alone or not panel.is_stacked else f"{panel.heading}: {name}"
        kind = "stacked" if panel.is_stacked else "evaluations" if panel.is_evaluation else "steps"
        chart = Chart(heading, panel.unit, kind, panel.is_share, panel.unit == DIFFERENCE)
        charts.setdefault(heading, chart).lines.extend(_lines(index, panel))
    if max(len(line.steps) for line in series.values()) > _MOST_POINTS:
        left_out.append(f"points of the curves: of each line at most {_MOST_POINTS:,} remain, peaks among them")
    held_out, first, last = [], [], []
    for heldout_set in sets:
        one, texts = _held_out(folder, heldout_set, series, most // len(sets))
        if one is not None:
            held_out.append(one)
            first += texts[0]
            last += texts[-1]
    events = list(_events(folder, rows))
    if len(events) > _MOST_EVENTS:
        left_out.append(f"{len(events) - _MOST_EVENTS} of {len(events)} events")
    step = max(int(row["step"] or 0) for row in rows)
    planned = config.run.steps if config is not None else None
    return RunData(
        name=name,
        title=name if config is None else f"{name}: {config.algorithm_title}",
        state=_state(folder, step, planned),
        step=step,
        steps_planned=planned,
        settings={} if config is None else _flat(config.model_dump(mode="json")),
        given=[] if config is None else list(_flat(config.model_dump(mode="json", exclude_unset=True))),
        environment=_environment(folder),
        events=events[:_MOST_EVENTS],
        findings=list(findings_of(series, first, last)),
        held_out=held_out,
        training=list(_training_groups(folder / SAMPLES)),
        left_out=left_out,
    )


def _heldout_sets(folder: Path, config: RunConfig | None) -> list[str]:
    """Returns the names of the held-out sets; the folders of an unreadable run's evaluations have these names, too."""
    if config is not None:
        return list(config.data.heldout_sets)
    root = folder / EVALUATIONS
    folders = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    return folders or [""]


def _lines(run: int, panel: Panel) -> Iterator[Line]:
    """Yields the lines of a panel with at most _MOST_POINTS points each, which include the peaks of each part."""
    total = np.sum([line.values for line in panel.lines.values()], axis=0) if panel.is_stacked else None
    for label, line in panel.lines.items():
        kept = _peaks(line.values if total is None else total)
        steps = [int(step) for step in line.steps[kept]]
        low, high = (
            (
                [_number(bounds.get(step)) for step in steps]
                for bounds in (dict(zip(band.steps, band.values, strict=True)) for band in panel.bands[label])
            )
            if label in panel.bands
            else (None, None)
        )
        yield Line(run, label, steps, [float(f"{value:.6g}") for value in line.values[kept]], low, high)


def _peaks(values: np.ndarray) -> np.ndarray:
    """Returns the positions of the smallest and largest value in each of equal parts of a line; all, if it is short."""
    if len(values) <= _MOST_POINTS:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), _MOST_POINTS // 2)
    return np.unique([part[at(values[part])] for part in parts for at in (np.argmin, np.argmax)])


def _number(value: Any, digits: int = 6) -> float | None:
    """Returns a number with so many digits; None for what is no finite number, since JSON has none."""
    if type(value) not in (int, float, np.float64) or not abs(value) < 1e300:
        return None
    return float(f"{value:.{digits}g}")


def _state(folder: Path, step: int, planned: int | None) -> str:
    if os.access(folder / LOCK, os.W_OK):
        try:
            FolderLock(folder).require_free()
        except CheckpointError:
            return "running"
    return "ended" if planned is not None and step >= planned else "stopped"


def _flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings of a file as section.name -> JSON."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        inner = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {key: json.dumps(item, ensure_ascii=False) for key, item in inner.items()}
    return flat


def _environment(folder: Path) -> dict[str, str]:
    """Returns machine and versions of the newest start; those of the newest checkpoint if no start is recorded."""
    found: dict[str, Any] = next(reversed(list(_objects(folder / STARTS))), {})
    if not found and (newest := next(CheckpointStore.of_run(folder).manifests(), None)) is not None:
        found = newest.info
    versions = found.get("versions")
    values = {"machine": found.get("machine", "-"), **(versions if isinstance(versions, dict) else {})}
    return {str(name): str(value) for name, value in values.items()}


def _events(folder: Path, rows: Sequence[Row]) -> Iterator[Event]:
    """Yields starts, recoveries and warnings; equal warnings of successive rows are one event."""
    times = sorted((row.get("time") or 0.0, int(row["step"] or 0)) for row in rows)
    for number, start in enumerate(_objects(folder / STARTS)):
        text = "The run started." if number == 0 else "The run was resumed."
        yield Event(int(_number(start.get("step"), 15) or 0), "start", text)
    for lost in _objects(folder / RECOVERIES):
        noticed = _number(lost.get("noticed_at"), 15) or 0.0
        at = next((step for moment, step in times if moment >= noticed), times[-1][1])
        text = f"Rank {lost.get('rank')} was lost in {lost.get('call')} ({lost.get('message')}); "
        text += f"{lost.get('calls_repeated')} calls were repeated, {_number(lost.get('seconds'), 2)} s."
        yield Event(at, "recovery", text)
    if skipped := sum(1 for _ in _objects(folder / SKIPPED)):
        yield Event(0, "warning", f"{skipped} records were left out: data.overlong_prompts=skip")
    begun: dict[str, list[int]] = {}  # text -> first and last step
    for row in rows:
        step, texts = int(row["step"] or 0), set(_warnings(row))
        for text in [text for text in begun if text not in texts]:
            yield _warning(text, *begun.pop(text))
        for text in texts:
            begun.setdefault(text, [step, step])[1] = step
    for text, steps in begun.items():
        yield _warning(text, *steps)


def _warning(text: str, first: int, last: int) -> Event:
    return Event(first, "warning", text + (f" (to step {last})" if last > first else ""))


def _warnings(row: Row) -> Iterator[str]:
    """Yields what a step's metrics warn of."""
    if any(value is None for value in row.values()):
        yield f"not finite: {', '.join(name for name, value in row.items() if value is None)[:200]}"
    if reason := reason_without_update({name: value for name, value in row.items() if value is not None}):
        yield f"no update: {reason}"
    elif row.get("skipped_update"):
        yield "an update was skipped, since its gradients were not finite"
    if row.get("rollout/reward_failures"):
        yield "rewards failed"


def _held_out(
    folder: Path, name: str, series: Mapping[str, Series], most: int
) -> tuple[HeldOut | None, list[list[str]]]:
    """Returns a held-out set, and all responses of each evaluation that is shown; None if nothing was evaluated."""
    root = folder / EVALUATIONS / name
    files = {int(path.stem[5:]): path for path in root.glob("step_*.jsonl") if path.stem[5:].isdecimal()}
    steps = sorted(files)
    if not steps:
        return None, []
    reward = series.get(f"eval/{name}/reward" if name else "eval/reward")
    best = [int(reward.steps[reward.values.argmax()])] if reward is not None else []
    shown = _chosen(steps, _MOST_EVALUATIONS, best)
    with_texts = {shown.index(step) for step in _chosen(shown, _MOST_WITH_TEXTS, best)}
    prompts: dict[str, Prompt] = {}
    evaluations: list[dict[str, list[Response]]] = []  # place of a prompt -> responses
    for step in shown:
        evaluations.append(defaultdict(list))
        for row in _objects(files[step]):
            prompt, response = _sample(row, files[step], len(shown))
            prompts.setdefault(prompt.place, prompt)
            evaluations[-1][prompt.place].append(response)
    all_responses = [[one for group in groups.values() for one in group] for groups in evaluations]
    scores = list(dict.fromkeys(["reward", *(name for some in all_responses for one in some for name in one[3])]))
    scores = scores[:_MOST_SCORES]
    for index, groups in enumerate(evaluations):
        for place, group in groups.items():
            prompts[place].cells[index] = _cell(group, scores)
            if index in with_texts:
                prompts[place].responses[index] = sorted(group, key=lambda one: one[3].get("reward") or 0.0)
    all_prompts = list(prompts.values())
    kept = [all_prompts[index] for index in _spread(len(all_prompts), _MOST_PROMPTS)]
    held_out = HeldOut(name, shown, scores, kept)
    held_out.left_out += [f"{len(all_prompts) - len(kept)} of {len(all_prompts)} prompts"] * (len(kept) < len(prompts))
    held_out.left_out += [f"{len(steps) - len(shown)} of {len(steps)} evaluations"] * (len(shown) < len(steps))
    if len(with_texts) < len(shown):
        held_out.left_out.append(f"the responses of {len(shown) - len(with_texts)} of the shown evaluations")
    _bound_texts(held_out, most)
    return held_out, [[one[0] for one in responses] for responses in all_responses]


def _chosen(steps: Sequence[int], most: int, wanted: Iterable[int]) -> list[int]:
    """Returns at most `most` steps: the first, the last, those that are wanted, and others at equal distances."""
    if len(steps) <= most:
        return list(steps)
    extra = set(wanted) & set(steps)
    return sorted({steps[index] for index in _spread(len(steps), most - len(extra))} | extra)


def _spread(count: int, most: int) -> list[int]:
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, most))})


def _cell(group: Sequence[Response], scores: Sequence[str]) -> Cell:
    values = [[one[3][score] for one in group if score in one[3]] for score in scores]
    means = [_number(sum(some) / len(some)) if some else None for some in values]
    solved = [round(sum(value >= 1 for value in some) / len(group), 4) for some in values]
    return means, solved, max(one[1] for one in group), sum(not one[2] for one in group)


def _bound_texts(held_out: HeldOut, most: int) -> None:
    """Shortens texts, and leaves out responses between the best and the worst, until they fit."""
    groups = [group for prompt in held_out.prompts for group in prompt.responses.values()]
    for characters, responses in _TEXT_LIMITS:
        shown = [_lowest_and_highest(group, responses) for group in groups]
        size = sum(min(len(one[0]), characters) for group in shown for one in group)
        size += sum(min(len(prompt.text), characters) for prompt in held_out.prompts)
        if size <= most:
            break
    for prompt in held_out.prompts:
        prompt.text = shortened(prompt.text, characters)
        prompt.record = shortened(prompt.record, characters)
        prompt.responses = {
            index: [(shortened(text, characters), *rest) for text, *rest in _lowest_and_highest(group, responses)]  # type: ignore[misc]
            for index, group in prompt.responses.items()
        }
    if any(len(group) > responses for group in groups):
        held_out.left_out.append(
            f"of each prompt, responses between the {responses} with the lowest and highest rewards"
        )
    if any(len(one[0]) > characters for group in groups for one in group):
        held_out.left_out.append(f"the middle of responses above {characters:,} characters")


def _lowest_and_highest(group: list[Response], most: int) -> list[Response]:
    return group if len(group) <= most else [*group[: most // 2], *group[most // 2 - most :]]


def _sample(row: Mapping[str, Any], file: Path, evaluations: int) -> tuple[Prompt, Response]:
    """Returns the prompt and the response of an evaluation's line."""
    match row:
        case {
            "place": str(place),
            "prompt": str() | list() as written,
            "response": str(response),
            "tokens": int(tokens),
            "finished": bool(finished),
            "scores": dict(scores),
        }:
            record = json.dumps(row.get("record", {}), ensure_ascii=False)
            numbers = {name: number for name, value in scores.items() if (number := _number(value)) is not None}
            try:
                prompt = Prompt(place, prompt_text(written), record, [None] * evaluations, {})
                return prompt, (response, tokens, finished, numbers)
            except (AttributeError, KeyError, TypeError):  # the messages are of another form
                pass
    raise CheckpointError(f"{file} has a line that is no response of an evaluation", field=file.name, hint=_DELETE)


def _training_groups(folder: Path) -> Iterator[tuple[int, str]]:
    """Yields the texts of training groups of some steps, which the run has written for people."""
    files = {int(path.stem[5:]): path for path in folder.glob("step_*.txt") if path.stem[5:].isdecimal()}
    for step in _chosen(sorted(files), _MOST_GROUPS, ()):
        with io_reported(files[step], "report"), open_plain(files[step]) as file:
            text = file.read(_MOST_LINE_BYTES).decode(errors="replace")
        yield step, shortened(text, _MOST_OF_GROUPS)


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects in the lines of a file; none if it is missing. Leaves out an incomplete last line.

    Raises:
        CheckpointError: the file cannot be read, or a line is no JSON object.
    """
    if not path.exists():
        return
    with io_reported(path, "report"), open_plain(path) as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES):
            number += 1
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            elif line.endswith(b"\n") or len(line) == _MOST_LINE_BYTES:
                raise CheckpointError(f"{path}, line {number} is no JSON object", field=path.name, hint=_DELETE)
