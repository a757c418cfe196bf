"""Writes the example that learns to use a tool: a tiny random model, and problems like `37*46`.

    python scripts/make_calculator.py OUT_DIR [--seed S]

The model is too small to multiply, but it can ask a calculator and repeat the result. In half of the warm-up
demonstrations the answer is a random number without a call, so a model that imitates them calls the calculator only
half of the time.
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

SFT_RECORDS = 6400  # in four epochs: 400 updates of 64
TRAIN_RECORDS = 2000
HELDOUT_RECORDS = 128
CALL = '<tool_call>{{"name": "calculator", "arguments": {{"expression": "{}"}}}}</tool_call>'
RESULT = "<tool_response>\n{}\n</tool_response>"


def write_calculator(out_dir: str | Path, seed: int = 0) -> dict[str, int]:
    """Writes `model/`, `sft.jsonl`, `train.jsonl` and `heldout.jsonl` under `out_dir`; the seed determines all bytes.

    Returns:
        The number of records by file name, and the number of the model's parameters under `model`.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    # all results have four digits, so that the text to repeat is always at the same distance
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
    """Returns a random kind of demonstration: a guess, a call, or the answer after the result of a call."""
    question = [{"role": "user", "content": record["prompt"]}]
    call, kind = CALL.format(record["prompt"]), rng.choice(("guess", "call", "result"))
    if kind == "guess":
        return {"prompt": question, "answer": str(rng.randint(1000, 9999))}
    if kind == "call":
        return {"prompt": question, "answer": call}
    result = {"role": "user", "content": RESULT.format(record["answer"])}
    return {"prompt": [*question, {"role": "assistant", "content": call}, result], "answer": record["answer"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights and the data (default 0)")
    arguments = parser.parse_args()
    for name, count in write_calculator(arguments.out_dir, arguments.seed).items():
        print(f"{arguments.out_dir / name}: {count} {'parameters' if name == 'model' else 'records'}")


if __name__ == "__main__":
    main()
