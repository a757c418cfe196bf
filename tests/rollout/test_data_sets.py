"""Records from Parquet files, folders and data sets of the hub: columns by name, places for errors, and no surprise."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.rollout.prompt_files import with_data_commits
from actors.rollout.prompts import PromptStream, digest_of
from actors.rollout.records import Record, place_of, read_demonstrations, read_pairs, read_records
from actors.run_dir import RunFolder
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.config.data import DataSettings
from slimefsdp.errors import ConfigError
from slimefsdp.io import hub
from tests.support.hub import COMMITS, files_of, lay_out, use_cache
from tests.support.refusals import refused

ROWS = [
    {"question": "1 + 1", "answer": "2", "level": 3, "tags": ["a"], "meta": {"of": 0.5, "by": None}},
    {"question": "2 + 2", "answer": "4", "level": None, "tags": [], "meta": {"of": None, "by": "x"}},
]
TEST = [{**ROWS[0], "question": "3 + 3", "answer": "6"}]
RECORDS = [{"prompt": row["question"], **row} for row in ROWS]
NAME = "owner/sums"
COMMIT = COMMITS[0]
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files: [{split: validation, path: hard/*}]
---
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone, offline; the current folder is its own too."""
    datasets = pytest.importorskip("datasets")
    use_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.chdir(tmp_path)
    datasets.disable_progress_bars()
    return (tmp_path / "cache").resolve()


