"""The longest sample that a rank can train on, by the estimate of memory, and what is full at that length.

A micro-batch then is one sample, as long as `mesh.cp` ranks can hold together; an update has more than one of them, so
gradients are there while the next one computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.flops import Flops
from slimefsdp.perf_model.memory import ByteSizes, Computing, Memory, MicroBatches, Sharding
from slimefsdp.perf_model.simulate import MeshShape
from slimefsdp.perf_model.step_time import ColocatedModels, Workload, fits, peak_memory

MOST_TOKENS = 2**27  # of a sample: longer ones are not looked for
_NOTHING = Flops(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LongestContext:
    """One way to train, and the longest sample that fits."""

    recompute: str
    recompute_every: int
    offload_activations: bool
    cpu_offload: bool
    tokens: int  # of the sample, on all cp ranks together; 0: not one fits
    memory: Memory  # of a rank at the fullest moment, with a sample of that length

    @property
    def settings(self) -> str:
        """As overrides of a command line."""
        text = f"model.activation_checkpointing={self.recompute}"
        text += f" model.checkpoint_every_n_layers={self.recompute_every}" if self.recompute_every > 1 else ""
        text += " model.offload_activations=true" if self.offload_activations else ""
        return text + (" fsdp.cpu_offload=true" if self.cpu_offload else "")


def longest_contexts(
    model_spec: ModelSpec,
    sharding: Sharding,
    *,
    mesh: MeshShape,
    sizes: ByteSizes,
    computing: Computing,
    beside: ColocatedModels,
    memory_bytes: int,
    counted_share: float = 1.0,
    most_tokens: int = MOST_TOKENS,
) -> list[LongestContext]:
    """The longest sample of these settings first, then of other ways to store activations and states.

    Args:
        memory_bytes: of a rank's device, of which a tenth stays free.
        counted_share: of a sample's tokens, those that the head projects.
        most_tokens: longer samples are not looked for, as where a model learned no more positions.
    """
    ways = [computing]
    for offload in (False,) if computing.on_cpu else (False, True):
        stored = replace(computing, recompute_every=1, cpu_offload=offload, offload_activations=False)
        ways += [replace(stored, recompute="none"), replace(stored, recompute="full")]
        if not computing.on_cpu:
            ways.append(replace(stored, recompute="full", offload_activations=True))

    def found(how: Computing) -> LongestContext:
        def held(tokens: int) -> Memory:
            return memory_of_context(
                model_spec, sharding, tokens,
                mesh=mesh, sizes=sizes, computing=how, beside=beside, counted_share=counted_share,
            )  # fmt: skip

        tokens = most_that_fit(lambda tokens: fits(held(tokens), memory_bytes), most_tokens)
        return LongestContext(
            how.recompute,
            how.recompute_every,
            how.offload_activations,
            how.cpu_offload,
            tokens,
            held(max(tokens, mesh.cp)),
        )

    return [found(how) for how in dict.fromkeys(ways)]


def memory_of_context(
    model_spec: ModelSpec,
    sharding: Sharding,
    tokens: int,
    *,
    mesh: MeshShape,
    sizes: ByteSizes,
    computing: Computing,
    beside: ColocatedModels,
    counted_share: float = 1.0,
) -> Memory:
    """What a rank holds at the fullest moment of an update whose micro-batches are one sample of this length each."""
    local = -(-tokens // mesh.cp)
    batch = MicroBatches(local, rows=max(1, round(local * counted_share)), count=2)
    work = Workload(model_spec, mesh.dp_replicate, mesh.dp * mesh.cp, sizes, batch, _NOTHING, _NOTHING, local)
    return peak_memory(replace(work, beside=beside), sharding, computing)


def attention_workspace(model_spec: ModelSpec, tokens: int, cp: int) -> int:
    """Bytes that flash attention's backward allocates inside: gradients of queries in float32, and a sum a head.

    No estimate has them in it; they have to fit what is left free.
    """
    return -(-tokens // cp) * model_spec.heads * (model_spec.head_dim + 1) * 4


def most_that_fit(does: Callable[[int], bool], most: int) -> int:
    """The largest number of 1 to `most` of which `does` says yes, as of all below it; 0: of none."""
    low, high = 0, most + 1  # does(low), not does(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low
