"""The Ray actor of one rank: a process that forwards calls to the Trainer of each of its roles."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from typing import Any

import ray

from actors.cluster.interfaces import use_interface_of_node
from actors.workers.group_calls import RankRequest
from actors.workers.watchdog import Watched
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import PeerFailed, ResourceError, SlimeError, portable
from slimefsdp.results import Health
from slimefsdp.rpc import DEFAULT_ADAPTER

EXIT_AFTER_S = 2.0  # time until a failed rank ends, in which its error reaches the driver


class TrainWorker(Watched):
    """Runs one rank. Ray runs the constructor and the calls in different threads, so `start` sets up torch."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.trainers: dict[str, Any] = {}  # role -> its Trainer; an actor's rank may also be a rank of the critic
        self._configs: dict[str, RunConfig] = {}  # role -> the settings with which its group was launched
        self._last_updates: dict[type, Any] = {}  # transport -> last update, whose group or buffers the next one uses
        self._listener: socket.socket | None = None  # on rank 0, until the process group uses it
        self._has_aborted = False  # whether collectives were or will now be aborted, so that results are garbage

    def free_address(self) -> tuple[str, int]:
        """Listens on a free port of this node until `start`; returns the node's address and the port.

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
        """Joins the process group and loads the model; returns the level of fsdp.sharding, chosen if it is auto."""
        self.keep_stacks(config.run.dir, f"{role}_rank_{self.rank}")
        import torch

        from slimefsdp.distributed.mesh import choose_device, start_process_group

        use_interface_of_node()
        try:
            device = choose_device(config.mesh.device)
            if device.type == "cpu":
                torch.set_num_threads(1)  # ranks share the machine's cores, for which more threads would contend
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
        """Loads the model of one more role in the joined process group; returns the same as `start`."""
        import torch

        from slimefsdp.distributed.mesh import choose_device
        from slimefsdp.trainer import Trainer

        heartbeat.enter(heartbeat.LAUNCH)
        try:
            device = choose_device(config.mesh.device)
            if device.type == "cuda":
                torch.cuda.set_device(device)  # this is a setting of the current thread
            trainer = Trainer(config, role, device=device)  # type: ignore[arg-type]
        except Exception as error:
            raise self._failed(error, "start", config, role) from None
        self.trainers[role], self._configs[role] = trainer, config
        heartbeat.enter(heartbeat.IDLE)
        level: str = trainer.config.fsdp.sharding
        return level

    def call(self, request: RankRequest, role: str = "actor") -> Any:
        """Runs a call on the role's Trainer; only rank 0 returns the result, unless the call has `answers_by_rank`."""
        import torch

        trainer = self.trainers[role]
        if trainer.mesh.device.type == "cuda":
            torch.cuda.set_device(trainer.mesh.device)  # this is a setting of the current thread
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
        """Returns the receivers for this rank's Trainer: on rank 0, one transport to all `receivers`; else none."""
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
        """Begins a weight update of this reference rank, which is a `slimefsdp.weight_sync.receive.Receiver`."""
        self.trainers["ref"].wake_up(("parameters",))
        self.trainers["ref"].receiver.begin(version, manifest)

    def receive(self, bucket: Any) -> None:
        from actors.workers.weight_update import unpack_bucket

        self.trainers["ref"].receiver.receive(unpack_bucket(bucket))

    def commit(self, version: int) -> None:
        self.trainers["ref"].receiver.commit(version)

    @ray.method(concurrency_group="control")
    def health(self, role: str = "actor") -> Health:
        """Returns the health of a role's Trainer, also while another call is stuck in a collective."""
        health: Health = self.trainers[role].health() if role in self.trainers else Health(self.rank, os.getpid(), 0)
        return health

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> None:
        """Aborts collectives and refuses further calls, if collectives would not end by the loss of a rank alone."""
        from slimefsdp.distributed import collectives

        if not collectives.needs_abort():
            return
        # Set before the abort: as soon as a kernel has ended, the thread of the call continues with garbage.
        self._has_aborted = True
        try:
            collectives.abort_collectives()
        except Exception:  # printed, since no caller waits for an answer
            problem = f"rank {self.rank} could not abort its collectives, and may wait in them until they time out"
            print(f"{problem}:\n{traceback.format_exc().rstrip()}", file=sys.stderr, flush=True)

    def _require_peers(self) -> None:
        if self._has_aborted:
            raise PeerFailed(
                "another rank of this group is gone", field="process_group", hint="look at what ended that rank"
            )

    def _failed(self, error: Exception, call: str, config: RunConfig, role: str) -> Exception:
        """Returns the error for the caller; ends this process after an error that other ranks do not have.

        A typed error is raised by all ranks alike, or before any collective, and leaves the group healthy. After any
        other error, peers may wait for this rank in a collective, until this process ends and closes its connections.
        """
        if isinstance(error, SlimeError) and (not self._has_aborted or isinstance(error, PeerFailed)):
            error.call = call
            if error.rank is None:  # ranks that agree on an error name the rank where it happened
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
            if not has_lost_a_peer:  # the time starts here, since composing the error may take long
                threading.Timer(EXIT_AFTER_S, os._exit, (1,)).start()
