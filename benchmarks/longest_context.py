"""The longest GRPO context of an 8-billion model on one GPU of 80 GB, term by term: `slimefsdp plan`'s estimate of it.

    python benchmarks/longest_context.py

Arithmetic from the model's dimensions: nothing is measured, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slimefsdp.estimate.hardware import HEADROOM
from slimefsdp.estimate.memory import LayerActivations, MicroBatches, head_activations
from slimefsdp.estimate.recommend import LongestContext, longest_contexts, memory_of_context
from slimefsdp.estimate.setup import TrainingSetup
from slimefsdp.model_spec import ModelSpec

# Qwen3-8B, as its config.json says
MODEL = ModelSpec(
    hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936, has_head_norms=True
)
DEVICE_BYTES = 80 * 10**9
GOAL = 128 * 1024
ALL = TrainingSetup(MODEL, recompute="full", is_optimizer_fused=True)
TRAINED = {"adapters of rank 16": replace(ALL, trained_share=0.0, lora_rank=16), "all parameters": ALL}


def longest_table() -> str:
    """The longest context of every way to store, and what is full there."""
    terms = ("weights", "gradients", "optimiser", "gathered", "activations", "buffers", "total", "on the host")
    lines = [f"| trained | stored | tokens | {' | '.join(terms)} |", "|---" * (len(terms) + 3) + "|"]
    for name, setup in TRAINED.items():
        for one in longest_contexts(setup, DEVICE_BYTES):
            held = one.memory
            sizes = (
                held.parameters, held.gradients, held.optimizer, held.unsharded, held.activations,
                held.head + held.buffers, held.total, held.host,
            )  # fmt: skip
            cells = [gigabytes(size) for size in sizes] if one.tokens else ["" for _ in sizes]
            tokens = f"{one.tokens:,}" if one.tokens else f"none: {gigabytes(held.total)} GB"
            lines.append(f"| {name} | {stored(one)} | {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


def stored(one: LongestContext) -> str:
    """A way to store in words."""
    words = {"none": "all activations", "full": "inputs of layers", "offload": "inputs of layers on the host"}[
        one.setup.recompute
    ]
    return words + (", states on the host" if one.setup.cpu_offload else "")


def terms_table() -> str:
    """What adapters of rank 16 take at the goal's length, each term by itself, and the fullest moment."""
    setup = TRAINED["adapters of rank 16"]
    layer, head = LayerActivations.of(setup), head_activations(setup, MicroBatches(GOAL, rows=GOAL))

    def held(offload: bool) -> int:
        return memory_of_context(replace(setup, recompute="offload" if offload else "full"), GOAL).total

    at_rest = memory_of_context(setup, 1)
    workspace = LongestContext(setup, GOAL, at_rest).attention_workspace
    rows = [
        ("weights in bf16, adapters in float32", at_rest.parameters, "always"),
        ("gradients and optimiser states of adapters", at_rest.gradients + at_rest.optimizer, "always"),
        ("inputs of 36 layers", MODEL.layers * layer.stream * GOAL, "forward to backward; or on the host"),
        ("a layer that is computed again: norms", layer.norms * GOAL, "in its backward"),
        ("its attention", layer.attention * GOAL, "in its backward"),
        ("its MLP", layer.mlp * GOAL, "in its backward"),
        ("what its adapters read", layer.adapters * GOAL, "in its backward"),
        ("gradients inside its MLP", layer.mlp_backward * GOAL, "in its backward"),
        ("the head: hidden rows that are kept", head.kept, "in the head"),
        ("the head: logits of a chunk, gradients of rows", max(head.forward, head.backward), "in the head"),
        (
            "attention's own workspace",
            workspace,
            "in a layer's backward, of the tenth left free",
        ),
        ("left free: allocator, CUDA context, workspaces", round(DEVICE_BYTES * (1 - HEADROOM)), "always"),
        ("**fullest moment**, inputs on the device", held(False), verdict(held(False))),
        ("**fullest moment**, inputs on the host", held(True), verdict(held(True))),
    ]
    lines = [f"| {GOAL:,} tokens, adapters of rank 16 | GB | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {gigabytes(size)} | {when} |" for name, size, when in rows)])


def verdict(held: int) -> str:
    """Whether so many bytes fit."""
    return "fits" if held <= HEADROOM * DEVICE_BYTES else "does not fit"


def gigabytes(size: int) -> str:
    """Of 10^9 bytes."""
    return f"{size / 1e9:.1f}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{terms_table()}\n\n{longest_table()}")


if __name__ == "__main__":
    main()
