"""Prompt files of reasoning_gym's tasks (https://github.com/open-thought/reasoning-gym), and rewards by its scorers.

As a script it writes prompt files: `python examples/environments/reasoning_gym_tasks.py chain_sum data/chain_sum`. The
same seed, data set and settings give the same files. The functions `scored`, `solved` and `well_formed` are rewards:
`rollout.reward: examples/environments/reasoning_gym_tasks.py:solved`.

Models answer in sentences, so only a part of the response is scored (`answer_in`):

1. the text in the last `<answer>...</answer>`, if there is one;
2. otherwise, if the true answer is a number, the last number of the response;
3. otherwise as many last lines of the response as the true answer has, without Markdown emphasis and final full stop.

Two further scores are logged. `answer_only` is 1 if the response is the answer and nothing else. `mentioned` is 1 if
the true answer occurs anywhere in the response, finished or not. A policy that learns only the form of answers raises
`answer_only`, but not `mentioned`. Evaluations themselves report how many responses finish (`eval/finished`).

Importing this module does not import reasoning_gym.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from slimefsdp.config.loader import apply_override
from slimefsdp.errors import BatchError, ConfigError, SlimeError, short_repr, short_text
from slimefsdp.io.files import new_folder, require_free_folder
from slimefsdp.io.user_files import path_argument

Record = dict[str, Any]
Scores = dict[str, float]

_CHUNK = 500  # number of problems to draw with one seed of reasoning_gym
# Drawing stops after 20 draws per known problem, and 1000 more, without a new problem. If all problems are equally
# likely, a remaining problem would have been missed with a probability of e^-20.
_PATIENCE, _AT_LEAST = 20, 1000
# a + or - is a sign only if no number or bracket comes before it, unlike in 10-5
_NUMBER = r"(?:(?<![\w)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_MINUS = str.maketrans("\u2212\u2013", "--")  # characters that models write instead of a minus


# ---------------------------------------------------------------------- prompts


def distinct_problems(
    name: str, settings: Mapping[str, Any], *, train: int, heldout: int, seed: int = 0, instruction: str = ""
) -> tuple[list[Record], list[Record]]:
    """Returns records to train on and records to hold out; no question occurs twice.

    A record has `prompt` and `answer`, and reasoning_gym's `question` and `metadata`. The held-out records do not
    depend on the number of training records.

    Args:
        name: the data set.
        settings: settings of the data set, except `seed` and `size`.
        train, heldout: the numbers of records.
        instruction: becomes the last line of each prompt.

    Raises:
        ConfigError: reasoning_gym is not installed or has no such data set, the data set has no such setting or refuses
            a value, a problem cannot be written as JSON, or there are too few distinct problems.
    """
    configuration = _configuration(name, settings)
    problems: dict[str, Record] = {}
    drawn = last_new = 0
    while len(problems) < heldout + train:
        if drawn - last_new > _PATIENCE * len(problems) + _AT_LEAST:
            raise ConfigError(
                f"{name} gave {len(problems):,} distinct problems in {drawn:,} draws, and {train:,} to train on and "
                f"{heldout:,} to hold out are wanted",
                field="--train",
                hint="ask for fewer, or widen the data set's settings",
            )
        for entry in _drawn(name, configuration, chunk_seed(seed, drawn // _CHUNK)):
            drawn += 1
            if entry["question"] not in problems:
                problems[entry["question"]] = _record(name, entry, instruction)
                last_new = drawn
            if len(problems) == heldout + train:
                break
    records = list(problems.values())
    return records[heldout:], records[:heldout]


def chunk_seed(seed: int, chunk: int) -> int:
    """Returns reasoning_gym's seed for a chunk of draws.

    The data sets draw problem i with seed + i, so neighbouring seeds would give nearly the same problems.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {chunk}".encode()).digest()[:4]) >> 1


def data_set_names() -> list[str]:
    """Returns the names of all data sets, sorted.

    Raises:
        ConfigError: reasoning_gym is not installed.
    """
    return sorted(_data_sets())


