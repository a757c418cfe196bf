"""What an update of an engine's weights takes, by each transport, against one raw copy of the same bytes.

    python benchmarks/weight_updates.py --json benchmarks/results/weight_updates.json

A Trainer of one rank sends its weights to an embedded engine in another process; the raw copy sends as many bytes, in
pieces of a bucket's size, from one array to another one there, and does nothing else: through the object store it is a
put and a copy out of it; by gloo a broadcast into the array; by disk a file that is written, synced and read; by
shared memory a copy in and a copy out. A round takes both by every transport, in an order that turns from round to
round. Where the raw copy ends in the receiver's own memory as an update does only after the engine has loaded it
(broadcast) or checked and loaded it (disk), the engine's own time for that is recorded apart and not counted. The first
update of each transport says what memory it takes beside the model on both sides; later ones find theirs again. The
same is asked of two ranks that hold half of the model each.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402
import torch  # noqa: E402

from actors.cluster.connect import connect, disconnect  # noqa: E402
from actors.engines.embedded import EmbeddedEngine  # noqa: E402
from actors.engines.pool import EnginePool  # noqa: E402
from actors.workers import disk_update  # noqa: E402
from actors.workers.broadcast_update import BroadcastUpdate  # noqa: E402
from actors.workers.disk_update import DiskUpdate  # noqa: E402
from actors.workers.transports import IpcUpdate  # noqa: E402
from actors.workers.watchdog import Watched, remote_class  # noqa: E402
from actors.workers.weight_update import ObjectStoreUpdate, WeightUpdate  # noqa: E402
from actors.workers.worker_group import WorkerGroup  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import RunConfig, config_from_dict  # noqa: E402
from slimefsdp.distributed.mesh import start_process_group  # noqa: E402
from slimefsdp.trainer import Trainer  # noqa: E402
from slimefsdp.weight_sync.broadcast import BroadcastGroup  # noqa: E402
from slimefsdp.weight_sync.buckets import (  # noqa: E402
    OpenedBuffers,
    SharedBuffer,
    packed_bytes,
)
from slimefsdp.weight_sync.send import DEFAULT_BUCKET_BYTES  # noqa: E402

TRANSPORTS = ("object_store", "broadcast", "disk", "ipc")
TIMEOUT_S = 600.0
CPU = torch.device("cpu")


class Measured(Watched):
    """A process whose peak of resident memory can be asked for."""

    def begin_peak(self) -> None:
        self._resident = begin_peak()

    def peak(self) -> int:
        """Bytes above what was resident at `begin_peak`."""
        return resident("VmHWM") - self._resident


class TimedEngine(Measured, EmbeddedEngine):
    """Says how long it took to load what came, and to check a folder."""

    def __init__(self, config: RunConfig, index: int) -> None:
        super().__init__(config, index)
        self._own_s = 0.0
        self._receiver.receive = self._timed(self._receiver.receive)  # type: ignore[method-assign]
        disk_update.checked_weights = self._timed(disk_update.checked_weights)  # type: ignore[assignment]

    def begin_peak(self) -> None:
        """With every page of the model resident: of a file that was mapped, they come when they are first touched."""
        with torch.no_grad():
            for parameter in self._policy.parameters():
                parameter.add_(0)
        super().begin_peak()

    def own_seconds(self) -> float:
        """Since it was asked last."""
        seconds, self._own_s = self._own_s, 0.0
        return seconds

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._own_s += time.perf_counter() - start

        return call


class RawTaker(Measured):
    """Takes plain bytes into an array of its own."""

    def __init__(self, size: int) -> None:
        torch.set_num_threads(1)
        self._own = torch.ones(size, dtype=torch.uint8)
        self._group: BroadcastGroup | None = None
        self._buffers = OpenedBuffers()

    def join(self, port: int) -> None:
        self._group = BroadcastGroup("127.0.0.1", port, 1, 2, "gloo", TIMEOUT_S)

    def by_object_store(self, start: int, data: Any) -> None:
        self._own[start : start + len(data)].copy_(torch.from_numpy(data))

    def by_broadcast(self, start: int, count: int) -> None:
        assert self._group is not None
        self._group.broadcast(self._own[start : start + count])

    def by_disk(self, start: int, path: str) -> None:
        with Path(path).open("rb", buffering=0) as file:
            view = memoryview(self._own[start:].numpy())
            while count := file.readinto(view):  # type: ignore[attr-defined]
                view = view[count:]

    def by_ipc(self, start: int, count: int, handle: Any) -> None:
        self._own[start : start + count].copy_(self._buffers.get(handle)[:count])


class RawSender:
    """The other end: an array, and what it takes to hand it over in pieces."""

    def __init__(self, size: int, piece: int, folder: Path) -> None:
        self._own = torch.ones(size, dtype=torch.uint8)
        self._pieces = [(start, min(piece, size - start)) for start in range(0, size, piece)]
        self._folder = folder
        self._taker = remote_class(RawTaker).options(num_cpus=0).remote(size)
        self._buffer = SharedBuffer(min(piece, size), CPU)
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        joined = self._taker.join.remote(port)
        self._group = BroadcastGroup("127.0.0.1", port, 0, 2, "gloo", TIMEOUT_S, listener=listener)
        ray.get(joined, timeout=TIMEOUT_S)

    def copy(self, transport: str) -> float:
        """Seconds."""
        start = time.perf_counter()
        for begin, count in self._pieces:
            getattr(self, f"_by_{transport}")(begin, self._own[begin : begin + count])
        return time.perf_counter() - start

    def _by_object_store(self, begin: int, data: torch.Tensor) -> None:
        ray.get(self._taker.by_object_store.remote(begin, ray.put(data.numpy())), timeout=TIMEOUT_S)

    def _by_broadcast(self, begin: int, data: torch.Tensor) -> None:
        taken = self._taker.by_broadcast.remote(begin, len(data))
        self._group.broadcast(data)
        ray.get(taken, timeout=TIMEOUT_S)

    def _by_disk(self, begin: int, data: torch.Tensor) -> None:
        path = self._folder / "raw"
        with path.open("wb", buffering=0) as file:
            view = memoryview(data.numpy())
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        ray.get(self._taker.by_disk.remote(begin, str(path)), timeout=TIMEOUT_S)
        path.unlink()

    def _by_ipc(self, begin: int, data: torch.Tensor) -> None:
        self._buffer.data[: len(data)].copy_(data)
        ray.get(self._taker.by_ipc.remote(begin, len(data), self._buffer.handle), timeout=TIMEOUT_S)


class Updates:
    """Updates of one engine by every transport."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self._folder = folder
        self.trainer = Trainer(config, device=CPU)
        self.engine = remote_class(TimedEngine).options(num_cpus=0).remote(config, 0)
        self._before: dict[str, Any] = {"broadcast": None, "ipc": None}
        self.sent_bytes: dict[str, int] = {}

    def update(self, transport: str) -> dict[str, float]:
        """Seconds of one, and of it those that the engine took for itself."""
        ray.get(self.engine.own_seconds.remote(), timeout=TIMEOUT_S)
        receiver = self._receiver(transport)
        start = time.perf_counter()
        self.trainer.update_weights([receiver])
        seconds = time.perf_counter() - start
        if transport in self._before:
            self._before[transport] = receiver
        if transport == "disk":
            (path,) = self._folder.iterdir()
            self.sent_bytes["disk"] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return {"update_s": seconds, "engine_s": ray.get(self.engine.own_seconds.remote(), timeout=TIMEOUT_S)}

    def memory(self, transport: str) -> dict[str, int]:
        """Peaks of a first update above what was resident, in bytes."""
        ray.get(self.engine.begin_peak.remote(), timeout=TIMEOUT_S)
        before = begin_peak()
        self.update(transport)
        return {
            "rank_0_bytes": resident("VmHWM") - before,
            "engine_bytes": ray.get(self.engine.peak.remote(), timeout=TIMEOUT_S),
        }

    def _receiver(self, transport: str) -> WeightUpdate:
        if transport == "disk":
            source = self.trainer.folder
            return DiskUpdate([self.engine], TIMEOUT_S, folder=self._folder, source=source, dtype=torch.float32)
        self.sent_bytes[transport] = 0
        counted = self._counted(
            {"object_store": ObjectStoreUpdate, "broadcast": BroadcastUpdate, "ipc": IpcUpdate}[transport], transport
        )
        if transport == "object_store":
            return counted([self.engine], TIMEOUT_S)
        how = {"address": "127.0.0.1"} if transport == "broadcast" else {}
        return counted([self.engine], TIMEOUT_S, device=CPU, before=self._before[transport], **how)

    def _counted(self, kind: Any, transport: str) -> Any:
        sent = self.sent_bytes

        class Counted(kind):  # type: ignore[misc]
            def _prepared(self, bucket: Any) -> Any:
                ready = super()._prepared(bucket)
                layout = [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in bucket]
                exact = sum(one.nbytes for _, one in bucket)
                sent[transport] += exact if transport == "object_store" else packed_bytes(layout)
                return ready

        return Counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        save_model(path, args.hidden, args.layers)
        results = measured(path, args.rounds)
    for transport, found in results["transports"].items():
        print(
            f"{transport}: update {found['update_s']:.3f} s (engine's own {found['engine_s']:.3f}), raw copy "
            f"{found['raw_s']:.3f} s: {found['share']:.0%} of its speed; bytes {found['bytes_over_model']:+.2%}; peak "
            f"{found['rank_0_buckets']:.2f} and {found['engine_buckets']:.2f} buckets, of two ranks "
            + " and ".join(f"{peak:.2f}" for peak in found["two_ranks_buckets"])
        )
    what = "an update of an embedded engine's weights against a raw copy of as many bytes"
    write_record(args.json, what, 1, results)


