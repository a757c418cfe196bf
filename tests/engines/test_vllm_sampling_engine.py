"""What a service asks a server of vLLM for, which adapters it tells it of, what it refuses; without vLLM and Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from actors.engines import vllm_sampling_engine
from actors.engines.server_client import ServerClient
from actors.engines.tokenizer import load_tokenizer
from actors.engines.vllm_sampling_engine import VllmSamplingEngine
from slimefsdp.config import RunConfig
from slimefsdp.errors import BatchError, EngineError, ModelError, ResourceError, StateError, WorkerDied
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.refusals import refused
from tests.support.table_server import EMBEDDING, adapter_of_folder, next_logits
from tests.support.versions import asked, random_adapters
from tests.support.vllm_server import ProtocolServer

BASE_MODULES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
NAMES = ["v0", "v1", "v2"]


@pytest.fixture(scope="module")
def folders(example: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("versions")
    base = example / "model"
    return {name: random_adapters(base, root / name, rank=1 + n, seed=n) for n, name in enumerate(NAMES)}


class Servers:
    """All that were started; the newest one is `now`."""

    def __init__(self, model: Path) -> None:
        self._folder = read_model_folder(model)
        self._decode = load_tokenizer(str(model)).decode
        self.all: list[ProtocolServer] = []
        self.said: dict[str, Any] = {"logprobs_mode": "raw_logprobs", "lora_modules": BASE_MODULES}

    @property
    def now(self) -> ProtocolServer:
        return self.all[-1]

    def start(self) -> ProtocolServer:
        server = ProtocolServer(self._folder.vocab_size, self._folder.model_type, self._decode)
        server.faults.said, server.is_raw = self.said, True
        torch.manual_seed(0)
        server.tensors[EMBEDDING] = torch.randn(self._folder.vocab_size, 8)
        self.all.append(server)
        return server


class Child:
    """A server's process, which a test says the end of."""

    log = Path("log")

    def __init__(self, server: ProtocolServer) -> None:
        self._server = server

    def status(self) -> int | None:
        return -9 if self._server.faults.is_gone else None

    def ends_within(self, seconds: float) -> bool:
        return self.status() is not None

    def last_lines(self, count: int) -> list[str]:
        return ["killed"]

    def end(self) -> None:
        self._server.faults.is_gone = True


@pytest.fixture
def servers(example: Path) -> Iterator[Servers]:
    found = Servers(example / "model")
    yield found
    for server in found.all:
        server.close()


Life = Callable[[VllmSamplingEngine], Coroutine[Any, Any, None]]
Lived = Callable[..., None]


@pytest.fixture
def lived(servers: Servers, make_config: Any, tmp_path: Path) -> Lived:
    """Runs what a test does with an engine beside a server at a URL."""

    def live(life: Life, *, begins: bool = True, limits: dict[str, Any] | None = None, **sections: Any) -> None:
        sections = {"lora": {"rank": 4}, **sections}
        if "rollout" not in sections:
            url = (servers.all[-1] if servers.all else servers.start()).url
            sections["rollout"] = {"engine": "vllm", "engines": 1, "engine_urls": [url]}
        config: RunConfig = make_config(mesh={"dp": 1}, run={"dir": str(tmp_path / "run")}, **sections)

        async def whole() -> None:
            engine = VllmSamplingEngine(config, max_samples=16, **limits or {})
            try:
                if begins:
                    await engine.begin()
                await life(engine)
            finally:
                await engine.shutdown()

        asyncio.run(whole())

    return live


def exact(server: ProtocolServer, tokens: list[int]) -> torch.Tensor:
    """Log-probs of the table, of each token but the first."""
    table = server.tensors[EMBEDDING]
    return torch.stack([next_logits(table, before).log_softmax(-1)[token] for before, token in pairwise(tokens)])


