"""Records that are too long are refused by file and line, or left out, counted and listed, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.rollout import prompt_files
from actors.rollout.demonstrations import prompt_lengths
from actors.rollout.prompt_files import Prompts, read_heldout, read_prompts, without_overlong
from actors.rollout.records import Record
from actors.run_dir import SKIPPED, RunFolder
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError, ModelError, ResourceError

SIZES = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
LENGTHS = (3, 9, 5, 12, 4)  # words of each prompt
MAX_NEW_TOKENS = 6
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
TEMPLATE += "{% if messages[0]['role'] == 'no' %}{{ 1 / 0 }}{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"w": 0, "</s>": 1}, unk_token="w"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, eos_token="</s>")
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    lines = [json.dumps({"prompt": " ".join("w" * length), "answer": "w w"}) for length in LENGTHS]
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text("\n\n".join(lines))
    return tmp_path


def config(folder: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(folder / "model")},
        "optim": {"total_updates": 100},
        "data": {"train": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS, "reward": "a:b"},
        "evaluation": {"interval_steps": 1},
    }
    if sections.get("algorithm") == "sft":
        del tree["rollout"], tree["evaluation"], tree["data"]["heldout"]
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return config_from_dict(tree)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted here; what the process that does it finds is compared below."""

    monkeypatch.setattr(prompt_files, "prompt_lengths", lambda path, records, **_: lengths_of(records))


def lengths_of(records: Sequence[Any]) -> list[int]:
    return [len(record["prompt"].split()) for record in records]


def test_tokens_are_counted_in_a_side_process_as_engines_will_encode_them(folder: Path) -> None:
    settings = config(folder)
    train = read_prompts(settings).train

    def counted(records: Sequence[Record], timeout_s: float = 300.0) -> list[int]:
        return prompt_lengths(settings.model.path, records, data=settings.data, timeout_s=timeout_s)

    assert counted(train) == list(LENGTHS)
    with pytest.raises(ConfigError) as caught:
        counted([*train, Record({"prompt": [{"role": "no", "content": "w"}]}, "x.jsonl:9")])
    assert "x.jsonl:9" in caught.value.message and caught.value.field == "prompt" and caught.value.hint
    with pytest.raises(ResourceError) as late:
        counted(train, timeout_s=0.001)
    assert late.value.field == "cluster.call_timeout_s"
    (settings.model.path / "generation_config.json").write_text('{"eos_token_id": "x"}')  # engines could not use it
    with pytest.raises(ModelError) as unusable:
        counted(train)
    assert unusable.value.field == "model.path" and "generation_config.json" in unusable.value.message


@pytest.mark.parametrize(
    ("sections", "first", "kept"),
    [
        ({"data": {"max_prompt_tokens": 4}}, ("data.train", 3), [3, 4]),
        ({"data": {"max_prompt_tokens": 11}}, ("data.train", 7), [3, 9, 5, 4]),
        ({"batch": {"max_tokens_per_rank": 5 + MAX_NEW_TOKENS}}, ("data.train", 3), [3, 5, 4]),
        ({"batch": {"max_tokens_per_rank": 8}, "mesh": {"cp": 2}}, ("data.train", 7), [3, 9, 5, 4]),
        ({"algorithm": "sft", "batch": {"max_tokens_per_rank": 8}}, ("data.train", 3), [3, 5, 4]),
        (
            {
                "batch": {"max_tokens_per_rank": 2 * (5 + MAX_NEW_TOKENS)},
                "loss": {"policy": "dpo"},
                "rollout": {"samples_per_prompt": 2, "filter": "mixed_groups"},
            },
            ("data.train", 3),
            [3, 5, 4],
        ),
    ],
)  # fmt: skip
def test_a_record_that_could_never_be_trained_on_is_refused_by_line_or_left_out(
    words: None, folder: Path, sections: dict[str, Any], first: tuple[str, int], kept: list[int], capsys: Any
) -> None:
    settings = config(folder, **sections)
    name, line = first
    with pytest.raises(ConfigError) as caught:
        without_overlong(settings, read_prompts(settings))
    assert caught.value.field == name and f"{folder / 'train.jsonl'}:{line}" in caught.value.message
    assert "data.overlong_prompts=skip" in str(caught.value.hint)

    sections = {**sections, "data": {**sections.get("data", {}), "overlong_prompts": "skip"}}
    settings = config(folder, **sections)
    found = without_overlong(settings, read_prompts(settings))
    assert lengths_of(found.train) == kept
    held = [] if sections.get("algorithm") == "sft" else list(LENGTHS)
    evaluated = kept if "max_prompt_tokens" in sections["data"] else held
    assert lengths_of(found.heldout.get("", [])) == evaluated  # which no pack has to hold
    assert len(found.skipped) == len(LENGTHS) - len(kept) + len(held) - len(evaluated)
    assert found.skipped[0].place == f"{folder / 'train.jsonl'}:{line}"
    assert f"{folder / 'train.jsonl'}:{line}" in capsys.readouterr().err


