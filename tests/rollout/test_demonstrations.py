"""Demonstrations: each form of record, which of its tokens are trained, and records that are too long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.rollout import prompt_files
from actors.rollout.demonstrations import (
    Demonstration,
    encode_demonstration,
)
from actors.rollout.prompt_files import Prompts, read_prompts, without_overlong
from actors.rollout.records import read_demonstrations
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.config.data import DataSettings
from slimefsdp.errors import ConfigError
from tests.support.tiny_models import SIZES

WORDS = ["</s>", "<user>", "<assistant>", "<tools>", "<end>", "<think>", *"abcdefgh"]
TURN = "<{{ m.role }}> {{ m.content }} <end> "
OPENS = "{% if add_generation_prompt %}<assistant> {% endif %}"
PLAIN = "{% if tools %}<tools> {% endif %}{% for m in messages %}" + TURN + "{% endfor %}" + OPENS
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} "
    "{% endgeneration %}<end> {% else %}{{ m.content }} <end> {% endif %}{% endfor %}" + OPENS
)
# as Qwen3's: the last turn begins with thinking, which earlier ones have not
FORGETS = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}<think> {% endif %}"
    "{{ m.content }} <end> {% endfor %}" + OPENS
)
# as Mistral's: a system message stands in the user's turn where that is the last of the chat
MOVES = (
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}> {% if m.role == 'user' and loop.last and "
    "messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}{{ m.content }} <end> {% endfor %}" + OPENS
)
# as Phi-3's: a chat that opens no answer is ended
ENDS = "{% for m in messages %}" + TURN + "{% endfor %}" + OPENS + "{% if not add_generation_prompt %}</s>{% endif %}"
SYSTEM = {"role": "system", "content": "h"}


def tokenizer(template: str | None = PLAIN, end: str | None = "</s>") -> Any:
    """Whose tokens are words."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="h"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, eos_token=end)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


def shown(one: Demonstration) -> str:
    """Its words, those that are trained in capitals."""
    mask = np.ones(one.response_length, bool) if one.loss_mask is None else one.loss_mask
    trained = [False] * one.prompt_length + mask.tolist()
    words = [WORDS[token] for token in one.tokens]
    assert mask[0] and one.prompt_length >= 1
    return " ".join(word.upper() if is_trained else word for word, is_trained in zip(words, trained, strict=True))


@pytest.mark.parametrize(
    ("template", "record", "expected"),
    [
        (PLAIN, {"prompt": "a b", "answer": "c"}, "<user> a b <end> <assistant> C </S>"),
        (PLAIN, {"prompt": chat("a"), "answer": "c d"}, "<user> a <end> <assistant> C D </S>"),
        (None, {"prompt": "a b", "answer": "c"}, "a b C </S>"),
        (PLAIN, {"prompt": "a b", "completion": " c d"}, "a b C D </S>"),
        (PLAIN, {"prompt": "a b ", "completion": "c </s>"}, "a b C </S>"),
        (
            PLAIN,
            {"prompt": chat("a"), "completion": [{"role": "assistant", "content": "b"}]},
            "<user> a <end> <assistant> B <END>",
        ),
        (PLAIN, {"text": "a b c"}, "a B C </S>"),
        (
            PLAIN,
            {"messages": chat("a", "b", "c", "d e")},
            "<user> a <end> <assistant> B <END> <user> c <end> <assistant> D E <END>",
        ),
        (PLAIN, {"messages": chat("a", "b", "c")}, "<user> a <end> <assistant> B <END> <user> c <end>"),
        (PLAIN, {"messages": chat("a", "b"), "tools": '[{"name": "f"}]'}, "<tools> <user> a <end> <assistant> B <END>"),
        (
            MARKED,
            {"messages": chat("a", "b", "c", "d e")},
            "<user> a <end> <assistant> B <end> <user> c <end> <assistant> D E <end>",
        ),
        (FORGETS, {"messages": chat("a", "b")}, "<user> a <end> <assistant> <THINK> B <END>"),
        (
            PLAIN,
            {"messages": chat("a", "b", "c", "d")[1:]},  # begins with the assistant
            "<assistant> B <END> <user> c <end> <assistant> D <END>",
        ),
        (
            "<tools> " + FORGETS,  # what stands before every chat
            {"messages": chat("a", "b c")[1:]},
            "<tools> <assistant> <think> B C <END>",
        ),
    ],
)  # fmt: skip
def test_of_each_form_the_right_tokens_are_trained(template: str | None, record: dict[str, Any], expected: str) -> None:
    assert shown(encode_demonstration(tokenizer(template), record)) == expected


@pytest.mark.parametrize("template", [PLAIN, MARKED, FORGETS, MOVES, ENDS])
def test_the_last_turn_alone_is_trained_if_it_is_asked_for(template: str) -> None:
    found = encode_demonstration(tokenizer(template), {"messages": chat("a", "b", "c", "d")}, train_on="last_turn")
    thinking, ended = "<THINK> " if template == FORGETS else "", " </S>" if template == ENDS else ""
    assert shown(found) == f"<user> a <end> <assistant> b <end> <user> c <end> <assistant> {thinking}D <END>{ended}"


