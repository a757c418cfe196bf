"""The example runs, and what README and docs say is so: names, links, commands, signatures and figures."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from actors.workers.worker_group import WorkerGroup
from benchmarks.lora_ranks import rank_table
from benchmarks.lora_updates import table as lora_update_rows
from benchmarks.rl_step import RECORD, learning_rows, speed_rows
from slimefsdp import errors
from slimefsdp.config import load_config
from slimefsdp.models.head_tiles import CHUNK_BYTES, HeadTiles
from slimefsdp.models.hf_folder import SUPPORTED_MODELS
from tests.support.refusals import names
from tests.support.rpcs import RPCS
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/*.md")])
FOLDERS = "slimefsdp|actors|tests|scripts|configs|docs|examples|benchmarks"


# ---------------------------------------------------------------------- the example


def run(*command: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_of_ones_own_trains_and_its_engines_get_every_update(tmp_path: Path) -> None:
    run(ROOT / "scripts/make_sort_digits.py", "data/sort_digits", cwd=tmp_path)
    settings = ["model.path=data/sort_digits/model", "run.steps=2", "rollout.prompts_per_step=16", "rollout.engines=1"]
    printed = run(ROOT / "examples/own_loop.py", ROOT / "configs/sort_digits_grpo.yaml", *settings, cwd=tmp_path)
    steps = re.findall(r"step (\d): reward ([\d.]+), (\d+) updates, weights (\d+)\n", printed)
    assert [int(step) for step, *_ in steps] == [1, 2], printed
    updates = [int(count) for _, _, count, _ in steps]
    assert updates[0] >= 1 and all(float(reward) > 0 for _, reward, _, _ in steps), printed
    # a version is the number of updates that led to it
    assert [int(version) for *_, version in steps] == [updates[0], sum(updates)]


def test_without_settings_the_example_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples/own_loop.py")
    for arguments in ([], ["--help"]):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(script, run_name="__main__")
        said = capsys.readouterr()
        assert end.value.code == 2 and said.err.startswith("usage: ") and said.err.count("\n") == 1 and not said.out


def test_the_readme_shows_the_example_as_it_is() -> None:
    assert (ROOT / "examples/own_loop.py").read_text() in blocks(README, "python")


# ---------------------------------------------------------------------- names, files, links


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_in_a_file_that_a_document_gives_exists(document: Path) -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", document.read_text())
    missing = [
        f"{path}:{name}"
        for path, name in named
        if not (ROOT / path).is_file() or name not in definitions(ast.parse((ROOT / path).read_text()).body)
    ]
    assert not missing


def test_the_way_of_a_batch_names_its_functions() -> None:
    """So that the test above has something to look at."""
    way = (ROOT / "docs/architecture.md").read_text().split("## Follow one batch")[1].split("\n## ")[0]
    assert len(re.findall(r"`[\w/]+\.py:[\w.]+`", way)) >= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_link_in_a_document_leads_somewhere(document: Path) -> None:
    text = document.read_text()
    files = set(re.findall(rf"(?:^|[\s`(])((?:{FOLDERS})/[\w./-]*\w\.(?:py|sh|md|yaml|json|png))\b", text))
    missing = [name for name in files if not (ROOT / name).exists() and not (document.parent / name).exists()]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        path = (document.parent / file) if file else document
        if re.match(r"[a-z]+://", target):
            continue
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    assert not missing


def anchors(document: Path) -> list[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_names_every_package_and_nothing_that_is_not_there() -> None:
    named = set(re.findall(r"`((?:slimefsdp|actors)\.\w+)`", README.split("## How it works")[1].split("\n## ")[0]))
    packages = {
        f"{top}.{folder.name}"
        for top in ("slimefsdp", "actors")
        for folder in (ROOT / top).iterdir()
        if (folder / "__init__.py").is_file()
    }
    modules = {f"{top}.{file.stem}" for top in ("slimefsdp", "actors") for file in (ROOT / top).glob("*.py")}
    assert packages <= named <= packages | modules


def commands() -> list[list[str]]:
    documents = [document.read_text() for document in DOCUMENTS]
    lines = [
        line for text in documents for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()
    ]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_settings_in_every_command_are_accepted() -> None:
    of_presets = [[word for word in words if not word.startswith("compose.")] for words in commands()]
    runs = [words for words in of_presets if any(word.endswith(".yaml") for word in words)]
    assert len(runs) >= 4
    for words in runs:
        config = next(word for word in words if word.endswith(".yaml"))
        load_config(ROOT / config, [word for word in words if re.match(r"\w+\.\w+=", word)])


def test_every_preset_is_described_with_what_it_was_run_on() -> None:
    table = re.findall(
        r"^\| \[([\w.]+)\]\(\1\) \| .+ \| (.+) \|$", (ROOT / "configs/README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in table) == sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))


# ---------------------------------------------------------------------- signatures, errors, figures


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^### (\w+)$", text, flags=re.MULTILINE)
    return {
        name: re.split(r"^## ", body, flags=re.MULTILINE)[0]
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("name", RPCS)
def test_every_call_is_documented_with_its_signature_and_errors(name: str) -> None:
    section = sections((ROOT / "docs/rpc.md").read_text())[name]
    (written,) = blocks(section, "python")
    method = trainer_methods()[name]
    # on a rank also what the driver prepared of the batch; receivers that a rank drops are Ray actors, of a group alone
    of_group = signature(ast.parse(written).body[0]).replace(", *, drop_failed: bool=False", "")
    assert of_group == signature(method).replace(" | PreparedBatch", "")
    raised = re.findall(r"(\w+Error): ", (ast.get_docstring(method) or "").partition("Raises:")[2])
    assert [error for error in raised if error not in section] == []
    assert callable(getattr(WorkerGroup, name)) and callable(getattr(WorkerGroup, f"{name}_async"))


def trainer_methods() -> dict[str, ast.FunctionDef]:
    module = ast.parse((ROOT / "slimefsdp/trainer.py").read_text())
    (trainer,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "Trainer"]
    return {node.name: node for node in trainer.body if isinstance(node, ast.FunctionDef)}


def signature(function: ast.stmt) -> str:
    """A function's parameters without `self`, and what it returns."""
    assert isinstance(function, ast.FunctionDef) and function.returns is not None
    parameters = ast.unparse(function.args).removeprefix("self").removeprefix(", ")
    return f"{function.name}({parameters}) -> {ast.unparse(function.returns)}"


