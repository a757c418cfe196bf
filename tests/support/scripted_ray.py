"""Actors that answer as a test's script says, and functions that stand for Ray's waits, on a clock of their own."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.cluster import ray_errors

NEVER = object()
"""The outcome of a call that is not answered."""


class Call:
    """A reference of a call; `outcome` is its answer, its error, or `NEVER`."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome


class Actor:
    """Answers the calls of a name with the outcomes that `script` has for it in order, and any other call with None."""

    def __init__(self, **script: Sequence[Any]) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._script = {name: list(outcomes) for name, outcomes in script.items()}

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Call:
            self.calls.append((name, args))
            outcomes = self._script.get(name)
            return Call(outcomes.pop(0) if outcomes else None)

        return SimpleNamespace(remote=remote)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class ScriptedRay:
    """Stands for the module ray; a wait without an answer moves the clock on and takes no time.

    `actors` are the named ones by (namespace, name); `killed` has what `kill` was called with.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.actors: dict[tuple[str, str], Actor] = {}
        self.killed: list[Any] = []
        self.util = SimpleNamespace(list_named_actors=self._list)

    def _list(self, all_namespaces: bool) -> list[dict[str, str]]:
        return [{"namespace": namespace, "name": name} for namespace, name in self.actors]

    def get_actor(self, name: str, namespace: str) -> Actor:
        if (namespace, name) not in self.actors:
            raise ValueError(name)
        return self.actors[namespace, name]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)

    def monotonic(self) -> float:
        return self.now

    def wait(
        self, calls: Sequence[Call], num_returns: int = 1, timeout: float = 0.0, fetch_local: bool = True
    ) -> tuple[list[Call], list[Call]]:
        ready = [call for call in calls if call.outcome is not NEVER][:num_returns]
        if not ready:
            self.now += timeout
        return ready, [call for call in calls if call not in ready]

    def get(self, call: Call, timeout: float) -> Any:
        if call.outcome is NEVER:
            self.now += timeout
            raise GetTimeoutError("no answer")
        if isinstance(call.outcome, RayError):
            raise call.outcome
        if isinstance(call.outcome, Exception):
            raise RayTaskError("call", repr(call.outcome), call.outcome)
        return call.outcome


def script_ray(
    monkeypatch: pytest.MonkeyPatch,
    waits: Sequence[ModuleType],
    clocks: Sequence[ModuleType] = (),
    scripted: ScriptedRay | None = None,
) -> ScriptedRay:
    """Has modules wait for scripted actors, and modules read the clock that these waits move on."""
    scripted = scripted or ScriptedRay()
    monkeypatch.setattr(ray_errors, "cluster_is_gone", lambda: False)
    for module in waits:
        monkeypatch.setattr(module, "ray", scripted)
    for module in clocks:
        monkeypatch.setattr(module, "time", scripted)
    return scripted
