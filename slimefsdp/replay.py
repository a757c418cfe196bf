"""Runs `train_step` on one recorded batch, without Ray.

    torchrun --nproc-per-node 2 -m slimefsdp.replay CONFIG --batch FILE --export DIR

Without torchrun the command runs one rank. It prints the metrics as one JSON object, and writes the new weights to a
Hugging Face folder. Use it for bug reports, mesh comparisons and benchmarks; `slimefsdp replay` does the same with Ray.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence

from slimefsdp.config import load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import SlimeError
from slimefsdp.io.user_files import path_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that this module shares with `slimefsdp replay`."""
    parser.add_argument("config", type=path_argument, help="YAML settings")
    parser.add_argument("overrides", nargs="*", help="dotted settings, e.g. mesh.dp=2")
    parser.add_argument("--batch", type=path_argument, required=True, help="file written by RolloutBatch.save")
    parser.add_argument("--export", type=path_argument, help="write the new weights here as a Hugging Face folder")


def json_text(metrics: dict[str, float]) -> str:
    """Returns the metrics as one JSON object, in which non-finite values are null."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps(finite, allow_nan=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m slimefsdp.replay", description=__doc__)
    add_arguments(parser)
    options = parser.parse_intermixed_args(arguments)  # settings may follow --batch
    try:
        config = load_config(options.config, options.overrides)
        batch = RolloutBatch.load(options.batch)
        import torch
        import torch.distributed as dist

        from slimefsdp.distributed.mesh import choose_device, start_process_group_from_environment
        from slimefsdp.trainer import Trainer

        device = choose_device(config.mesh.device)
        if device.type == "cpu":
            torch.set_num_threads(1)
        start_process_group_from_environment(device, timeout_s=config.collective_timeout_s)
        trainer = Trainer(config, device=device)
        metrics = trainer.train_step(batch)
        if options.export is not None:
            trainer.export_hf(options.export)
        if dist.get_rank() == 0:
            print(json_text(metrics))
        dist.barrier()
        dist.destroy_process_group()
    except SlimeError as error:
        print(f"error [{error.code}]: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all output is flushed; a normal exit could let gloo abort while the interpreter ends