def measured(path: Path, rounds: int) -> dict[str, Any]:
    """All results."""
    config = settings(path)
    connect(config)
    torch.set_num_threads(1)
    listener = socket.create_server(("127.0.0.1", 0))
    start_process_group(
        CPU, rank=0, world_size=1, address="127.0.0.1", port=listener.getsockname()[1], timeout_s=TIMEOUT_S,
        listener=listener,
    )  # fmt: skip
    try:
        (path / "weights").mkdir()
        updates = Updates(config, path / "weights")
        model_bytes = sum(one.numel() * 4 for _, one in updates.trainer.policy.named_weights())
        bucket = min(DEFAULT_BUCKET_BYTES, model_bytes)
        memory = {transport: updates.memory(transport) for transport in TRANSPORTS}
        raw = RawSender(model_bytes, bucket, path)
        found: list[dict[str, dict[str, float]]] = []
        for number in range(rounds + 1):  # one warms up
            order = TRANSPORTS[number % 4 :] + TRANSPORTS[: number % 4]
            one: dict[str, dict[str, float]] = {}
            for transport in order:
                turns: list[Callable[[], dict[str, float]]] = [
                    lambda transport=transport: updates.update(transport),  # type: ignore[misc]
                    lambda transport=transport: {"raw_s": raw.copy(transport)},  # type: ignore[misc]
                ]
                first, second = turns if number % 2 else turns[::-1]
                one[transport] = first() | second()
            found.append(one)
        of_two = peaks_of_two_ranks(path)
    finally:
        disconnect()
    summaries = {
        transport: summary(transport, [one[transport] for one in found[1:]])
        | {
            "bytes_over_model": updates.sent_bytes[transport] / model_bytes - 1,
            "rank_0_buckets": memory[transport]["rank_0_bytes"] / bucket,
            "engine_buckets": memory[transport]["engine_bytes"] / bucket,
            "two_ranks_buckets": [peak / bucket for peak in of_two[transport]],
        }
        for transport in TRANSPORTS
    }
    rounded = [{t: {k: round(v, 4) for k, v in values.items()} for t, values in one.items()} for one in found[1:]]
    return {"model_bytes": model_bytes, "bucket_bytes": bucket, "transports": summaries, "rounds": rounded}