def test_each_version_is_an_adapter_of_its_own_and_the_base_one_of_zeros(
    servers: Servers, lived: Lived, folders: dict[str, Path]
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        size = [await engine.load(name, str(folder)) for name, folder in folders.items()]
        assert len(set(size)) == 1 and (await engine.stats()).versions == dict(zip(NAMES, size, strict=True))
        answers = await asyncio.gather(*(engine.sample(asked(name, [3, 4], 2, 7)) for name in [*NAMES, None]))
        server = servers.now
        known = {name: adapter_of_folder(folder) for name, folder in folders.items()}
        used = {body["model"] for body in server.asked}
        assert len(used) == 4 and used == set(server.adapters)
        for name, adapter in known.items():
            (same,) = [
                one
                for one in server.adapters.values()
                if one.matrices.keys() == adapter.matrices.keys()
                and all(torch.equal(adapter.matrices[key], one.matrices[key]) for key in adapter.matrices)
            ]
            assert same.scale == adapter.scale, name
        zeros = [one for one in server.adapters.values() if not any(matrix.any() for matrix in one.matrices.values())]
        assert len(zeros) == 1
        for answer in answers:  # the table knows no adapters
            assert answer.samples == answers[0].samples and len(answer.samples) == 2
            assert answer.samples[0] != answer.samples[1]
        await engine.drop("v1")
        assert len(server.adapters) == 3 and await engine.versions() == ["v0", "v2"]
        with refused(StateError, "version", "v1"):
            await engine.sample(asked("v1", [3]))
        with refused(StateError, "version", "v0"):
            await engine.load("v0", str(folders["v0"]))

    lived(life)


def test_log_probs_are_at_temperature_one_and_parameters_are_what_was_asked_for(servers: Servers, lived: Lived) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        prompt = [3, 4, 9]
        answer = await engine.sample(
            asked(None, prompt, 2, 5, temperature=0.5, top_k=7, top_p=0.9, max_new_tokens=9, prompt_log_probs=True)
        )
        server = servers.now
        for body in server.asked:
            params = body["sampling_params"]
            assert (params["temperature"], params["top_k"], params["top_p"]) == (0.5, 7, 0.9)
        assert sorted("prompt_logprobs" in body["sampling_params"] for body in server.asked) == [False, True]
        for sample in answer.samples:
            found = exact(server, [*prompt, *sample.tokens])[len(prompt) - 1 :]
            assert torch.allclose(found, torch.tensor(sample.log_probs), atol=1e-6)
            assert sample.finish_reason == "length" and len(sample.tokens) == 9
        assert answer.prompt_log_probs is not None and np.isnan(answer.prompt_log_probs[0])
        expected = exact(server, prompt).numpy()
        assert (
            answer.prompt_log_probs.dtype == np.float32 and np.abs(answer.prompt_log_probs[1:] - expected).max() < 1e-6
        )
        again = await engine.sample(asked(None, prompt, 2, 5, temperature=0.5, top_k=7, top_p=0.9, max_new_tokens=9))
        assert again.samples == answer.samples, "the seed decides"
        read = await engine.sample(asked(None, prompt, 0, prompt_log_probs=True))
        assert read.samples == [] and np.array_equal(read.prompt_log_probs, answer.prompt_log_probs, equal_nan=True)
        top = (await engine.sample(asked(None, prompt, 0, prompt_log_probs=True, prompt_top_k=5))).prompt_top_tokens
        table = torch.stack([next_logits(server.tensors[EMBEDDING], token).log_softmax(-1) for token in prompt[:-1]])
        assert top is not None and np.array_equal(top.tokens, table.topk(5).indices.numpy())
        assert np.abs(top.log_probs - table.topk(5).values.numpy()).max() < 1e-6 and top.log_probs.dtype == np.float32
        alone = (await engine.sample(asked(None, [3], 0, prompt_log_probs=True, prompt_top_k=5))).prompt_top_tokens
        assert alone is not None and alone.tokens.shape == alone.log_probs.shape == (0, 5)
        one = await engine.sample(asked(None, [3], 0, prompt_log_probs=True))
        assert one.prompt_log_probs is not None and np.isnan(one.prompt_log_probs).tolist() == [True]
        greedy = (await engine.sample(asked(None, prompt, 1, greedy=True))).samples[0]
        assert servers.now.asked[-1]["sampling_params"]["temperature"] == 0
        likeliest = int(next_logits(server.tensors[EMBEDDING], prompt[-1]).argmax())
        assert greedy.tokens[0] == likeliest

    lived(life)


def test_samples_end_at_end_tokens_and_where_a_stop_text_is_whole(
    servers: Servers, lived: Lived, example: Path
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        (free,) = (await engine.sample(asked(None, [5, 9], 1, 7, max_new_tokens=30))).samples
        end = free.tokens[4]
        (ended,) = (
            await engine.sample(asked(None, [5, 9], 1, 7, max_new_tokens=30, end_token_ids=frozenset([end])))
        ).samples
        assert ended.tokens == free.tokens[: free.tokens.index(end) + 1] and ended.finish_reason == "stop"
        decode = load_tokenizer(str(example / "model")).decode
        stop = decode(free.tokens[9:11])
        request = asked(None, [5, 9], 1, 7, max_new_tokens=30, stop=(stop,))
        (stopped,) = (await engine.sample(request)).samples
        assert stopped.finish_reason == "stop" and len(stopped.log_probs) == len(stopped.tokens)
        assert stop in decode(stopped.tokens) and stop not in decode(stopped.tokens[:-1])
        # a server that goes on behind it
        servers.now.faults.choice = {
            "token_ids": free.tokens, "finish_reason": "length",
            "logprobs": {"content": [{"token_id": one, "logprob": -1.0} for one in free.tokens]},
        }  # fmt: skip
        (cut,) = (await engine.sample(request)).samples
        assert cut.tokens == stopped.tokens and cut.finish_reason == "stop"
        servers.now.faults.choice["finish_reason"] = "stop"
        with refused(EngineError, "engine", "without an end that was asked for"):
            await engine.sample(asked(None, [5, 9], 1, 7, max_new_tokens=30))

    lived(life)


def test_what_vllm_does_not_do_is_refused_by_name_and_never_sent(servers: Servers, lived: Lived) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        for changes, field in (
            ({"temperature": 0.005}, "temperature"),
            ({"temperature": 2.5}, "temperature"),
            ({"tempered": True}, "tempered"),
            ({"max_new_tokens": 100}, "max_new_tokens"),
            ({"prompt_top_k": 21, "prompt_log_probs": True}, "prompt_top_k"),
            ({"prompt_top_k": 2}, "prompt_top_k"),
        ):
            with refused(BatchError, field):
                await engine.sample(asked(None, [3], 1, **changes))
        for prompt, samples, field in (([320], 1, "prompt"), ([], 1, "prompt"), ([3], 17, "num_samples")):
            with refused(BatchError, field):
                await engine.sample(asked(None, prompt, samples))
        assert servers.now.asked == []

    lived(life)


def test_log_probs_of_prompts_are_refused_where_the_head_may_have_an_adapter(servers: Servers, lived: Lived) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        with refused(BatchError, "prompt_log_probs", "head"):
            await engine.sample(asked(None, [3, 4], 1, prompt_log_probs=True))
        assert len((await engine.sample(asked(None, [3, 4]))).samples) == 1

    for modules in (None, [*BASE_MODULES, "lm_head"]):
        servers.said = {**servers.said, "lora_modules": modules}
        servers.start()
        lived(life)


def test_a_version_that_does_not_fit_is_refused_and_none_gives_way_to_it(
    servers: Servers, lived: Lived, folders: dict[str, Path], tmp_path: Path
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        for name in ("v0", "v1"):
            await engine.load(name, str(folders[name]))
        with refused(ResourceError, "memory_bytes", "room for 2"):
            await engine.load("v2", str(folders["v2"]))
        assert await engine.versions() == ["v0", "v1"] and len(servers.now.adapters) == 3
        await engine.drop("v0")
        with refused(ModelError, "folder"):
            await engine.load("v2", str(tmp_path / "nothing"))
        servers.now.faults.refuses_folders = True
        with refused(ModelError, "folder", "expected target modules"):
            await engine.load("v2", str(folders["v2"]))
        servers.now.faults.refuses_folders = False
        await engine.load("v2", str(folders["v2"]))
        assert await engine.versions() == ["v1", "v2"] and len(servers.now.adapters) == 3

    servers.said = {**servers.said, "max_loras": 3}
    lived(life)


def test_bytes_bound_versions_as_places_do(servers: Servers, lived: Lived, folders: dict[str, Path]) -> None:
    sizes: list[int] = []

    async def learns(engine: VllmSamplingEngine) -> None:
        sizes.append(await engine.load("v0", str(folders["v0"])))

    async def life(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        with refused(ResourceError, "memory_bytes", "room for 1"):
            await engine.load("v1", str(folders["v1"]))

    async def begins(engine: VllmSamplingEngine) -> None:
        with refused(ResourceError, "service.max_version_bytes", sizes[0] - 1):
            await engine.begin()

    lived(learns)
    servers.start()
    lived(life, limits={"memory_bytes": 2 * sizes[0] - 1})
    lived(begins, begins=False, limits={"memory_bytes": sizes[0] - 1})


def test_adapters_of_another_base_rank_or_module_are_refused_before_vllm_reads_them(
    lived: Lived, example: Path, untied_folder: Path, tmp_path: Path
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        for name, how in {"rank": {"rank": 5}, "module": {"targets": ["down_proj"]}}.items():
            folder = random_adapters(example / "model", tmp_path / name, **how)  # type: ignore[arg-type]
            with refused(ModelError, "folder"):
                await engine.load(name, str(folder))
        with refused(ModelError, "folder"):
            await engine.load("untied", str(random_adapters(untied_folder, tmp_path / "untied")))

    lived(life, lora={"rank": 4, "targets": ["attention"]})


def test_a_version_that_is_dropped_while_it_is_sampled_ends_its_requests_alone(
    servers: Servers, lived: Lived, folders: dict[str, Path]
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        servers.now.faults.token_s = 0.02
        ours = asyncio.create_task(engine.sample(asked("v0", [3], 2, max_new_tokens=60)))
        other = asyncio.create_task(engine.sample(asked(None, [3], 1, max_new_tokens=60)))
        while servers.now.running < 3:
            await asyncio.sleep(0.01)
        assert (await engine.stats()).running_rows == 3
        await engine.drop("v0")
        with refused(StateError, "version", "dropped"):
            await ours
        assert len((await other).samples[0].tokens) == 60
        cancelled = asyncio.create_task(engine.sample(asked(None, [3], 2, max_new_tokens=60)))
        while servers.now.running < 2:
            await asyncio.sleep(0.01)
        cancelled.cancel()
        while servers.now.running:
            await asyncio.sleep(0.01)
        assert (await engine.stats()).running_rows == 0 and len(servers.now.aborted) == 4

    lived(life)


def test_an_engine_whose_server_was_killed_raises_the_loss_from_then_on(
    servers: Servers, lived: Lived, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*given: Any) -> ServerClient:
        server = servers.start()
        return ServerClient(server.url, 0, cast(Any, Child(server)))

    monkeypatch.setattr(vllm_sampling_engine, "start_client", started)

    async def life(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        servers.now.faults.token_s = 0.02
        waiting = [asyncio.create_task(engine.sample(asked("v0", [3], 2, max_new_tokens=60))) for _ in range(2)]
        while servers.now.running < 4:
            await asyncio.sleep(0.01)
        servers.now.faults.is_gone = True
        for one in waiting:
            with pytest.raises(WorkerDied, match="killed"):
                await one
        for call in (engine.sample(asked(None, [3])), engine.stats(), engine.load("v1", str(folders["v1"]))):
            with pytest.raises(WorkerDied, match="killed"):
                await call
        assert len(servers.all) == 1  # whoever supervises the engine starts another one

    lived(life, rollout={"engine": "vllm", "engines": 1, "engine_python": "python"})


def test_a_connection_that_is_cut_is_made_again_and_a_server_that_was_started_again_is_a_loss(
    servers: Servers, lived: Lived, folders: dict[str, Path]
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        before = await engine.sample(asked("v0", [3, 4], 2, 7))
        servers.now.faults.cuts = 2
        assert (await engine.sample(asked("v0", [3, 4], 2, 7))).samples == before.samples
        servers.now.faults.cuts = 100
        with refused(WorkerDied, "rollout.engine_urls"):
            await engine.sample(asked("v0", [3, 4], 1, 7))

    async def restarted(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        servers.now.adapters.clear()  # somebody has started it again
        with refused(WorkerDied, "rollout.engine_urls"):
            await engine.sample(asked("v0", [3, 4], 2, 7))

    lived(life)
    lived(restarted)


def test_a_server_that_would_answer_something_else_is_refused_by_the_argument_that_it_lacks(
    servers: Servers, lived: Lived
) -> None:
    usual = servers.said
    for said, words in (
        ({"logprobs_mode": "processed_logprobs"}, "raw_logprobs"),
        ({"max_lora_rank": 1}, "--max-lora-rank 8"),
        ({"max_lora_rank": None}, "no room for adapters"),
        ({"max_loras": 1}, "room for one adapter alone"),
        ({"lora_modules": ["q_proj"]}, "down_proj"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"protocol": 3}, "protocol"),
    ):

        async def life(engine: VllmSamplingEngine, words: str = words) -> None:
            with refused(EngineError, "rollout.engine_urls", words):
                await engine.begin()
            with refused(StateError, "engine", "has not begun"):
                await engine.stats()

        servers.said = {**usual, **said}
        servers.start()
        lived(life, begins=False)


def test_an_engine_that_is_shut_down_answers_everybody_and_leaves_no_copies(
    servers: Servers, lived: Lived, folders: dict[str, Path], tmp_path: Path
) -> None:
    async def life(engine: VllmSamplingEngine) -> None:
        await engine.load("v0", str(folders["v0"]))
        servers.now.faults.token_s = 0.02
        waiting = asyncio.create_task(engine.sample(asked("v0", [3], 1, max_new_tokens=60)))
        while not servers.now.running:
            await asyncio.sleep(0.01)
        await engine.shutdown()
        await engine.shutdown()
        with refused(StateError, "engine", "shut down"):
            await waiting
        for call in (engine.sample(asked(None, [1])), engine.stats(), engine.load("x", "y"), engine.drop("v0")):
            with refused(StateError, "engine", "shut down"):
                await call

    lived(life)
    assert list((tmp_path / "run/service").iterdir()) == []
