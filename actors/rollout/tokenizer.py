"""What records come to in tokens, counted in a process of its own, and how such processes are run.

`python -m actors.rollout.tokenizer` is that process: a chat template can compute for long, and what counts tokens
before a run starts must be able to end it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.engines.tokenizer import encode_prompt, end_token_ids, load_tokenizer
from actors.rollout.prompts import Record, place_of
from slimefsdp.errors import ConfigError, ModelError, ResourceError, SlimeError

LONGEST_WAIT_S = 2e6  # for a process: it is asked for in milliseconds, of 32 bits
PR_SET_PDEATHSIG = 1  # of prctl(2)


def encode_records(
    model_path: str,
    records: Sequence[Mapping[str, Any]],
    *,
    with_answers: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[list[int], int]]:
    """(tokens, response_length) of each record.

    Args:
        with_answers: `answer` follows the prompt, with the tokenizer's end token; without, the length is 0.
        template_kwargs: as `encode_prompt`.

    Raises:
        ConfigError: a prompt cannot be encoded, named by its place in the file. ModelError: the tokenizer, or without
            answers generation_config.json.
    """
    tokenizer = load_tokenizer(model_path)
    if with_answers and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {model_path} has no end token", field="model.path", hint="set its eos_token"
        )
    if not with_answers:  # engines will ask for the tokens that end a response
        end_token_ids(model_path, tokenizer.eos_token_id)
    encoded = []
    for record in records:
        try:
            prompt = encode_prompt(tokenizer, record["prompt"], template_kwargs)
        except ConfigError as error:
            error.message = f"{place_of(record)}: {error.message}"
            raise
        answer: list[int] = []
        if with_answers:
            answer = [*tokenizer.encode(str(record["answer"]), add_special_tokens=False), tokenizer.eos_token_id]
        encoded.append((prompt + answer, len(answer)))
    return encoded


def count_tokens(
    model_path: Path,
    records: Sequence[Mapping[str, Any]],
    *,
    with_answers: bool,
    timeout_s: float,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[int, int]]:
    """(tokens of the prompt, tokens of the answer) of each record, as `encode_records` has them.

    Raises:
        ConfigError, ModelError: as `encode_records`. ResourceError: it took longer, or its process ended.
    """
    places = [place_of(record) for record in records]
    keys = ("prompt", "answer") if with_answers else ("prompt",)
    asked = {
        "model_path": str(model_path),
        "records": [[{key: record[key] for key in keys}, place] for record, place in zip(records, places, strict=True)],
        "with_answers": with_answers,
        "template_kwargs": dict(template_kwargs or {}),
    }
    said = answer_beside("actors.rollout.tokenizer", asked, timeout_s, f"counting the tokens of {len(records)} records")
    answer = json.loads(said)
    if "error" in answer:
        raise error_beside(answer)
    return [(prompt, response) for prompt, response in answer["counts"]]


def answer_beside(module: str, asked: Mapping[str, Any], timeout_s: float, what: str) -> bytes:
    """Returns what `run_beside` writes to its standard output.

    Args:
        what: it does, for an error.

    Raises:
        ResourceError: it took longer than that, or its process ended.
    """
    try:
        done = run_beside(module, asked, timeout_s)
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"{what} took more than cluster.call_timeout_s={timeout_s:g}",
            field="cluster.call_timeout_s",
            hint="raise it, or look at the chat template of the model folder",
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[-500:]
        raise ResourceError(
            f"the process for {what} ended with status {done.returncode}: {said}",
            field="data.train",
            hint="look at what it said, and at the memory that is left",
        )
    return done.stdout


def error_beside(answer: Mapping[str, Any]) -> SlimeError:
    """The error of a process beside, of the fields that it wrote."""
    kind = ModelError if answer["code"] == ModelError.code else ConfigError
    return kind(answer["error"], field=answer["field"], hint=answer["hint"])


def run_beside(module: str, asked: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """A module of ours, run in a process of its own with what it is asked as JSON on its standard input.

    Raises:
        subprocess.TimeoutExpired: it was ended after so long.
    """
    # the package of this file, whatever lies in the present folder
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=json.dumps(asked).encode(),
        capture_output=True,
        timeout=min(timeout_s, LONGEST_WAIT_S),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )


def end_with_parent() -> None:
    """Has the kernel end this process with the one that started it, which may be killed without a word."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stream_of_answer() -> int:
    """Returns what was standard output, where the answer goes; libraries print to standard error instead."""
    stream = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    asked = json.load(sys.stdin.buffer)
    records = [Record(fields, place) for fields, place in asked["records"]]
    answer: dict[str, Any]
    try:
        encoded = encode_records(
            asked["model_path"],
            records,
            with_answers=asked["with_answers"],
            template_kwargs=asked["template_kwargs"],
        )
        answer = {"counts": [(len(tokens) - length, length) for tokens, length in encoded]}
    except SlimeError as error:
        answer = {"error": error.message, "code": error.code, "field": error.field, "hint": error.hint}
    with os.fdopen(stream, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    _main()