@pytest.mark.parametrize("train_on", ["all_turns", "last_turn"])
@pytest.mark.parametrize("form", ["messages", "completion"])
def test_a_template_that_writes_the_question_otherwise_before_its_answer_is_refused(form: str, train_on: str) -> None:
    messages = [SYSTEM, *chat("a", "b")]
    record = {"messages": messages} if form == "messages" else {"prompt": messages[:2], "completion": messages[2:]}
    with pytest.raises(ConfigError) as caught:
        encode_demonstration(tokenizer(MOVES), record, train_on=train_on)
    assert caught.value.field == "data.train_on" and "last_turn" not in str(caught.value.hint)
    answered = encode_demonstration(tokenizer(MOVES), {"prompt": messages[:2], "answer": "b"})  # which is a way out
    assert shown(answered) == "<user> h a <end> <assistant> B </S>"


def data(folder: Path, record: dict[str, Any], **settings: Any) -> DataSettings:
    file = folder / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return DataSettings.model_validate({"train": str(file), **settings})


@pytest.mark.parametrize(
    ("record", "settings", "expected"),
    [
        ({"messages": chat("a", "b"), "prompt": "a"}, {}, {"messages": chat("a", "b")}),
        ({"text": "a", "prompt": "b", "answer": 3}, {}, {"prompt": "b", "answer": 3}),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            {},
            {"messages": chat("a", "b")},
        ),
        (
            {"instruction": "a", "input": "b", "output": "c"},
            {"prompt_column": "{instruction}\n\n{input} {{}}", "answer_column": "output"},
            {"prompt": "a\n\nb {}", "answer": "c"},
        ),
        (
            {"instruction": "a", "input": None, "output": "c"},
            {"prompt_column": "{instruction}\n\n{input}", "answer_column": "output"},
            {"prompt": "a", "answer": "c"},
        ),
        ({"question": "a", "completion": "b"}, {"prompt_column": "question"}, {"prompt": "a", "completion": "b"}),
    ],
)
def test_columns_and_templates_make_a_record(
    tmp_path: Path, record: dict[str, Any], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    (found,) = read_demonstrations(data(tmp_path, record, **settings), "train")
    assert {key: found[key] for key in expected} == expected and found.place == f"{tmp_path / 'records.jsonl'}:1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model of these words, and records of 3, 8 and 13 tokens that are texts, and one that is a chat.

    Records are encoded here; what the process that does it finds is compared above.
    """

    def encoded(path: Path, records: Sequence[Any], **_: Any) -> list[Demonstration]:
        return [encode_demonstration(tokenizer(), record) for record in records]

    monkeypatch.setattr(prompt_files, "encoded_demonstrations", encoded)
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    texts: list[Any] = [{"text": " ".join("a" * length) + " "} for length in (2, 7, 12)]
    chats = [{"messages": chat("a b c d e f", "g")}]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats + texts)))
    return tmp_path


def prepared(folder: Path, name: str, *, most: int, how: str = "error", **settings: Any) -> Prompts:
    config = sft(folder, data={"train": str(folder / name), "max_tokens": most, "overlong_prompts": how}, **settings)
    return without_overlong(config, read_prompts(config))


def sft(folder: Path, **sections: Any) -> RunConfig:
    tree = {"algorithm": "sft", "model": {"path": str(folder / "model")}, "batch": {"samples_per_update": 2}}
    return config_from_dict({**tree, **sections})


@pytest.mark.parametrize(
    ("how", "lengths", "skipped"), [("skip", [3, 8], [3]), ("truncate", [3, 8, 8], []), ("split", [3, 8, 8, 6], [])]
)
def test_a_text_that_is_too_long_is_left_out_cut_or_split(
    folder: Path, how: str, lengths: list[int], skipped: list[int]
) -> None:
    found = prepared(folder, "texts.jsonl", most=8, how=how)
    assert [len(one.tokens) for one in found.demonstrations] == lengths
    assert [one.place for one in found.skipped] == [f"{folder / 'texts.jsonl'}:{line}" for line in skipped]


@given(length=st.integers(2, 60), most=st.integers(2, 20))
def test_pieces_of_a_text_train_every_token_but_the_first_once(length: int, most: int) -> None:
    whole = Demonstration(np.arange(length), length - 1)
    pieces = whole.split(most)
    trained = [token for piece in pieces for token in piece.tokens[piece.prompt_length :].tolist()]
    assert trained == list(range(1, length)) and all(2 <= len(piece.tokens) <= most for piece in pieces)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(1, 30))
def test_a_cut_keeps_what_it_can_of_the_mask(mask: list[bool], length: int) -> None:
    whole = Demonstration(np.arange(len(mask) + 3), len(mask), np.array([True, *mask[1:]]))
    cut = whole.truncated(min(length, len(whole.tokens)))
    if cut is None:
        assert length <= 3
        return
    assert cut.loss_mask is not None and cut.prompt_length == 3
    assert cut.loss_mask.tolist() == [True, *mask[1:]][: cut.response_length]


def test_the_steps_follow_from_epochs_and_records(folder: Path) -> None:
    config = sft(folder, run={"epochs": 3}, optim={"schedule": "linear"})
    assert config.with_steps_of(5).run.steps == 8 == config.with_steps_of(5).total_updates  # 15 records, the last alone
    stopped = sft(folder, run={"epochs": 3, "steps": 2}, optim={"total_updates": 6})
    assert stopped.with_steps_of(5).run.steps == 2 and stopped.with_steps_of(5).total_updates == 6
    with pytest.raises(ConfigError) as caught:
        sft(folder, run={"epochs": 3}, optim={"warmup_updates": 8}).with_steps_of(5)
    assert "optim.warmup_updates=8" in caught.value.message
