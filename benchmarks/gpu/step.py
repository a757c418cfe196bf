"""One train step on one device: Qwen3 shapes, packed tokens, with and without recomputation; and the same in peers.

    python benchmarks/gpu/step.py --json step.json
    python benchmarks/gpu/step.py --models 0.6B --tokens 16384 --systems slimefsdp hf
    python benchmarks/gpu/step.py --models 4B --tokens 16384 --systems slimefsdp --compile --head-chunk-mib 1024
    python benchmarks/gpu/step.py --models 4B --tokens 65536 --checkpointing full --systems slimefsdp --compile
    python benchmarks/gpu/step.py --device cpu --models tiny --tokens 512 --lengths uneven

Needs torch and transformers alone: no Ray, no download, no settings file. Models are made from their sizes with random
weights. A step is GRPO's loss on samples of one length, forward and backward in bfloat16 over float32 masters, clipping
and AdamW. The peers get the same samples and the same weights: a plain Hugging Face loop whose logits become log-probs
in float32, and TRL's GRPOTrainer where it is installed, which computes logits for the completions alone. Samples are
equally long, so that no peer pads and what differs is the step itself; under --lengths uneven responses have from a
quarter of the longest on, and peers pad. They are computed at once, or as many as fit: half as many after each time
that memory ran out, with the same model.

The gradient norms of a model's cases with as many tokens must agree but for rounding: a line PASS or FAIL says whether
they do, and the exit status is 1 where they do not. At the time limit the program ends, whatever it is doing, with the
record of what it has measured and exit status 1.

MFU is model FLOPs (`estimate/flops.py`) over the matrix rate that this script measures on the device first, and over
the rate that its maker states. What does not fit is reported as out of memory, what the time limit leaves as not run, a
peer that is not installed as absent. --compile, --head-chunk-mib, --sharding and --profile change or watch slimefsdp's
steps alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks import add_common_options, device_of, hardware, time_limit
from benchmarks.record import write_record
from slimefsdp.algorithms.objective import Objective, TokenInputs
from slimefsdp.algorithms.policy_losses import POLICY_LOSSES
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import Parallelism, parallelize
from slimefsdp.distributed.mesh import Mesh, build_mesh, start_process_group_from_environment
from slimefsdp.estimate.flops import training_flops
from slimefsdp.estimate.hardware import peak_tflops
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models import decoder
from slimefsdp.models.build import build_model, materialise
from slimefsdp.models.decoder import PolicyModel, register_attention
from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.optim.optimizer import undecayed_names
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.training.packs import PassOptions, RankPacks, accumulate_gradients, reduced
from tests.support.optimizers import optimizer_of

_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True},
    "0.6B": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "tie_word_embeddings": True},
    "1.7B": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                      "num_attention_heads": 16, "tie_word_embeddings": True},
    "4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "tie_word_embeddings": True},
    "8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                    "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
SYSTEMS = ("slimefsdp", "hf", "trl")
ADAMW = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
HEAD_VOCAB = 151936
NORM_TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # of gradient norms, relative
PROFILED_ROWS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns the exit status."""
    args = parsed(arguments)
    device = device_of(args.device)
    cases = [
        {"model": model, "tokens": tokens, "checkpointing": checkpointing, "system": system}
        for model in args.models
        for tokens in args.tokens
        for checkpointing in args.checkpointing
        for system in args.systems
    ]
    rows = [case | {"not_run": f"the time limit of {args.time_limit_s:g} s had passed"} for case in cases]
    results: dict[str, Any] = {**hardware(device), "cases": rows}

    def write() -> None:
        assert __doc__ is not None
        write_record(args.json, __doc__.splitlines()[0], torch.get_num_threads(), results)

    with time_limit(args.time_limit_s, write) as reporting:
        start_process_group_from_environment(device, timeout_s=600)
        bench = bench_for(args, device)
        results |= {"matrix_tflops": bench.matrix_tflops, "stated_tflops": bench.stated_tflops}
        results["head"] = bench.head_memory(max(args.tokens))
        print(json.dumps(results | {"cases": len(cases)}), flush=True)
        for index, case in enumerate(cases):
            row = case | bench.measured(**case)
            with reporting:
                rows[index] = row
                print(json.dumps(row), flush=True)
                write()
    dist.destroy_process_group()
    is_right, line = verdict_on_norms(rows, NORM_TOLERANCE[bench.dtype])
    print(line, flush=True)
    return int(not is_right)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; ends the process where nothing could be measured, or an option would do nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384], help="of one step")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--checkpointing", nargs="+", choices=["none", "full"], default=["none", "full"])
    parser.add_argument("--sample-tokens", type=int, default=2048, help="prompt and response of a sample")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of a sample, not trained")
    parser.add_argument("--lengths", choices=["equal", "uneven"], default="equal", help="of responses")
    parser.add_argument("--steps", type=int, default=5, help="timed ones; the median counts")
    parser.add_argument("--compile", action="store_true", help="slimefsdp's decoder layers, as model.compile does")
    parser.add_argument(
        "--head-chunk-mib", type=int, help="of the logits that slimefsdp's head holds; default: its own"
    )
    parser.add_argument(
        "--sharding", choices=["full", "keep_parameters", "optimizer"], help="of slimefsdp; default: keep_parameters"
    )
    parser.add_argument("--profile", type=Path, help="write a table of what one more slimefsdp step runs here")
    args = parser.parse_args(arguments)
    if args.steps < 1 or args.sample_tokens < 2 or args.prompt_tokens < 1 or min(args.tokens) < 2:
        parser.error("--steps and --prompt-tokens are at least 1, --tokens and --sample-tokens at least 2")
    if args.head_chunk_mib is not None and args.head_chunk_mib < 1:
        parser.error("--head-chunk-mib is at least 1")
    own = {"--compile": args.compile or None, "--head-chunk-mib": args.head_chunk_mib}
    own |= {"--sharding": args.sharding, "--profile": args.profile}
    given = [option for option, value in own.items() if value is not None]
    if given and "slimefsdp" not in args.systems:
        parser.error(f"{', '.join(given)}: without effect where slimefsdp is not measured; name it in --systems")
    return args


