"""A Trainer on one device: first ratio, KL, repeatability, sleep, host syncs, FSDP's modes, compiling, optimisers.

    python benchmarks/gpu/trainer.py --json trainer.json
    python benchmarks/gpu/trainer.py --only 'modes/*' compile
    python benchmarks/gpu/trainer.py --device cpu

Needs torch, transformers and pydantic: no Ray, no download. The model is a Qwen3 of random weights: on CUDA of 0.6B's
shapes with 8 layers, in bfloat16 (weights are drawn on the host, which takes longest), on a CPU tiny, in float32. Each
check prints PASS, FAIL or SKIP with its figures; the exit status is 1 if any failed. Whatever follows `determinism` is
computed under run.deterministic, which a process keeps for good.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before run.deterministic can set it here
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check, Finding
from benchmarks.sleep_wake import plain_copies
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.trainer import Trainer
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest

COMMON = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True,
          "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
          "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "recompute_full": {"model": {"activation_checkpointing": "full"}},
    "recompute_selective": {"model": {"activation_checkpointing": "selective"}},
    "recompute_offload": {"model": {"activation_checkpointing": "offload"}},
    "cpu_offload": {"fsdp": {"cpu_offload": True}},
    "optimizer": {"fsdp": {"sharding": "optimizer"}},
    "replicate": {"fsdp": {"sharding": "replicate"}},
}
UPDATES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optim": {"name": "muon"}},
    "bfloat16_moments": {"optim": {"state_dtype": "bfloat16"}},
    "8bit_moments": {"optim": {"state_dtype": "8bit"}},
    "lora": {"lora": {"rank": 16}},
}
STEPS, SLEEPS = 3, 3
MOST_BYTES_ASLEEP = 1.5e9  # of the whole process on the GPU: CUDA's own, and NCCL's


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    assert __doc__ is not None
    with tempfile.TemporaryDirectory() as folder:
        return checks.main(__doc__, partial(checks_of, Path(folder)), arguments)


def checks_of(folder: Path, device: torch.device) -> list[Check]:
    """Every check on this device, in an order that matters: once deterministic, a process stays so.

    Args:
        folder: empty; the model's configuration is written there.
    """
    start_process_group_from_environment(device, timeout_s=120)
    bench = TrainerBench(folder, device)
    return [
        Check("train_step", bench.train_step),
        Check("first_ratio", bench.first_ratio),
        Check("reference_kl", bench.reference_kl),
        Check("host_syncs", bench.host_syncs, needs_cuda=True),
        Check("weights_out", bench.weights_out),
        Check("determinism", bench.determinism),
        Check("sleep", bench.sleep),
        *[Check(f"modes/{name}", partial(bench.mode, settings)) for name, settings in MODES.items()],
        Check("compile", bench.compile),
        *[Check(f"updates/{name}", partial(bench.update, settings)) for name, settings in UPDATES.items()],
    ]


@dataclass(frozen=True)
class Size:
    """A model's dimensions, and those of the batches that it is trained on."""

    model: dict[str, int]
    sample_tokens: int  # most
    prompt_tokens: int
    group: int  # samples that share a prompt


