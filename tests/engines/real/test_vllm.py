"""A real vLLM on CPU samples from the weights it was last sent, says how likely each token was, and fails by name.

Run with SLIMEFSDP_VLLM_PYTHON naming the interpreter of an environment that scripts/setup_vllm.sh made; takes minutes.
"""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from actors.engines import dialect, vllm
from actors.engines.child_server import ChildServer
from actors.engines.protocol import Request, Sample, TensorInfo
from actors.engines.served import ServedEngine
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, StateError, SyncError, WorkerDied
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams, VersionSpan
from tests.support.refusals import refused
from tests.support.waiting import PATIENCE_S, is_alive, wait_until
from tests.support.weight_sender import WeightSender

PYTHON = os.environ.get("SLIMEFSDP_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="SLIMEFSDP_VLLM_PYTHON names no interpreter with vLLM"),
    pytest.mark.slow,
]
MOST_TOKENS = 512
LONG = 400  # tokens: a second or more of sampling
CLOSE = 1e-4  # of a log-prob in float32
ATTEMPTS = 6  # to come while samples are drawn, which takes longer or shorter as the machine is busy


class Trained:
    """A model as a trainer has it, an engine, and what sends the one's weights to the other."""

    def __init__(self, config: RunConfig) -> None:
        began = time.monotonic()
        self.engine = ServedEngine(config, 0)
        self.info = self.engine.info()
        print(f"vLLM was ready after {time.monotonic() - began:.1f} s")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
        with torch.no_grad():  # a random model's tokens are all as likely, and errors would hide
            self.model.get_input_embeddings().weight.mul_(3 if self.model.config.tie_word_embeddings else 1)
        self.sender = WeightSender({name: parameter.detach() for name, parameter in self.model.named_parameters()})
        self.sender.join(self.engine)

    def send(self, version: int, seed: int | None = None) -> None:
        """Other weights, if there is a seed."""
        if seed is not None:
            self.sender.change(seed)
        began = time.monotonic()
        self.sender.send(self.engine, version)
        print(f"update {version} took {time.monotonic() - began:.2f} s")

    def close(self) -> None:
        self.sender.leave()
        self.engine.stop()


