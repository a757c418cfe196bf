"""Tokens that a CPU-second samples: the embedded engine's sampler, transformers' generate, and an earlier commit's.

    python benchmarks/sampling.py --json benchmarks/results/sampling.json
    python benchmarks/sampling.py --shapes demo --rounds 1 --samples 64

All draw from one model of random size and known lengths: its first token is a number, drawn with the probabilities of a
log-normal length, each later one the number before it, and 0 is the end. Its layers add nothing, but are computed. All
may hold the same number of rows at once; generate takes prompts in batches of so many rows, as its callers do, and is
not asked for log-probs. One process, one thread; rounds in turn, every other one in reverse.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import ROOT, write_record
from slimefsdp.models.decoder import PolicyModel, register_attention
from slimefsdp.sampling.params import SamplingParams
from slimefsdp.sampling.sampler import sample

WHAT = "tokens sampled per CPU-second, float32, one thread; ratios are of rounds, with the smallest and the largest"
BEFORE = "5c00431"  # the last commit whose sampler let rows leave the batch, but filled none
SHAPES: dict[str, dict[str, int]] = {
    "demo": {  # of scripts/make_sort_digits.py
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
    },
    "135M": {  # of SmolLM2-135M
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    },
}  # fmt: skip
MEDIAN, SIGMA, LONGEST = 48, 0.8, 256  # of a response, in tokens
END, LAST_OF_PROMPT = 0, LONGEST + 1
CERTAIN = 40.0  # logit of the one token that may follow a number
Sample = Callable[[list[list[int]], int, int, int], int]  # (prompts, samples of each, rows, round) -> sampled tokens


def counting_model(shape: dict[str, int]) -> LlamaForCausalLM:
    """Embeddings and head hold the rule; output projections are 0, so that layers leave their input as it is."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False, max_position_embeddings=1024)).eval()
    width = shape["hidden_size"]
    codes = torch.randn(LONGEST + 2, width).sign()  # of unit mean square, as the final norm leaves them
    codes[:, 0] = 0.0  # the first direction is that of the prompt's last token alone
    codes *= (width / (width - 1)) ** 0.5
    codes[LAST_OF_PROMPT] = 0.0
    codes[LAST_OF_PROMPT, 0] = width**0.5
    lengths = torch.arange(1, LONGEST + 1, dtype=torch.float64)
    log_chance = (-lengths.log() - (lengths / MEDIAN).log() ** 2 / (2 * SIGMA**2)).float()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight[: len(codes)] = codes
        model.lm_head.weight.zero_()
        model.lm_head.weight[:LONGEST] = codes[1 : LONGEST + 1] * CERTAIN / width
        model.lm_head.weight[1 : LONGEST + 1, 0] = (log_chance - log_chance.max() + CERTAIN) / width**0.5
    return model