SIZES = {
    "cuda": Size(
        {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 3072, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        sample_tokens=600, prompt_tokens=300, group=8,
    ),
    "cpu": Size(
        {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
        sample_tokens=24, prompt_tokens=12, group=4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Train steps from one start."""

    metrics: tuple[dict[str, float], ...]
    digest: str  # of the weights after them

    @property
    def losses(self) -> list[str]:
        """To the bit."""
        return [metrics["loss"].hex() for metrics in self.metrics]

    def equals(self, other: Run) -> bool:
        """Whether losses and weights are the same to the bit."""
        return self.losses == other.losses and self.digest == other.digest


class TrainerBench:
    """The checks of one device; runs that several need are made once."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._size = SIZES[device.type]
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        (folder / "config.json").write_text(json.dumps(COMMON | self._size.model))

    def trainer(self, **sections: dict[str, Any]) -> Trainer:
        """A new one, with these settings on top of the ones that all have."""
        settings: dict[str, dict[str, Any]] = {
            "model": {"path": str(self._folder), "init": "random"},
            "mesh": {"dp": "auto", "device": self._device.type},
            "precision": {"compute_dtype": str(self._dtype).removeprefix("torch.")},
            "loss": {"kl_coefficient": 0.1, "old_log_probs": "recompute"},
            "optim": {"lr": 1e-5, "total_updates": 100},
            "batch": {"max_tokens_per_rank": 4 * self._size.sample_tokens},
        }
        for section, values in sections.items():
            settings[section] = settings.get(section, {}) | values
        return Trainer(config_from_dict(settings), device=self._device)

    def batch(self, seed: int, groups: int = 3) -> RolloutBatch:
        """Groups of samples with a common prompt, random tokens, lengths and rewards."""
        size, rng = self._size, np.random.default_rng(seed)
        most = size.sample_tokens - size.prompt_tokens
        samples = []
        for group in range(groups):
            prompt = rng.integers(3, size.model["vocab_size"], size.prompt_tokens)
            for response_length in rng.integers(most // 2, most, size.group).tolist():
                response = rng.integers(3, size.model["vocab_size"], response_length)
                samples.append(
                    {
                        "tokens": np.concatenate([prompt, response]),
                        "response_length": response_length,
                        "reward": float(rng.random()),
                        "group_id": group,
                    }
                )
        return RolloutBatch.from_samples(samples)

    def run(self, **sections: dict[str, Any]) -> Run:
        """A new Trainer's first steps."""
        return self._steps_of(self.trainer(**sections))

    def _steps_of(self, trainer: Trainer) -> Run:
        metrics = tuple(trainer.train_step(self.batch(seed)) for seed in range(STEPS))
        return Run(metrics, digest_of(trainer.policy.parameters()))

    @cached_property
    def plain(self) -> Run:
        """With the settings that all have."""
        return self.run()

    @cached_property
    def deterministic(self) -> Run:
        """The same under run.deterministic."""
        return self.run(run={"deterministic": True})

    def difference(self, one: Run, other: Run) -> dict[str, float]:
        """How far losses, and gradient norms relative to themselves, are apart at most."""
        pairs = list(zip(one.metrics, other.metrics, strict=True))
        return {
            "loss": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
            "grad_norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs),
        }

    # ------------------------------------------------------------------ one step

    def train_step(self) -> Finding:
        """Losses and gradient norms are finite, no update is skipped, and how fast the last step was."""
        found = self.plain.metrics
        is_right = all(
            math.isfinite(step["loss"]) and 0 < step["grad_norm"] < math.inf and not step["skipped_update"]
            for step in found
        )
        rates = ("train_seconds", "tokens_per_second", "tflops_per_rank", "mfu")
        shown = {name: found[-1][name] for name in rates if name in found[-1]}
        return is_right, {"loss": found[-1]["loss"], "grad_norm": found[-1]["grad_norm"], **shown}

    def first_ratio(self) -> Finding:
        """The policy's log-probs are the same without gradients and with them: the first ratio is exactly 1."""
        deviation = self.plain.metrics[0]["ratio_deviation_max"]
        return deviation == 0, {"ratio_deviation_max": deviation}

    def reference_kl(self) -> Finding:
        """The KL to the reference is exactly 0 while both have the same weights, and not when the policy has moved."""
        first, *_, last = (step["kl_ref"] for step in self.plain.metrics)
        return first == 0 and last != 0, {"first_step": first, "last_step": last}

    def host_syncs(self) -> Finding:
        """A step waits for the device as often with twice the micro-batches: never for a micro-batch."""
        trainer = self.trainer()
        trainer.train_step(self.batch(0, groups=6))  # allocates and compiles
        once, places = syncs_in(trainer, self.batch(1, groups=3))
        twice, more_places = syncs_in(trainer, self.batch(2, groups=6))
        figures = {"of_3_groups": once, "of_6_groups": twice, "places": sorted(places | more_places)}
        return once == twice, figures

    def weights_out(self) -> Finding:
        """What a rollout engine would receive: every weight in the compute dtype, on the host."""
        trainer = self.trainer()
        trainer.train_step(self.batch(0))
        expected = {name: local_of(weight).to(self._dtype).cpu() for name, weight in trainer.policy.named_weights()}
        receiver = WeightSink(expected)
        report = trainer.update_weights([receiver])
        is_right = receiver.missing == set() and receiver.is_equal and report.bytes == receiver.received_bytes
        return is_right, {"gb": report.bytes / 1e9, "gb_per_s": report.bytes / report.seconds / 1e9}

    # ------------------------------------------------------------------ bits

    def determinism(self) -> Finding:
        """Under run.deterministic two runs are the same to the bit; whether they are without it is reported."""
        repeats_without = self.plain.equals(self.run())
        repeats = self.deterministic.equals(self.run(run={"deterministic": True}))
        return repeats, {"repeats": repeats, "repeats_without": repeats_without}

    def sleep(self) -> Finding:
        """A Trainer that slept goes on to the bit; asleep it leaves the device to others."""
        expected = self.deterministic.losses
        trainer = self.trainer(run={"deterministic": True})
        losses = [trainer.train_step(self.batch(seed))["loss"].hex() for seed in range(STEPS - 1)]
        trainer.wake_up()
        gc.collect()  # what is left of other Trainers, in cycles
        before = digest_of(state_of(trainer))
        for _ in range(SLEEPS):
            asleep = trainer.sleep()
            memory = trainer.memory()
            left = memory.parameters + memory.optimizer + memory.reference
            used = device_bytes_used(self._device)
            awake = trainer.wake_up()
        copies = self._copies(asleep.device_bytes_before)
        is_equal = digest_of(state_of(trainer)) == before
        losses.append(trainer.train_step(self.batch(STEPS - 1))["loss"].hex())
        whole = trainer.compute_log_probs(self.batch(STEPS)).log_probs
        trainer.sleep(("optimizer",))
        is_like_whole = np.array_equal(trainer.compute_log_probs(self.batch(STEPS)).log_probs, whole)
        is_right = is_equal and losses == expected and is_like_whole and left == 0 and used < MOST_BYTES_ASLEEP
        return is_right, {
            "state_equal": is_equal,
            "losses_equal": losses == expected,
            "log_probs_equal_without_optimizer": is_like_whole,
            "gb": asleep.device_bytes_before / 1e9,
            "sleep_gb_per_s": asleep.bytes_per_s / 1e9,
            "wake_up_gb_per_s": awake.bytes_per_s / 1e9,
            "of_a_pinned_copy": asleep.bytes_per_s / copies["copy to the host"],
            "of_a_pinned_copy_into_new_memory": awake.bytes_per_s / copies["copy back into new memory"],
            "bytes_left": left,
            "device_gb_used_asleep": used / 1e9,
            "device_gb_reserved_asleep": asleep.device_reserved / 1e9,
        }

    def _copies(self, nbytes: int) -> dict[str, float]:
        """Bytes a second of plain copies of so many bytes, to page-locked memory on the host and back."""
        flat = torch.ones(nbytes, dtype=torch.uint8, device=self._device)
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        taken = [plain_copies(flat, host, self._device) for _ in range(SLEEPS)]
        return {name: nbytes / min(copy[name] for copy in taken) for name in taken[0]}

    # ------------------------------------------------------------------ modes

    def mode(self, settings: dict[str, dict[str, Any]]) -> Finding:
        """Another way to hold or recompute the model: the same first loss to the bit, and nearly the same steps."""
        return self._against_plain(settings, is_exact=True)

    def compile(self) -> Finding:
        """Compiled layers round otherwise; but a step's first ratio is exactly 1 with them, too."""
        return self._against_plain({"model": {"compile": True}}, is_exact=False)

    def update(self, settings: dict[str, dict[str, Any]]) -> Finding:
        """Another way to update weights: it begins with the same loss, repeats to the bit, and moves the policy."""
        trainer = self.trainer(run={"deterministic": True}, **settings)
        found = self._steps_of(trainer)
        state_gb = trainer.memory().optimizer / 1e9
        update_ms = self._update_ms(trainer)
        del trainer
        begins_alike = found.losses[0] == self.deterministic.losses[0]
        repeats = found.equals(self.run(run={"deterministic": True}, **settings))
        kl = [step["kl_ref"] for step in found.metrics]
        moves = kl[0] == 0 and math.isfinite(kl[-1]) and kl[-1] != 0
        return begins_alike and repeats and moves, {
            "begins_alike": begins_alike,
            "repeats": repeats,
            "kl_ref": kl[-1],
            "optimizer_state_gb": state_gb,
            "update_ms": update_ms,
        }

    def _update_ms(self, trainer: Trainer) -> float:
        """Milliseconds of an update alone: norm, clipping, and the optimiser's step."""
        taken = []
        for _ in range(STEPS):  # the first one allocates
            for parameter in trainer.policy.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, 1e-3)
            synchronise(self._device)
            began = time.perf_counter()
            trainer.updater.step(trainer.mesh.group)
            synchronise(self._device)
            taken.append(1e3 * (time.perf_counter() - began))
        return min(taken)

    def _against_plain(self, settings: dict[str, dict[str, Any]], *, is_exact: bool) -> Finding:
        began = time.perf_counter()
        found = self.run(run={"deterministic": True}, **settings)
        seconds = time.perf_counter() - began
        difference = self.difference(found, self.deterministic)
        deviation = found.metrics[0]["ratio_deviation_max"]
        # AdamW on the host and sums in another order are roundings, which a step or two make a little larger
        bound = 1e-2 if self._dtype is torch.bfloat16 else 1e-4
        is_right = deviation == 0 and max(difference.values()) < bound
        if is_exact:
            is_right = is_right and found.losses[0] == self.deterministic.losses[0]
        figures = {f"{name}_difference": value for name, value in difference.items()}
        last_s = found.metrics[-1]["train_seconds"]
        return is_right, {**figures, "ratio_deviation_max": deviation, "last_step_s": last_s, "run_s": seconds}


class WeightSink:
    """A receiver that compares what arrives with what should."""

    def __init__(self, expected: dict[str, torch.Tensor]) -> None:
        self._expected = expected
        self.missing: set[str] = set()
        self.received_bytes = 0
        self.is_equal = True

    def begin(self, version: int, manifest: Manifest) -> None:
        """An update begins; all that it announces is missing yet."""
        self.missing = set(manifest) | self._expected.keys()

    def receive(self, bucket: Bucket) -> None:
        """Some tensors arrive."""
        for name, tensor in bucket:
            self.missing.discard(name)
            self.received_bytes += tensor.nbytes
            self.is_equal &= tensor.device.type == "cpu" and torch.equal(tensor, self._expected[name])

    def commit(self, version: int) -> None:
        """The update is whole."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which of one rank is all of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 of their bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # a copy: memory that numpy has seen could not be freed
        digest.update(local_of(tensor).cpu().clone().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """All that sleeps: parameters, moments, reference."""
    assert trainer.reference is not None
    moments = [value for state in trainer.updater.optimizer.state.values() for value in state.values()]
    return [*trainer.policy.parameters(), *trainer.reference.parameters(), *moments]


def synchronise(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_bytes_used(device: torch.device) -> int:
    """Of a GPU, by whoever is on it; 0 of a CPU."""
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def syncs_in(trainer: Trainer, batch: RolloutBatch) -> tuple[int, set[str]]:
    """How often a train step waits for the GPU, and where."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.train_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # "called a synchronizing CUDA operation"; that watching is a prototype torch says once in a process, of no wait
    waits = [warning for warning in seen if "synchronizing CUDA operation" in str(warning.message)]
    return len(waits), {f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits}


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # gloo may abort while the interpreter ends; the work is done and flushed