def test_no_call_is_documented_that_does_not_exist() -> None:
    assert sections((ROOT / "docs/rpc.md").read_text()).keys() == set(RPCS)


def test_the_table_of_errors_has_every_type_with_its_code_and_exit_status() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    types = [
        value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.SlimeError)
    ]
    assert table == [(error.__name__, error.code, str(error.exit_code)) for error in types]


def test_the_supported_models_are_those_of_the_code() -> None:
    listed = re.findall(r"`(\w+)`", README.split("`model_type`s:")[1].split(".\n")[0])
    assert listed == list(SUPPORTED_MODELS)


def test_the_demos_figures_are_the_recorded_ones_and_keep_its_promise() -> None:
    record = json.loads((ROOT / "benchmarks/results/sort_digits_seeds.json").read_text())
    assert {run["seed"] for run in record["runs"]} == {0, 1, 2}
    for run in record["runs"]:
        before, after, mismatch = run["before"], run["after"], run["largest_rollout_mismatch"]
        assert before <= 0.45 and after >= 0.95 and mismatch <= 1e-4
        assert f"{before:.3f} -> {after:.3f}" in README
    assert f"at most {max(run['largest_rollout_mismatch'] for run in record['runs']):.1e} apart" in README


def test_the_figures_of_the_demo_with_a_pretrained_model_are_the_recorded_ones() -> None:
    record = json.loads((ROOT / "benchmarks/results/demo_llm.json").read_text())
    page = (ROOT / "docs/demo_llm.md").read_text()
    for run in record["runs"]:
        apart, most, seconds = run["rollout_mismatch"], run["rollout_mismatch_max"], run["training_seconds"]
        entropy = ", ".join(f"{value:.2f}" for value in run["entropy"])
        assert f"| {run['seed']} | `{run['reward']}` | {apart:.1e} | {most:.1e} | {entropy} | {seconds:.0f} s |" in page
        # a control keeps more entropy, and with it more tokens that are not certain
        assert apart <= (1e-5 if run["reward"] == "solved" else 1.2e-5) and most <= 5e-4
        for family, sides in run["families"].items():
            shown = " | ".join(
                f"{side['solved']:.3f} ({side['interval'][0]:.3f} to {side['interval'][1]:.3f})"
                for side in (sides["before"], sides["after"])
            )
            assert f"| {run['seed']} | `{run['reward']}` | `{family}` | {shown} |" in page
    controls = {run["seed"]: run for run in record["runs"] if run["reward"] == "well_formed"}
    assert {(run["seed"], run["reward"]) for run in record["runs"]} == {
        (seed, reward) for seed in range(3) for reward in ("solved", "well_formed")
    }
    for run in (run for run in record["runs"] if run["reward"] == "solved"):
        for family in ("chain_sum", "products"):
            sides = run["families"][family]
            assert sides["after"]["interval"][0] > sides["before"]["interval"][1]
            form = controls[run["seed"]]["families"][family]["after"]
            assert sides["after"]["interval"][0] > form["interval"][1] and f"{form['solved']:.3f}" in README
            # more than learning to end explains
            assert sides["after"]["solved_of_finished"] > sides["before"]["solved_of_finished"] + 0.1
            for side in sides.values():
                low, high = side["interval"]
                assert f"{side['solved']:.3f} (" in README and f"{low:.3f} to {high:.3f})" in README
        assert run["zero_variance_groups"][1] < 0.9 and run["entropy"][1] > 0.05


