"""Streams of samples from several engines at once, which survive the loss of one and the aborting of all."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from actors.cluster.ray_errors import require_cluster
from actors.engines.processes import EngineProcesses, errors_of
from actors.engines.protocol import Request, Sample, check_sample
from actors.fault_tolerance.recovery import LOST
from actors.workers.futures import SLICE_S, meaning_of
from slimefsdp.errors import EngineError, SlimeError, short_repr

_GET_S = 10.0  # for samples that Ray says are here
_LOOK_S = 1.0  # how often engines are looked after, while samples come


class EngineStreams:
    """Asks engines for samples, and takes these as they end.

    Args:
        replace_lost: is told of an engine that was lost while it sampled, by its index, its handle and the error; it
            puts another one in its place, or raises.
    """

    def __init__(self, processes: EngineProcesses, replace_lost: Callable[[int, Any, SlimeError], None]) -> None:
        self._processes, self._replace_lost = processes, replace_lost
        self.aborts = 0  # of all samples, so far

    def stream(self, requests: Sequence[Request], shares: dict[int, list[int]]) -> Iterator[Sample]:
        """Returns the samples of all requests as they end, in no order.

        Args:
            shares: the places of the requests that each engine is asked for, by its index.

        Raises:
            As `EnginePool.generate`.
        """
        engines = list(self._processes.engines)  # as they are before they are asked: another thread may replace one
        streams: dict[Any, tuple[int, str]] = {}  # the engine, and the stream's name there
        given: set[tuple[int, int]] = set()
        try:
            for index, places in shares.items():
                streams |= self._asked(index, [requests[place] for place in places])
            asked = looked = time.monotonic()
            heard = dict.fromkeys(shares, asked)  # when each engine was asked, or last handed samples over
            while streams:
                require_cluster()
                ready, _ = ray.wait(list(streams), num_returns=1, timeout=SLICE_S, fetch_local=False)
                lost: dict[int, SlimeError] = {}
                if not ready or time.monotonic() - looked > _LOOK_S:  # one may hang while others hand over
                    looked = time.monotonic()
                    here, _ = ray.wait(list(streams), num_returns=len(streams), timeout=0, fetch_local=False)
                    quiet = {index: heard[index] for stream, (index, _) in streams.items() if stream not in here}
                    lost = self._processes.found_hanging(quiet, asked) if quiet else {}
                for stream in ready:
                    index, _ = streams[stream]
                    try:
                        samples = _next_item(stream, index)
                    except LOST as error:
                        lost[index] = error
                        continue
                    share = [requests[place] for place in shares[index]]
                    if samples is None:
                        del streams[stream]
                        _require_whole(index, share, shares[index], given)
                        continue
                    heard[index] = time.monotonic()
                    for sample in samples:
                        check_sample(sample, share, self._processes.vocab_size, index)
                        place = shares[index][sample.request]
                        if (place, sample.number) not in given:
                            given.add((place, sample.number))
                            yield replace(sample, request=place)
                for index, loss in lost.items():
                    self._processes.require_running("generate")  # as `shutdown` of another thread loses them
                    self._replace_lost(index, engines[index], loss)
                    engines[index] = self._processes.engines[index]
                    streams = {stream: one for stream, one in streams.items() if one[0] != index}
                    # the whole of what is not complete, since it is drawn as it was; what was given is not given twice
                    # none, where an engine hangs that was asked for nothing
                    places = shares.get(index, [])
                    shares[index] = left = [one for one in places if not is_complete(one, requests[one], given)]
                    if left:
                        streams |= self._asked(index, [requests[place] for place in left])
                    asked = heard[index] = time.monotonic()
        finally:
            for index, name in streams.values():  # what else was asked for is of no use to anybody
                with suppress(RayError):
                    engines[index].end_stream.remote(name)

    def _asked(self, index: int, requests: Sequence[Request]) -> dict[Any, tuple[int, str]]:
        """The stream of what an engine hands over from now on, of these requests, with the engine and its name."""
        while not self._processes.may_ask.wait(SLICE_S):  # an update, which has a deadline
            pass
        name = uuid.uuid4().hex
        return {self._processes.engines[index].stream.remote(name, list(requests)): (index, name)}

    def abort(self) -> None:
        """Has all samples end that are running or wait, as they are.

        Raises:
            WorkerDied, WorkerHung: an engine ended or did not answer; all others have done it.
        """
        self._processes.require_running("abort")
        self.aborts += 1
        began = time.monotonic()
        refs = [engine.abort.options(concurrency_group="control").remote() for engine in self._processes.engines]
        lost: list[SlimeError] = []
        for index, ref in enumerate(refs):
            try:
                with errors_of(index, "abort"):
                    self._processes.wait([ref], "abort", "call_timeout_s", began, first_rank=index)
            except LOST as error:
                lost.append(error)
        if lost:
            raise lost[0]


def _next_item(stream: Any, index: int) -> list[Sample] | None:
    """Returns what an engine hands over next, of a stream that has something; None at its end."""
    try:
        ref = next(stream)
    except StopIteration:
        return None
    with errors_of(index, "generate"):
        try:
            samples: list[Sample] = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            raise meaning_of(error, index, "generate") from error
    if not isinstance(samples, list | tuple):
        problem = f"engine {index} handed over {short_repr(samples)}"
        raise EngineError(problem, field="rollout.engine", hint="yield lists of samples", rank=index)
    return list(samples)


def is_complete(place: int, request: Request, given: Collection[tuple[int, int]]) -> bool:
    """Returns whether all samples of a request are among those given, as (place of the request, number)."""
    return all((place, number) in given for number in range(request.samples))


def _require_whole(index: int, asked: Sequence[Request], places: Sequence[int], given: set[tuple[int, int]]) -> None:
    """
    Raises:
        EngineError: the engine has ended a call without all of its samples, and would do so again.
    """
    wanted = {(place, number) for place, one in zip(places, asked, strict=True) for number in range(one.samples)}
    if missing := wanted - given:
        raise EngineError(
            f"engine {index} ended a call without {len(missing)} of its {len(wanted)} samples",
            field="rollout.engine", hint="have it hand over each sample, aborted ones too", rank=index,
        )  # fmt: skip
