"""Reward functions: found by name or refused with the reason, checked at each call, and right on hand-worked cases."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.rewards import exact_match, final_number, sorted_digits
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.user_code import call_of, calls_of, reward_host, scores_of

digits = st.text("0123456789", min_size=1, max_size=7)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module that only this test can import, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"user_reward_{tmp_path.name}"

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.modules.pop(name, None)


def outcome_of(name: str) -> Any:
    """What the function gives one response, with the record at train.jsonl:0."""
    return scores_of(reward_host(name).run(calls_of("abc")))[0]


def test_other_keys_and_numpy_numbers_come_back_as_floats(user_module):
    name = user_module(
        "import numpy as np\n"
        "def score(record, response, finished):\n"
        "    return {'reward': np.float32(0.5), 'length': len(response), 'ok': finished}\n"
    )
    scores = outcome_of(f"{name}:score")
    assert scores == {"reward": np.float32(0.5), "length": 3.0, "ok": 1.0}
    assert all(type(value) is float for value in scores.values())


@pytest.mark.parametrize("returned", ["0.5", "numpy.float32(0.5)", "{'reward': 0.5}"])
def test_a_reward_may_be_a_number_alone(user_module, returned):
    name = user_module(f"import numpy\ndef f(record, response, finished):\n    return {returned}\n")
    assert outcome_of(f"{name}:f") == {"reward": 0.5}


@pytest.mark.parametrize(
    "result",
    [
        "'1.0'", "[10**6000]", "float('nan')", "{'score': 1.0}", "None", "{'reward': '1'}", "{'reward': 1, 'n': None}",
        "{'reward': 10**400}", "{'reward': numpy.ones(3)}", "{'reward': 1, 3: 2}", "{'reward': -numpy.inf}",
    ],
)  # fmt: skip
def test_a_result_that_breaks_the_contract_is_refused_with_the_record_it_was_returned_for(user_module, result):
    name = user_module(f"import numpy\ndef f(record, response, finished):\n    return {result}\n")
    error = outcome_of(f"{name}:f")
    assert type(error) is BatchError and error.field == "rollout.reward" and error.hint
    assert f"{name}:f" in error.message and "train.jsonl:0" in error.message and len(error.message) < 1000


def test_exact_match_wants_the_whole_answer_and_an_end():
    record = {"prompt": "p", "answer": 12}
    assert exact_match(record, " 12\n", True) == {"reward": 1.0}
    with refused(BatchError, "answer"):  # also where nothing could be right
        exact_match({"prompt": "p"}, "12", False)
    assert exact_match(record, "12", False) == exact_match(record, "012", True) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("5 + 67 = 72\n#### 72", "So there are 5 and 67, in all \\boxed{72}.", 1.0),
        ("72", "72 of 100", 0.0),
        ("1,234.50", "it costs $1234.5", 1.0),
        (-3, "x = -3", 1.0),
        (-3, "x = 3", 0.0),
        (4, "on pages 3-4", 1.0),
        (1, "1,2", 0.0),  # two numbers
        (12, "twelve", 0.0),
    ],
)
def test_final_number_compares_the_last_numbers(answer, response, reward):
    record = {"prompt": "p", "answer": answer}
    assert final_number(record, response, True) == {"reward": reward}
    assert final_number(record, response, False) == {"reward": 0.0}
    with refused(BatchError, "answer", "'p'"):
        final_number({"prompt": "p", "answer": "none"}, response, True)


@pytest.mark.parametrize(
    ("response", "reward", "exact"),
    [
        ("23578", 1.0, 1.0),
        (" 23578\n", 1.0, 1.0),
        ("23587", 0.5 * 3 / 5, 0.0),
        ("2357", 0.5 * 4 / 5, 0.0),
        ("23578888", 0.5 * 5 / 8, 0.0),
        ("87532", 0.5 * 1 / 5, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_sorted_digits_gives_half_for_the_answer_and_half_for_the_places(response, reward, exact):
    scores = sorted_digits({"prompt": "sort 52837", "answer": "23578"}, response, True)
    assert scores == {"reward": pytest.approx(reward), "exact": exact}


@given(answer=digits, response=digits)
def test_sorted_digits_is_one_only_for_the_answer_and_zero_without_an_end(answer, response):
    record = {"prompt": "p", "answer": answer}
    scores = sorted_digits(record, response, True)
    assert (scores["reward"] == 1.0) == (scores["exact"] == 1.0) == (response == answer)
    assert 0.0 <= scores["reward"] <= (1.0 if response == answer else 0.5)
    assert sorted_digits(record, response, False) == {"reward": 0.0, "exact": 0.0}


def test_async_calls_overlap_and_one_that_does_not_return_costs_itself(user_module):
    name = user_module(
        "import asyncio\n"
        "inside = most = 0\n"
        "async def f(record, response, finished):\n"
        "    global inside, most\n"
        "    inside += 1\n"
        "    most = max(most, inside)\n"
        "    if response == 'fail': raise TimeoutError('of its own')\n"
        "    await asyncio.sleep(600 if response == 'wait' else 0.01)\n"
        "    inside -= 1\n"
        "    return {'reward': record['number'], 'most': most}\n"
    )
    host = reward_host(f"{name}:f", timeout_s=2.0)
    texts = ["", "wait", "", "fail", ""]
    asked = calls_of(*texts)
    outcomes = scores_of(host.run(asked))
    assert [outcomes[n] for n in (0, 2, 4)] == [{"reward": n, "most": 5} for n in (0, 2, 4)]
    for number, word in ((1, "2 s"), (3, "of its own")):
        assert isinstance(outcomes[number], BatchError) and word in outcomes[number].message
        assert f"train.jsonl:{number}" in outcomes[number].message
    assert scores_of(host.run(asked[:1]))[0]["reward"] == 0, "the loop goes on"


@pytest.fixture
def judge():
    """A server that answers as the response asks, and is busy at the first request about each record."""
    asked = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self):  # the name that http.server calls
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            is_busy = sum(other == body for other in asked) == 1
            status = 503 if is_busy else 400 if body["response"] == "refuse" else 200
            answer = "no JSON" if body["response"] == "babble" else json.dumps({"reward": body["record"]["number"]})
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_):
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/score", asked
    server.shutdown()
    server.server_close()


def test_a_url_is_asked_until_it_answers_and_answers_with_numbers(judge):
    url, requests = judge
    texts = ["right", "refuse", "babble", "wrong"]
    asked = calls_of(*texts)
    outcomes = scores_of(reward_host(url, concurrency=4).run(asked))
    assert [outcomes[0], outcomes[3]] == [{"reward": 0.0}, {"reward": 3.0}]
    for number, word in ((1, "400"), (2, "JSON")):
        assert isinstance(outcomes[number], BatchError) and outcomes[number].field == "rollout.reward"
        assert f"train.jsonl:{number}" in outcomes[number].message and word in outcomes[number].message
    wanted = [{"record": dict(one.record), "response": one.responses[0][0], "finished": True} for one in asked]
    assert len(requests) == 8 and all(requests.count(one) == 2 for one in wanted)


def test_a_url_that_nobody_answers_at_is_an_error_within_the_time():
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    url = f"http://127.0.0.1:{server.server_port}/"
    server.server_close()
    (outcome,) = reward_host(url, timeout_s=1).run([call_of({"prompt": "p"}, "r")])
    assert isinstance(outcome, BatchError) and outcome.field == "rollout.reward" and "'p'" in outcome.message


def test_a_plain_function_may_start_an_event_loop_of_its_own(user_module):
    name = user_module(
        "import asyncio\n"
        "async def later():\n    return 0.5\n"
        "def f(record, response, finished):\n    return asyncio.run(later())\n"
    )
    assert scores_of(reward_host(f"{name}:f").run(calls_of("a", "b"))) == [{"reward": 0.5}] * 2