def test_the_algorithms_compared_are_the_recorded_ones_and_all_of_them_learned() -> None:
    runs = json.loads((ROOT / "benchmarks/results/sort_digits_algorithms.json").read_text())["results"]
    assert len(runs) == 7
    page = (ROOT / "docs/algorithms.md").read_text()
    for name, run in runs.items():
        assert run["before"] <= 0.45 and run["after"] >= 0.80 and run["curve"][-1]["exact"] == run["after"]
        settings = ", ".join(f"`{setting}`" for setting in run["settings"]) or f"none (`{run['config']}`)"
        assert f"| {name} | {settings} | {run['before']:.3f} | {run['after']:.3f} |" in page
        load_config(ROOT / run["config"], run["settings"])


def test_the_ranks_of_adapters_compared_are_the_recorded_ones_and_all_of_them_learned() -> None:
    runs = json.loads((ROOT / "benchmarks/results/lora_ranks.json").read_text())["results"]
    page = (ROOT / "docs/lora.md").read_text()
    for row in rank_table(runs).splitlines():
        assert row in page
    assert all(
        run["after"] > run["before"] + 0.4 and run["curve"][-1]["exact"] == run["after"] for run in runs.values()
    )


def test_the_bytes_of_an_update_of_adapters_are_the_recorded_ones() -> None:
    runs = json.loads((ROOT / "benchmarks/results/lora_updates.json").read_text())["results"]
    assert lora_update_rows(runs) in (ROOT / "docs/lora.md").read_text()
    assert runs["rank 8, adapters alone"]["bytes"] < runs["all weights"]["bytes"] / 50


def test_the_preset_with_adapters_learned_as_its_row_says() -> None:
    run = json.loads((ROOT / "benchmarks/results/sort_digits_lora.json").read_text())["results"]
    said = f"held-out sampled accuracy {run['before']:.3f} -> {run['after']:.3f}; leaves `runs/sort_digits_lora/model`"
    assert said in (ROOT / "configs/README.md").read_text() and run["curve"][-1] == {"step": 200, "exact": run["after"]}


def test_a_correction_keeps_learning_what_stale_engines_alone_do_not() -> None:
    runs = json.loads((ROOT / "benchmarks/results/stale_engines.json").read_text())["results"]
    page = (ROOT / "docs/algorithms.md").read_text()
    for name, run in runs.items():
        assert f"| {name} | {run['before']:.3f} | {run['after']:.3f} | {run['means']['rollout_k3']:.1e} |" in page
    stalled, corrected = runs["15 steps behind, uncorrected"], runs["15 steps behind, TIS"]
    assert corrected["after"] - stalled["after"] > 0.2 and corrected["means"]["correction_weight"] < 1
    exact = [point["exact"] for point in stalled["curve"]]
    assert any(later < earlier for earlier, later in pairwise(exact)), "it falls back"


