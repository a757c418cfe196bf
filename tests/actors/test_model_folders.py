"""Models named by id: everybody has the folder of one commit, and a resumed run that of the run it goes on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from actors.cli import main as cli
from actors.cli.preflight import check_models
from actors.loop import train
from actors.model_folders import with_model_folders
from actors.run_dir import SETTINGS, RunFolder, settings_text
from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.errors import ConfigError, ModelError
from tests.support.hub import COMMITS, Hub, Repository, files_of, lay_out, use_cache
from tests.support.peft_folders import rewrite
from tests.support.refusals import refused
from tests.support.runs import rows_of, startable

OLD, NEW = COMMITS[:2]
NAME = "owner/tiny-sorter"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone, offline; the current folder is one in which no model lies."""
    use_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return (tmp_path / "cache").resolve()


@pytest.fixture
def served(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the example's model, and an empty cache."""
    with Hub() as server:
        use_cache(monkeypatch, tmp_path / "cache", endpoint=server.endpoint)
        files = files_of(example / "model")
        server.repositories["model", NAME] = Repository({OLD: files, NEW: files}, {"main": OLD})
        yield server


def settings(written: str, **sections: dict[str, Any]) -> RunConfig:
    return config_from_dict({"model": {"path": written}, "optim": {"total_updates": 10}, **sections})


def test_every_role_has_the_folder_of_its_id_and_local_ones_stay(cache: Path, folder: Path) -> None:
    files = files_of(folder)
    policy = lay_out(cache, NAME, OLD, files)
    critic = lay_out(cache, "owner/critic", NEW, files, refs=("v1",))
    config = settings(NAME, reference={"path": str(folder)}, critic={"path": "owner/critic@v1"}, algorithm="ppo")
    found = with_model_folders(config)
    assert [found.folder_of(role)[0] for role in ("actor", "ref", "critic")] == [policy, folder, critic]
    assert found.model_copy(update={"model": config.model, "critic": config.critic}) == config
    check_models(found)
    assert with_model_folders(found) is found


@pytest.mark.parametrize("written", ["./runs/mdoel", "runs/mdoel/", "nowhere", "a/b/c", Path("runs/mdoel")])
def test_a_path_that_leads_nowhere_is_named_and_no_hub_is_asked(served: Hub, written: str | Path) -> None:
    config = with_model_folders(config_from_dict({"model": {"path": written}, "optim": {"total_updates": 10}}))
    with refused(ModelError, "model.path", str(written).removeprefix("./").removesuffix("/"), "does not exist"):
        check_models(config)
    assert served.asked == 0


def test_an_id_that_cannot_be_had_is_named_with_its_setting(cache: Path) -> None:
    with refused(ModelError, "reference.path", f"reference.path={NAME}", cache):
        with_model_folders(settings("m", reference={"path": NAME}))


def test_the_run_folder_says_id_and_commit_and_a_resumed_run_has_the_same(served: Hub, tmp_path: Path) -> None:
    run = {"run": {"dir": str(tmp_path / "run")}, "reference": {"path": NAME}}
    first = with_model_folders(settings(NAME, **run))
    assert first.model.path.name == OLD
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_settings(first)
    recorded = load_config(tmp_path / "run" / SETTINGS)
    assert str(recorded.model.path) == str(recorded.reference.path) == f"{NAME}@{OLD}"

    served.repositories["model", NAME].refs["main"] = NEW
    use_another_process()
    resumed = {**run, "checkpoint": {"resume": True}}
    assert with_model_folders(settings(NAME, **resumed)) == first.model_copy(
        update={"checkpoint": settings(NAME, **resumed).checkpoint}
    )
    assert with_model_folders(recorded).model.path == first.model.path
    assert with_model_folders(settings(f"{NAME}@main", **resumed)).model.path.name == NEW
    assert with_model_folders(settings(NAME, **run)).model.path.name == NEW


def use_another_process() -> None:
    from slimefsdp.io import hub

    hub._snapshot.cache_clear()


def test_a_dry_run_fetches_no_weights_and_says_where_they_come_from(
    served: Hub, example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = startable(example, tmp_path)
    tree["model"]["path"] = NAME
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    words = ["train", str(tmp_path / "c.yaml"), "--dry-run"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert f"model.path={NAME}:" in capsys.readouterr().out
    assert "tokenizer.json" in served.sent and "model.safetensors" not in served.sent
    with_model_folders(load_config(tmp_path / "c.yaml"))
    assert cli.main(words) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert OLD in said and f"model.path={NAME}:" not in said
    assert cli.main([*words, "model.path=owner/nmae"]) == ModelError.exit_code
    assert "owner/nmae" in capsys.readouterr().err


def test_a_plan_fetches_no_weights(
    served: Hub, example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = startable(example, tmp_path)
    tree["model"]["path"] = NAME
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    assert cli.main(["plan", str(tmp_path / "c.yaml")]) == 0, capsys.readouterr().err
    assert "config.json" in served.sent and "model.safetensors" not in served.sent


def test_a_run_trains_on_a_model_and_prompts_of_the_hub_and_goes_on_with_them(
    cluster: None, make_config: Any, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    cache = tmp_path / "cache"
    use_cache(monkeypatch, cache)
    lay_out(cache, NAME, OLD, files_of(example / "model"))
    rows = [json.loads(line) for line in (example / "train.jsonl").read_text().splitlines()]
    (tmp_path / "made").mkdir()
    for split in ("train", "test"):
        table = datasets.Dataset.from_list([{"question": row["prompt"], "answer": row["answer"]} for row in rows[:16]])
        table.to_parquet(tmp_path / "made" / f"{split}.parquet")
    lay_out(cache, "owner/digits", NEW, files_of(tmp_path / "made"), kind="dataset")

    def config(steps: int, **sections: Any) -> RunConfig:
        made: RunConfig = make_config(
            run={"dir": str(tmp_path / "run"), "steps": steps},
            model={"path": NAME},
            mesh={"dp": 1},
            data={"train": "owner/digits", "heldout": "owner/digits#test", "prompt_column": "question"},
            rollout={
                "prompts_per_step": 2,
                "samples_per_prompt": 2,
                "max_new_tokens": 6,
                "engines": 1,
                "reward": "tests.support.runs:variety",
            },
            evaluation={"interval_steps": 2},
            checkpoint={"interval_steps": 1, **sections},
        )
        return made

    train(config(1))
    recorded = load_config(tmp_path / "run" / SETTINGS)
    assert str(recorded.model.path) == f"{NAME}@{OLD}" and str(recorded.data.train) == f"owner/digits@{NEW}"
    for name in (f"models--{NAME.replace('/', '--')}", "datasets--owner--digits"):
        (cache / name / "refs" / "main").write_text(COMMITS[2])  # of which the cache has nothing
    use_another_process()
    train(config(2, resume=True))
    assert [row["step"] for row in rows_of(config(2))] == [0, 1, 2]


# ---------------------------------------------------------------------- adapters


ADAPTERS = "owner/adapters"
Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapters(folder: Path, tmp_path: Path) -> Path:
    """Of rank 3 and alpha 7, which fit `folder`."""
    lora = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_rank_alpha_and_targets_are_those_of_the_folder(folder: Path, adapters: Path, tmp_path: Path) -> None:
    config = settings(str(folder), lora={"path": str(adapters)}, run={"dir": str(tmp_path / "run")})
    found = with_model_folders(config)
    assert (found.lora.rank, found.lora.alpha) == (3, 7.0)
    assert found.lora.targets == tuple(f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1))
    assert found.reference_is_policy and config.reference_is_policy
    assert with_model_folders(found) == found
    check_models(found)
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").write_settings(found)  # which names all of them, and is taken as it is
    assert with_model_folders(load_config(tmp_path / "run" / SETTINGS)).lora == found.lora


@pytest.mark.parametrize(("name", "own", "there"), [("rank", 4, 3), ("alpha", 8.0, 7.0)])
def test_a_setting_that_the_folder_has_otherwise_is_named_with_both(
    folder: Path, adapters: Path, name: str, own: float, there: float
) -> None:
    with_model_folders(settings(str(folder), lora={"path": str(adapters), name: there}))
    with refused(ConfigError, f"lora.{name}", f"lora.{name}={own}", there, adapters):
        with_model_folders(settings(str(folder), lora={"path": str(adapters), name: own}))


def test_adapters_of_the_hub_are_had_by_their_id_even_for_a_plan(served: Hub, adapters: Path, tmp_path: Path) -> None:
    served.repositories["model", ADAPTERS] = Repository({NEW: files_of(adapters)}, {"main": NEW})
    config = settings(NAME, lora={"path": ADAPTERS}, run={"dir": str(tmp_path / "run")})
    found = with_model_folders(config, with_weights=False)
    assert found.lora.path is not None and found.lora.path.name == NEW and found.lora.rank == 3
    assert "adapter_model.safetensors" in served.sent and "model.safetensors" not in served.sent
    recorded = yaml.safe_load(settings_text(found))["lora"]
    assert recorded["path"] == f"{ADAPTERS}@{NEW}" and recorded["rank"] == 3


def test_what_cannot_be_honoured_is_found_by_check_before_anything_starts(
    folder: Path, adapters: Path, tiny_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    tree = {"model": {"path": str(folder)}, "optim": {"total_updates": 10}, "lora": {"path": str(adapters)}}
    file.write_text(yaml.safe_dump(tree))
    assert cli.main(["check", str(file)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    larger = tiny_folder(hidden_size=64)
    assert cli.main(["check", str(file), f"model.path={larger}"]) == ModelError.exit_code
    said = capsys.readouterr().err
    assert f"{Q_PROJ}.lora_A.weight" in said and "64 x 32" in said and "64 x 64" in said and "lora.path" in said
    rewrite(adapters, config={"use_dora": True})
    assert cli.main(["check", str(file)]) == ModelError.exit_code
    assert "use_dora=True" in capsys.readouterr().err
