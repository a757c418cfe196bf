"""What an earlier commit left on disk is read as it was written: checkpoints, a run, a batch, an exported folder.

tests/fixtures/write.py wrote the files, and says what they are. What is read must have the same bits; what is computed
from it then is compared with a tolerance, since processors round differently.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from slimefsdp.config import RunConfig, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.fixtures.write import (
    PROMPTS,
    SAMPLES,
    STEPS,
    all_fields,
    digest,
    digests_of_batch,
    train_command,
    with_judge,
)
from tests.support.rank_pool import RankPool
from tests.support.runs import rows_of
from tests.support.waiting import PATIENCE_S

COMMITS = ["dbb0a31"]
ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
CPU = torch.device("cpu")
ROLES = ("actor", "critic")
SAVED_STEP, KILLED_AFTER = 2, 3


@pytest.fixture(params=COMMITS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of everything that a commit wrote."""
    folder = Path(shutil.copytree(FIXTURES / request.param, tmp_path / "written"))
    settings = (folder / "settings.yaml").read_text()  # somebody wrote them, so that no name in them is translated
    (folder / "settings.yaml").write_text(settings.replace("cluster: {max_ranks_per_core: 64}\n", ""))
    return folder


def config_of(written: Path, *overrides: str) -> RunConfig:
    paths = {"run.dir": "run", "model.path": "model", "data.train": "train.jsonl"}
    given = [f"{name}={written / path}" for name, path in paths.items()]
    return load_config(written / "settings.yaml", [*given, *overrides])


def expected_of(written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "expected.json").read_text())
    return found


def digests_of_folder(folder: Path) -> dict[str, str]:
    return {name: digest(values) for name, values in load_file(folder / "model.safetensors").items()}


def about(metrics: dict[str, float]) -> Any:
    """Numbers of the same computation on another processor."""
    return pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_a_batch_has_every_field_as_it_was_written(written: Path) -> None:
    found = digests_of_batch(written / "batch.safetensors")
    assert found == expected_of(written)["batch"]
    recorded = RolloutBatch.load(written / f"run/batches/step_{SAVED_STEP:08}/batch.safetensors")
    assert recorded.num_samples == 8 and recorded.rewards is not None and recorded.rollout_log_probs is not None


def test_settings_that_a_run_left_are_read(written: Path) -> None:
    left, given = load_config(written / "run" / "settings.yaml"), load_config(written / "settings.yaml")
    assert left.model_dump(exclude={"run"}) == given.model_dump(exclude={"run"})


def loaded_and_continued(rank: int, config: RunConfig, folder: Path) -> dict[str, Any]:
    """As `continued` of write.py."""
    found: dict[str, Any] = {"weights": {}, "loop_state": {}, "continued": {}}
    trainers = {"actor": Trainer(config, "actor", device=CPU), "critic": Trainer(config, "critic", device=CPU)}
    for role, trainer in trainers.items():
        found["loop_state"][role] = trainer.load("latest")
        trainer.export_hf(folder / role)
        found["weights"][role] = digests_of_folder(folder / role)
    for role, trainer in trainers.items():
        found["continued"][role] = [trainer.train_step(all_fields()) for _ in range(2)]
    return found


@pytest.mark.filterwarnings("ignore:random generators are not those of the checkpoint")
def test_checkpoints_of_policy_and_critic_go_on_where_they_were_on_another_mesh(
    written: Path, ranks: RankPool, tmp_path: Path
) -> None:
    expected = expected_of(written)
    (found,) = ranks.run(1, loaded_and_continued, config_of(written, "mesh.dp=1"), tmp_path)
    for role in ROLES:
        assert found["weights"][role] == expected["weights"][role]
        assert found["loop_state"][role].items() >= expected["loop_state"][role].items()
        for ours, theirs in zip(found["continued"][role], expected["continued"][role], strict=True):
            assert {name: ours[name] for name in theirs} == about(theirs)
            assert theirs["grad_norm"] > 0.1, "the step has something to compute"


def loaded_and_saved(rank: int, config: RunConfig) -> None:
    for role in ("actor", "critic"):
        trainer = Trainer(config, "actor" if role == "actor" else "critic", device=CPU)
        trainer.load(SAVED_STEP)
        trainer.save(SAVED_STEP + 1, {})


def test_parameters_and_moments_of_a_checkpoint_are_loaded_to_the_last_bit(written: Path, ranks: RankPool) -> None:
    ranks.run(2, loaded_and_saved, config_of(written, "checkpoint.keep_last=3"))
    for folder in (written / "run", written / "run" / "critic"):
        for rank in range(2):
            before, after = (
                load_file(folder / f"checkpoints/step_{step:08}/rank_{rank:05}.safetensors")
                for step in (SAVED_STEP, SAVED_STEP + 1)
            )
            assert len(before) > 60 and before.keys() == after.keys()
            assert {name: digest(values) for name, values in before.items()} == {
                name: digest(values) for name, values in after.items()
            }


def exported_again(rank: int, config: RunConfig, folder: Path) -> None:
    Trainer(config, device=CPU).export_hf(folder)


def test_an_exported_folder_is_a_model_again(written: Path, ranks: RankPool, tmp_path: Path) -> None:
    config = config_of(written, f"model.path={written / 'exported'}", "mesh.dp=2")
    ranks.run(2, exported_again, config, tmp_path / "again")
    expected = expected_of(written)["weights"]["actor"]
    assert digests_of_folder(tmp_path / "again") == expected == digests_of_folder(written / "exported")


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_numbers(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    expected = {row["step"]: row for row in expected_of(written)["rows"]}
    before = {row["step"]: row for row in rows_of(config_of(written))}
    calls = written / "judge.calls"
    done = subprocess.run(  # in the folder, since the paths in the settings are relative, as when it began
        train_command("checkpoint.resume=true"), cwd=written, env=with_judge({"JUDGE_CALLS": str(calls)}),
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["step"]: row for row in rows_of(config_of(written))}
    assert list(rows) == list(expected) and max(rows) == STEPS
    for step in range(1, SAVED_STEP + 1):  # made before the checkpoint
        assert rows[step] == before[step]
    known = {name: value for name, value in expected[KILLED_AFTER].items() if not name.startswith("memory/")}
    replayed = {name: rows[KILLED_AFTER][name] for name in known}
    assert replayed == about(known)
    judged = 1 + (STEPS - KILLED_AFTER) * PROMPTS * SAMPLES  # the trial of the reward before the start, and a step
    assert calls.stat().st_size == judged, "the batch of the third step was on record, and nothing was sampled for it"