def test_the_figures_of_recovery_are_the_recorded_ones_and_meet_what_is_promised() -> None:
    def record(name: str) -> dict[str, Any]:
        return dict(json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"])

    page = (ROOT / "docs/recovery.md").read_text()
    cases = record("kill_matrix")["cases"]
    assert len(cases) == 38 and all(case["identical"] and not case["misses"] for case in cases)
    hangs = [case["noticed_s"] for case in cases if case["noticed_s"] > 1]
    crashes = [case["noticed_s"] for case in cases if case["noticed_s"] <= 1]
    single = [case["recovered_s"] for case in cases if len(case["fired"]) == 1]
    pairs = [case["recovered_s"] for case in cases if len(case["fired"]) == 2]
    assert len(hangs) == 6 and max(hangs) <= 7
    assert max(crashes) <= 0.1 and max(single) <= 10
    assert f"| {len(cases)} cases, {sum(len(case['fired']) for case in cases)} faults | the same bits |" in page
    for what, seconds in {
        "a crash noticed": crashes,
        "a silent rank noticed": hangs,
        "made good": single,
        "two at once made good": pairs,
    }.items():
        assert f"| {what} after | {min(seconds):.2f} to {max(seconds):.2f} s |" in page

    soak = record("soak")
    assert soak["identical"] and soak["fired"] == [fault.split(": ")[1] for fault in soak["faults"]]
    assert f"| {soak['steps']} steps, {len(soak['fired'])} faults at random | the same bits |" in page
    for name, count in {"soak_recoveries": "recoveries", "soak_steps": "steps"}.items():
        found = record(name)
        assert found["passed"] and found[count] in (100, 1000)
        for process, held in found["grown"].items():
            grown = f"{held['bytes'] / 2**20:+.1f} MiB, {held['files']:+.0f} files, {held['threads']:+.0f} threads"
            assert f"| {found[count]:,} {count}, {process} | {grown} |" in page
    share = record("guarding")["share"]
    assert share <= 0.02 and f"| guarding code, of a step of 65,536 tokens | {share:.2%} |" in page


def test_the_speed_beside_others_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "benchmarks/results/train_step.json").read_text())
    faster = {(one["workload"], one["system"]): one.get("slimefsdp_is_faster_by") for one in record["results"]}
    for workload in record["workloads"]:
        shown = (f"{faster[workload, system]:.2f}x" for system in ("trl", "hf_padded", "slime"))
        assert f"| `{workload}` | {' | '.join(shown)} |" in README


def test_the_steps_on_a_gpu_are_the_recorded_ones() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    cases = json.loads((ROOT / "benchmarks/results/gpu_step.json").read_text())["results"]["cases"]
    for case in cases:
        figures = f"| {case['seconds']:.3f} | {case['tokens_per_s']:,.0f} | {case['tflops']:.0f} |"
        shares = f"{case['mfu_of_measured']:.1%} | {case['mfu_of_stated']:.1%} | {case['peak_gib']:.0f} |"
        assert f"{figures} {shares}" in page
    fastest = max(case["tflops"] for case in cases if case["system"] == "slimefsdp")
    assert f"Qwen3-4B trains at {fastest:.0f} TFLOP/s with compiled layers" in README


def test_on_a_gpu_the_transports_end_at_the_same_bits() -> None:
    runs = json.loads((ROOT / "benchmarks/results/gpu_sort_digits.json").read_text())["runs"]
    assert {run["weight_transport"] for run in runs} == {"object_store", "broadcast", "disk", "ipc"}
    for run in runs:
        assert (run["losses"], run["grad_norms"]) == (runs[0]["losses"], runs[0]["grad_norms"])


def test_the_second_run_of_the_train_step_is_the_recorded_one() -> None:
    page = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
    results = json.loads((ROOT / "benchmarks/results/train_step_repeated.json").read_text())["results"]
    faster = {(one["workload"], one["system"]): f"{one['slimefsdp_is_faster_by']:.2f}x" for one in results}
    skewed = (
        f"`skewed` came out at {faster['skewed', 'trl']} of TRL and {faster['skewed', 'slime']} of slime's semantics"
    )
    assert f"{skewed}, `uniform` at {faster['uniform', 'trl']} of TRL." in page


def test_the_whole_steps_beside_another_trainer_are_the_recorded_ones() -> None:
    record = json.loads(RECORD.read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    for row in [*speed_rows(record), *learning_rows(record)]:
        assert row in page
    seeds = record["results"]["learning"].values()
    ours, theirs = ([sum(one[system]["curves"]["cpu/step"]) for one in seeds] for system in ("slimefsdp", "trl"))
    assert f"slimefsdp {min(ours):.0f} to {max(ours):.0f} CPU-seconds, and TRL {min(theirs):.0f} to" in page
    ratios = [other / one for one, other in zip(ours, theirs, strict=True)]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times as many samples" in page


def test_the_documents_compare_the_train_steps_of_two_commits_as_the_record_says() -> None:
    results = json.loads((ROOT / "benchmarks/results/step_commits.json").read_text())["results"]
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert all(results["commits"][side][:7] in page for side in ("old", "new"))
    for workload, found in results["workloads"].items():
        low, high = found["interval"]
        assert f"| `{workload}` | {found['ratio']:.3f} | {low:.3f} to {high:.3f} |" in page
        assert found["ratio"] >= 0.98


def test_the_cost_of_calls_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "benchmarks/results/rpc_overhead.json").read_text())["results"]
    page = " ".join((ROOT / "docs/performance.md").read_text().split())
    assert f"Over {len(record['rounds'])} rounds" in page
    low, high = record["overhead_95"]
    assert all(f"{1 + value:.3f}" in page for value in (record["overhead"], low, high))
    assert high <= 0.03
    medians = record["medians"]
    driver, step, ray = medians["driver_cpu_s"] * 1000, medians["group_s"], medians["ray_cpu_s"] * 1000
    assert all(said in page for said in (f"{driver:.0f} ms", f"{step:.1f} s", f"{ray:.0f} ms"))