def settings_of(name: str) -> list[tuple[str, str, str]]:
    """Returns name, type and default of each setting of a data set, except `seed` and `size`.

    Raises:
        ConfigError: reasoning_gym is not installed or has no such data set.
    """
    data_sets = _data_sets()
    if name not in data_sets:
        near = difflib.get_close_matches(name, data_sets, n=3, cutoff=0.5)
        raise ConfigError(
            f"reasoning_gym has no data set {name!r}",
            field="NAME",
            hint=f"name one of its {len(data_sets)}" + (f", such as {', '.join(near)}" if near else " (--list)"),
        )
    settings = []
    for field in dataclasses.fields(data_sets[name][1]):
        if field.name in ("seed", "size"):
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        shown = "(needed)" if default is dataclasses.MISSING else repr(default)
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        kind = kind if not hasattr(field.type, "__args__") else str(field.type)
        settings.append((field.name, kind, shown))
    return settings


def _configuration(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the names of the settings; the data set checks their values."""
    known = {key for key, _, _ in settings_of(name)}
    for key in settings:
        if key in ("seed", "size"):
            hint = "give --seed, --train and --heldout"
            raise ConfigError(f"{key} is no setting here: it follows from the arguments", field=key, hint=hint)
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"{name} has no setting {key!r}",
                field=key,
                hint=f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}",
            )
    return dict(settings)


@cache
def _data_sets() -> Mapping[str, Any]:
    if find_spec("reasoning_gym") is None:
        raise ConfigError(
            "the package reasoning-gym is not installed",
            field="reasoning-gym",
            hint="install the `reasoning-gym` extra: .venv/bin/pip install -c constraints.txt -e '.[reasoning-gym]'",
        )
    from reasoning_gym.factory import DATASETS

    data_sets: Mapping[str, Any] = DATASETS
    return data_sets


def _drawn(name: str, configuration: Mapping[str, Any], seed: int) -> Iterator[Mapping[str, Any]]:
    """Yields one chunk of a data set's problems."""
    import reasoning_gym

    described = f"{name}({', '.join(f'{key}={short_text(value)}' for key, value in configuration.items())})"
    try:
        data_set = reasoning_gym.create_dataset(name, **configuration, seed=seed, size=_CHUNK)
    except Exception as error:  # mostly asserts; a value of a wrong type can fail in any way
        hint = "correct the settings; the data set's source says what they mean"
        raise ConfigError(f"{described} is refused: {_short_error(error)}", field="SETTINGS", hint=hint) from error
    try:
        for index in range(_CHUNK):
            yield data_set[index]
    except Exception as error:  # a generator may raise anything
        hint = "choose other settings, or another data set"
        raise ConfigError(
            f"{described} cannot make its problems: {_short_error(error)}", field="SETTINGS", hint=hint
        ) from error


def _record(name: str, entry: Mapping[str, Any], instruction: str) -> Record:
    question, answer, metadata = entry["question"], entry["answer"], dict(entry["metadata"])
    record = {
        "prompt": f"{question}\n{instruction}" if instruction else question,
        "answer": answer,
        "question": question,
        "metadata": metadata | {"source_dataset": metadata.get("source_dataset", name)},
    }
    try:
        kept: Record = json.loads(json.dumps(record))
        if answer is not None and _score(answer, kept) != _score(answer, record):
            raise ValueError("its scorer judges what was written otherwise")
    except (TypeError, ValueError, KeyError, BatchError) as error:
        raise ConfigError(
            f"a problem of {name} cannot be kept in JSON: {_short_error(error)}",
            field="NAME",
            hint="choose another data set",
        ) from error
    return kept


def _short_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# ---------------------------------------------------------------------- rewards


def scored(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Returns reasoning_gym's score of a response, from 0 to 1, as the reward; 0 for an unfinished response.

    Many of reasoning_gym's scorers give partial credit if the true answer is a part of the answer.

    Raises:
        BatchError: the record is not one of `distinct_problems`, or the scorer failed.
    """
    answer = answer_in(response, _true_answer(record))
    score = _score(answer, record)
    return {"reward": score if finished else 0.0, **_further_scores(record, response, finished)}


def solved(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Returns the reward 1 for a finished response with reasoning_gym's full score, otherwise 0.

    Raises:
        BatchError: as in `scored`.
    """
    scores = scored(record, response, finished)
    return {**scores, "reward": float(scores["reward"] >= 1.0)}


def well_formed(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Returns the reward 1 for a finished response with an answer of the right form, right or wrong; for control runs.

    The right form is a number if the true answer is a number, otherwise any text. The score `solved` is logged as well.

    Raises:
        BatchError: as in `scored`.
    """
    scores = solved(record, response, finished)
    has_answer = bool(answer_in(response, _true_answer(record)))
    return {**scores, "reward": float(finished and has_answer), "solved": scores["reward"]}


def answer_in(response: str, true_answer: str | None) -> str:
    """Returns the part of a response that is scored; "" if there is none.

    Args:
        true_answer: determines the form to look for; None means that the problem has many answers.
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    if true_answer is not None and re.fullmatch(_NUMBER, true_answer.strip()):
        numbers = re.findall(_NUMBER, response.translate(_MINUS))
        return numbers[-1] if numbers else ""
    count = len((true_answer or "").splitlines()) or 1
    answer = "\n".join(response.strip().splitlines()[-count:]).strip().strip("*").strip()
    ends_in_stop = true_answer is not None and true_answer.rstrip().endswith(".")
    return answer if ends_in_stop else answer.removesuffix(".").rstrip()


def _further_scores(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    true_answer = _true_answer(record)
    pattern = rf"(?<![\w.-]){re.escape(true_answer or '')}(?!\.?\w)"
    is_mentioned = bool(true_answer) and re.search(pattern, response) is not None
    return {
        "answer_only": float(finished and _score(response.strip(), record) >= 1.0),
        "mentioned": float(is_mentioned),
    }


def _true_answer(record: Mapping[str, Any]) -> str | None:
    answer = record.get("answer")
    return None if answer is None else str(answer)


def _score(answer: str, record: Mapping[str, Any]) -> float:
    metadata = record.get("metadata")
    name = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or "question" not in record or name not in _data_sets():
        raise BatchError(
            f"the record of {short_repr(record.get('prompt'))} has no question and data set of reasoning_gym's",
            field="metadata",
            hint="write the file with `python examples/environments/reasoning_gym_tasks.py`",
        )
    entry = {"question": record["question"], "answer": record.get("answer"), "metadata": metadata}
    try:
        return float(_scorer(name)(answer, entry))
    except Exception as error:  # each data set has its own scorer
        raise BatchError(
            f"reasoning_gym's scorer of {name} failed on {short_repr(answer)}: {_short_error(error)}",
            field="rollout.reward",
            hint="choose another data set",
        ) from error


@cache
def _scorer(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


# ---------------------------------------------------------------------- the script


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write prompt files of a data set of reasoning_gym.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the data set, e.g. chain_sum")
    parser.add_argument("target", nargs="?", type=path_argument, metavar="DIR", help="a new folder for the two files")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="settings of the data set: max_terms=3")
    parser.add_argument("--train", type=int, default=1000, help="number of problems to train on (default 1000)")
    parser.add_argument("--heldout", type=int, default=200, help="number of other problems, to hold out (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems (default 0)")
    parser.add_argument("--instruction", default="", metavar="TEXT", help="text to put on a last line of each prompt")
    parser.add_argument("--list", action="store_true", help="print the names of all data sets and stop")
    parser.add_argument("--settings", action="store_true", help="print the settings of NAME and stop")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        print(_answer(_parser().parse_args(arguments)))
    except SlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _answer(options: argparse.Namespace) -> str:
    """Writes the files, unless only a list is requested; returns the text to print.

    Raises:
        ConfigError: as in `distinct_problems`, or an argument is missing or out of range.
        CheckpointError: the folder exists already or cannot be written.
    """
    if options.list:
        return "\n".join(data_set_names())
    for name, value in (("NAME", options.name), ("DIR", options.target)):
        if value is None and not (name == "DIR" and options.settings):
            hint = "give NAME and DIR, or --list for the names, or NAME --settings"
            raise ConfigError(f"{name} is missing", field=name, hint=hint)
    if options.settings:
        return "\n".join(f"{name}: {kind} = {default}" for name, kind, default in settings_of(options.name))
    counts = {"train": options.train, "heldout": options.heldout}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{name}={count} is no number of problems", field=f"--{name}", hint="give 1 or more")
    require_free_folder(options.target, field="DIR")
    settings: dict[str, object] = {}
    for override in options.overrides:
        apply_override(settings, override)
    train, heldout = distinct_problems(
        options.name, settings, **counts, seed=options.seed, instruction=options.instruction
    )
    with new_folder(options.target) as folder:
        for name, records in (("train", train), ("heldout", heldout)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return f"{options.target}: {len(train):,} problems to train on, {len(heldout):,} to hold out; no question twice"


if __name__ == "__main__":
    sys.exit(main())