def settings(make_config: Any, folder: Path | None = None, **others: Any) -> RunConfig:
    rollout = {"engine": "vllm", "engines": 1, **others.pop("rollout", {})}
    if "engine_urls" not in rollout:
        rollout["engine_python"] = PYTHON
    tree: dict[str, Any] = {
        "rollout": rollout,
        "batch": {"max_tokens_per_rank": MOST_TOKENS},
        "cluster": {"launch_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, "sync_timeout_s": 300.0},
        **others,
    }
    if folder is not None:
        tree["model"] = {"path": str(folder)}
    config: RunConfig = make_config(**tree)
    return config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def tied(make_config: Any, run_dir: Path) -> Iterator[Trained]:
    """The example's model, whose head is its embedding."""
    trained = Trained(settings(make_config, run={"dir": str(run_dir)}))
    yield trained
    trained.close()


@pytest.fixture(scope="module")
def untied(make_config: Any, untied_folder: Path) -> Iterator[Trained]:
    """A llama with a head of its own."""
    trained = Trained(settings(make_config, untied_folder))
    yield trained
    trained.close()


@pytest.fixture(params=["tied", "untied"])
def trained(request: pytest.FixtureRequest) -> Trained:
    found: Trained = request.getfixturevalue(request.param)
    return found


def prompts_of(engine: ServedEngine) -> list[list[int]]:
    return [engine.tokenizer.encode(text) for text in ("sort 31942", "sort 5", "sort 90210")]


def drawn(engine: ServedEngine, prompts: list[list[int]], samples: int, params: SamplingParams) -> list[Sample]:
    requests = [Request(prompt, samples, params) for prompt in prompts]
    found = [sample for some in engine.generate(requests) for sample in some]
    assert len(found) == samples * len(prompts)
    return sorted(found, key=lambda sample: (sample.request, sample.number))


@torch.no_grad()
def full_forward(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of a response, computed as a trainer does, all tokens at once."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def greatest_difference(model: Any, prompts: list[list[int]], samples: list[Sample], temperature: float) -> float:
    exact = [full_forward(model, prompts[one.request], one.tokens, temperature) for one in samples]
    return max(
        float((values - torch.tensor(one.log_probs)).abs().max()) for values, one in zip(exact, samples, strict=True)
    )


def midway_s(engine: ServedEngine, prompt: list[int], samples: int) -> float:
    """After how long such samples have been drawn by a third."""
    began = time.monotonic()
    drawn(engine, [prompt], samples, SamplingParams(LONG, seed=(6,)))
    return (time.monotonic() - began) / 3


@contextmanager
def beside(function: Callable[..., Any], *args: Any) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as side:
        yield side.submit(function, *args)


# ---------------------------------------------------------------------- samples


def test_every_update_decides_the_tokens_and_their_log_probs(trained: Trained) -> None:
    engine, model = trained.engine, trained.model
    prompts = prompts_of(engine)
    for version in range(3):
        trained.send(version, seed=version if version else None)
        for temperature in (0.7, 1.0, 1.3):
            asked = SamplingParams(24, temperature, end_token_ids=engine.end_token_ids(), seed=(version,))
            samples = drawn(engine, prompts, 4, asked)
            difference = greatest_difference(model, prompts, samples, temperature)
            print(f"version {version}, temperature {temperature}: log-probs differ by {difference:.1e} at most")
            assert difference < CLOSE
            assert all(one.versions == (VersionSpan(version, 0, len(one.tokens)),) for one in samples)
            assert len({tuple(one.tokens) for one in samples}) > len(samples) / 2, "samples repeat each other"
        greedy = drawn(engine, prompts, 1, SamplingParams(24, greedy=True))
        assert greatest_difference(model, prompts, greedy, 1.0) < CLOSE
        for prompt, sample in zip(prompts, greedy, strict=True):
            ids = torch.tensor([prompt])
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
            )
            assert said[0, len(prompt) :].tolist() == sample.tokens


def test_more_is_asked_at_once_than_the_server_reads_in_a_step(tied: Trained) -> None:
    """A prompt that is read in parts would end vLLM on a CPU, where its sample has a seed."""
    tied.send(9)
    prompts = [tied.engine.tokenizer.encode(f"sort {number:05d}{'31942' * 16}") for number in range(240)]
    assert sum(map(len, prompts)) > 20_000
    samples = drawn(tied.engine, prompts, 2, SamplingParams(2, seed=(4,)))
    assert greatest_difference(tied.model, prompts, samples[::40], 1.0) < CLOSE


def test_a_server_says_what_it_is(tied: Trained) -> None:
    info = tied.info
    assert info.name.startswith("vllm 0.32") and (info.vocab_size, info.dtype) == (320, "float32")
    assert info.max_tokens == MOST_TOKENS and info.processes == 1
    assert info.transports == ("broadcast", "disk", "ipc")


def test_samples_end_by_the_tokens_and_texts_that_were_asked_for(tied: Trained) -> None:
    tied.send(10)
    engine, (prompt, *_) = tied.engine, prompts_of(tied.engine)
    (whole,) = drawn(engine, [prompt], 1, SamplingParams(30, seed=(5,)))
    assert whole.finish_reason == "length" and len(whole.tokens) == 30
    end = whole.tokens[7]
    (ended,) = drawn(engine, [prompt], 1, SamplingParams(30, seed=(5,), end_token_ids=frozenset([end])))
    assert ended.finish_reason == "stop" and ended.tokens == whole.tokens[: whole.tokens.index(end) + 1]
    text = engine.decode([whole.tokens])[0]
    stop = next(letter for letter in text[3:] if letter.isascii() and letter.isprintable())
    (stopped,) = drawn(engine, [prompt], 1, SamplingParams(30, seed=(5,), stop=(stop,)))
    assert stopped.finish_reason == "stop" and stop in stopped.text
    assert stopped.tokens == whole.tokens[: len(stopped.tokens)]
    assert stop not in engine.decode([stopped.tokens[:-1]])[0]


def test_a_sample_follows_from_its_seed_and_number(tied: Trained) -> None:
    tied.send(11)
    engine, prompts = tied.engine, prompts_of(tied.engine)
    asked = SamplingParams(16, seed=(1, 2))
    alone = drawn(engine, prompts[:1], 3, asked)
    together = [one for one in drawn(engine, prompts, 3, asked) if one.request == 0]
    assert [one.tokens for one in alone] == [one.tokens for one in together]


def test_samples_go_on_across_an_update_with_the_new_weights(tied: Trained) -> None:
    engine, (prompt, *_) = tied.engine, prompts_of(tied.engine)
    for attempt in range(ATTEMPTS):
        old, new = 100 + 2 * attempt, 101 + 2 * attempt
        tied.send(old)
        before = copy.deepcopy(tied.model)
        wait_s = midway_s(engine, prompt, 8)
        with beside(drawn, engine, [prompt], 8, SamplingParams(LONG, seed=(6,))) as running:
            time.sleep(wait_s)
            tied.send(new, seed=new)
            samples = running.result(timeout=PATIENCE_S)
        split = [sample for sample in samples if len(sample.versions) == 2]
        for sample in split:
            first, second = sample.versions
            assert (first.version, first.start, second.version, second.end) == (old, 0, new, LONG)
            one, other = (full_forward(model, prompt, sample.tokens, 1.0) for model in (before, tied.model))
            expected = torch.cat([one[: first.end], other[first.end :]])
            difference = float((expected - torch.tensor(sample.log_probs)).abs().max())
            print(f"tokens 0 to {first.end} before, the rest after an update: log-probs differ by {difference:.1e}")
            assert difference < CLOSE
        if split:
            return
    pytest.fail("no update came while samples were drawn")


def test_aborted_samples_keep_what_they_have(tied: Trained) -> None:
    tied.send(30)
    engine, prompts = tied.engine, prompts_of(tied.engine)
    for _ in range(ATTEMPTS):
        wait_s = midway_s(engine, prompts[0], 8)
        with beside(drawn, engine, prompts[:1], 8, SamplingParams(LONG, seed=(7,))) as running:
            time.sleep(wait_s)
            engine.abort()
            samples = running.result(timeout=PATIENCE_S)
        assert all(len(one.tokens) == len(one.log_probs) for one in samples)
        assert all((one.finish_reason == "abort") == (len(one.tokens) < LONG) for one in samples)
        begun = [one for one in samples if 0 < len(one.tokens) < LONG]
        if begun:
            assert greatest_difference(tied.model, prompts, begun, 1.0) < CLOSE
            return
    pytest.fail("nothing was aborted while it was drawn")


# ---------------------------------------------------------------------- updates that fail


@pytest.mark.parametrize("after", ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"])
@pytest.mark.parametrize("how", ["refused", "left"])
def test_what_an_unfinished_update_brought_leaves_no_trace(trained: Trained, after: str, how: str) -> None:
    # vLLM makes one tensor of the named one and those that follow it, which never come
    engine, sender, prompts = trained.engine, trained.sender, prompts_of(trained.engine)
    sender.change(40)
    sender.bucket_bytes = 1
    try:
        engine.begin(40, sender.manifest)
        for bucket in sender.buckets():
            sender.broadcast(engine, bucket)
            if bucket[-1][0] == after:
                break
        if how == "refused":
            with refused(SyncError, "update_weights", "float64"):
                sender.broadcast(engine, [(name, tensor.double()) for name, tensor in bucket])
        else:
            with refused(SyncError, "update_weights", 40):
                engine.commit(40)
    finally:
        sender.bucket_bytes = 50_000
    if how == "refused":
        with refused(StateError, "update_weights"):
            drawn(engine, prompts, 1, SamplingParams(4))
    trained.send(41, seed=41)
    assert greatest_difference(trained.model, prompts, drawn(engine, prompts, 2, SamplingParams(24)), 1.0) < CLOSE


def test_a_group_without_its_sender_is_an_error_and_another_one_works(tied: Trained) -> None:
    tied.sender.timeout_s = 3.0
    tied.sender.join(tied.engine)
    tied.engine.begin(50, tied.sender.manifest)
    bucket = next(tied.sender.buckets())
    tied.sender.leave()
    with refused(SyncError, "update_weights", "broadcast"):
        tied.engine.receive_broadcast([TensorInfo(name, "float32", tuple(one.shape)) for name, one in bucket])
    tied.sender.timeout_s = 60.0
    tied.sender.join(tied.engine)
    tied.send(51)
    prompts = prompts_of(tied.engine)
    assert greatest_difference(tied.model, prompts, drawn(tied.engine, prompts, 1, SamplingParams(8)), 1.0) < CLOSE


def test_after_sleep_weights_are_sent_again(tied: Trained) -> None:
    tied.engine.sleep()
    with refused(StateError, "update_weights"):
        drawn(tied.engine, prompts_of(tied.engine), 1, SamplingParams(4))
    tied.engine.wake_up()
    tied.send(60)
    assert drawn(tied.engine, prompts_of(tied.engine), 1, SamplingParams(4))


# ---------------------------------------------------------------------- servers of no use


def test_a_server_without_dev_mode_is_refused(make_config: Any, tmp_path: Path) -> None:
    config = settings(make_config)
    folder, port = read_model_folder(config.model.path), dialect.free_port()
    ours = vllm.VllmDialect(config, folder)
    environment = ours.environment(tmp_path)
    del environment["VLLM_SERVER_DEV_MODE"]
    command = [str(PYTHON), *ours.arguments()]
    child = ChildServer([*command, "--port", str(port)], environment, tmp_path / "log", tmp_path)
    try:
        engine = ServedEngine(settings(make_config, rollout={"engine_urls": [f"http://127.0.0.1:{port}"]}), 0)
        assert wait_until(lambda: engine._client.answers(5.0))
        with refused(EngineError, "rollout.engine_urls", "VLLM_SERVER_DEV_MODE=1"):
            engine.info()
    finally:
        child.end()


# ---------------------------------------------------------------------- as an actor, and servers that die


def test_a_server_that_is_killed_is_named_and_a_new_engine_works(
    tied: Trained, make_config: Any, run_dir: Path
) -> None:
    tied.send(80)
    engine, prompts = tied.engine, prompts_of(tied.engine)
    assert engine._client.child is not None
    with beside(drawn, engine, prompts, 30, SamplingParams(LONG, seed=(9,))) as running:
        time.sleep(0.7)
        os.kill(engine._client.child.pid, signal.SIGKILL)
        with refused(WorkerDied, "rollout.engine", 0) as caught:
            running.result(timeout=PATIENCE_S)
    assert str(engine._client.child.log) in str(caught.value) and wait_until(
        lambda: engine._client.child.status() is not None, 30
    )
    engine.stop()
    after = Trained(settings(make_config, run={"dir": str(run_dir)}))
    try:
        after.send(0)
        samples = drawn(after.engine, prompts, 2, SamplingParams(8))
        assert greatest_difference(after.model, prompts, samples, 1.0) < CLOSE
        assert after.engine._client.child is not None
        pid = after.engine._client.child.pid
        after.engine.begin(1, after.sender.manifest)
        first, *_ = after.sender.buckets()
        after.sender.broadcast(after.engine, first)
        os.kill(pid, signal.SIGKILL)
        with refused(WorkerDied, "rollout.engine", 0):
            after.engine.receive_broadcast([])
        assert wait_until(lambda: not is_alive(pid), 30)
    finally:
        after.close()
