"""The user's code is imported and tried in a process that may hang or end, before anything starts."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.engines.tokenizer import encode_prompt
from actors.rollout.prompt_files import Prompts
from actors.rollout.records import Record
from actors.rollout.trials import try_calls, try_environment, try_imports, try_reward
from actors.rollout.user_code import EpisodeCall, UserCode
from actors.startup import reporting
from slimefsdp import Environment, StepResult
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused
from tests.support.runs import startable
from tests.support.user_code import call_of
from tests.support.waiting import is_alive, wait_until

HERE = __name__
TRAIN, HELD = Record({"prompt": "1"}, "train.jsonl:1"), Record({"prompt": "2"}, "held.jsonl:4")


class Begins(Environment):
    """As it is told to, at the record with the prompt 2."""

    def __init__(self, how: str = "well") -> None:
        self.how = how if how != "init" else how[9]

    async def reset(self, record: Any, seed: int) -> Any:
        print("this is no answer")
        if record["prompt"] != "2":
            return record["prompt"]
        if self.how == "raises":
            raise OSError("the world is full")
        if self.how == "ends":
            os._exit(3)
        if self.how == "hangs":
            time.sleep(3600)
        return None if self.how == "nothing" else "2"

    def step(self, response: str, finished: bool) -> StepResult:
        return StepResult(done=True)


def begun(how: str, *records: Record, encode: Any = len, name: str = f"{HERE}:Begins", **arguments: Any) -> None:
    code = UserCode("rollout.environment", name, {"how": how} if how else arguments, 1, 60.0, 1)
    calls = [EpisodeCall((0, place, 0), record, 1, ()) for place, record in enumerate(records)]
    try_calls(code, calls, encode)


def test_what_an_environment_does_wrong_at_the_beginning_is_named_with_its_record() -> None:
    begun("well", TRAIN, HELD)
    for how, words in (
        ("raises", ("OSError: the world is full", "held.jsonl:4")),
        ("init", ("IndexError", "train.jsonl:1")),
        ("nothing", ("a prompt that is a NoneType", "held.jsonl:4")),
    ):
        with refused(ConfigError, "rollout.environment", f"{HERE}:Begins", *words):
            begun(how, TRAIN, HELD)


def test_a_chat_template_that_writes_no_tools_is_found_before_a_run_starts(example: Path) -> None:
    from tools import ToolUse  # here, since other processes import this module too

    tokenizer = AutoTokenizer.from_pretrained(example / "model")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    name = f"{ToolUse.__module__}:{ToolUse.__name__}"

    def encode(prompt: Any) -> list[int]:
        return encode_prompt(tokenizer, prompt)

    with refused(ConfigError, "rollout.environment", "does not write them", "train.jsonl:1"):
        begun("", TRAIN, name=name, encode=encode, tools=["calculator"])
    begun("", TRAIN, name=name, encode=encode, tools=["calculator"], described="prompt")
    tokenizer.chat_template += "{{ tools }}"
    begun("", TRAIN, name=name, encode=encode, tools=["calculator"])


@pytest.fixture
def config(example: Path, tmp_path: Path) -> Any:
    def made(how: str, reward_timeout_s: float = 60.0, **environment: Any) -> RunConfig:
        tree = startable(example, tmp_path)
        del tree["rollout"]["reward"]
        tree["rollout"] |= {"environment": f"{HERE}:Begins", "reward_timeout_s": reward_timeout_s}
        tree["environment"] = {"arguments": {"how": how}, **environment}
        tree["evaluation"] = {"interval_steps": 1}
        return config_from_dict(tree)

    return made


def score(record: Any, response: str, finished: bool) -> Any:
    """As the record's prompt says."""
    assert finished and response == record.get("answer", "")
    if record["prompt"] == "hangs":
        time.sleep(3600)
    return [1.0] if record["prompt"] == "list" else 1 / record.get("by", 1)


