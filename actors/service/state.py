"""The state that all parts of a service share: settings, properties of the model, sessions, answers and records."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from actors.engines.dialect import longest_sample
from actors.engines.tokenizer import end_token_ids, load_tokenizer
from actors.service import wire
from actors.service.catalogue import Catalogue
from actors.service.operations import Metrics
from actors.service.results import Answer, Results
from actors.service.users import LIMITS, NotFound, ServiceLimits, Session, User
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, ResourceError
from slimefsdp.models.hf_folder import read_model_folder

SESSION_TIMEOUT_S = 120.0  # after this time without a sign of its client, a session and its runs end
SHOWN = 200  # limit on the characters of an unknown id in an error


class ServiceState:
    """The state that training runs, sampling clients and the HTTP application share.

    Args:
        limits: limits on the requests and objects of clients.
    """

    def __init__(self, config: RunConfig, limits: ServiceLimits = LIMITS) -> None:
        assert config.run.dir is not None
        path = str(config.model.path)
        folder = read_model_folder(Path(path))
        self.config, self.limits = config, limits
        self.model_name = config.service.model_name or path
        self.model_type, self.vocab_size = folder.model_type, folder.vocab_size
        self.tokenizer_id = path  # clients get a path on the server's disk
        self.end_token_ids = frozenset(end_token_ids(path, load_tokenizer(path).eos_token_id))
        self.most_tokens = config.max_pack_tokens  # limit on the tokens of a datum
        self.most_context = longest_sample(config, folder)  # limit on the tokens of a prompt with its response
        self.results = Results(limits.result_kept_s, limits.result_bytes, limits.waiting, limits.waiting_bytes)
        self.catalogue = Catalogue(config.run.dir)
        self.metrics = Metrics()
        self.sessions: dict[str, Session] = {}
        self.is_ending = False
        self.began = time.time()

    def create_session(self, body: wire.CreateSession, user: User) -> Answer:
        """Creates a session for a new client of the user.

        Raises:
            ResourceError: the server has as many sessions as it takes.
        """
        if len(self.sessions) >= self.limits.sessions:
            raise ResourceError(
                f"there are {len(self.sessions)} sessions, as many as this server takes", hint="try again later"
            )
        session = Session(f"session-{uuid.uuid4().hex[:16]}", user.id, body.sdk_version)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id}

    def session(self, key: str, user: User) -> Session:
        """Returns a session, and records that its client is alive.

        Raises:
            NotFound: the user has no session of this id.
        """
        session = self.sessions.get(key)
        if session is None or not user.owns(session.owner):
            raise NotFound(f"session {key[:SHOWN]} has ended", is_gone=True)
        session.seen = time.monotonic()
        return session

    def saw_client_of(self, session: str) -> None:
        """Records that the client of a session is alive, unless the session has ended."""
        if session in self.sessions:
            self.sessions[session].seen = time.monotonic()

    def overdue_sessions(self) -> list[str]:
        """Returns the ids of the sessions whose clients have been silent for `SESSION_TIMEOUT_S`."""
        last = time.monotonic() - SESSION_TIMEOUT_S
        return [session.id for session in self.sessions.values() if session.seen < last]

    def check_base(self, name: str) -> None:
        """Raises a ConfigError unless `name` names the base model of this server."""
        if name not in (self.model_name, str(self.config.model.path)):
            problem = f"base_model={name!r}, and this server has {self.model_name}"
            raise ConfigError(problem, field="base_model", hint="name this model")
