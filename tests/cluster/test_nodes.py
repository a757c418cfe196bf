"""Which problems of nodes are found, in which order ranks are placed, and what is said of ranks on several nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cluster import placement
from actors.cluster.nodes import Node, digests_of, problems_of, usual_gbps, versions_here
from actors.cluster.placement import bundles_by_node, describe_nodes, runtime_environment
from slimefsdp.config import config_from_dict
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused

HERE = {"python": "3.12.1", "torch": "2.13.0", "slimefsdp's source": "aa"}
NODE = Node("one", "10.0.0.1", HERE, ["H100"] * 8, "NVLink", [], 10.0)
OTHER = replace(NODE, name="two", address="10.0.0.2")
A, B = "one (10.0.0.1)", "two (10.0.0.2)"
IB = ["mlx5_0: 400 Gb/sec (4X NDR), 4: ACTIVE", "mlx5_1: 800 Gb/sec (8X NDR), 1: DOWN"]


@pytest.mark.parametrize(
    ("node", "unreachable", "sending", "words"),
    [
        (OTHER, [], [(A, B, 6.0), (B, A, 5.0)], None),
        (replace(OTHER, versions=HERE | {"torch": "2.12.0"}), [], [], f"{B} has torch 2.12.0, and this machine has"),
        (replace(OTHER, versions=HERE | {"slimefsdp's source": "b"}), [], [], "slimefsdp's source b"),
        (replace(OTHER, versions=HERE | {"driver": "580"}), [], [], None),
        (replace(OTHER, skew_s=-1.5), [], [], "-1.5 s off"),
        (replace(OTHER, skew_s=0.9), [], [], None),
        (replace(OTHER, lacks={"run.dir": "No such file"}), [], [], f"{B} does not see the folder of run.dir: No such"),
        (OTHER, [(A, B, "10.0.0.2:4711: timed out")], [], f"{A} cannot connect to {B}: 10.0.0.2:4711: timed out"),
        (OTHER, [], [(A, B, 6.0), (B, A, 2.0)], f"{B} sends to {A} at 2 Gb/s, where 7 Gb/s are usual"),
        (replace(OTHER, interface_gbps=None), [], [(A, B, 2.0)], "at 2 Gb/s, where 7 Gb/s are usual"),
    ],
)
def test_each_problem_is_named_and_nothing_else(
    node: Node, unreachable: list[Any], sending: list[Any], words: str | None
) -> None:
    problems = problems_of([NODE, node], HERE, unreachable, sending)
    assert len(problems) == (words is not None)
    assert words is None or words in problems[0]


def test_a_link_of_unknown_rate_is_compared_with_the_fastest() -> None:
    nodes = [replace(node, interface_gbps=None) for node in (NODE, OTHER)]
    assert problems_of(nodes, HERE, [], [(A, B, 10.0), (B, A, 3.1)]) == []
    (problem,) = problems_of(nodes, HERE, [], [(A, B, 10.0), (B, A, 2.9)])
    assert "where the fastest link has 10 Gb/s" in problem


def test_the_usual_rate_is_that_of_an_active_infiniband_port_only_under_nccl() -> None:
    node = replace(NODE, infiniband=IB)
    assert usual_gbps(node, "nccl") == pytest.approx(280)
    assert usual_gbps(node, "gloo") == pytest.approx(7)
    assert usual_gbps(replace(NODE, interface_gbps=400.0), "gloo") == 15
    assert usual_gbps(replace(NODE, interface_gbps=None), "nccl") is None


def test_folders_are_alike_by_names_and_sizes_and_files_by_their_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    paths = {"a": tmp_path / "a", "b": tmp_path / "b", "none": tmp_path / "none"}
    found = digests_of(paths)
    assert found["a"] == found["b"] and found["none"] == "No such file or directory"
    (tmp_path / "b" / "config.json").write_text("{ }")
    assert digests_of(paths)["b"] != found["a"]
    files = digests_of({name: tmp_path / name / "config.json" for name in ("a", "b")})
    assert files["a"] != files["b"]


def test_this_machine_knows_its_versions() -> None:
    versions = versions_here()
    assert {"python", "torch", "ray", "transformers", "slimefsdp", "slimefsdp's source"} <= versions.keys()
    assert "not installed" not in versions.values()


def test_ranks_of_a_node_are_adjacent_whatever_order_ray_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"bundles_to_node_id": {2: "b", 0: "b", 3: "a", 1: "a"}}
    monkeypatch.setattr(placement, "placement_group_table", lambda group: table)
    assert bundles_by_node(None) == ([0, 2, 1, 3], ["b", "b", "a", "a"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nodes", "mesh", "line"),
    [
        ("aaaa", {"tp": 2, "cp": 2, "copies": 1}, ""),
        ("aabb", {"tp": 1, "cp": 1, "copies": 1}, "4 ranks on 2 nodes"),
        ("aabb", {"tp": 2, "cp": 1, "copies": 1}, "4 ranks on 2 nodes: mesh.tp stays within a node"),
        ("aaab", {"tp": 2, "cp": 1, "copies": 1}, "4 ranks on 2 nodes: mesh.tp has ranks on several nodes, such as "
         "ranks 2 to 3"),
        ("aabb", {"tp": 2, "cp": 2, "copies": 1}, "4 ranks on 2 nodes: mesh.tp stays within a node; mesh.cp has ranks "
         "on several nodes, such as ranks 0 to 3"),
        ("aabb", {"tp": 1, "cp": 1, "copies": 2}, "4 ranks on 2 nodes: a copy of the model stays within a node"),
    ],
)  # fmt: skip
def test_a_line_says_which_ranks_are_on_several_nodes(nodes: str, mesh: dict[str, int], line: str) -> None:
    assert describe_nodes(list(nodes), **mesh) == line


def environment(value: Any) -> dict[str, str]:
    return config_from_dict({"model": {"path": "x"}, "cluster": {"environment": value}}).cluster.environment


def test_variables_reach_processes_as_text() -> None:
    variables = environment({"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"})
    assert runtime_environment(1, variables) == {"env_vars": variables}
    on_cpu = runtime_environment(0, variables)["env_vars"]
    assert on_cpu["OMP_NUM_THREADS"] == "2" and on_cpu["NCCL_IB_DISABLE"] == "1" and "MALLOC_ARENA_MAX" in on_cpu
    assert runtime_environment(1, {}) == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"PYTHONPATH": "x"}, "PYTHONPATH"),
        ({"RAY_ADDRESS": "x"}, "RAY_ADDRESS"),
        ({"a b": "x"}, "names"),
        ("x", "texts"),
        ({"A": 1}, "texts"),
    ],
)
def test_variables_that_processes_are_given_are_refused(value: Any, words: str) -> None:
    with refused(ConfigError, "cluster.environment", words):
        environment(value)
