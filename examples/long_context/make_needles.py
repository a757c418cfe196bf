"""Writes the long-context example: a tiny random model, and texts of 256 to 16,384 tokens in which a digit is hidden.

    python examples/long_context/make_needles.py OUT_DIR [--seed S]

A prompt is a text of random letters with one mark followed by a digit, `...gdhc#7mbep...`, and ends with `?`. The
answer is that digit, the only one in the text. Each letter, digit and mark is a token. The demonstrations of the
warm-up have the shortest texts.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

LENGTHS = (256, 1024, 4096, 16384)  # tokens of a prompt
TRAIN_RECORDS, HELDOUT_RECORDS = 400, 32  # for each length
SFT_RECORDS = 3840  # all of the shortest length; 120 updates of 32
LETTERS = "abcdefghijklmnop"
END = "<|end|>"


def write_needles(out_dir: str | Path, seed: int = 0) -> dict[str, int]:
    """Writes `model/`, `sft.jsonl`, `train.jsonl` and `heldout.jsonl` below `out_dir`; the seed determines all bytes.

    Returns:
        The number of records by file name, and the number of the model's parameters under `model`.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    shortest = min(LENGTHS)
    sft = [needle(rng, shortest) for _ in range(SFT_RECORDS)]
    train = [needle(rng, tokens) for tokens in LENGTHS for _ in range(TRAIN_RECORDS)]
    heldout = [needle(rng, tokens) for tokens in LENGTHS for _ in range(HELDOUT_RECORDS)]
    written = {"model": _write_model(out_dir / "model", seed)}
    for name, records in (("sft.jsonl", sft), ("train.jsonl", train), ("heldout.jsonl", heldout)):
        (out_dir / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        written[name] = len(records)
    return written


def needle(rng: random.Random, tokens: int) -> dict[str, str]:
    """Returns a prompt of this many tokens, with the mark and the digit at a random position, and its answer."""
    digit = rng.choice("0123456789")
    text = rng.choices(LETTERS, k=tokens - 3)
    position = rng.randrange(tokens - 2)
    return {"prompt": "".join([*text[:position], "#", digit, *text[position:], "?"]), "answer": digit}


def _tokenizer() -> Any:
    """Returns a tokenizer in which every character of the task is a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [END, *"0123456789", "#", "?", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, padding_side="left", model_max_length=32768
    )


def _write_model(folder: Path, seed: int) -> int:
    """Writes a random Qwen3 and its tokenizer as a Hugging Face folder; returns the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer()
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):  # keeps the caller's random state
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="of the model's weights and the data (default 0)")
    arguments = parser.parse_args()
    for name, count in write_needles(arguments.out_dir, arguments.seed).items():
        print(f"{arguments.out_dir / name}: {count} {'parameters' if name == 'model' else 'records'}")


if __name__ == "__main__":
    main()
