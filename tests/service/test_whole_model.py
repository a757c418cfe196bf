"""A server that trains all weights, in float64 on a rank in one process: its updates are the formulas', and its runs
begin, go on and end where they should, bit for bit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from actors.service import tinker_pb2, wire
from actors.service.catalogue import Catalogue, Saved
from actors.service.datums import LOSSES
from actors.service.service import Service
from actors.service.users import User
from actors.workers.group_calls import GroupCalls, RankRequest
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.results import LogProbs
from slimefsdp.trainer import Trainer
from slimefsdp.training.prepare import BatchPlanner
from tests.support.datums import parts_of, plain, request
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.service import service_tree
from tests.support.tiny_models import plain_model
from tests.support.waiting import wait_until

VOCABULARY = 320
USER = User("", is_operator=True, is_alone=True)
ADAM = {"learning_rate": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1.0}  # so large that an update is smooth in gradients
Weights = dict[str, torch.Tensor]


class Answered:
    """A future that has come."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


class Group(GroupCalls):
    """A trainer of one rank, called as a group is."""

    role = "actor"

    def __init__(self, config: RunConfig) -> None:
        with KeepFloat64():
            self._trainer = Trainer(config, device=torch.device("cpu"))
        folder, cost = self._trainer.folder, self._trainer.policy.attention.cost
        self._planner = BatchPlanner(config, self.role, folder.vocab_size, folder.max_sample_tokens, cost)

    def _start(self, request: RankRequest) -> Answered:
        planning = request.call.planning(self._planner, request.arguments)
        if planning is not None:
            request = request.having(batch=planning())
        with KeepFloat64():  # in whichever thread
            return Answered(getattr(self._trainer, request.name)(**request.arguments))


class Client:
    """What a client asks a service for, with numbers that count up."""

    def __init__(self, service: Service, session: str, number: int = 0) -> None:
        self.service, self.session = service, session
        self.run, self.next = f"{session}:train:{number}", 1

    def _numbered(self, **how: Any) -> dict[str, Any]:
        self.next += 1
        return {"model_id": self.run, "seq_id": self.next - 1, **how}

    def create(self) -> Client:
        body = {"session_id": self.session, "model_seq_id": int(self.run[-1]), "base_model": "tiny/model"}
        body["lora_config"] = {"rank": 0}
        done(self.service.training.create_model(wire.CreateModel(**cast(Any, body)), USER))
        return self

    def create_from(self, path: str, *, optimizer: bool) -> Client:
        body = {"session_id": self.session, "model_seq_id": int(self.run[-1]), "path": path, "optimizer": optimizer}
        done(self.service.training.load_weights(wire.LoadWeights(**cast(Any, body)), USER))
        return self

    def forward_backward(self, *requests: bytes) -> list[Any]:
        return [self._sent(tinker_pb2.ForwardBackwardRequest.FromString(data)) for data in requests]

    def forward(self, data: bytes) -> bytes:
        message = tinker_pb2.ForwardBackwardRequest.FromString(data)
        message.forward_only = True
        return bytes(self._sent(message))

    def _sent(self, message: Any) -> Any:
        numbers = self._numbered()
        message.model_id, message.seq_id = self.run, numbers["seq_id"]
        return done(self.service.forward_backward(message, 0, USER))

    def step(self) -> Any:
        return done(self.service.optim_step(wire.OptimStep(**self._numbered(adam_params=ADAM)), USER))

    def save(self, name: str) -> str:
        return str(
            done(self.service.training.save_weights(wire.SaveWeights(**self._numbered(path=name)), USER))["path"]
        )

    def load(self, path: str, *, optimizer: bool) -> None:
        body = wire.LoadWeights(**self._numbered(path=path, optimizer=optimizer))
        done(self.service.training.load_weights(body, USER))

    def weights(self, name: str) -> Weights:
        """Those that it may sample from."""
        body = wire.SaveForSampler(**self._numbered(path=name))
        saved = self.service.catalogue.get(
            done(self.service.training.save_weights_for_sampler(body, USER))["path"], USER
        )
        return weights_in(self.service.catalogue.folder(saved))


def weights_in(folder: Path) -> Weights:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def done(result: Any) -> Any:
    answer = asyncio.run(result.wait(60.0))
    assert answer is not None and not (isinstance(answer, dict) and "error" in answer), answer
    return answer


def settings(model: Path, folder: Path, **sections: Any) -> RunConfig:
    tree = service_tree(model, folder, precision={"compute_dtype": "float64"}, **sections)
    del tree["lora"]
    tree["service"] = {"model_name": "tiny/model"}
    return config_from_dict(tree)