def test_what_a_reward_function_does_wrong_is_found_before_a_run_starts() -> None:
    def scored(**record: Any) -> None:
        call = call_of(Record(record, "train.jsonl:1"), record.get("answer", ""))
        try_calls(UserCode("rollout.reward", f"{HERE}:score", {}, 1, 60.0, 1), [call], len)

    scored(prompt="1", answer="42")
    scored(prompt="1")
    for record, words in (({"by": 0}, "ZeroDivisionError"), ({"prompt": "list"}, "[1.0]")):
        with refused(ConfigError, "rollout.reward", f"{HERE}:score", "train.jsonl:1", words):
            scored(**{"prompt": "1", **record})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("hangs", "did not return within 1 s for train.jsonl:1"),
        ("x", None),
    ],
)
def test_a_reward_function_that_hangs_or_ends_its_process_is_found_before_a_run_starts(
    example: Path, tmp_path: Path, prompt: str, words: str | None
) -> None:
    tree = startable(example, tmp_path)
    tree["rollout"] |= {"reward": f"{HERE}:score", "reward_timeout_s": 1.0}
    prompts = Prompts([Record({"prompt": prompt}, "train.jsonl:1")], {})
    if words is None:
        try_reward(config_from_dict(tree), prompts)
        return
    with refused(ConfigError, "rollout.reward", words):
        try_reward(config_from_dict(tree), prompts)
    tree["rollout"]["reward_failure"] = "skip"
    try_reward(config_from_dict(tree), prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "timeout_s", "words"),
    [
        ("hangs", 1.0, "did not return within 1 s at the beginning of episode 0 of held.jsonl:4"),
        ("ends", 60.0, "ended with status 3"),
        ("well", 60.0, None),
    ],
)
def test_an_environment_that_hangs_or_ends_its_process_costs_its_trial_alone(
    config: Any, how: str, timeout_s: float, words: str | None
) -> None:
    found, prompts = config(how, reward_timeout_s=timeout_s), Prompts([TRAIN, TRAIN], {"": [HELD, TRAIN]})
    if words is None:
        try_environment(found, prompts)
        return
    with refused(ConfigError, "rollout.environment", words):
        try_environment(found, prompts)
    unasked = found.model_copy(update={"evaluation": found.evaluation.model_copy(update={"interval_steps": None})})
    if how == "ends":
        try_environment(unasked, prompts)  # of whose held-out records no episode ever begins


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "trial_fine.py").write_text("def score(): ...")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "timeout_s", "values"),
    [
        ("import time; time.sleep(600)", 2.0, ["cluster.launch_timeout_s=2"]),
        ("import os, sys; print('leaving', flush=True); os._exit(0)", 600.0, [0, "leaving"]),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 600.0, [-9]),
    ],
    ids=["hangs", "ends", "is killed"],
)
def test_an_import_that_does_not_come_back_is_refused(
    folder: Path, code: str, timeout_s: float, values: list[object]
) -> None:
    (folder / "trial_wrong.py").write_text(code)
    named = {"rollout.filter": "trial_fine:score", "rollout.reward": "trial_wrong:score"}
    if timeout_s < 600:  # which module of several it is is known only where there was time to begin
        del named["rollout.filter"]
    terminal = _Terminal()
    with reporting(terminal), refused(ConfigError, "rollout.reward", "trial_wrong", *values):
        try_imports(named, timeout_s)
    assert "trial_wrong" in terminal.getvalue()  # so that nobody waits without a word


def test_what_comes_back_or_raises_is_left_to_whoever_imports_it(folder: Path) -> None:
    (folder / "trial_raises.py").write_text("raise SystemExit(3)")
    named = {"rollout.reward": "trial_fine:score", "rollout.filter": "trial_raises:score"}
    named |= {"rollout.environment": "nowhere_at_all:Class", "advantage.estimator": "rloo"}
    try_imports(named, 600.0)
    assert not {"trial_fine", "trial_raises"} & sys.modules.keys()
    try_imports({"rollout.reward": "http://127.0.0.1:1/score", "loss.policy": "actors.no_such:f"}, 1e-9)  # none is ours


def test_an_import_that_starts_a_process_is_not_waited_for_until_that_ends(folder: Path) -> None:
    code = "import subprocess\nfrom pathlib import Path\nprocess = subprocess.Popen(['sleep', '600'])\n"
    (folder / "trial_starts.py").write_text(code + "Path(__file__).with_suffix('.pid').write_text(str(process.pid))")
    try_imports({"rollout.reward": "trial_starts:score"}, 120.0)
    pid = int((folder / "trial_starts.pid").read_text())
    assert wait_until(lambda: not is_alive(pid)), "it ends with the trial"