def test_the_figures_of_the_head_are_the_recorded_ones() -> None:
    record = json.loads((ROOT / "benchmarks/results/head_memory.json").read_text())
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert record["torch"] in page and record["threads"] == 1, "as it says"
    by_case: dict[tuple[int, int, int, str], dict[str, str]] = {}
    for result in record["results"]:
        case = (result["rows"], result["vocab"], result["hidden"], result["dtype"])
        cpu_s = result.get("user_cpu_s", 0) + result.get("system_cpu_s", 0)
        measured = f"{result.get('peak_growth_mib', 0):.0f} MiB, {cpu_s:.1f} s"
        skipped = f"not run, {result.get('skipped', '').split(',')[0]}"
        by_case.setdefault(case, {})[result["head"]] = skipped if "skipped" in result else measured
    for (rows, vocab, hidden, dtype), heads in by_case.items():
        assert (
            f"| {rows:,} x {vocab:,}, {hidden}, {dtype} | {heads['naive']} | {heads['by rows']} | {heads['fused']} |"
            in page
        )
    passes = [len(HeadTiles.of(16_384, 151_936, 4, "cuda", mib * 2**20).rows) for mib in (128, 1024)]
    assert f"151,936 words these were {passes[0]} when" in page and f"and are {passes[1]} with the 1 GiB" in page
    fused = [result["weight_gradient_passes"] for result in record["results"] if result["head"] == "fused"]
    assert CHUNK_BYTES["cuda"] == 2**30 and set(fused) == {1}


def test_how_large_the_house_is_stands_as_it_was_counted() -> None:
    old, new = json.loads((ROOT / "benchmarks/results/count_files.json").read_text()).values()
    page = (ROOT / "docs/architecture.md").read_text()
    for name in ("until_first_step", "inside_a_rank", "import_circles"):
        assert f"| {len(old[name])} | {len(new[name])} |" in page
    assert new["import_circles"] == [] and len(new["inside_a_rank"]) < len(old["inside_a_rank"])
    assert all(f"`{path}` ({lines})" in " ".join(page.split()) for path, lines in new["longest"].items())


def test_the_speed_of_context_parallelism_is_the_recorded_one() -> None:
    record = json.loads((ROOT / "benchmarks/results/context_parallel.json").read_text())
    alone, *shared = record["results"]
    assert alone["ranks"] == 1 and {result["ranks"] for result in shared} == {2}
    page = (ROOT / "docs/benchmarks.md").read_text()
    for result in shared:
        assert result["speedup"] == pytest.approx(alone["median_s"] / result["median_s"])
        assert f"| `{result['strategy']}` | {result['speedup']:.2f} |" in page
        assert result["strategy"] != "ring" or result["speedup"] >= 1.6


def test_the_figures_of_the_meshes_are_the_recorded_ones_and_within_their_bounds() -> None:
    printed = (ROOT / "benchmarks/results/equivalence.txt").read_text()
    rows = [line.replace(" x ", " ").split() for line in printed.splitlines() if re.match(r" +[1248]  ", line)]
    models = set(re.findall(r"^(\w.*); \w+ data on every rank$", printed, re.MULTILINE))
    meshes = {tuple(map(int, row[1:4])) for row in rows}
    assert len(meshes) == 20 and {r * d * c for r, d, c in meshes} == {1, 2, 4, 8}  # all there are
    assert "OUTSIDE" not in printed
    # ranks, three axes, strategy, sharding, loss, sum; gradient and weight of SGD in float64, in float32; AdamW in both
    double = max(max(float(row[9]), float(row[12])) for row in rows)
    single = max(float(row[11]) for row in rows)
    assert double <= 1e-12
    page = (ROOT / "docs/benchmarks.md").read_text()
    (said,) = [line for line in page.split("\n\n") if "equivalence.txt" in line]
    assert all(names(said, value) for value in (len(rows), len(models), f"{double:.1e}", f"{single:.1e}"))
