"""Write the example that learns to use a tool: a tiny random model, and the data of products like `37*46`.

    python scripts/make_calculator.py OUT_DIR [--seed S]

The model is too small to multiply; it can ask a calculator and repeat what that says. Of the warm-up's demonstrations,
half answer at once, with numbers at random: imitating them gives a policy that calls the calculator half of the time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_sort_digits import tokenizer_of, write_model

SFT_RECORDS = 6400  # 400 updates of 64, each four times
TRAIN_RECORDS = 2000
HELDOUT_RECORDS = 128
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
RESULT = "<tool_response>\n{}\n</tool_response>"


def write_calculator(out_dir: str | Path, seed: int = 0) -> dict[str, int]:
    """Write `model/`, `sft.jsonl`, `train.jsonl` and `heldout.jsonl` under `out_dir`; the same seed, the same bytes.

    Returns:
        What was written: records per file name, and the model's parameters under `model`.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    # of four digits each: what is to be repeated is always as far away
    pairs = [(left, right) for left in range(32, 100) for right in range(32, 100)]
    rng.shuffle(pairs)
    records = [{"prompt": f"{left}*{right}", "answer": str(left * right)} for left, right in pairs]
    heldout, others = records[:HELDOUT_RECORDS], records[HELDOUT_RECORDS:]
    sft, train = [_demonstration(rng, rng.choice(others)) for _ in range(SFT_RECORDS)], others[:TRAIN_RECORDS]

    texts = [CALL.format("0123456789*"), RESULT.format("0123456789")]
    tokenizer = tokenizer_of(texts, r"\d|[\p{L}_]+| ?[^\s\p{L}\p{N}_]+|\s")
    written = {"model": write_model(out_dir / "model", tokenizer, seed)}
    for name, kept in (("sft.jsonl", sft), ("train.jsonl", train), ("heldout.jsonl", heldout)):
        (out_dir / name).write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        written[name] = len(kept)
    return written


def _demonstration(rng: random.Random, record: dict[str, str]) -> dict[str, Any]:
    """A guess, a call, or what is said to a call's result."""
    asked = [{"role": "user", "content": record["prompt"]}]
    call, kind = CALL.format(record["prompt"]), rng.choice(("guess", "call", "result"))
    if kind == "guess":
        return {"prompt": asked, "answer": str(rng.randint(1000, 9999))}
    if kind == "call":
        return {"prompt": asked, "answer": call}
    told = {"role": "user", "content": RESULT.format(record["answer"])}
    return {"prompt": [*asked, {"role": "assistant", "content": call}, told], "answer": record["answer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights and the data (default 0)")
    arguments = parser.parse_args()
    for name, count in write_calculator(arguments.out_dir, arguments.seed).items():
        print(f"{arguments.out_dir / name}: {count} {'parameters' if name == 'model' else 'records'}")


if __name__ == "__main__":
    main()
