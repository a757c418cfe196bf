"""One Ray actor: one process, one rank, a Trainer for each role in it. It holds the environment and forwards."""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from typing import Any, NamedTuple

import ray

from actors.workers.group_calls import RankRequest
from actors.workers.watchdog import Watched
from slimefsdp import heartbeat
from slimefsdp.config import RunConfig
from slimefsdp.errors import PeerFailed, ResourceError, SlimeError, portable
from slimefsdp.results import Health
from slimefsdp.rpc import DEFAULT_ADAPTER

EXIT_AFTER_S = 2.0  # long enough for the error to reach the driver


class Loaded(NamedTuple):
    """Describes the model that a rank has loaded."""

    vocab_size: int
    sharding: str  # the level; what `auto` became


class TrainWorker(Watched):
    """A rank. Calls arrive on Ray's threads, so what is per thread or needs torch is set up in `start`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.trainers: dict[str, Any] = {}  # by role: the group's own, and a critic's beside an actor's
        self._configs: dict[str, RunConfig] = {}  # by role, as the group was launched
        self._last_updates: dict[type, Any] = {}  # by transport: the next update takes over its group or buffers
        self._listener: socket.socket | None = None  # of rank 0, until its process group has it
        self._has_aborted = False  # its collectives, or is about to: what they bring may be anything

    def free_address(self) -> tuple[str, int]:
        """Listens on a port of this node until `start`, so that no other process takes it; returns address and port.

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

    def start(self, config: RunConfig, role: str, address: str, port: int) -> Loaded:
        """Joins the process group and loads the model."""
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

    def add_trainer(self, config: RunConfig, role: str) -> Loaded:
        """Loads the model of a role into the process group that there is."""
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
        return Loaded(int(trainer.folder.vocab_size), trainer.config.fsdp.sharding)

    def call(self, request: RankRequest, role: str = "actor") -> Any:
        """Makes a prepared call on the role's Trainer.

        Returns:
            Its result; None on ranks other than 0, unless the call answers by rank.
        """
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
                arguments = {"receivers": self._sent_to(**arguments, role=role)}
            result = getattr(trainer, request.name)(**arguments)
            self._require_peers()
        except Exception as error:
            raise self._failed(error, request.name, trainer.config, role) from None
        return result if request.call.answers_by_rank or self.rank == 0 else None

    def _sent_to(self, receivers: list[Any], drop_failed: bool, role: str) -> list[Any]:
        """Returns what the Trainer of this rank sends weights to: on rank 0 the transport of the settings."""
        if self.rank != 0 or not receivers:
            return []
        return [self._weight_update(receivers, drop_failed, role)]

    def _weight_update(self, receivers: list[Any], drop_failed: bool, role: str) -> Any:
        from actors.workers.transports import transport_to

        trainer = self.trainers[role]
        config = self._configs[role]
        settings = config.rollout
        kind = transport_to(receivers, settings.transport)
        update = kind.from_trainer(
            trainer,
            config,
            receivers,
            before=self._last_updates.get(kind),
            drops=drop_failed,
            checksums=settings.weight_checksums,
        )
        self._last_updates[kind] = update
        return update

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
        """Answers while another call is stuck in a collective: it runs in a group of threads of its own."""
        if role not in self.trainers:
            return Health(self.rank, os.getpid(), 0)
        from slimefsdp.distributed.memory_manager import memory_in_use

        trainer = self.trainers[role]
        return Health(self.rank, os.getpid(), trainer.updates_taken, *memory_in_use(trainer.mesh.device))

    @ray.method(concurrency_group="control")
    def abort_collectives(self) -> None:
        """Aborts collectives that the loss of another rank does not end, and refuses calls from then on."""
        from slimefsdp.distributed import collectives

        if not collectives.needs_abort():
            return
        # before the abort, whose kernels end one by one: the thread of the call goes on with garbage while it works
        self._has_aborted = True
        try:
            collectives.abort_collectives()
        except Exception:  # nobody waits for an answer
            problem = f"rank {self.rank} could not abort its collectives, and may wait in them until they time out"
            print(f"{problem}:\n{traceback.format_exc().rstrip()}", file=sys.stderr, flush=True)

    def _require_peers(self) -> None:
        if self._has_aborted:
            raise PeerFailed(
                "another rank of this group is gone", field="process_group", hint="look at what ended that rank"
            )

    def _failed(self, error: Exception, call: str, config: RunConfig, role: str) -> Exception:
        """Returns the error for the caller; ends this process after an error that its peers cannot know of.

        A typed error was raised by all ranks alike, or before any collective: the group is healthy. A peer in a
        collective lets go when the connections close, and torch keeps them open while anything refers to the process
        group, also after `destroy_process_group`.
        """
        if isinstance(error, SlimeError) and (not self._has_aborted or isinstance(error, PeerFailed)):
            error.call = call
            if error.rank is None:  # else it is agreed on, and says where it happened
                error.rank = self.rank
            return error
        from actors.workers.oom_advice import memory_error
        from slimefsdp.distributed.collectives import is_out_of_memory, lost_a_peer, peer_failed
        from slimefsdp.distributed.mesh import choose_device

        try:
            # a collective that was aborted leaves values that may break anything behind it
            has_lost_a_peer = self._has_aborted or lost_a_peer(error)
            told = peer_failed(error) if has_lost_a_peer else error
            if is_out_of_memory(error) and not has_lost_a_peer:
                folder = self.trainers[role].folder.config if role in self.trainers else None
                told = memory_error(error, config, role, folder, choose_device(config.mesh.device))  # type: ignore[arg-type]
            if isinstance(told, SlimeError):
                told.rank, told.call, told.ends_rank = self.rank, call, not has_lost_a_peer
            told.add_note(f"on rank {self.rank}, in {call}:\n{''.join(traceback.format_exception(error)).rstrip()}")
            return portable(told)
        finally:
            if not has_lost_a_peer:  # once it is worded, which may take longer than to send it
                threading.Timer(EXIT_AFTER_S, os._exit, (1,)).start()
