"""Counts the tokens of records in a separate process, and runs modules of ours in such processes.

`python -m actors.rollout.tokenizer` counts tokens. A chat template can run for long, so the program that asks must be
able to end the process.
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

LONGEST_WAIT_S = 2e6  # limit on a wait for a process: the milliseconds have to fit into 32 bits
PR_SET_PDEATHSIG = 1  # of prctl(2)


def encode_records(
    model_path: str,
    records: Sequence[Mapping[str, Any]],
    *,
    with_answers: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[tuple[list[int], int]]:
    """Returns (tokens, response_length) of each record.

    Args:
        with_answers: appends `answer` and the tokenizer's end token to the prompt; otherwise the response length is 0.
        template_kwargs: as in `encode_prompt`.

    Raises:
        ConfigError: a prompt cannot be encoded; the message names its place.
        ModelError: the tokenizer is unusable, or without answers, generation_config.json.
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
    """Returns (tokens of the prompt, tokens of the answer) of each record, as in `encode_records`.

    Raises:
        ConfigError, ModelError: as in `encode_records`.
        ResourceError: the process took longer than `timeout_s`, or ended.
    """
    places = [place_of(record) for record in records]
    keys = ("prompt", "answer") if with_answers else ("prompt",)
    request = {
        "model_path": str(model_path),
        "records": [[{key: record[key] for key in keys}, place] for record, place in zip(records, places, strict=True)],
        "with_answers": with_answers,
        "template_kwargs": dict(template_kwargs or {}),
    }
    output = answer_of_process(
        "actors.rollout.tokenizer", request, timeout_s, f"counting the tokens of {len(records)} records"
    )
    answer = json.loads(output)
    if "error" in answer:
        raise error_of_process(answer)
    return [(prompt, response) for prompt, response in answer["counts"]]


def answer_of_process(module: str, asked: Mapping[str, Any], timeout_s: float, what: str) -> bytes:
    """Runs a module with `run_beside` and returns its standard output.

    Args:
        what: the work of the process, for an error message.

    Raises:
        ResourceError: the process took longer than `timeout_s`, or ended.
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
        printed = " ".join(done.stderr.decode(errors="replace").split())[-500:]
        raise ResourceError(
            f"the process for {what} ended with status {done.returncode}: {printed}",
            field="data.train",
            hint="look at what it said, and at the memory that is left",
        )
    return done.stdout


def error_of_process(answer: Mapping[str, Any]) -> SlimeError:
    kind = ModelError if answer["code"] == ModelError.code else ConfigError
    return kind(answer["error"], field=answer["field"], hint=answer["hint"])


def run_beside(module: str, asked: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Runs a module of ours in a separate process, with `asked` as JSON on its standard input.

    Raises:
        subprocess.TimeoutExpired: it ran longer than `timeout_s` and was ended.
    """
    # import the package that contains this file, not one in the current folder
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
    """Has the kernel end this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def stream_of_answer() -> int:
    """Returns a descriptor of standard output for the answer, and redirects what libraries print to standard error."""
    stream = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def _main() -> None:
    end_with_parent()
    stream = stream_of_answer()
    request = json.load(sys.stdin.buffer)
    records = [Record(fields, place) for fields, place in request["records"]]
    answer: dict[str, Any]
    try:
        encoded = encode_records(
            request["model_path"],
            records,
            with_answers=request["with_answers"],
            template_kwargs=request["template_kwargs"],
        )
        answer = {"counts": [(len(tokens) - length, length) for tokens, length in encoded]}
    except SlimeError as error:
        answer = {"error": error.message, "code": error.code, "field": error.field, "hint": error.hint}
    with os.fdopen(stream, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    _main()
