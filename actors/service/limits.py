"""How much clients may ask of a service at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds that keep a client's mistakes from taking the whole server.

    They are no settings: the defaults are far above what the public clients send, and far below what a host has. Memory
    for versions of weights, which follows from the model, is `service.max_version_bytes`.
    """

    sessions: int = 64  # clients at the same time; more are told to wait
    runs: int = 32  # training runs at the same time, of all clients
    waiting: int = 4096  # requests without an answer, of one user at most four fifths
    waiting_bytes: int = 2**30  # of these requests, and as many of bodies that are on their way
    body_bytes: int = 64 * 2**20  # of one request, also when it is decompressed
    receive_s: float = 60.0  # for a request's head, and again for its body, from their first byte to the last
    result_bytes: int = 2**30  # of answers that are kept to be fetched again; the oldest ones go first
    result_kept_s: float = 600.0  # how long an answer is kept


LIMITS = ServiceLimits()