def test_what_engines_that_the_run_starts_can_take_bounds_evaluation_too(words: None, folder: Path) -> None:
    sections = {"batch": {"max_tokens_per_rank": 5 + MAX_NEW_TOKENS}, "data": {"overlong_prompts": "skip"}}
    settings = config(folder, **sections, rollout={"engine": "vllm", "engine_python": "p"})
    found = without_overlong(settings, read_prompts(settings))
    assert lengths_of(found.train) == lengths_of(found.heldout[""]) == [3, 5, 4] and found.longest == 5
    settings = config(folder, **sections, rollout={"engine": "vllm", "engine_urls": ["http://a:1"]})
    found = without_overlong(settings, read_prompts(settings))
    assert (found.longest, found.longest_heldout) == (5, max(LENGTHS))


def test_a_stage_that_admits_no_prompt_is_refused_and_one_that_admits_the_shortest_is_not(
    words: None, folder: Path
) -> None:
    def checked(most: int) -> Prompts:
        stages = [{"from_step": 1, "max_prompt_tokens": 9}, {"from_step": 5, "max_prompt_tokens": most}]
        settings = config(folder, rollout={"curriculum": stages})
        return without_overlong(settings, read_prompts(settings))

    assert len(checked(min(LENGTHS)).train) == len(LENGTHS)
    with pytest.raises(ConfigError) as caught:
        checked(min(LENGTHS) - 1)
    assert caught.value.field == "rollout.curriculum"
    assert "max_prompt_tokens=2" in caught.value.message and "step 5" in caught.value.message
    assert "3 or more" in str(caught.value.hint)


def test_each_held_out_set_keeps_its_records_and_is_named_where_one_is_wrong(words: None, folder: Path) -> None:
    lines = (folder / "heldout.jsonl").read_text().split("\n\n")
    (folder / "short.jsonl").write_text("\n".join(line for line in lines if len(line) < 45))
    sets = {"all": str(folder / "heldout.jsonl"), "short": str(folder / "short.jsonl")}
    found = without_overlong(
        config(folder, data={"heldout": sets}), read_prompts(config(folder, data={"heldout": sets}))
    )
    assert {name: lengths_of(records) for name, records in found.heldout.items()} == {
        "all": list(LENGTHS), "short": [3, 5, 4],
    }  # fmt: skip
    assert found.longest_heldout == max(LENGTHS)
    alone = read_heldout(config(folder, data={"heldout": sets}))
    assert alone.heldout == found.heldout and lengths_of(alone.train) == [*LENGTHS, 3, 5, 4]

    bounded = config(folder, data={"heldout": sets, "max_prompt_tokens": 5, "overlong_prompts": "skip"})
    found = without_overlong(bounded, read_prompts(bounded))
    assert [lengths_of(records) for records in found.heldout.values()] == [[3, 5, 4]] * 2
    assert len(found.skipped) == 2 * 2
    data = {"heldout": {"short": sets["short"], "all": sets["all"]}, "max_prompt_tokens": 5}
    with pytest.raises(ConfigError) as caught:
        read_heldout(config(folder, data=data))
    assert caught.value.field == "data.heldout.all" and f"{folder / 'heldout.jsonl'}:3" in caught.value.message


def test_the_run_folder_lists_what_was_left_out_of_its_newest_start(tmp_path: Path) -> None:
    listed = [{"place": "a:1", "reason": "x"}, {"place": "b:2", "reason": "y"}]
    RunFolder(tmp_path).write_skipped(listed)
    assert [json.loads(line) for line in (tmp_path / SKIPPED).read_text().splitlines()] == listed
    RunFolder(tmp_path).write_skipped([])
    assert not (tmp_path / SKIPPED).exists()
