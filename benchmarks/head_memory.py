"""Peak memory and CPU time of the fused log-prob head against plain log_softmax, each in a fresh process on the CPU.

"by rows" is the fused head in tiles that have all words, as on CUDA, and here before tiles had a part of them.

    python benchmarks/head_memory.py --case 4096 512 32000 float32 --json benchmarks/results/head_memory.json

`weight_gradient_passes` says how often the sums of the weight's gradient are read and written from end to end: once for
each tile of rows, or once where the rows of some words all come before the next words, whose gradient a cache holds.
One measurement is one forward and backward pass: log-probs with gradients to hidden and weight, entropy as a value.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CASES = [
    ["4096", "512", "32000", "float32"],
    ["2048", "128", "152000", "float32"],
    ["512", "1024", "152000", "float32"],
    ["8192", "64", "152000", "float32"],
    ["8192", "64", "152000", "bfloat16"],
]
HEADS = ("naive", "by rows", "fused")
# Naive holds three [rows, vocab] float32 tensors at its peak: log-softmax, its gradient and that of the logits.
NAIVE_COPIES = 3
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=4, action="append", metavar=("ROWS", "HIDDEN", "VOCAB", "DTYPE"))
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--naive-limit-gb", type=float, default=4.0, help="skip naive where it would need more")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=HEADS, help=argparse.SUPPRESS)  # in the child process
    args = parser.parse_args()
    cases = [(int(rows), int(hidden), int(vocab), dtype) for rows, hidden, vocab, dtype in args.case or DEFAULT_CASES]
    if args.measure:
        print(json.dumps(measure(args.measure, *cases[0])))
        return
    print("  rows hidden   vocab     dtype    head  peak MiB  user s   sys s  mean log-prob")
    results = []
    for case in cases:
        for head in HEADS:
            result = run_or_skip(head, case, args.threads, args.naive_limit_gb)
            results.append(result)
            print(table_row(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps({**describe_run(args.threads), "results": results}, indent=2) + "\n")


def run_or_skip(head: str, case: tuple[int, int, int, str], threads: int, naive_limit_gb: float) -> dict[str, Any]:
    """One measurement in a fresh process, or the reason why there is none."""
    rows, hidden_dim, vocab, dtype = case
    result: dict[str, Any] = {"head": head, "rows": rows, "hidden": hidden_dim, "vocab": vocab, "dtype": dtype}
    estimate_gb = NAIVE_COPIES * rows * vocab * 4 / 1e9
    if head == "naive" and estimate_gb > naive_limit_gb:
        reason = f"would need about {estimate_gb:.0f} GB, over the limit of {naive_limit_gb:g} GB"
        return {**result, "skipped": reason}
    command = [sys.executable, __file__, "--measure", head, "--case", *map(str, case)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {**result, **json.loads(output)}


def measure(head: str, rows: int, hidden_dim: int, vocab: int, dtype_name: str) -> dict[str, float]:
    """Growth of the resident set at its peak, and CPU seconds, over one forward and backward pass."""
    import torch

    from slimefsdp.models import head_tiles

    function = naive_log_probs if head == "naive" else fused_log_probs
    if head == "by rows":
        head_tiles.TILE_WORDS, head_tiles.TILE_BYTES = vocab, head_tiles.CHUNK_BYTES["cpu"] // 2
    dtype = getattr(torch, dtype_name)

    def leaves(rows: int, vocab: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        hidden = torch.randn(rows, hidden_dim).to(dtype).requires_grad_()
        weight = torch.randn(vocab, hidden_dim).div_(hidden_dim**0.5).to(dtype).requires_grad_()
        return hidden, weight, torch.randint(0, vocab, (rows,))

    function(*leaves(4, 16))[0].mean().backward()  # libraries and thread pools come up here
    hidden, weight, targets = leaves(rows, vocab)
    before_bytes, before = resident_bytes(), resource.getrusage(resource.RUSAGE_SELF)
    log_probs, _ = function(hidden, weight, targets)
    log_probs.mean().backward()
    after = resource.getrusage(resource.RUSAGE_SELF)
    counted = {}
    if head != "naive":
        wide = torch.promote_types(dtype, torch.float32).itemsize
        tiles = head_tiles.HeadTiles.of(rows, vocab, wide, "cpu")
        counted["weight_gradient_passes"] = len(tiles.rows) if len(tiles.words) == 1 else 1
        counted["recomputed_share"] = round(tiles.recomputed_share, 3)
    return {
        "peak_growth_mib": round((after.ru_maxrss * 1024 - before_bytes) / MIB, 1),
        "returned_gradients_mib": round((hidden.grad.nbytes + weight.grad.nbytes) / MIB, 1),
        "user_cpu_s": round(after.ru_utime - before.ru_utime, 2),
        "system_cpu_s": round(after.ru_stime - before.ru_stime, 2),
        "mean_log_prob": log_probs.mean().item(),
        "weight_grad_norm": weight.grad.double().norm().item(),
        **counted,
    }


def fused_log_probs(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs

    return token_log_probs(HeadInputs(hidden, weight), targets, with_entropy=True)


def naive_log_probs(hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    import torch

    log_softmax = (hidden @ weight.t()).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp().mul_(log_softmax)).sum(-1)
    return log_softmax.gather(1, targets[:, None]).squeeze(1), entropy


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def describe_run(threads: int) -> dict[str, Any]:
    cpu_lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    torch_version = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    return {
        "what": "one forward and backward pass; log-probs with gradients to hidden and weight, entropy as a value; "
        "peak_growth_mib is the peak resident set over that before the pass and includes returned_gradients_mib",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", "benchmarks/head_memory.py", *sys.argv[1:]]),
        "cpu": cpu_lines[0].split(":", 1)[1].strip() if cpu_lines else platform.machine(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch_version,
    }


def table_row(result: dict[str, Any]) -> str:
    start = f"{result['rows']:>6} {result['hidden']:>6} {result['vocab']:>7} {result['dtype']:>9} {result['head']:>7} "
    if "skipped" in result:
        return start + f"skipped: {result['skipped']}"
    cpu_s = f"{result['user_cpu_s']:>7.1f} {result['system_cpu_s']:>7.1f}"
    return start + f"{result['peak_growth_mib']:>9.0f} {cpu_s} {result['mean_log_prob']:>14.6f}"


if __name__ == "__main__":
    main()
