"""The training runs of a server: how they are made, ended, kept on disk, and continued at the next start."""

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

_MISSING_S = 60.0  # clients send a part of a request again for half a minute before they send the next part


class RunTable:
    """Makes and ends training runs; `by_id` has those that exist.

    Runs are made and ended in threads, since both wait for the group.

    Args:
        sessions: of the service, by id.
        max_runs: that may exist at the same time.
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
        self._not_loaded: set[str] = set()  # runs of earlier starts that have no checkpoint that is whole
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
        """Makes the run of this number in a session, and returns its id and the result of `begin`.

        A request that is sent again gets the run and the result of the first one.

        Args:
            call: the request that asks for the run, by which a repetition is told from a conflict.
            rank: of its adapter; 0: it trains all weights.
            begin: gives the run its weights, and returns the client's answer.

        Raises:
            NotFound: the run has ended.
            StateError: the number is that of another call or of an earlier start, or there is no place beside others.
            ResourceError: there are service.max_runs.
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
            problem = f"there are {len(self.by_id)} training runs, which is service.max_runs"
            raise ResourceError(problem, field="service.max_runs", hint="end one, or raise it")
        running = [run for run in list(self.by_id.values()) if not run.is_ending]
        self._weights.check_free([run.id if run.owner == session.owner else "another user's run" for run in running])

    def unload(self, run: TrainingRun) -> Result:
        """Ends a run at its client's request."""
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
            is_overdue: the client was silent for too long; it may come back for what a start has saved for it.
        """
        for run in [run for run in list(self.by_id.values()) if run.session == session]:
            run.is_ending = True
            self._threads.submit(self._end, run, is_overdue)

    def _end(self, run: TrainingRun, is_overdue: bool = False) -> None:
        run.is_made.wait()
        run.close()
        try:
            self._weights.end(run.id)
        except SlimeError as error:  # it was never made
            print(f"{run.id}: {error.message}", file=sys.stderr, flush=True)
        if not is_overdue:
            self._catalogue.remove_made_at_starts(run.id)
        self._catalogue.forget_run(run.id)
        self.by_id.pop(run.id, None)

    def refuse_behind_lost(self) -> None:
        """Fails requests that wait for lost ones; it is to be called every few seconds."""
        for run in list(self.by_id.values()):
            run.refuse_behind_lost(_MISSING_S)

    def continue_kept(self) -> None:
        """Continues the runs of the last start in the same run.dir, each from its newest whole checkpoint.

        A run without such a checkpoint is given up, which is printed.

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
                run.save()  # a recovery of ranks starts from it; the client may delete the checkpoint with a name
            if not record.is_finished:
                run.resumed_at = save_under_a_name(run, checkpoint, self._catalogue)
                self._catalogue.remove_made_at_starts(run.id, but=run.resumed_at)
            self.by_id[run.id] = run
            self._sessions.setdefault(run.session, Session(run.session, run.owner, record.sdk_version))
            self._keep(run)  # as one that is not finished: requests that come now are not in the checkpoint

    def _keep(self, run: TrainingRun, *, is_finished: bool = False) -> None:
        """Has the next start continue a run.

        Args:
            is_finished: its checkpoint has all that it was asked for.
        """
        session = self._sessions.get(run.session)
        sdk_version = "" if session is None else session.sdk_version
        self._catalogue.keep_run(
            RunRecord(run.id, run.session, run.owner, sdk_version, run.rank, run.user_metadata, is_finished)
        )

    def close(self) -> None:
        """Finishes what the runs were asked for, and saves every run for the next start."""
        self._threads.shutdown()  # waits for runs that are being made or ended
        for run in list(self.by_id.values()):
            run.close(finishes=True)
            try:
                if run.lost is None:
                    run.save()
                self._keep(run, is_finished=run.lost is None and run.resumed_at is None)
            except SlimeError as error:  # the other runs can be kept, and this one as its last checkpoint has it
                print(f"{run.id} is kept without its newest updates: {error}", file=sys.stderr, flush=True)
