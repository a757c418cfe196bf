"""Manages the training runs of a server: makes and ends them, records them, and continues them at the next start."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actors.service.catalogue import Catalogue, RunRecord
from actors.service.results import Answer, Result, Results
from actors.service.run_weights import RunWeights
from actors.service.saving import load_newest, save_under_a_name
from actors.service.sessions import Made, NotFound, Session
from actors.service.training_runs import TrainingRun, require_same_kind
from slimefsdp.errors import ResourceError, SlimeError, StateError

_MISSING_S = 60.0  # clients repeat a part of a request for half a minute before they send the next part


class RunTable:
    """Makes and ends training runs; `by_id` has the existing ones.

    Runs are made and ended in threads, since both wait for the group.

    Args:
        sessions: the sessions of the service by id.
        max_runs: limit on the number of runs that exist at the same time.
    """

    def __init__(
        self,
        weights: RunWeights,
        results: Results,
        catalogue: Catalogue,
        sessions: dict[str, Session],
        max_runs: int,
    ) -> None:
        self.by_id: dict[str, TrainingRun] = {}
        self._weights, self._results, self._catalogue = weights, results, catalogue
        self._sessions, self._max_runs = sessions, max_runs
        self._not_loaded: set[str] = set()  # runs of earlier starts without a valid checkpoint
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="making-runs")
        self._lock = threading.Lock()

    def make(
        self,
        call: str,
        session: Session,
        number: int,
        rank: int,
        user_metadata: dict[str, Any] | None,
        begin: Callable[[TrainingRun], Answer],
    ) -> tuple[str, Result]:
        """Makes the run with this number in a session; returns its id and the pending result of `begin`.

        A repeated request gets the run and the result of the first one.

        Args:
            call: the name of the request, which tells a repetition from a conflict.
            rank: the rank of the run's adapter; 0: it trains all weights.
            begin: gives the run its weights, and returns the client's answer.

        Raises:
            NotFound: the run has ended.
            StateError: the number was used by another call or by an earlier start, or other runs leave no place.
            ResourceError: there are as many as there may be.
        """
        run_id = f"{session.id}:train:{number}"
        with self._lock:
            if (known := session.made.get(number)) is not None:
                require_same_kind("model_seq_id", number, known.by, call)
                if known.run.is_ending:
                    raise NotFound(f"{run_id} has ended", is_gone=True)
                return run_id, known.result
            self._check_room(run_id, session)
            result = self._results.new(session.owner)
            calls = self._weights.calls(run_id)
            run = TrainingRun(run_id, session.id, session.owner, rank, calls, self._results, user_metadata or {})
            self.by_id[run_id], session.made[number] = run, Made(call, run, result)

        def work() -> None:
            try:
                answer = begin(run)
                self._keep(run)
            except Exception as error:
                run.is_made.set()
                self._end(run)
                result.fail(error)
                return
            run.is_made.set()
            result.set(answer)

        self._threads.submit(work)
        return run_id, result

    def _check_room(self, run_id: str, session: Session) -> None:
        if run_id in self.by_id:
            problem = f"{run_id} goes on since before the server was started anew"
            raise StateError(problem, field="model_seq_id", hint="go on with it, or give another number")
        if run_id in self._not_loaded:
            problem = f"{run_id} is of before the server was started anew, which could not load its checkpoints"
            raise StateError(problem, field="model_seq_id", hint="give another number")
        if len(self.by_id) >= self._max_runs:
            problem = f"there are {len(self.by_id)} training runs, as many as this server takes"
            raise ResourceError(problem, hint="end one")
        running = [run for run in list(self.by_id.values()) if not run.is_ending]
        self._weights.check_free([run.id if run.owner == session.owner else "another user's run" for run in running])

    def unload(self, run: TrainingRun) -> Result:
        """Ends a run at the request of its client."""
        result = self._results.new(run.owner, is_needed=True)
        run.is_ending = True

        def work() -> None:
            self._end(run)
            result.set({"type": "unload_model", "model_id": run.id})

        self._threads.submit(work)
        return result

    def end_session(self, session: str, *, is_overdue: bool) -> None:
        """Ends the runs of a session.

        Args:
            is_overdue: whether the client was silent for too long. It may come back, so the checkpoints that a start
                saved for its runs are kept.
        """
        for run in [run for run in list(self.by_id.values()) if run.session == session]:
            run.is_ending = True
            self._threads.submit(self._end, run, is_overdue)

    def _end(self, run: TrainingRun, is_overdue: bool = False) -> None:
        run.is_made.wait()
        run.close()
        try:
            self._weights.end(run.id)
        except SlimeError as error:  # the run was never made
            print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
        if not is_overdue:
            self._catalogue.remove_made_at_starts(run.id)
        self._catalogue.forget_run(run.id)
        self.by_id.pop(run.id, None)

    def refuse_behind_lost(self) -> None:
        """Fails requests that wait for lost requests; it is to be called every few seconds."""
        for run in list(self.by_id.values()):
            run.refuse_behind_lost(_MISSING_S)

    def continue_kept(self) -> None:
        """Continues the runs of the last start in the same run.dir, each from its newest valid checkpoint.

        A run without such a checkpoint is given up, with a message on stderr.

        Raises:
            SlimeError: a run does not fit the settings of this server.
        """
        self._catalogue.remove_unknown()
        for record in self._catalogue.kept_runs():
            self._weights.check_rank(record.rank)
            checkpoints = self._catalogue.checkpoints_of(record.run, record.rank)
            if not checkpoints:
                print(f"{record.run} had no checkpoint, and is gone", file=sys.stderr, flush=True)
                self._catalogue.forget_run(record.run)
                continue
            self._weights.reopen(record.run, record.rank)
            calls = self._weights.calls(record.run)
            run = TrainingRun(
                record.run, record.session, record.owner, record.rank, calls, self._results, record.user_metadata
            )
            checkpoint = load_newest(run, checkpoints)
            if checkpoint is None:
                self._weights.end(record.run)
                self._not_loaded.add(run.id)
                continue
            run.resume(checkpoint.progress)
            run.is_made.set()
            if checkpoint.name is not None:
                run.save()  # for recoveries of ranks, since the client may delete the checkpoint with a name
            if not record.is_finished:
                run.resumed_at = save_under_a_name(run, checkpoint, self._catalogue)
                self._catalogue.remove_made_at_starts(run.id, but=run.resumed_at)
            self.by_id[run.id] = run
            self._sessions.setdefault(run.session, Session(run.session, run.owner, record.sdk_version))
            self._keep(run)  # not as finished, since requests that come from now on are not in the checkpoint

    def _keep(self, run: TrainingRun, *, is_finished: bool = False) -> None:
        """Records a run, so that the next start continues it.

        Args:
            is_finished: whether its checkpoint covers all of its requests.
        """
        session = self._sessions.get(run.session)
        sdk_version = "" if session is None else session.sdk_version
        self._catalogue.keep_run(
            RunRecord(run.id, run.session, run.owner, sdk_version, run.rank, run.user_metadata, is_finished)
        )

    def close(self) -> None:
        """Finishes the requests of all runs, and saves every run for the next start."""
        self._threads.shutdown()  # waits for runs that are being made or ended
        for run in list(self.by_id.values()):
            run.close(finishes=True)
            try:
                if run.lost is None:
                    run.save()
                self._keep(run, is_finished=run.lost is None and run.resumed_at is None)
            except SlimeError as error:  # other runs are still saved, and this one goes back to its last checkpoint
                print(f"{run.id} is kept without its newest updates: {error}", file=sys.stderr, flush=True)