@contextmanager
def serving(config: RunConfig) -> Iterator[Service]:
    service = Service(config, Group(config), engine=None)
    service.continue_runs()
    yield service
    service.close()


def session(service: Service) -> str:
    return str(cast(Any, service.create_session(wire.CreateSession(), USER))["session_id"])


def end(service: Service, one: Client) -> None:
    asyncio.run(service.end_session(one.session))


def first_updates(rank: int, config: RunConfig, batches: list[list[bytes]]) -> list[Weights]:
    """The weights of runs one after the other, each after one update with its requests."""
    found = []
    with serving(config) as service:
        for requests in batches:
            one = Client(service, session(service)).create()
            one.forward_backward(*requests)
            one.step()
            found.append(one.weights("trained"))
            end(service, one)
    return found


def plain_update(model: Path, data: bytes) -> Weights:
    """The weights of a plain model after torch's AdamW with the formulas' gradients."""
    with KeepFloat64():
        gradients, _, _ = plain(model, data)
    updated = plain_model(model, torch.float64)
    for name, parameter in updated.named_parameters():
        parameter.grad = gradients[name]
    torch.optim.AdamW(
        updated.parameters(), lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
        weight_decay=0.0,
    ).step()  # fmt: skip
    return {name: parameter.detach() for name, parameter in updated.named_parameters()}


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_an_update_by_any_loss_is_the_formulas_whatever_was_trained_before(
    untied: Path, ranks: RankPool, tmp_path: Path
) -> None:
    data = [request(loss, 12, vocabulary=VOCABULARY) for loss in LOSSES]
    batches = [parts_of(one, 5) if number % 2 else [one] for number, one in enumerate(data)]
    found = ranks.run(1, first_updates, settings(untied, tmp_path), batches)[0]
    base = weights_in(untied)
    for ours, one in zip(found, data, strict=True):
        expected = plain_update(untied, one)
        assert largest_difference(ours, expected) <= 1e-12 < 1e-4 < largest_difference(base, expected)


def trained(one: Client, steps: range) -> Client:
    for seed in steps:
        one.forward_backward(request("cross_entropy", 4, seed, VOCABULARY))
        one.step()
    return one


def a_life(rank: int, config: RunConfig) -> dict[str, Any]:
    """Of three runs one after the other, with a state that is resumed by all of them and by one of a later start."""
    found: dict[str, Any] = {}
    again = request("cross_entropy", 3, 9, VOCABULARY)
    with serving(config) as service:
        first = Client(service, session(service)).create()
        found["base"] = first.weights("base")
        trained(first, range(3))
        path = first.save("half")
        found["after 3"], found["after 5"] = first.weights("three"), trained(first, range(3, 5)).weights("five")
        first.load(path, optimizer=True)
        found["loaded, after 5"] = trained(first, range(3, 5)).weights("five-again")
        first.load(path, optimizer=False)
        found["loaded without its optimiser, after 5"] = trained(first, range(3, 5)).weights("five-anew")
        first.forward_backward(again)  # gradients that no later run may have
        end(service, first)

        second = Client(service, session(service)).create()
        found["second, base"], found["second, forward"] = second.weights("base"), second.forward(again)
        found["second, after 5"] = trained(second, range(5)).weights("five")
        end(service, second)

        third = Client(service, session(service)).create_from(path, optimizer=True)
        found["third, after 3"] = third.weights("three")
        found["third, after 4"] = trained(third, range(3, 4)).weights("four")
        kept = third.next
        service.catalogue.remove(path, USER)
    with serving(config) as service:
        (run,) = service.runs.values()
        assert (run.id, run.rank, run.updates) == (third.run, 0, 1)
        third.service, third.next = service, kept
        found["third, started anew, after 5"] = trained(third, range(4, 5)).weights("five")
        end(service, third)
        fourth = Client(service, session(service)).create()
        found["fourth, base"], found["fourth, forward"] = fourth.weights("base"), fourth.forward(again)
    return found


