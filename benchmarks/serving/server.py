"""A server as `slimefsdp serve` starts it, a model for it, and what its processes hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from benchmarks.record import ROOT
from benchmarks.rpc_overhead import cpu_seconds, descendants
from tests.support.process_resources import held_by

KEY = "tml-of-a-benchmark"
NAME = "benchmark/model"
RANK = 8  # of adapters
_START_S, _END_S = 300.0, 120.0


@dataclass(frozen=True)
class Server:
    """Where it is, and its process."""

    url: str
    pid: int
    log: Path  # what it said

    def status(self) -> dict[str, Any]:
        """What its page shows."""
        return dict(requests.get(f"{self.url}/status.json", timeout=60).json())

    def counter(self, name: str) -> float:
        """The sum of a counter for Prometheus over its labels."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        return sum(float(found) for found in re.findall(rf"^slimefsdp_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def processes(self) -> dict[int, str]:
        """Its process and all below by what they are: `server`, `rank`, `engine`, or `ray`."""
        found = {self.pid: "server"}
        for pid in descendants(self.pid):
            with suppress(OSError):
                name = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                found[pid] = "rank" if "TrainWorker" in name else "engine" if "SamplingEngine" in name else "ray"
        return found

    def cpu_seconds(self) -> dict[str, float]:
        """That processes have taken since they began, by what they are; of those that are there."""
        found: dict[str, float] = {}
        for pid, kind in self.processes().items():
            with suppress(OSError):
                found[kind] = found.get(kind, 0.0) + cpu_seconds(pid)
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """Resident bytes, open files and threads by what processes are; what they share counts for each."""
        found: dict[str, dict[str, int]] = {}
        for pid, kind in self.processes().items():
            with suppress(OSError):  # it has ended meanwhile
                for what, value in held_by(pid).items():
                    of_kind = found.setdefault(kind, {})
                    of_kind[what] = of_kind.get(what, 0) + value
        return found


@contextmanager
def serving(tree: dict[str, Any], folder: Path) -> Iterator[Server]:
    """A server of these settings; its processes have ended behind the block.

    Raises:
        RuntimeError: it does not start.
    """
    file, log = folder / "service.yaml", folder / "server.log"
    file.write_text(yaml.safe_dump(tree))
    # no session of its own: the kernel may share out cores by sessions, and others are measured beside it
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.cli", "serve", str(file)], env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=folder, process_group=0, stdout=subprocess.PIPE, stderr=said, text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"serving .+ at (http://\S+)", first)
        if found is None:
            raise RuntimeError(f"the server did not start: {first}{log.read_text()}")
        yield Server(found[1], process.pid, log)
        process.send_signal(signal.SIGTERM)
        process.wait(_END_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def settings(model: Path, folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Of a server on one rank, as a file holds them."""
    tree: dict[str, Any] = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": str(model)},
        "lora": {"rank": RANK, "targets": ["attention", "mlp", "head"]},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "optim": {"lr": 1e-4, "total_updates": 1},
        "checkpoint": {"interval_steps": 20},
        "service": {"address": "127.0.0.1:0", "model_name": NAME},
        "cluster": {"launch_timeout_s": _START_S},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


def write_model(folder: Path, shape: dict[str, int]) -> None:
    """A Qwen3 of random weights whose head is a weight of its own, with the tokenizer of the sort-digits example."""
    import torch
    import transformers

    from scripts.make_sort_digits import tokenizer_of

    tokenizer = tokenizer_of(["sort 0123456789"], r"\d| ?\p{L}+|[^\s\p{L}\p{N}]|\s")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **shape, tie_word_embeddings=False, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.1, dtype="float32",
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