def peaks_of_two_ranks(path: Path) -> dict[str, list[int]]:
    """By transport, what the first update takes of memory on each of two ranks that share the model, in bytes."""
    found = {}
    for transport in TRANSPORTS:
        config = settings(
            path, mesh={"device": "cpu", "dp": 2}, rollout={"engines": 1, "weight_transport": transport},
            run={"dir": str(path / f"run_{transport}")},
        )  # fmt: skip
        group = WorkerGroup.launch(config)
        try:
            engines = EnginePool.launch(config)
            try:
                before = of_ranks(group, begin_peak)
                engines.update_from(group)
                peaks = of_ranks(group, lambda: resident("VmHWM"))
            finally:
                engines.shutdown()
        finally:
            group.shutdown()
        found[transport] = [peak - held for peak, held in zip(peaks, before, strict=True)]
    return found


def of_ranks(group: WorkerGroup, function: Callable[[], int]) -> list[int]:
    answers: list[int] = ray.get(
        [actor.__ray_call__.remote(lambda _: function()) for actor in group.receivers], timeout=TIMEOUT_S
    )
    return answers


def settings(path: Path, **sections: Any) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(path / "model")},
            "mesh": {"device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "optim": {"total_updates": 1},
            **sections,
        }
    )


def summary(transport: str, rounds: list[dict[str, float]]) -> dict[str, float]:
    """Medians; what slows the machine meets both parts of a round, so the share is that inside one."""
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    is_apart = transport in ("broadcast", "disk")
    shares = [one["raw_s"] / (one["update_s"] - (one["engine_s"] if is_apart else 0.0)) for one in rounds]
    return {**medians, "share": statistics.median(shares)}


def save_model(path: Path, hidden: int, layers: int) -> None:
    """Random weights in the shape of Qwen3, with the tokenizer of the sort-digits example."""
    import transformers

    spec = importlib.util.spec_from_file_location("make_sort_digits", ROOT / "scripts" / "make_sort_digits.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_sort_digits(path)
    config = transformers.AutoConfig.from_pretrained(path / "model")
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    kinds = ["full_attention"] * layers
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    whole = transformers.Qwen3Config(**{**config.to_dict(), **sizes, **heads, "layer_types": kinds})
    tokenizer = transformers.AutoTokenizer.from_pretrained(path / "model")
    shutil.rmtree(path / "model")
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(whole).save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")


def begin_peak() -> int:
    """What is resident, in bytes, from which `resident("VmHWM")` counts."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
