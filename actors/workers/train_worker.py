"""The Ray actor of one rank: a process with a Trainer for each role in it, to which it forwards calls."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from typing import Any

import ray

from actors.workers.group_calls import RankRequest
from actors.workers.watchdog import Watched
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import PeerFailed, ResourceError, SlimeError, portable
from slimefsdp.results import Health
from slimefsdp.rpc import DEFAULT_ADAPTER

EXIT_AFTER_S = 2.0  # long enough for the error to reach the driver


class TrainWorker(Watched):
    """Runs one rank. Calls arrive on threads of Ray, so state of threads and torch is set up in `start`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.trainers: dict[str, Any] = {}  # role -> its Trainer; an actor's process may have the critic's, too
        self._configs: dict[str, RunConfig] = {}  # role -> the settings with which its group was launched
        self._last_updates: dict[type, Any] = {}  # transport -> its last update, whose group or buffers are used again
        self._listener: socket.socket | None = None  # on rank 0, until the process group takes it
        self._has_aborted = False  # collectives were aborted, or are about to be: their results are garbage

    def free_address(self) -> tuple[str, int]:
        """Listens on a free port of this node until `start`; returns its address and the port.

        Raises:
            ResourceError: this node cannot listen at its own address, or has no port left.
        """
        host = ray.util.get_node_ip_address()
        try:
            self._listener = socket.create_server((host, 0), backlog=max(128, self.world_size))
        except OSError as error:
            raise ResourceError(
                f"rank 0 cannot listen at {host}, which is its node's address for Ray: {error.strerror}",
                field="cluster.address",
                hint="start Ray on that node with an address that it has",
            ) from error
        return host, self._listener.getsockname()[1]

    def start(self, config: RunConfig, role: str, address: str, port: int) -> str:
        """Joins the process group and loads the model; returns the level that fsdp.sharding has become."""
        self.keep_stacks(config.run.dir, f"{role}_rank_{self.rank}")
        import torch

        from slimefsdp.distributed.mesh import choose_device, start_process_group

        try:
            device = choose_device(config.mesh.device)
            if device.type == "cpu":
                torch.set_num_threads(1)  # ranks share the cores; threads of their own only contend
            start_process_group(
                device,
                rank=self.rank,
                world_size=self.world_size,
                address=address,
                port=port,
                timeout_s=config.cluster.call_timeout_s,
                listener=self._listener,
            )
        except Exception as error:
            raise self._failed(error, "start", config, role) from None
        return self.add_trainer(config, role)

    def add_trainer(self, config: RunConfig, role: str) -> str:
        """Loads the model of a role as `start` does; the process group exists."""
        import torch

        from slimefsdp.distributed.mesh import choose_device
        from slimefsdp.trainer import Trainer

        heartbeat.enter(heartbeat.LAUNCH)
        try:
            device = choose_device(config.mesh.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # per thread
            trainer = Trainer(config, role, device=device)  # type: ignore[arg-type]
        except Exception as error:
            raise self._failed(error, "start", config, role) from None
        self.trainers[role], self._configs[role] = trainer, config
        heartbeat.enter(heartbeat.IDLE)
        level: str = trainer.config.fsdp.sharding
        return level

    def call(self, request: RankRequest, role: str = "actor") -> Any:
        """Makes a prepared call on the role's Trainer; ranks other than 0 return None, unless it answers by rank."""
        import torch

        trainer = self.trainers[role]
        if trainer.mesh.device.type == "cuda":
            torch.cuda.set_device(trainer.mesh.device)  # per thread
        try:
            self._require_peers()
            if role == "actor" and trainer.config.lora.rank is not None and request.call.adapter == "in_model":
                trainer.use_adapter(request.adapter or DEFAULT_ADAPTER)
            arguments = dict(request.arguments)
            trainer.job = arguments.pop("job", None)
            if isinstance(arguments.get("batch"), ray.ObjectRef):
                timeout_s = trainer.config.collective_timeout_s
                arguments["batch"] = ray.get(arguments["batch"], timeout=timeout_s)
            if request.name == "update_weights":
                arguments = {"receivers": self._receivers(**arguments, role=role)}
            result = getattr(trainer, request.name)(**arguments)
            self._require_peers()
        except Exception as error:
            raise self._failed(error, request.name, trainer.config, role) from None
        return result if request.call.answers_by_rank or self.rank == 0 else None

    def _receivers(self, receivers: list[Any], drop_failed: bool, role: str) -> list[Any]:
        """Returns what this rank's Trainer sends weights to: on rank 0 the transport to all receivers."""
        if self.rank != 0 or not receivers:
            return []
        from actors.workers.transports import transport_to

        config = self._configs[role]
        kind = transport_to(receivers, config.rollout.transport)
        self._last_updates[kind] = kind.from_trainer(
            self.trainers[role],
            config,
            receivers,
            before=self._last_updates.get(kind),
            drops=drop_failed,
            checksums=config.rollout.weight_checksums,
        )
        return [self._last_updates[kind]]

    def begin(self, version: int, manifest: dict[str, tuple[int, ...]]) -> None:
        """Begins a weight update of a reference group, as `slimefsdp.weight_sync.receive.Receiver`."""
        self.trainers["ref"].wake_up(("parameters",))
        self.trainers["ref"].receiver.begin(version, manifest)

    def receive(self, bucket: Any) -> None:
        """Receives a bucket from the object store."""
        from actors.workers.weight_update import unpack_bucket

        self.trainers["ref"].receiver.receive(unpack_bucket(bucket))

    def commit(self, version: int) -> None:
        """Commits a weight update."""
        self.trainers["ref"].receiver.commit(version)

    @ray.method(concurrency_group="control")
    def health(self, role: str = "actor") -> Health:
        """Returns the health of a role's Trainer, also while another call is stuck in a collective."""
        health: Health = self.trainers[role].health() if role in self.trainers else Health(self.rank, os.getpid(), 0)
        return health

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> None:
        """Aborts collectives that do not end by themselves after the loss of a rank, and refuses further calls."""
        from slimefsdp.distributed import collectives

        if not collectives.needs_abort():
            return
        # before the abort: as kernels end one by one, the thread of the call goes on with garbage
        self._has_aborted = True
        try:
            collectives.abort_collectives()
        except Exception:  # no caller waits for an answer
            problem = f"rank {self.rank} could not abort its collectives, and may wait in them until they time out"
            print(f"{problem}:\n{traceback.format_exc().rstrip()}", file=sys.stderr, flush=True)

    def _require_peers(self) -> None:
        if self._has_aborted:
            raise PeerFailed(
                "another rank of this group is gone", field="process_group", hint="look at what ended that rank"
            )

    def _failed(self, error: Exception, call: str, config: RunConfig, role: str) -> Exception:
        """Returns the error for the caller; ends this process after an error that other ranks do not have.

        A typed error was raised by all ranks alike, or before any collective, and the group is healthy. After any other
        error, peers in a collective are freed only when this process closes its connections by ending.
        """
        if isinstance(error, SlimeError) and (not self._has_aborted or isinstance(error, PeerFailed)):
            error.call = call
            if error.rank is None:  # otherwise ranks have agreed on it, and it names the one where it happened
                error.rank = self.rank
            return error
        from actors.workers.oom_advice import memory_error
        from slimefsdp.distributed.collectives import is_out_of_memory, lost_a_peer, peer_failed
        from slimefsdp.distributed.mesh import choose_device

        try:
            # garbage from an aborted collective may raise any error
            has_lost_a_peer = self._has_aborted or lost_a_peer(error)
            reported = peer_failed(error) if has_lost_a_peer else error
            if is_out_of_memory(error) and not has_lost_a_peer:
                folder = self.trainers[role].folder.config if role in self.trainers else None
                reported = memory_error(error, config, role, folder, choose_device(config.mesh.device))  # type: ignore[arg-type]
            if isinstance(reported, SlimeError):
                reported.rank, reported.call, reported.ends_rank = self.rank, call, not has_lost_a_peer
            reported.add_note(f"on rank {self.rank}, in {call}:\n{''.join(traceback.format_exception(error)).rstrip()}")
            return portable(reported)
        finally:
            if not has_lost_a_peer:  # begins now, since composing the error may take long
                threading.Timer(EXIT_AFTER_S, os._exit, (1,)).start()