def table(rows: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


def records(written: str | Path, name: Any = "train", **columns: str) -> list[Any]:
    columns = {"prompt_column": "question", **columns}
    return read_records(DataSettings.model_validate({name: str(written), **columns}), name)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    table(rows).to_parquet(file)
    return file


def in_parquet(folder: Path) -> Path:
    return write_parquet(folder / "train.parquet", ROWS)


def saved(folder: Path) -> Path:
    table(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


def saved_in_splits(folder: Path) -> Path:
    import datasets

    datasets.DatasetDict(train=table(ROWS), test=table(TEST)).save_to_disk(folder / "saved")
    return folder / "saved"


def folder_of_parquet(folder: Path) -> Path:
    write_parquet(folder / "files" / "test-00000-of-00001.parquet", TEST)
    return write_parquet(folder / "files" / "train-00000-of-00001.parquet", ROWS).parent


def folder_of_jsonl(folder: Path) -> Path:
    (folder / "files").mkdir()
    for name, rows in (("train", ROWS), ("test", TEST)):
        (folder / "files" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "files"


WAYS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a Parquet file": (in_parquet, ""),
    "saved to disk": (saved, ""),
    "saved in splits": (saved_in_splits, "[train]"),
    "a folder of Parquet files": (folder_of_parquet, "[train]"),
    "a folder of JSONL files": (folder_of_jsonl, "[train]"),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_they_are_kept_the_records_are_the_same_and_know_their_places(tmp_path: Path, way: str) -> None:
    write, split = WAYS[way]
    path = write(tmp_path)
    found = records(path)
    assert found == RECORDS
    assert [place_of(record) for record in found] == [f"{path}{split} row {row}" for row in range(2)]
    lines = tmp_path / "records.jsonl"
    without_column = [{key: record[key] for key in record if key != "question"} for record in RECORDS]
    lines.write_text("".join(json.dumps(record) + "\n" for record in without_column))
    assert digest_of(found) == digest_of(records(lines, prompt_column="prompt"))
    PromptStream(found, 1).restore(PromptStream(records(lines, prompt_column="prompt"), 1).state())


@pytest.mark.parametrize(
    ("rows", "taken"),
    [("[:1]", [0]), ("[1:]", [1]), ("[-1:]", [1]), ("[0:5]", [0, 1]), ("[:-1]", [0]), (f"[1:{10**30}]", [1])],
)
@pytest.mark.parametrize("way", [*WAYS, "a JSONL file"])
def test_a_slice_takes_some_of_the_records_however_they_are_kept(
    tmp_path: Path, way: str, rows: str, taken: list[int]
) -> None:
    if way == "a JSONL file":
        path, split = tmp_path / "records.jsonl", ""
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    else:
        path, split = WAYS[way][0](tmp_path), WAYS[way][1].strip("[]")
    assert records(f"{path}#{split}{rows}") == [RECORDS[index] for index in taken]
    with pytest.raises(ConfigError) as caught:
        records(f"{path}#{split}[7:]")
    assert caught.value.field == "data.train"


def test_a_slice_from_the_beginning_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"prompt": "a"}\nno JSON\n')
    assert read_records(DataSettings.model_validate({"train": f"{path}#[:1]"}), "train") == [{"prompt": "a"}]
    with pytest.raises(ConfigError, match=r"records\.jsonl:2"):
        read_records(DataSettings.model_validate({"train": f"{path}#[:-1]"}), "train")


@pytest.mark.parametrize("write", [saved_in_splits, folder_of_parquet, folder_of_jsonl])
def test_training_takes_the_split_train_and_evaluation_test_unless_another_is_named(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    path = write(tmp_path)
    assert len(records(path)) == len(records(f"{path}#train", "heldout")) == 2
    (found,) = records(path, "heldout")
    named = DataSettings.model_validate({"heldout": {"sums": str(path)}, "prompt_column": "question"})
    assert read_records(named, "heldout.sums") == [found]
    assert found["answer"] == "6" and place_of(found) == f"{path}[test] row 0"
    assert records(f"{path}#test") == [found]
    with refused(ConfigError, "data.heldout", path, "dev", "train", "test"):
        records(f"{path}#dev", "heldout")


def lay_out_sums(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    for config, split, rows in (("main", "train", ROWS), ("main", "test", TEST), ("hard", "validation", TEST)):
        write_parquet(folder / config / f"{split}-00000-of-00001.parquet", rows)
    (folder / "README.md").write_text(README)
    lay_out(cache, NAME, COMMIT, files_of(folder), kind="dataset", refs=("main", "v1"))


def test_a_data_set_of_the_hub_is_named_by_id_revision_configuration_and_split(cache: Path, tmp_path: Path) -> None:
    lay_out_sums(cache, tmp_path)
    found = records(f"{NAME}:main#train")
    assert found == RECORDS and place_of(found[1]) == f"{NAME}[train] row 1"
    assert records(f"{NAME}:main", "heldout") == records(f"{NAME}@v1:hard") == records(f"{NAME}@{COMMIT}:main#test")
    with refused(ConfigError, "data.train", NAME, "main", "hard"):
        records(NAME)
    with refused(ConfigError, "data.train", NAME, "easy", "main", "hard"):
        records(f"{NAME}:easy")
    with refused(ConfigError, "data.heldout", NAME, "dev", "train", "test"):
        records(f"{NAME}:main#dev", "heldout")


def test_a_resumed_run_has_the_commit_of_a_data_set_that_it_began_with(cache: Path, tmp_path: Path) -> None:
    lay_out_sums(cache, tmp_path)

    def settings(train: str, resume: bool = True) -> RunConfig:
        tree = {"model": {"path": "m"}, "optim": {"total_updates": 1}, "run": {"dir": str(tmp_path / "run")}}
        data = {"train": train, "heldout": str(tmp_path / "x.jsonl")}
        return config_from_dict({**tree, "data": data, "checkpoint": {"resume": resume}})

    first = with_data_commits(settings(f"{NAME}:main#train"))
    assert str(first.data.train) == f"{NAME}@{COMMIT}:main#train" and with_data_commits(first) == first
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_settings(first)
    (cache / f"datasets--{NAME.replace('/', '--')}" / "refs" / "main").write_text(COMMITS[1])
    hub._snapshot.cache_clear()
    assert with_data_commits(settings(f"{NAME}:main#train")) == first
    assert with_data_commits(settings(f"{NAME}@v1:main#train")) == first
    for config in (settings(f"{NAME}:main#train", resume=False), settings(f"{NAME}@main:main#train")):
        with refused(ConfigError, "data.train", NAME, cache):  # of whose newest commit the cache has nothing
            with_data_commits(config)


def test_columns_are_mapped_by_name_and_keep_their_own_outside_the_digest(tmp_path: Path) -> None:
    rows = [{"prompt": "raw", "question": "q", "answer": "long", "solution": "s", "level": 1}]
    path = write_parquet(tmp_path / "x.parquet", rows)
    expected = {"prompt": "q", "answer": "s", "level": 1}  # what the digests of earlier checkpoints are of
    found = records(path, answer_column="solution")
    assert found == [{**expected, "question": "q", "solution": "s"}]
    assert digest_of(found) == digest_of([expected]) == digest_of(pickle.loads(pickle.dumps(found)))
    assert records(path, prompt_column="prompt") == rows
    (tmp_path / "x.jsonl").write_text(json.dumps(rows[0]))
    assert records(tmp_path / "x.jsonl", answer_column="solution") == found


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_a_column_that_is_missing_is_named_with_its_setting_and_those_there_are(tmp_path: Path, name: str) -> None:
    path = write_parquet(tmp_path / "x.parquet", ROWS)
    (tmp_path / "x.jsonl").write_text(json.dumps(ROWS[0]))
    place = f"{path} row 0" if name == "x.parquet" else f"{tmp_path / name}:1"
    with refused(ConfigError, "data.prompt_column", place, "problem", "question"):
        records(tmp_path / name, prompt_column="problem")
    with refused(ConfigError, "data.answer_column", place, "solution", "answer"):
        records(tmp_path / name, answer_column="solution")
    with refused(ConfigError, "data.train", place, "prompt", "question") as caught:
        records(tmp_path / name, prompt_column="prompt")
    assert "data.prompt_column" in str(caught.value.hint)


@pytest.mark.parametrize("value", [b"\x00", datetime.date(2026, 1, 1), [{"at": datetime.datetime(2026, 1, 1)}]])
def test_a_value_that_json_cannot_hold_is_named_by_column_and_row(tmp_path: Path, value: object) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"question": "q", "odd": None}, {"question": "r", "odd": value}])
    with refused(ConfigError, "data.train", f"{path} row 1", "odd"):
        records(path)


def test_chat_messages_have_the_keys_that_they_were_written_with(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        {"role": "tool", "content": "", "name": "f"},
    ]
    path = write_parquet(tmp_path / "x.parquet", [{"question": chat}])
    assert records(path) == [{"prompt": chat, "question": chat}]


@pytest.mark.parametrize("read", [read_demonstrations, read_pairs])
def test_tools_have_the_parameters_that_they_were_written_with(
    tmp_path: Path, read: Callable[[DataSettings, str], list[Record]]
) -> None:
    tools = [{"name": name, "parameters": {name: {"type": "string"}}} for name in ("f", "g")]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    row = {"messages": chat, "tools": tools, "prompt": "a", "chosen": "b", "rejected": "c"}
    path = write_parquet(tmp_path / "x.parquet", [row])
    assert read(DataSettings(train=path), "train")[0]["tools"] == tools


@pytest.mark.parametrize("elsewhere", ["../secret.jsonl", "/etc/../secret.jsonl"])
def test_a_readme_that_names_files_elsewhere_is_refused(tmp_path: Path, elsewhere: str) -> None:
    (tmp_path / "secret.jsonl").write_text(json.dumps(RECORDS[0]))
    path = folder_of_jsonl(tmp_path)
    named = elsewhere.replace("/etc/..", str(tmp_path))
    (path / "README.md").write_text(f"---\nconfigs:\n- {{config_name: a, data_files: '{named}'}}\n---\n")
    with refused(ConfigError, "data.train", path):
        records(path)


@pytest.mark.parametrize("described", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("named", ["hf://datasets/a/b/x.jsonl", "http://127.0.0.1:1/x.jsonl"])
def test_files_of_other_machines_are_refused_before_anything_is_asked_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: str, named: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("datasets.get_dataset_config_names", asked.append)
    path = folder_of_jsonl(tmp_path)
    rule = "---\n" * (described == "README.md")
    (path / described).write_text(
        f"{rule}configs:\n- config_name: a\n  data_files: [{{split: a, path: '{named}'}}]\n{rule}"
    )
    with refused(ConfigError, "data.train", path, named):
        records(path)
    assert asked == []
