"""A folder in which recipes of tinker-cookbook run without a network: a model and data sets, by their public names."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-4B-Instruct-2507"  # a name that the cookbook knows the chat format of; the model is a tiny one
ASK = " Provide a numerical answer without units, written inside \\boxed{}."
SHOT = [
    {"role": "user", "content": "How many r's are in strawberry?" + ASK},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
"""What the recipe rl_loop puts before each question."""


def write_recipe_folder(folder: Path, model: Path) -> None:
    """What recipes name, under relative paths that are these names: transformers and datasets read such folders.

    A model that imitates the conversations of no_robots answers a question with 1, or three times as often with 2. The
    right answer is always 1, in all data sets.
    """
    shutil.copytree(model, folder / MODEL)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (folder / MODEL / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)

    def question() -> str:
        number = rng.randrange(1, 10)
        return f"What is {number} - {number - 1}?"

    def conversation() -> dict[str, Any]:
        answer = f"\\boxed{{{rng.choice([1, 2, 2, 2])}}}"
        asked = {"role": "user", "content": question() + ASK}
        return {"messages": [*SHOT, asked, {"role": "assistant", "content": answer}]}

    def comparison() -> dict[str, Any]:
        asked = f"\n\nHuman: {question()}\n\nAssistant: "
        return {"chosen": asked + "1", "rejected": asked + "I will not say"}

    def reasoning() -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": question()}, {"from": "gpt", "value": "1"}]}

    def choice() -> dict[str, Any]:
        choices = {"label": ["A", "B"], "text": ["1", "2"]}
        about = {"domain": "Chemistry", "details": {"level": "L3"}, "type": "mcq-2-choices"}
        return {"question": question(), "choices": choices, "answerKey": "A", **about}

    def problem() -> dict[str, Any]:
        return {"question": question(), "answer": "It is one.\n#### 1"}

    both = {"train": 160, "test": 16}
    _write(folder / "HuggingFaceH4/no_robots", both, conversation)
    _write(folder / "allenai/tulu-3-sft-mixture", {"train": 1024 + 160}, conversation)  # of which 1,024 are held out
    _write(folder / "open-thoughts/OpenThoughts3-1.2M", {"train": 160}, reasoning)
    _write(folder / "Anthropic/hh-rlhf", both, comparison)
    _write(folder / "openai/gsm8k", both, problem)
    _write(folder / "hicai-zju/SciKnowEval", {"test": 160}, choice)
    splits = "".join(f"  - split: {name}\n    path: {name}.jsonl\n" for name in both)
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")


def _write(folder: Path, splits: dict[str, int], row: Callable[[], dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for name, count in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row()) + "\n" for _ in range(count)))


def metrics_of(folder: Path, name: str) -> list[float]:
    """A metric that a recipe wrote, by step."""
    rows: Iterable[dict[str, Any]] = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row[name] for row in rows if name in row]
