"""Prompt files: every fault is named by file and line; the stream's order is a function of seed and place."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from actors.engines.tokenizer import encode_observation, encode_prompt
from actors.rollout import data_sets
from actors.rollout.prompts import PromptStream
from actors.rollout.records import read_records
from slimefsdp.config.data import DataSettings
from slimefsdp.errors import CheckpointError, ConfigError
from tests.support.refusals import refused

FIELD = "data.train"
WORDS = [
    "<s>",
    "</s>",
    "[user]",
    "[system]",
    "[assistant]",
    "sort",
    "52",
    "now",
    "25",
    "13",
    "31",
    "<im_start>",
    "<im_end>",
    "user",
    "assistant",
    "system",
    *["no", "what", "the", "assistant", "has", "said", "is", "wrong"],
]
CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}[assistant]{% endif %}"


def word_tokenizer(chat_template=None):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=chat_template)


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_records_come_back_whole_and_in_file_order(tmp_path):
    records = [
        {"prompt": "sort 52", "answer": 25, "source": ["x"]},
        {"prompt": [{"role": "user", "content": "h\u2028i"}], "answer": None},
        {"prompt": [{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": ""}]},
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path = write(tmp_path, lines[0] + "\r\n\n" + "\n".join(lines[1:]))
    assert read_records(DataSettings(train=path), "train") == records


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"prompt": "a"', "JSON"),
        ('["prompt"]', "list"),
        ('{"answer": 1}', "['answer']"),
        ('{"prompt": "b"', "column 15"),
        ('{"prompt": " "}', "'prompt'"),
        ('{"prompt": []}', "'prompt'"),
        ('{"prompt": null}', "NoneType"),
        ('{"prompt": [{"role": "user", "content": "a"}, "b"]}', "index 1"),
        ('{"prompt": [{"role": "user"}]}', "index 0"),
        ('{"prompt": [{"content": "a"}]}', "index 0"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "5000"),
        ('{"prompt": ' + "[" * 100_000, "JSON"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt'"),
        ('{"prompt": "a", "answer": {"b": 1, "b": 2}}', "'b'"),
        ('{"prompt": [{"role": "user", "content": 3}]}', "int"),
        ('{"prompt": [{"role": "user", "content": ["a"]}]}', "list"),
        ('{"prompt": [{"role": "user", "content": null}]}', "NoneType"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "\\ud800"}]}', "message 1"),
    ],
)
def test_a_faulty_line_is_named_by_file_number_and_fault(tmp_path, line, fault):
    path = write(tmp_path, '{"prompt": "good"}\n\n' + line + "\n")
    with refused(ConfigError, FIELD, f"{path}:3", fault):
        read_records(DataSettings(train=path), "train")


def test_a_text_becomes_one_user_message_with_the_assistants_turn_opened():
    tokenizer = word_tokenizer(CHAT)
    assert encode_prompt(tokenizer, "sort 52") == ids("[user] sort 52 [assistant]")
    messages = [{"role": "system", "content": "now"}, {"role": "user", "content": "sort 52"}]
    assert encode_prompt(tokenizer, messages) == ids("[system] now [user] sort 52 [assistant]")


def test_without_a_chat_template_a_text_is_encoded_with_the_tokenizers_own_special_tokens():
    assert encode_prompt(word_tokenizer(), "sort 52") == ids("<s> sort 52")


def records(count):
    return [{"prompt": f"p{index}"} for index in range(count)]


@settings(deadline=None)
@given(
    count=st.integers(1, 20), takes=st.lists(st.integers(0, 30), min_size=1, max_size=8), seed=st.integers(0, 2**64 - 1)
)
def test_any_way_of_taking_gives_the_same_stream_each_record_once_per_epoch(count, takes, seed):
    stream = PromptStream(records(count), seed)
    parts = [stream.take(size) for size in takes]
    assert [len(part) for part in parts] == takes
    joined = [record["prompt"] for part in parts for record in part]
    assert joined == [record["prompt"] for record in PromptStream(records(count), seed).take(sum(takes))]
    for start in range(0, len(joined), count):
        epoch = Counter(joined[start : start + count])
        assert max(epoch.values()) == 1


@settings(deadline=None)
@given(count=st.integers(1, 20), before=st.integers(0, 60), seed=st.integers(0, 1000))
def test_a_restored_stream_goes_on_where_the_saved_one_stood(count, before, seed):
    stream = PromptStream(records(count), seed)
    stream.take(before)
    state = json.loads(json.dumps(stream.state()))
    resumed = PromptStream(records(count), seed)
    resumed.take(3)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.take(2 * count + 1) == stream.take(2 * count + 1)
    assert resumed.state() == stream.state()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    takes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=6),
    saved=st.integers(0, 6),
)
def test_prompts_that_are_too_long_are_passed_over_until_the_next_epoch_also_after_a_resume(lengths, takes, saved):
    """Each take is the unlimited order of its epochs without what is too long, whatever the limits were before."""
    takes = [(count, min(lengths) + more) for count, more in takes]
    order = [int(one["prompt"][1:]) for one in PromptStream(records(len(lengths)), 5).take(len(lengths) * 100)]
    stream, place = PromptStream(records(len(lengths)), 5, lengths=lengths), 0
    for number, (count, limit) in enumerate(takes):
        if number == saved:
            state = json.loads(json.dumps(stream.state()))
            stream = PromptStream(records(len(lengths)), 5, lengths=lengths)
            stream.restore(state)
        expected = []
        while len(expected) < count:
            if lengths[order[place]] <= limit:
                expected.append(f"p{order[place]}")
            place += 1
        assert [one["prompt"] for one in stream.take(count, limit)] == expected


@pytest.mark.parametrize(("count", "seed", "field"), [(9, 1, "data.train"), (10, 2, "run.seed")])
def test_a_place_in_another_stream_is_refused(count, seed, field):
    state = PromptStream(records(10), 1).state()
    with pytest.raises(CheckpointError) as caught:
        PromptStream(records(count), seed).restore(state)
    assert caught.value.field == field


def test_other_records_of_the_same_number_are_refused_or_begin_the_next_epoch():
    stream = PromptStream(records(10), 1)
    stream.take(13)
    state = json.loads(json.dumps(stream.state()))
    for others in ([*records(9), {"prompt": "another"}], records(10)[::-1], records(12)):
        with pytest.raises(CheckpointError) as caught:
            PromptStream(others, 1).restore(state)
        assert caught.value.field == "data.train" and "data.allow_changed" in caught.value.hint
        resumed, fresh = PromptStream(others, 1), PromptStream(others, 1)
        resumed.restore(state, allow_changed=True)
        fresh.take(2 * len(others))
        assert resumed.take(5) == fresh.take(5)
        again = PromptStream(others, 1)
        again.restore(resumed.state())  # what is saved from now on is of the new records
        assert again.take(20) == resumed.take(20)


@pytest.mark.parametrize("written", ["x.parquet", "folder", "owner/name:main#train"])
def test_without_the_package_datasets_all_but_jsonl_names_the_extra(tmp_path, monkeypatch, written):
    monkeypatch.setattr(data_sets, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("x.parquet").write_bytes(b"PAR1")
    Path("x.jsonl").write_text('{"question": "a"}')
    assert read_records(DataSettings(train="x.jsonl", prompt_column="question"), "train")
    with refused(ConfigError, "data.train", f"data.train={written}", "datasets") as caught:
        read_records(DataSettings(train=written), "train")
    assert "`data` extra" in caught.value.hint


CHATML = (
    "{% for m in messages %}<im_start> {{ m.role }} {{ m.content.strip() }} <im_end> {% endfor %}"
    "{% if add_generation_prompt %}<im_start> assistant {% endif %}"
)


@pytest.mark.parametrize("template", [CHAT, CHATML])
def test_turns_put_together_are_the_conversation_as_the_template_writes_it(template):
    tokenizer = word_tokenizer(template)
    messages = [{"role": "user", "content": "sort 52"}]
    tokens = encode_prompt(tokenizer, messages)
    quoting = "no what the assistant has said is wrong"  # the text that the template is asked with
    for response, observation in (
        ("25", "now 31"),
        ("13", [{"role": "system", "content": "now sort"}]),
        ("25", quoting),
        ("13", [{"role": "user", "content": f"{quoting} what the assistant has said"}]),
    ):
        follows = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        messages += [{"role": "assistant", "content": response}, *follows]
        tokens = [*tokens, *ids(response), *encode_observation(tokenizer, observation)]
        assert tokens == encode_prompt(tokenizer, messages)


def test_without_a_chat_template_an_observation_follows_as_it_is():
    assert encode_observation(word_tokenizer(), "sort 52") == ids("sort 52")
    with refused(ConfigError, "observation", "chat template"):
        encode_observation(word_tokenizer(), [{"role": "user", "content": "sort 52"}])


def test_a_template_is_given_what_it_reads_and_nothing_else():
    thinks = CHAT + "{% if add_generation_prompt and enable_thinking is false %} now{% endif %}"
    tokenizer = word_tokenizer(thinks)
    plain = ids("[user] sort 52 [assistant]")
    assert encode_prompt(tokenizer, "sort 52") == plain
    assert encode_prompt(tokenizer, "sort 52", {"enable_thinking": False}) == [*plain, *ids("now")]
    assert encode_observation(tokenizer, "31", {"enable_thinking": False}) == ids("[user] 31 [assistant] now")
    for one in (tokenizer, word_tokenizer()):
        with refused(ConfigError, "data.chat_template_kwargs", "thinking_budget"):
            encode_prompt(one, "sort 52", {"thinking_budget": 3})
        with refused(ConfigError, "data.chat_template_kwargs", "thinking_budget"):
            encode_observation(one, "sort 52", {"thinking_budget": 3})