def systems(model: LlamaForCausalLM, before: str | None) -> dict[str, Sample]:
    """What is measured, by name."""
    policy = PolicyModel(LlamaForCausalLM(copy.deepcopy(model.config)))
    policy.load_state_dict({f"hf.{name}": value for name, value in model.state_dict().items()}, assign=True)
    policy.hf.set_attn_implementation(register_attention())
    policy.eval()
    ends = frozenset({END})

    def ours(prompts: list[list[int]], samples: int, rows: int, number: int) -> int:
        params = SamplingParams(LONGEST + 1, end_token_ids=ends, seed=(number,))
        found = sample(policy, dict(enumerate(prompts)), samples, params, max_rows=rows)
        return sum(len(completion.tokens) for _, completion in found)

    @torch.no_grad()
    def generate(prompts: list[list[int]], samples: int, rows: int, number: int) -> int:
        torch.manual_seed(number)
        tokens = 0
        for start in range(0, len(prompts), max(1, rows // samples)):
            batch = torch.tensor(prompts[start : start + max(1, rows // samples)])
            found = model.generate(
                batch, attention_mask=torch.ones_like(batch), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                num_return_sequences=samples, max_new_tokens=LONGEST + 1, eos_token_id=END, pad_token_id=LONGEST + 2,
            )[:, batch.shape[1] :]  # fmt: skip
            tokens += int((found != LONGEST + 2).sum())
        return tokens

    found: dict[str, Sample] = {"slimefsdp": ours, "transformers": generate}
    if before is not None:
        earlier = types.ModuleType("earlier_sampler")
        sys.modules[earlier.__name__] = earlier
        show = ["git", "show", f"{before}:actors/rollout/sampler.py"]
        exec(subprocess.run(show, cwd=ROOT, check=True, capture_output=True, text=True).stdout, earlier.__dict__)

        def rows_leave(prompts: list[list[int]], samples: int, rows: int, number: int) -> int:
            completions = earlier.sample(
                model, prompts, samples_per_prompt=samples, max_new_tokens=LONGEST + 1, temperature=1.0,
                eos_token_ids=ends, pad_token_id=END, generator=torch.Generator().manual_seed(number), max_batch=rows,
            )  # fmt: skip
            return sum(len(completion.tokens) for completion in completions)

        found["before"] = rows_leave
    return found


def measured(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of one shape."""
    model = counting_model(SHAPES[shape])
    measured_systems = systems(model, args.before)
    drawn = torch.Generator().manual_seed(1)
    numbers = torch.randint(1, LONGEST, (args.samples // args.group, args.prompt_tokens - 1), generator=drawn).tolist()
    prompts = [[*tokens, LAST_OF_PROMPT] for tokens in numbers]
    rates: dict[str, list[float]] = {name: [] for name in measured_systems}
    lengths: dict[str, list[float]] = {name: [] for name in measured_systems}
    for run in measured_systems.values():
        run(prompts[:1], 2, args.rows, 0)  # whatever a first call makes
    for number in range(args.rounds):
        order = list(measured_systems)
        for name in order if number % 2 == 0 else reversed(order):
            start = time.process_time()
            tokens = measured_systems[name](prompts, args.group, args.rows, number)
            rates[name].append(tokens / (time.process_time() - start))
            lengths[name].append(tokens / (len(prompts) * args.group))
            print(f"{shape} round {number}: {name} {rates[name][-1]:.0f} tokens per CPU-second", flush=True)
    found: dict[str, Any] = {
        name: {"tokens_per_cpu_second": statistics.median(rates[name]), "mean_length": statistics.mean(lengths[name])}
        for name in rates
    }
    for name in rates:
        if name != "slimefsdp":
            ratios = [ours / other for ours, other in zip(rates["slimefsdp"], rates[name], strict=True)]
            found[name]["ratio"] = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return found


def main(argv: list[str] | None = None) -> int:
    """Prints a line a measurement and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--group", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--rows", type=int, default=32, help="samples at once")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--before", default=BEFORE, help="a commit with actors/rollout/sampler.py; `none`: no such")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(argv)
    if min(args.samples, args.group, args.rows, args.rounds) < 1 or args.samples % args.group or args.prompt_tokens < 2:
        parser.error("--samples must be a multiple of --group, and every number 1 or more")
    args.before = None if args.before == "none" else args.before
    torch.set_num_threads(1)
    workload = {name: getattr(args, name) for name in ("samples", "group", "rows", "prompt_tokens", "rounds", "before")}
    lengths = {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST}
    found = {shape: measured(shape, args) for shape in args.shapes}
    for shape, rows in found.items():
        for name, row in rows.items():
            ratio = f", ours is {row['ratio']['median']:.2f} times that" if "ratio" in row else ""
            print(f"{shape:5} {name:13} {row['tokens_per_cpu_second']:8.0f} tokens per CPU-second{ratio}")
    write_record(args.json, WHAT, 1, {"workload": workload, "response_tokens": lengths, "shapes": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
