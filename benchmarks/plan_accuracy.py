"""What `slimefsdp plan` estimates against what `Trainer.train_step` does: peak memory, and which of two is faster.

    python benchmarks/plan_accuracy.py --json benchmarks/results/plan_accuracy.json
    python benchmarks/plan_accuracy.py --shared --json benchmarks/results/plan_accuracy_shared.json

Memory is the sum of all live tensors: what the trainer holds before the step, and every allocation and release during
it, as torch's own profiler records them (on CUDA, its allocator's peak). Time is user CPU seconds of
the slower rank (and the kernel's, where ranks send), rounds of both settings interleaved; which is the faster is
estimated from rates measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch._C._profiler import _EventType

from benchmarks.record import write_record
from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.estimate.calibrate import measure_rates
from slimefsdp.estimate.hardware import Rates, guessed_rates
from slimefsdp.estimate.recommend import Candidate
from slimefsdp.estimate.schedule import measure_schedule
from slimefsdp.estimate.setup import MeshShape, setup_of
from slimefsdp.model_spec import ModelSpec
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import cost_model_of, plan_training
from tests.support.rank_pool import RankPool

WHAT = (
    "Estimates of `slimefsdp plan` against Trainer.train_step. Memory: live tensor bytes of the fullest rank at its "
    "peak, the median of three steps, without copies inside of gloo. Time: user CPU seconds of a step of the slower "
    "rank, and the kernel's where ranks send, medians over interleaved rounds. A ranking is right if the setting that "
    "is estimated to be faster is at most 5 % slower than the other"
)
PROMPT, SAMPLE = 8, 128
TIE = 0.05  # a choice that is slower by less than this is right
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "wide": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64},
    "large vocabulary": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 32_768},
    "large vocabulary, untied": {"vocab_size": 32_768, "tie_word_embeddings": False},
    "llama": {"model_type": "llama"},
    "mixture": {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 192,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
}  # fmt: skip
SIZES = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 65_536,
    "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, settings and a batch."""

    model: str
    tokens: int  # batch.max_tokens_per_rank
    ranks: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    sample: int = SAMPLE  # tokens of a sample
    prompt: int = PROMPT  # of those; the samples of a group have it in common
    group: int = 4  # samples
    micro_batches: int = 2  # full ones, as far as whole samples fill them and share nothing

    def tree(self, folder: Path) -> dict[str, Any]:
        tree: dict[str, Any] = {
            "model": {"path": str(folder / self.model.replace(" ", "_")), "init": "random"},
            "mesh": {"dp": self.ranks, "device": DEVICE.type},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": self.tokens},
            "optim": {"lr": 1e-4, "total_updates": 1000},
        }
        for name, value in self.settings.items():
            section, key = name.split(".")
            tree.setdefault(section, {})[key] = value
        return tree

    @property
    def lengths(self) -> list[int]:
        return [self.sample] * (self.micro_batches * self.tokens // self.sample * self.ranks)

    def batch(self, vocab: int) -> RolloutBatch:
        rng = np.random.default_rng(0)
        count = len(self.lengths)
        prompts = rng.integers(3, vocab, (-(-count // self.group), self.prompt)).tolist()
        return RolloutBatch.from_samples(
            {
                "tokens": [
                    *prompts[index // self.group],
                    *rng.integers(3, vocab, self.sample - self.prompt).tolist(),
                ],
                "response_length": self.sample - self.prompt,
                "reward": float(rng.random()),
                "group_id": index // self.group,
            }
            for index in range(count)
        )


LONG_PROMPTS = {"sample": 1152, "prompt": 1024, "group": 16, "micro_batches": 9}  # 2 groups
CHECKPOINTING = "model.activation_checkpointing"
MEMORY = [
    *(Case(model, tokens, 1, {CHECKPOINTING: kind})
      for model, tokens in (("small", 512), ("small", 2048), ("wide", 512), ("large vocabulary", 1024), ("llama", 1024))
      for kind in ("none", "full", "selective")),
    Case("large vocabulary, untied", 1024),
    Case("small", 2048, 1, {"optim.name": "sgd"}),
    Case("wide", 512, 1, {"model.frozen": ["*.mlp.*"]}),
    Case("wide", 1024, 1, {"loss.kl_coefficient": 0.1}),
    *(Case(model, tokens, ranks, {"lora.rank": 32, "fsdp.sharding": level, CHECKPOINTING: kind})
      for model, tokens, ranks, level, kind in (
          ("wide", 512, 1, "full", "none"), ("wide", 512, 1, "full", "selective"), ("wide", 1024, 1, "full", "full"),
          ("large vocabulary", 1024, 1, "full", "none"), ("wide", 512, 2, "full", "none"),
          ("wide", 512, 2, "keep_parameters", "full"), ("wide", 512, 2, "optimizer", "none"),
          ("wide", 512, 2, "replicate", "none"))),
    Case("wide", 1024, 1, {"lora.rank": 32, "precision.compute_dtype": "bfloat16"}),
    Case("wide", 1024, 1, {"lora.rank": 32, "lora.targets": ["attention"], "loss.kl_coefficient": 0.1}),
    *(Case("mixture", 512, 1, {"lora.rank": 32, "lora.targets": ["attention", "experts"], CHECKPOINTING: kind})
      for kind in ("none", "full")),
    Case("small", 2048, 1, {"loss.entropy_coefficient": 0.01}),
    Case("small", 2048, 1, {}, sample=2048),
    Case("small", 2048, 1, {"precision.compute_dtype": "bfloat16"}),
    *(Case("small", 4096, 1, {CHECKPOINTING: kind}, **LONG_PROMPTS) for kind in ("none", "full")),
    *(Case(model, tokens, 2, {"fsdp.sharding": level, CHECKPOINTING: kind})
      for level in ("full", "keep_parameters", "optimizer", "replicate")
      for model, tokens, kind in (("wide", 1024, "none"), ("wide", 1024, "full"), ("large vocabulary", 1024, "none"))),
]  # fmt: skip
TP, EP = {"mesh.dp": 1, "mesh.tp": 2}, {"mesh.ep": 2}
# of settings under which ranks share matrices or experts
SHARED_MEMORY = [
    *(Case(model, tokens, 2, TP | {CHECKPOINTING: kind})
      for model, tokens in (("wide", 1024), ("large vocabulary", 1024), ("llama", 1024)) for kind in ("none", "full")),
    Case("large vocabulary, untied", 1024, 2, TP),
    Case("wide", 1024, 2, TP | {CHECKPOINTING: "selective"}),
    Case("wide", 1024, 2, TP | {"fsdp.sharding": "keep_parameters"}),
    Case("wide", 1024, 2, TP | {"fsdp.sharding": "optimizer"}),
    Case("wide", 1024, 2, TP | {"lora.rank": 32}),
    Case("wide", 1024, 4, {"mesh.dp": 2, "mesh.tp": 2}),
    *(Case("mixture", 1024, 2, EP | {CHECKPOINTING: kind}) for kind in ("none", "full")),
    Case("mixture", 1024, 2, TP),
    Case("mixture", 1024, 2, TP | EP),
]  # fmt: skip
SHARED_PAIRS = [
    ("tensor-parallel ranks against data ranks", Case("wide", 1024, 2, TP), Case("wide", 1024, 2)),
    ("tensor-parallel ranks against data ranks, large vocabulary", Case("large vocabulary", 1024, 2, TP),
     Case("large vocabulary", 1024, 2)),
    ("tensor-parallel ranks against context ranks", Case("wide", 1024, 2, TP, sample=1024),
     Case("wide", 1024, 2, {"mesh.dp": 1, "mesh.cp": 2}, sample=1024)),
    ("experts divided against experts gathered", Case("mixture", 1024, 2, EP), Case("mixture", 1024, 2)),
    ("experts divided against experts gathered, small packs", Case("mixture", 128, 2, EP, micro_batches=8),
     Case("mixture", 128, 2, micro_batches=8)),
]  # fmt: skip
PAIRS = [
    ("recomputing layers", Case("wide", 1024), Case("wide", 1024, 1, {CHECKPOINTING: "full"})),
    ("a small head against a large one", Case("small", 1024), Case("large vocabulary, untied", 1024)),
    ("one micro-batch against eight, two ranks", Case("wide", 1024, 2, micro_batches=1),
     Case("wide", 128, 2, sample=64, micro_batches=8)),
    ("whole gradients on every rank against shards", Case("wide", 256, 2, {"fsdp.sharding": "replicate"}),
     Case("wide", 256, 2, {"fsdp.sharding": "full"})),
    ("data ranks against context ranks", Case("small", 2048, 2, sample=1024),
     Case("small", 2048, 2, {"mesh.dp": 1, "mesh.cp": 2}, sample=1024)),
    ("prompts computed once against once for each response", Case("small", 4096, **LONG_PROMPTS),
     Case("small", 4096, 1, {"batch.share_prefixes": "never"}, **LONG_PROMPTS)),
    ("short samples against long ones", Case("small", 4096, sample=128), Case("small", 4096, sample=4096)),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("memory", "time"))
    parser.add_argument("--shared", action="store_true", help="settings under which ranks share matrices or experts")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    results: dict[str, Any] = {"memory": [], "rankings": []}
    pool = RankPool()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, changes in MODELS.items():
            (folder / model.replace(" ", "_")).mkdir()
            (folder / model.replace(" ", "_") / "config.json").write_text(json.dumps(SIZES | changes))
        pairs, cases = (SHARED_PAIRS, SHARED_MEMORY) if options.shared else (PAIRS, MEMORY)
        for name, first, second in pairs if options.only != "memory" else []:
            row = ranking_row(pool, name, first, second, folder, options.rounds)
            results["rankings"].append(row)
            print(f"{row['measured_ratio']:.3f} measured, {row['predicted_ratio']:.3f} predicted: {name}", flush=True)
        for case in cases if options.only != "time" else []:
            row = memory_row(pool, case, folder)
            results["memory"].append(row)
            print(f"{row['predicted_over_measured']:.3f} of {row['measured_mb']:8.1f} MB  {row['case']}", flush=True)
    pool.close()
    ratios = [row["predicted_over_measured"] for row in results["memory"]]
    results["worst_memory_error"] = round(max((abs(ratio - 1) for ratio in ratios), default=0.0), 3)
    results["rankings_right"] = sum(row["is_right"] for row in results["rankings"])
    print(f"worst memory error {results['worst_memory_error']}, {results['rankings_right']} rankings right")
    write_record(options.json, WHAT, 1, results)


def described(case: Case) -> str:
    """A case in one line."""
    settings = " ".join(f"{name}={value}" for name, value in case.settings.items())
    long = f", samples of {case.sample}" if case.sample != SAMPLE else ""
    long += f", prompts of {case.prompt} for {case.group}" if case.prompt != PROMPT else ""
    return f"{case.model}, {case.tokens} tokens, {case.ranks} ranks{long} {settings}".strip()


def predicted(case: Case, folder: Path, rates: Rates) -> Candidate:
    """Returns the estimate that `slimefsdp plan` would give."""
    config = config_from_dict(case.tree(folder))
    described = json.loads((Path(config.model.path) / "config.json").read_text())
    model, on_cpu = ModelSpec.from_config(described), DEVICE.type == "cpu"
    mesh = MeshShape(config.mesh.dp_replicate, config.mesh.dp, config.mesh.cp)
    setup = setup_of(config, model, mesh, on_cpu=on_cpu, reference=model, critic=model)
    shape = AttentionShape.of_model_spec(model).over(config.mesh.tp)
    strategy = choose_strategy(config.attention.strategy, shape, mesh.cp).traffic
    batch, cost = case.batch(model.vocab), cost_model_of(config, described)
    plan, counted = plan_training(config, batch, cost), int(batch.mask.sum()) / batch.num_tokens
    schedule = measure_schedule(plan, batch.lengths, setup, strategy=strategy, cost=cost, counted_share=counted)
    return Candidate.of(setup, schedule, rates)


def memory_row(pool: RankPool, case: Case, folder: Path) -> dict[str, Any]:
    """One case's peak, measured and predicted."""
    one = predicted(case, folder, guessed_rates("CPU", 4))
    measured = max(pool.run(case.ranks, measure_peak, case, folder))
    held = one.memory
    parts = ("parameters", "gradients", "optimizer", "unsharded", "activations", "head", "buffers", "others")
    return {
        "case": described(case),
        "measured_mb": round(measured / 1e6, 1),
        "predicted_mb": round(held.total / 1e6, 1),
        "predicted_over_measured": round(held.total / measured, 3),
        "predicted_parts_mb": {part: round(getattr(held, part) / 1e6, 1) for part in parts},
    }


def measure_peak(rank: int, case: Case, folder: Path) -> float:
    """Live tensor bytes of this rank at the peak of a step."""
    trainer, batch = trainer_of(case, folder)
    trainer.train_step(batch)
    return statistics.median(peak_of_step(trainer, batch) for _ in range(3))


def peak_of_step(trainer: Trainer, batch: RolloutBatch) -> int:
    """Bytes held before a step, and the highest that allocations less releases rise above that in it."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats(DEVICE)
        trainer.train_step(batch)
        return torch.cuda.max_memory_allocated(DEVICE)
    memory = trainer.memory()
    before = memory.parameters + memory.optimizer + memory.reference + memory.host_buffers
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer.train_step(batch)
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    return before + _highest_rise(profile.profiler.kineto_results.experimental_event_tree())


def _highest_rise(roots: Any) -> int:
    """Returns the highest number of live bytes above those before the profile.

    Copies that gloo makes inside of a collective do not count: gloo's own threads release them, which the profiler does
    not see, and NCCL makes none.
    """
    pending = [(root, False) for root in roots]
    events: list[tuple[int, int, int, bool]] = []  # (time, address, bytes, whether inside of a collective)
    while pending:
        event, is_in_collective = pending.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size, is_in_collective))
        is_in_collective = is_in_collective or event.name.startswith("c10d::")
        pending += [(child, is_in_collective) for child in event.children]
    live: dict[int, int] = {}  # address -> bytes
    total = highest = 0
    for _, address, nbytes, is_in_collective in sorted(events):
        released = live.pop(address, None)
        if nbytes < 0:
            total += nbytes if released is None else -released
            continue
        live[address] = 0 if is_in_collective else nbytes
        total += live[address] - (released or 0)  # an address is used again if the profiler did not see its release
        highest = max(highest, total)
    return highest


def trainer_of(case: Case, folder: Path) -> tuple[Trainer, RolloutBatch]:
    """On every rank: the trainer of a case, and its batch."""
    config: RunConfig = config_from_dict(case.tree(folder))
    trainer = Trainer(config, device=DEVICE)
    return trainer, case.batch(trainer.folder.vocab_size)


def ranking_row(pool: RankPool, name: str, first: Case, second: Case, folder: Path, rounds: int) -> dict[str, Any]:
    """Which of two settings is faster for the tokens it trains, measured and predicted."""
    assert first.ranks == second.ranks
    answers = pool.run(first.ranks, measure_pair, first, second, folder, rounds)
    rates: Rates = answers[0][0]
    seconds = np.array([answer[1] for answer in answers]).max(axis=0)  # [rounds, 2] of the slower rank
    estimates = [predicted(case, folder, rates).seconds.total for case in (first, second)]
    tokens = [sum(case.lengths) for case in (first, second)]
    measured = float(np.median((seconds[:, 1] / tokens[1]) / (seconds[:, 0] / tokens[0])))
    expected = (estimates[1] / tokens[1]) / (estimates[0] / tokens[0])
    return {
        "pair": name,
        "first": described(first),
        "second": described(second),
        "measured_cpu_s": [round(float(value), 4) for value in np.median(seconds, axis=0)],
        "predicted_s": [round(value, 4) for value in estimates],
        "measured_ratio": round(measured, 3),
        "predicted_ratio": round(expected, 3),
        "choice_is_slower_by": round(slower_by(measured, expected), 3),
        "is_right": slower_by(measured, expected) <= TIE,
    }


def slower_by(measured: float, expected: float) -> float:
    """Returns by what share the setting that is expected to be faster is slower than the better of the two.

    Args:
        measured, expected: the second's time over the first's.
    """
    of_choice = 1.0 if expected > 1 else measured  # times relative to the first's
    return of_choice / min(1.0, measured) - 1


def measure_pair(rank: int, first: Case, second: Case, folder: Path, rounds: int) -> tuple[Rates, list[list[float]]]:
    """The machine's rates, and CPU seconds of a step of both, round by round."""
    rates, _ = measure_rates(DEVICE, torch.float32, dist.group.WORLD, scale=0.5)
    both = [trainer_of(case, folder) for case in (first, second)]
    for trainer, batch in both:
        trainer.train_step(batch)
    return rates, [[step_seconds(*one) for one in both] for _ in range(rounds)]


def step_seconds(trainer: Trainer, batch: RolloutBatch) -> float:
    """User CPU seconds of one step in this process; on CUDA, seconds until the device is done.

    Of several ranks the kernel's share counts, too, since it sends; of one it is nothing but page faults.
    """
    if DEVICE.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        trainer.train_step(batch)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    before = resource.getrusage(resource.RUSAGE_SELF)
    trainer.train_step(batch)
    after = resource.getrusage(resource.RUSAGE_SELF)
    sending = after.ru_stime - before.ru_stime if dist.get_world_size() > 1 else 0.0
    return after.ru_utime - before.ru_utime + sending


if __name__ == "__main__":
    main()
