"""What a client cannot have is a 4xx or a failed future, at once, and moves no other run."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import requests
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from actors.service import tinker_pb2
from actors.service.datums import parse_request, scan_request, work_of
from actors.service.users import LIMITS
from slimefsdp.errors import BatchError, SlimeError
from tests.support.refusals import refused
from tests.support.service import Served, datum, log_probs_of, message, tokens_of

ONE, TWO = np.ones(3), np.ones((3, 2))
RL = {"logprobs": -ONE, "advantages": ONE}
SPARSE = tinker_pb2.Tensor(
    sparse_csr={
        "values": np.ones(1, "<f4").tobytes(), "col_indices": np.array([2], "<i8").tobytes(),
        "crow_indices": np.array([0, 1, 1, 1], "<i8").tobytes(),
    },
    dtype=1, shape=[3, 2],
)  # fmt: skip


def with_chunk(tokens: bytes | None) -> Any:
    """A request whose text is these bytes; None: a chunk without text."""
    made = message()
    chunk = made.data[0].model_input[0]
    if tokens is None:
        chunk.Clear()
    else:
        chunk.encoded_text.tokens = tokens
    return made


def joined(*messages: Any) -> Any:
    """A request with the datums of all of these."""
    made = message()
    del made.data[:]
    for one in messages:
        made.data.extend(one.data)
    return made


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (joined(), "no datums"),
    "a chunk of nothing": (with_chunk(None), "a chunk of nothing"),
    "half a token": (with_chunk(b"123456"), "no array of int32"),
    "no tokens": (with_chunk(b""), "has no tokens"),
    "a loss of nobody": (message(loss="mine"), "'mine' is not supported"),
    "one and two targets a token": (
        joined(message(), message(target_tokens=np.ones((3, 2), int), weights=TWO)), "differs from that of the datums"
    ),
    "too many targets a token": (message(target_tokens=np.ones((3, 257), int)), r"\[3, 257\]"),
    "no targets a token": (message(target_tokens=np.ones((3, 0), int)), r"\[3, 0\]"),
    "three axes": (message(target_tokens=np.ones((3, 1, 1), int)), "3 dimensions"),
    "two targets a token and one weight": (message(target_tokens=np.ones((3, 2), int), weights=ONE), r"\[3, 2\]"),
    "two targets a token of ppo": (
        message(loss="ppo", target_tokens=np.ones((3, 2), int), logprobs=-TWO, advantages=TWO), "cross_entropy"
    ),
    "too few": (message(weights=np.ones(2)), r"\[2\]"),
    "too few bytes": (message(weights=tinker_pb2.Tensor(dense=b"1234", dtype=1, shape=[3])), "4 bytes"),
    "no number": (message(weights=np.array([1.0, math.nan, 1.0])), "value 1 is not finite"),
    "tokens of floats": (message(target_tokens=np.array([4.0, 5.0, 6.0])), "send integers"),
    "no targets": (message(target_tokens=None), "target_tokens is missing"),
    "no advantages": (message(loss="ppo", logprobs=-ONE), "advantages is missing"),
    "an input too many": (message(loss="ppo", weights=ONE, **RL), "no input 'weights'"),
    "out of the vocabulary": (message(target_tokens=np.array([4, 5, 10**6])), "vocabulary"),
    "another loss": (message(loss="stable_reinforce"), "cross_entropy, importance_sampling"),
    "a dtype": (message(weights=tinker_pb2.Tensor(dense=b"0" * 6, dtype=4, shape=[3])), "number 4"),
    "sparse without rows": (message(weights=tinker_pb2.Tensor(sparse_csr={}, dtype=1, shape=[3])), "sparse"),
    "sparse beyond its shape": (message(target_tokens=np.ones((3, 2), int), weights=SPARSE), "sparse"),
    "no beta": (message(loss="dro", **RL), "needs beta"),
    "an advantage outside": (
        message(loss="gspo", sequence_ratio_mask=np.array([0.0, 1.0, 1.0]), **RL), "outside of it"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_datum_that_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    made, words = BAD[name]
    with pytest.raises(BatchError, match=words) as caught:
        work_of(made, vocab_size=100, max_tokens=64, max_targets=10**6)
    assert caught.value.field and caught.value.hint


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\x80" * 11, b"\x08" + b"\x80" * 10 + b"\x01", b"\x0a\x01\xff", b"\x0d\x00"],
    ids=["no length", "cut", "a group", "no end of a tag", "no end of a number", "no text", "four bytes cut"],
)
def test_bytes_that_are_no_request_are_refused_before_or_while_they_are_parsed(data: bytes) -> None:
    with refused(BatchError, "body", "ForwardBackwardRequest"):
        scan_request(data)
        parse_request(data)


def test_a_request_of_more_fields_than_memory_has_room_for_is_refused_by_its_bytes_alone() -> None:
    whole = message("s:train:0").SerializeToString()
    model, size = scan_request(whole)
    assert model == "s:train:0" and size > len(whole)
    with refused(BatchError, "data", 2**20):
        scan_request(whole + b"\x1a\x00" * (2**20 + 1))


def test_numbers_of_a_loss_are_those_it_has_and_in_their_ranges() -> None:
    for config, words in (
        ({"clip_low_threshold": 1.5}, "between 0 and 1"),
        ({"clip_high_threshold": 0.5}, "between 1 and"),
        ({"beta": 0.1}, "no 'beta'"),
    ):
        made = message(loss="ppo", **RL)
        made.loss_fn_config.update(config)
        with pytest.raises(BatchError, match=words):
            work_of(made, vocab_size=100, max_tokens=64, max_targets=10**6)
    made = message(loss="ppo", **RL)
    made.loss_fn_config["clip_low_threshold"] = 0.5
    made.loss_fn_config_v2["clip_low_threshold"].number = 0.75
    assert work_of(made, vocab_size=100, max_tokens=64, max_targets=10**6).settings["clip_low"] == 0.25
    made.loss_fn_config_v2["clip_low_threshold"].text = "low"
    with pytest.raises(BatchError, match="no number"):
        work_of(made, vocab_size=100, max_tokens=64, max_targets=10**6)
    with pytest.raises(BatchError, match="at most 3"):
        work_of(message(), vocab_size=100, max_tokens=3, max_targets=10**6)
    with pytest.raises(BatchError, match="at most 3"):  # before a tensor is made dense
        work_of(message(target_tokens=SPARSE), vocab_size=100, max_tokens=3, max_targets=1)


@given(st.data())
def test_whatever_bytes_come_a_request_is_work_or_a_typed_error(data: st.DataObject) -> None:
    """Bytes of a real request, some of them changed, cut or doubled."""
    whole = bytearray(message(loss="ppo", **RL).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        how = data.draw(st.sampled_from(["change", "cut", "double"]))
        if how == "change":
            whole[at] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del whole[at : at + data.draw(st.integers(1, 8))]
        else:
            whole[at:at] = whole[at : at + 8]
        if not whole:
            break
    made = tinker_pb2.ForwardBackwardRequest()
    try:
        made.ParseFromString(bytes(whole))
    except Exception as error:
        assert type(error).__name__ == "DecodeError"
        return
    try:
        work = work_of(made, vocab_size=100, max_tokens=64, max_targets=10**6)
    except SlimeError as error:
        assert error.field
    else:
        assert work.batch.num_samples == len(made.data)


def test_what_comes_over_the_wire_and_cannot_be_is_answered_at_once_and_moves_no_run(served: Served) -> None:
    client = served.client()
    training = served.training_client(client)
    data = [datum(tokens_of(1))]
    before = log_probs_of(training.forward(data, "cross_entropy").result())[0]
    session, model = training.model_id.partition(":")[0], training.model_id
    asked = {"session_id": session, "model_seq_id": 77, "base_model": "tiny/model", "lora_config": {"rank": 4}}
    save = {"model_id": model, "seq_id": 50}
    sample = {
        "sampling_session_id": f"{session}:sample:9", "seq_id": 0, "sampling_params": {},
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3]}]},
    }  # fmt: skip
    bomb = zstandard.ZstdCompressor().compress(bytes(LIMITS.body_bytes + 1))
    nothing = {"X-API-Key": ""}
    for path, body, headers, status in (
        ("create_session", {}, nothing, 401),
        ("create_session", {}, {"X-API-Key": "tml-wrong"}, 401),
        ("create_session", {"tags": 3}, {}, 422),
        ("session_heartbeat", {"session_id": "session-of-nobody"}, {}, 410),
        ("create_model", {**asked, "session_id": "nobody"}, {}, 410),
        ("create_model", {**asked, "base_model": "another"}, {}, 400),
        ("create_model", {**asked, "lora_config": {"rank": 10**9}}, {}, 400),
        ("create_model", {**asked, "lora_config": {"rank": "many"}}, {}, 422),
        ("create_model", {**asked, "optimizer_config": {"type": "muon"}}, {}, 422),
        ("get_info", {"model_id": "nobody:train:1"}, {}, 404),
        ("forward_backward", b"\xff\xff\xff", {}, 400),
        ("forward_backward", {"model_id": model}, {}, 415),
        ("forward_backward", message("nobody:train:0").SerializeToString(), {}, 404),
        ("forward_backward", message(model, 10**6).SerializeToString(), {}, 400),
        ("forward_backward", bytes(LIMITS.body_bytes + 1), {}, 413),
        ("forward_backward", bomb, {"content-encoding": "zstd"}, 413),
        ("forward_backward", b"no zstd", {"content-encoding": "zstd"}, 400),
        ("forward_backward", b"", {"content-encoding": "br"}, 415),
        ("save_weights", {**save, "path": "../../etc"}, {}, 422),
        ("save_weights", {**save, "path": "a/b"}, {}, 422),
        ("save_weights_for_sampler", {**save, "path": ".."}, {}, 422),
        ("save_weights_for_sampler", {**save, "kind": "inflight", "path": "x"}, {}, 400),
        ("load_weights", {**save, "path": "tinker://nobody/weights/x", "optimizer": True}, {}, 404),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1, "model_path": "x"}, {}, 404),
        ("asample", sample, {}, 404),
        ("asample", {**sample, "num_samples": 0}, {}, 422),
        ("asample", {**sample, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [True]}]}}, {}, 422),
        ("asample", {**sample, "topk_sample_logprobs": 3}, {}, 422),
        ("retrieve_future", {"request_id": "nobody's"}, {}, 410),
        ("nothing/of/this/name", {}, {}, 404),
    ):  # fmt: skip
        began = time.monotonic()
        answer = served.post(path, body, **headers)
        assert (answer.status_code, path) == (status, path), answer.text
        assert answer.headers["x-should-retry"] == "false" and answer.json()["error"]
        assert time.monotonic() - began < 10  # nobody waits for work
    malformed = requests.post(
        f"{served.url}/api/v1/create_session",
        data=b"{",
        timeout=30,
        headers={"X-API-Key": served.key, "content-type": "application/json"},
    )
    assert malformed.status_code == 422
    after = log_probs_of(training.forward(data, "cross_entropy").result())[0]
    assert np.array_equal(before, after)
    base = client.create_sampling_client(base_model="tiny/model").result()
    for prompt, params, word in (
        ([10**6], {"max_tokens": 2}, "vocabulary"),
        ([3], {"max_tokens": 10**6}, "max_new_tokens|positions|tokens"),
    ):
        with pytest.raises(Exception, match=word):
            base.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(**params)).result()
    client.close("success").result()
