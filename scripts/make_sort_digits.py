"""Writes an example that trains on a laptop: a tiny random model, and data of the task `sort 52837` -> `23578`.

    python scripts/make_sort_digits.py OUT_DIR [--seed S] [--untied]

Half of the warm-up demonstrations are wrong on purpose: a policy that imitates them is right at most half of the time,
and only reinforcement learning can improve it further.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SFT_RECORDS = 6400  # 100 updates of 64
TRAIN_RECORDS = 8000
HELDOUT_RECORDS = 256
CHAT_RECORDS = 640  # chats with one to three sortings, all correct
PAIR_RECORDS = 3200  # preference pairs, 100 updates of 32

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_sort_digits(out_dir: str | Path, seed: int = 0, *, untied: bool = False) -> dict[str, int]:
    """Writes `model/` and the files of records under `out_dir`; the seed determines all bytes.

    Held-out prompts are distinct and occur in no other file. The files `sft`, `train`, `chats` and `pairs` may have a
    prompt several times. `pairs` and `heldout_pairs` prefer right answers to wrong answers.

    Args:
        untied: see `write_model`.

    Returns:
        The number of records by file name, and the number of the model's parameters under `model`.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    heldout: dict[str, dict[str, str]] = {}
    while len(heldout) < HELDOUT_RECORDS:
        record = _sorting(rng)
        heldout[record["prompt"]] = record
    sft = [_sorting(rng, excluded=heldout) for _ in range(SFT_RECORDS)]
    for index in rng.sample(range(SFT_RECORDS), SFT_RECORDS // 2):
        sft[index]["answer"] = "".join(rng.sample(sft[index]["answer"], len(sft[index]["answer"])))
    train = [_sorting(rng, excluded=heldout) for _ in range(TRAIN_RECORDS)]
    chats = [_chat([_sorting(rng, excluded=heldout) for _ in range(rng.randint(1, 3))]) for _ in range(CHAT_RECORDS)]
    pairs = [_preference(rng, _sorting(rng, excluded=heldout)) for _ in range(PAIR_RECORDS)]
    heldout_pairs = [_preference(rng, record) for record in heldout.values()]

    written = {"model": write_model(out_dir / "model", _tokenizer(), seed, untied=untied)}
    files = {"sft": sft, "train": train, "heldout": list(heldout.values()), "chats": chats}
    files |= {"pairs": pairs, "heldout_pairs": heldout_pairs}
    for name, records in ((f"{stem}.jsonl", records) for stem, records in files.items()):
        (out_dir / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        written[name] = len(records)
    return written


def _sorting(rng: random.Random, excluded: dict[str, Any] | None = None) -> dict[str, str]:
    """Returns a prompt of three to five random digits with its right answer, other than the `excluded` prompts."""
    while True:
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))
        prompt = f"sort {digits}"
        if not excluded or prompt not in excluded:
            return {"prompt": prompt, "answer": "".join(sorted(digits))}


def _chat(sortings: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Returns a chat that asks for the sortings one after another."""
    turns = [
        [{"role": "user", "content": sorting["prompt"]}, {"role": "assistant", "content": sorting["answer"]}]
        for sorting in sortings
    ]
    return {"messages": [message for turn in turns for message in turn]}


def _preference(rng: random.Random, record: dict[str, str]) -> dict[str, Any]:
    """Returns a preference pair: the right answer, and a wrong one with shuffled digits or with one digit changed."""
    chosen = rejected = record["answer"]
    replaces = rng.random() < 0.5 or len(set(chosen)) == 1
    while rejected == chosen:
        digits = list(chosen)
        if replaces:
            digits[rng.randrange(len(digits))] = rng.choice("0123456789")
        else:
            rng.shuffle(digits)
        rejected = "".join(digits)
    prompt = [{"role": "user", "content": record["prompt"]}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _tokenizer() -> Any:
    """Returns a tokenizer in which every digit is a token."""
    return tokenizer_of(["sort 0123456789"], r"\d| ?\p{L}+|[^\s\p{L}\p{N}]|\s")


def tokenizer_of(texts: Sequence[str], pattern: str) -> Any:
    """Makes a byte-level BPE tokenizer whose merges only build the words of a task and its chat template.

    Args:
        texts: texts with all words of the task.
        pattern: matches texts that may become one token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([*texts, "user\n", "assistant\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def write_model(folder: Path, tokenizer: Any, seed: int, *, untied: bool = False) -> int:
    """Writes a random Qwen3 and its tokenizer as a Hugging Face folder; returns the number of parameters.

    Args:
        untied: whether the head has its own weight; all weights are then larger, so that adapters learn quickly.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=not untied,
        initializer_range=0.1 if untied else 0.02,
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
    parser.add_argument("--untied", action="store_true", help="a model that adapters can train, for configs/serve.yaml")
    arguments = parser.parse_args()
    written = write_sort_digits(arguments.out_dir, arguments.seed, untied=arguments.untied)
    for name, count in written.items():
        print(f"{arguments.out_dir / name}: {count} {'parameters' if name == 'model' else 'records'}")


if __name__ == "__main__":
    main()
