from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

from tests.support import tiers
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, save_tiny_model

pytest_plugins = ("tests.support.ray_fixtures",)

# shared machines stall: a deadline per example would fail tests that are right
hypothesis.settings.register_profile("slimefsdp", deadline=None)
hypothesis.settings.register_profile("default tier", deadline=None, max_examples=tiers.QUICK_EXAMPLES)

left_to_the_whole = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every test; without this, and without paths, the default tier")


def pytest_configure(config: pytest.Config) -> None:
    # whoever names a file or a test gets all of it
    if hasattr(config, "workerinput"):
        tiers.is_whole, config.stash[tiers.is_part] = config.workerinput["tier"]
    else:
        config.stash[tiers.is_part] = config.args_source is pytest.Config.ArgsSource.ARGS
        tiers.is_whole = config.getoption("--all") or config.stash[tiers.is_part]
    hypothesis.settings.load_profile("slimefsdp" if tiers.is_whole else "default tier")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process of pytest-xdist what was asked of this one."""
    node.workerinput["tier"] = (tiers.is_whole, node.config.stash[tiers.is_part])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[tiers.collected] = list(items)
    if not tiers.is_whole:
        items[:], left, why = tiers.divide(items)
        config.hook.pytest_deselected(items=left)
        config.stash[left_to_the_whole] = dict(why)
    # by turns a module on a Ray cluster or with processes of its own, which waits the most, and one on ranks, which
    # computes the most: the processes of pytest-xdist share the cores best so. All others come last, in whose small
    # parts both end together
    turns: dict[Path, int] = {}
    for waits in (True, False):
        found = dict.fromkeys(item.path for item in items if (_waits(item) if waits else "ranks" in _fixtures(item)))
        turns |= {path: turn for turn, path in enumerate(path for path in found if path not in turns)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


def _waits(item: pytest.Item) -> bool:
    """Returns whether a test uses a Ray cluster, or is of a module that starts processes."""
    return "cluster" in _fixtures(item) or hasattr(getattr(item, "module", None), "subprocess")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(left_to_the_whole, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    node.config.stash[left_to_the_whole] = getattr(node, "workeroutput", {}).get("left", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left: dict[str, int] = config.stash.get(left_to_the_whole, {})
    if left:
        reasons = ", ".join(f"{count} {tiers.WORDS[why]}" for why, count in Counter(left).most_common())
        terminalreporter.write_line(f"{sum(left.values())} tests are left to bash scripts/test.sh --all: {reasons}")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that become gloo ranks, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyFolder]:
    """`tiny_folder(kind, **changes)` is the folder of that tiny model, saved once a session; tests only read it."""
    saved: dict[str, Path] = {}

    def folder(kind: str = "qwen3", **changes: Any) -> Path:
        key = repr((kind, sorted(changes.items())))
        if key not in saved:
            saved[key] = save_tiny_model(tmp_path_factory.mktemp(kind), kind, **changes)
            written.update({path: path.stat().st_mtime_ns for path in saved[key].iterdir()})
        return saved[key]

    written: dict[Path, int] = {}
    yield folder
    found = {path: path.stat().st_mtime_ns for kept in saved.values() for path in kept.iterdir()}
    assert found == written, "a test wrote into a folder that others read"


@pytest.fixture(scope="session")
def tied_folder(tiny_folder: TinyFolder) -> Path:
    """A tiny model whose embedding is its head, with sizes that ranks cannot share evenly."""
    return tiny_folder(tie_word_embeddings=True, vocab_size=97, intermediate_size=55)


@pytest.fixture(scope="session")
def folder(tiny_folder: TinyFolder) -> Path:
    """The tiny model that most tests train: 97 rows and 55 columns divide by no world size used here."""
    return tiny_folder(vocab_size=97, intermediate_size=55)


@pytest.fixture(scope="session")
def default_tier(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """The tests of the default tier."""
    if request.config.stash[tiers.is_part]:
        pytest.skip("only some test modules were collected")
    return tiers.divide(request.config.stash[tiers.collected])[0]