def verdict_on_norms(rows: Sequence[dict[str, Any]], tolerance: float) -> tuple[bool, str]:
    """Whether the gradient norms of a model and a number of tokens agree, and the line that says so.

    Args:
        rows: of all cases; those without a norm do not count, but some must have one.
        tolerance: between the smallest norm and the largest, relative to that.
    """
    norms: dict[str, list[float]] = {}
    for row in rows:
        if "grad_norm" in row:
            norms.setdefault(f"{row['model']}/{row['tokens']}", []).append(row["grad_norm"])
    differences = {name: float(np.ptp(found) / np.max(found)) for name, found in norms.items()}  # nan stays nan
    is_right = bool(differences) and all(difference < tolerance for difference in differences.values())
    shown = " ".join(f"{name}={difference:.2g}" for name, difference in differences.items())
    return is_right, f"{'PASS' if is_right else 'FAIL'} gradient_norms {shown or 'nothing was measured'}"


@dataclass(frozen=True)
class OwnOptions:
    """How slimefsdp takes its steps."""

    compile: bool = False
    head_chunk_bytes: int | None = None  # None: the head's own
    sharding: str = "keep_parameters"
    profile: Path | None = None  # a table of a step of each case is added to this file


@dataclass(frozen=True)
class Bench:
    """What all cases have in common."""

    mesh: Mesh
    dtype: torch.dtype
    own: OwnOptions
    steps: int
    sample_tokens: int
    prompt_tokens: int
    is_uneven: bool
    matrix_tflops: float
    stated_tflops: float | None

    def measured(self, model: str, tokens: int, checkpointing: str, system: str) -> dict[str, Any]:
        """Median seconds of a step, and what follows from them; or why there are none."""
        if system == "trl" and find_spec("trl") is None:
            return {"absent": "pip install trl"}
        model_spec = ModelSpec.from_config(transformers.Qwen3Config(**MODELS[model]).to_dict())
        shape = (tokens, min(self.sample_tokens, tokens), min(self.prompt_tokens, tokens // 2))
        batch = recorded_batch(shape, model_spec.vocab, is_uneven=self.is_uneven)
        work = Work(MODELS[model], batch, checkpointing == "full", self.mesh, self.dtype, self.own)
        try:
            at_once, seconds, norm = step_seconds(system, work, self.steps)
        except torch.cuda.OutOfMemoryError:
            return {"failed": "out of memory"}
        except Exception as error:
            if system == "slimefsdp":
                raise
            # a peer that cannot do this says why, and the others are measured
            return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        finally:
            free_memory(self.mesh.device)
        median = statistics.median(seconds)
        flops = training_flops(model_spec, batch.lengths, counted_rows=batch.num_response_tokens).total
        tflops = flops / median / 1e12
        found: dict[str, Any] = {"samples_at_once": at_once, "samples": batch.num_samples, "grad_norm": norm}
        found |= {
            "seconds": median,
            "rounds": [round(s, 4) for s in seconds],
            "tokens_per_s": batch.num_tokens / median,
        }
        found |= {"tflops": tflops, "mfu_of_measured": tflops / self.matrix_tflops}
        if self.stated_tflops is not None:
            found["mfu_of_stated"] = tflops / self.stated_tflops
        if self.mesh.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.mesh.device) / 2**30
        return found

    def head_memory(self, rows: int) -> dict[str, Any]:
        """Returns the bytes that the head takes beyond its inputs and their gradients; without a GPU they are None."""
        device = self.mesh.device
        on_cpu = device.type == "cpu"
        hidden_dim, vocab = (64, MODELS["tiny"]["vocab_size"]) if on_cpu else (2560, HEAD_VOCAB)
        hidden = torch.randn(rows, hidden_dim, device=device, dtype=self.dtype, requires_grad=True)
        weight = torch.randn(vocab, hidden_dim, device=device, dtype=self.dtype).mul_(0.02).requires_grad_()
        targets = torch.randint(vocab, (rows,), device=device)
        synchronise(device)
        before = 0 if on_cpu else torch.cuda.memory_allocated(device)
        reset_peak(device)
        head = head_in_chunks(self.own.head_chunk_bytes)
        head(HeadInputs(hidden, weight), targets, with_entropy=True)[0].sum().backward()
        synchronise(device)
        found: dict[str, Any] = {"rows": rows, "hidden": hidden_dim, "vocab": vocab, "extra_gib": None}
        if on_cpu:
            return found
        extra = torch.cuda.max_memory_allocated(device) - before
        gradients = hidden.nbytes + weight.nbytes
        return found | {"extra_gib": (extra - gradients) / 2**30, "with_gradients_gib": extra / 2**30}


def bench_for(args: argparse.Namespace, device: torch.device) -> Bench:
    """Of the process group that there is; the device's matrix rate is measured here."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if args.profile is not None:
        args.profile.write_text("")
    return Bench(
        mesh=build_mesh(1, 1, device),
        dtype=dtype,
        own=OwnOptions(
            compile=args.compile,
            head_chunk_bytes=None if args.head_chunk_mib is None else args.head_chunk_mib * 2**20,
            sharding=args.sharding or "keep_parameters",
            profile=args.profile,
        ),
        steps=args.steps,
        sample_tokens=args.sample_tokens,
        prompt_tokens=args.prompt_tokens,
        is_uneven=args.lengths == "uneven",
        matrix_tflops=matrix_tflops(device, dtype),
        stated_tflops=peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
    )


def head_in_chunks(chunk_bytes: int | None) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """`token_log_probs` with chunks of this size; None: its own."""
    return token_log_probs if chunk_bytes is None else partial(token_log_probs, chunk_bytes=chunk_bytes)


@dataclass(frozen=True)
class Work:
    """What one step is made of."""

    sizes: dict[str, Any]
    batch: RolloutBatch
    recompute: bool
    mesh: Mesh
    dtype: torch.dtype
    own: OwnOptions

    @property
    def title(self) -> str:
        activations = "recomputed" if self.recompute else "stored"
        return f"hidden size {self.sizes['hidden_size']}, {self.batch.num_tokens} tokens, activations {activations}"

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def responses(self) -> int:
        """Tokens of the longest response."""
        return int(self.batch.response_lengths.max())

    @property
    def is_counted(self) -> torch.Tensor:
        """[samples, responses] bool, False where a response is filled up."""
        return torch.arange(self.responses) < torch.from_numpy(self.batch.response_lengths.copy())[:, None]

    @property
    def advantages(self) -> torch.Tensor:
        """[samples, responses], 0 where a response is filled up."""
        assert self.batch.advantages is not None
        found = torch.zeros(self.batch.num_samples, self.responses)
        found[self.is_counted] = torch.from_numpy(self.batch.advantages.copy()).float()
        return found

    @property
    def tokens(self) -> torch.Tensor:
        """[samples, tokens]; prompts are equally long, and shorter samples are filled up behind."""
        lengths = torch.from_numpy(self.batch.lengths.copy())
        found = torch.zeros(self.batch.num_samples, int(lengths.max()), dtype=torch.int64)
        found[torch.arange(found.shape[1]) < lengths[:, None]] = torch.from_numpy(self.batch.tokens.copy()).long()
        return found

    def parts(self, at_once: int) -> list[np.ndarray]:
        """The samples, so many at a time."""
        count = self.batch.num_samples
        return [np.arange(at, min(at + at_once, count)) for at in range(0, count, at_once)]


Step = Callable[[Sequence[np.ndarray]], float]
"""Takes an update from samples, computed part by part, and returns the gradient norm; without memory it drops all."""


def step_seconds(system: str, work: Work, steps: int) -> tuple[int, list[float], float]:
    """How many samples fit at once, seconds of so many steps, and the gradient norm of the first one.

    The first one compiles, allocates and warms up; where memory runs out it is taken again with half as many samples.

    Raises:
        torch.cuda.OutOfMemoryError: the model does not fit, or not with a single sample.
    """
    own = work.own if system == "slimefsdp" else OwnOptions()
    # the model's forward takes no chunk size: no setting has one
    with patch.object(decoder, "token_log_probs", head_in_chunks(own.head_chunk_bytes)):
        take_step, at_once = STEPS[system](work), work.batch.num_samples
        while True:
            try:
                norm = take_step(work.parts(at_once))
                reset_peak(work.device)
                seconds = [timed(lambda: take_step(work.parts(at_once)), work.device) for _ in range(steps)]  # noqa: B023
                break
            except torch.cuda.OutOfMemoryError:
                if at_once == 1:
                    raise
                at_once = -(-at_once // 2)
            free_memory(work.device)  # not where the error still holds what ran out
        if own.profile is not None:
            with own.profile.open("a") as file:
                table = profiled(lambda: take_step(work.parts(at_once)), work.device)
                file.write(f"{work.title}\n{table}\n\n")
    return at_once, seconds, norm


def free_memory(device: torch.device) -> None:
    """Gives back what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def profiled(step: Callable[[], object], device: torch.device) -> str:
    """A table of what one step runs, that which takes longest first."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        step()
        synchronise(device)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    table: str = profiler.key_averages().table(sort_by=key, row_limit=PROFILED_ROWS, max_name_column_width=70)
    return table


def recorded_batch(shape: tuple[int, int, int], vocab: int, *, is_uneven: bool = False) -> RolloutBatch:
    """Samples of random tokens with random advantages; what the prompts have in common is nothing.

    Args:
        shape: tokens in all, of the longest sample, of a prompt.
        is_uneven: responses have from a quarter of the longest on; the last one has what is left.
    """
    tokens, length, prompt = shape
    rng = np.random.default_rng(0)
    longest = length - prompt
    samples: list[dict[str, Any]] = []
    while tokens >= prompt + 1 if is_uneven else tokens >= length:
        response = int(rng.integers(max(1, longest // 4), longest + 1)) if is_uneven else longest
        response = min(response, tokens - prompt)
        tokens -= prompt + response
        samples.append(
            {
                "tokens": rng.integers(0, vocab, prompt + response).tolist(),
                "response_length": response,
                "advantages": [float(rng.normal())] * response,
            }
        )
    return RolloutBatch.from_samples(samples)


def own_step(work: Work) -> Step:
    """slimefsdp: each part as one pack, the model sharded over one rank."""
    batch, mesh = work.batch, work.mesh
    config = transformers.Qwen3Config(**work.sizes)
    config.architectures = ["Qwen3ForCausalLM"]
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        folder = read_model_folder(name, with_weights=False)
    model = build_model(PolicyModel, folder, torch.float32)
    how = Parallelism(
        work.dtype,
        torch.float32,
        keep_parameters=work.own.sharding != "full",
        recompute="full" if work.recompute else "none",
        compile=work.own.compile,
    )
    parallelize(model, mesh, how)
    materialise(model, mesh.device)
    draw(model)
    optimizer = optimizer_of(model.trained_weights(), "adamw", undecayed=undecayed_names(model.hf), **ADAMW)
    updater = OptimizerStep(optimizer, model.trained_weights(), lambda _: 1e-6, max_grad_norm=1.0)
    objective = Objective(POLICY_LOSSES["ppo"])
    inputs = TokenInputs(
        weights=torch.full((batch.num_response_tokens,), 1 / batch.num_response_tokens),
        sample_ids=torch.from_numpy(batch.sample_ids),
        num_samples=batch.num_samples,
        advantages=work.advantages[work.is_counted],
    )
    sum_once = work.own.sharding == "optimizer"

    def step(parts: Sequence[np.ndarray]) -> float:
        options = PassOptions(sum_once=sum_once)
        # drops all gradients where memory runs out
        sums = accumulate_gradients(model, RankPacks(batch, parts), inputs, objective, mesh, options)
        reduced(sums, mesh.group)
        return updater.step(mesh.group)["grad_norm"]

    return step


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Weights of the usual size, the same in every system, drawn where they lie; norms are 1."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        if parameter.ndim == 1:
            local.fill_(1)
        else:
            local.normal_(std=0.02)


def plain_model(work: Work) -> Any:
    """Hugging Face's own, float32 masters, on the device."""
    with torch.device("meta"):
        hf = transformers.Qwen3ForCausalLM._from_config(
            transformers.Qwen3Config(**work.sizes), attn_implementation="sdpa"
        )
    rotary = type(hf.model.rotary_emb)(hf.config)  # what is computed and not drawn has no memory on meta
    hf.to_empty(device=work.device)
    hf.model.rotary_emb = rotary.to(work.device)
    hf.tie_weights()
    draw(hf)
    if work.recompute:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return hf.train()


def hf_step(work: Work) -> Step:
    """A plain loop: all logits, log-softmax in float32, the same loss, autocast over float32 masters."""
    model = plain_model(work)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    tokens, response = work.tokens.to(work.device), work.responses
    advantages, is_counted = work.advantages.to(work.device), work.is_counted.to(work.device)

    def step(parts: Sequence[np.ndarray]) -> float:
        optimizer.zero_grad()  # of a step that memory ran out in
        for part in parts:
            rows, credit = tokens[part[0] : part[-1] + 1], advantages[part[0] : part[-1] + 1]
            with torch.autocast(work.device.type, work.dtype, enabled=work.dtype is not torch.float32):
                logits = model(rows, use_cache=False).logits[:, -response - 1 : -1]
            log_probs = logits.float().log_softmax(-1).gather(-1, rows[:, -response:, None]).squeeze(-1)
            ratio = torch.exp(log_probs - log_probs.detach())
            gain = torch.minimum(ratio * credit, ratio.clamp(0.8, 1.2) * credit)
            loss = -(gain * is_counted[part[0] : part[-1] + 1]).sum() / work.batch.num_response_tokens
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


def trl_step(work: Work) -> Step:
    """TRL's own loss and backward on prepared samples; generation is left out."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    response = work.responses
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"), use_cpu=work.device.type == "cpu",
        bf16=work.dtype is torch.bfloat16, gradient_checkpointing=work.recompute, report_to=[], loss_type="dapo",
        beta=0.0, max_grad_norm=1.0,
        per_device_train_batch_size=2, num_generations=2, learning_rate=ADAMW["lr"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=plain_model(work),
        reward_funcs=lambda prompts, **_: [0.0] * len(prompts),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["<eos>"] * 4}),
        processing_class=tokenizer,
    )
    model = trainer.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    tokens = work.tokens.to(work.device)
    inputs = {
        "prompt_ids": tokens[:, :-response],
        "prompt_mask": torch.ones_like(tokens[:, :-response]),
        "completion_ids": tokens[:, -response:],
        "completion_mask": work.is_counted.to(work.device).to(tokens.dtype),
        "advantages": work.advantages[:, 0].to(work.device),
    }
    in_all = torch.tensor(work.batch.num_response_tokens, device=work.device)

    def step(parts: Sequence[np.ndarray]) -> float:
        optimizer.zero_grad()  # of a step that memory ran out in
        # of a step in several parts; TRL scales the sum of a loss by what both say
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = len(parts)
        for part in parts:
            here = {name: value[part[0] : part[-1] + 1] for name, value in inputs.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, here | {"num_items_in_batch": in_all})
            trainer.accelerator.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(norm)

    return step


STEPS: dict[str, Callable[[Work], Step]] = {"slimefsdp": own_step, "hf": hf_step, "trl": trl_step}


def timed(step: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    step()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def matrix_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of large matrix products in this dtype: the best size's median."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (512, 1024):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        repeats = 20 if device.type == "cuda" else 3

        def products(left: torch.Tensor = left, right: torch.Tensor = right, repeats: int = repeats) -> None:
            for _ in range(repeats):
                left @ right

        products()
        seconds = statistics.median(timed(products, device) for _ in range(5))
        best = max(best, repeats * 2 * size**3 / seconds / 1e12)
    return best


if __name__ == "__main__":
    register_attention()
    status = main()
    sys.stdout.flush()
    os._exit(status)  # gloo may abort while the interpreter ends; the work is done and flushed