def test_runs_go_on_and_begin_anew_bit_for_bit(untied: Path, ranks: RankPool, tmp_path: Path) -> None:
    config = settings(untied, tmp_path, checkpoint={"interval_steps": 2})
    found = ranks.run(1, a_life, config)[0]
    equal = [
        ("after 3", "third, after 3"),
        *(("after 5", f"{name}after 5") for name in ("loaded, ", "second, ", "third, started anew, ")),
        *(("base", f"{name}, base") for name in ("second", "fourth")),
    ]
    for one, other in equal:
        assert all(torch.equal(found[one][name], found[other][name]) for name in found[one]), other
    stored = weights_in(untied)
    assert all(torch.equal(found["base"][name], stored[name].double()) for name in stored)
    assert largest_difference(found["after 5"], found["loaded without its optimiser, after 5"]) > 1e-4
    assert found["second, forward"] == found["fourth, forward"]
    steps = {step.name for step in (tmp_path / "run" / "checkpoints").glob("step_*")}
    assert len(steps) == config.checkpoint.keep_last
    named = {folder.name for folder in (tmp_path / "run" / "checkpoints" / "named").iterdir()}
    assert "beginning" in named and not [name for name in named if name.startswith("loaded-")]
    assert config.run.dir is not None
    assert {one.path.rpartition("/")[2] for one in Catalogue(config.run.dir).listed(USER)} >= {"base", "three", "five"}


class Recorder(GroupCalls):
    """A group without ranks: what it was asked for, in order; a forward may have to wait."""

    role = "actor"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def _start(self, request: RankRequest) -> Answered:
        self.asked.append(request.name)
        if request.name == "compute_log_probs":
            assert self.may_go_on.wait(60)
            return Answered(LogProbs(*np.zeros((2, 5), np.float32)))  # of two datums, with 1 and 4 tokens
        return Answered(None)


@pytest.fixture
def recorded(untied: Path, tmp_path: Path) -> Iterator[tuple[Service, Recorder]]:
    group = Recorder()
    service = Service(settings(untied, tmp_path), group, engine=None)
    yield service, group
    service.close()


def asked_for(service: Service, **lora: Any) -> wire.CreateModel:
    body = {"session_id": session(service), "model_seq_id": 0, "base_model": "tiny/model", "lora_config": lora}
    return wire.CreateModel(**cast(Any, body))


def test_what_is_no_run_of_all_weights_and_a_second_one_are_refused_by_name(
    recorded: tuple[Service, Recorder],
) -> None:
    service, _ = recorded
    wrong: list[dict[str, Any]] = [{"rank": 4}, {"rank": -1}, {"rank": 0, "train_attn": False}]
    for lora in wrong:
        field = list(lora)[-1]
        with refused(ConfigError, f"lora_config.{field}", lora[field]):
            service.training.create_model(asked_for(service, **lora), USER)
    run = Client(service, session(service)).create().run
    with refused(StateError, "model_seq_id", run):
        service.training.create_model(asked_for(service, rank=0), USER)
    other = User("other", is_operator=False, is_alone=False)
    body = asked_for(service, rank=0).model_copy(
        update={"session_id": cast(Any, service.create_session(wire.CreateSession(), other))["session_id"]}
    )
    with refused(StateError, "model_seq_id", "another user's run") as caught:
        service.training.create_model(body, other)
    assert run not in str(caught.value)
    for kind in ("weights", "sampler_weights"):
        saved = Saved("s:train:0", "s.train.0", kind, "of-adapters", 4, 1.0, 1)
        service.catalogue.folder(saved).mkdir(parents=True)
        service.catalogue.add(saved)
    load = wire.LoadWeights(path="tinker://s:train:0/weights/of-adapters", optimizer=True, model_id=run, seq_id=1)
    with refused(ConfigError, "lora_config.rank", 4):
        service.training.load_weights(load, USER)
    path = "tinker://s:train:0/sampler_weights/of-adapters"
    body = wire.CreateSamplingSession(session_id=session(service), sampling_session_seq_id=0, model_path=path)
    with refused(ConfigError, "lora_config.rank", 4):
        asyncio.run(service.samplers.create_sampling_session(body, USER))


def test_a_run_begins_when_the_one_that_is_ending_has_done_its_last_request(
    recorded: tuple[Service, Recorder],
) -> None:
    service, group = recorded
    assert group.asked == ["save"]  # of the beginning
    first = Client(service, session(service)).create()
    group.may_go_on.clear()
    message = tinker_pb2.ForwardBackwardRequest.FromString(request("cross_entropy", 2))
    message.model_id, message.seq_id, message.forward_only = first.run, 1, True
    last = service.forward_backward(message, 0, USER)
    assert wait_until(lambda: "compute_log_probs" in group.asked)
    end(service, first)
    second = service.training.create_model(asked_for(service, rank=0), USER)
    assert group.asked[-1] == "compute_log_probs" and first.run in service.runs
    group.may_go_on.set()
    assert isinstance(done(last), bytes)
    run = done(second)["model_id"]
    assert group.asked[-3:] == ["load", "save", "finish_save"]
    assert wait_until(lambda: list(service.runs) == [run])
