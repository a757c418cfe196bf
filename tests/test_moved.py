"""Import paths that earlier documents named still lead to what stands there, under its new name."""

from __future__ import annotations

import importlib
import pickle
import sys

import pytest

from slimefsdp._moved import MOVED, install


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_at_the_new_one_and_says_so(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    new = importlib.import_module(MOVED[old])
    monkeypatch.delitem(sys.modules, old, raising=False)
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=MOVED[old].replace(".", r"\.")):
        found = importlib.import_module(old)
    assert found is new and new.__spec__ is spec and new.__name__ == MOVED[old]
    assert importlib.reload(new) is new, "it is found again under its own name"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_old_path_names_is_the_same_object() -> None:
    from slimefsdp.loss import policy  # type: ignore[import-not-found]

    from slimefsdp.algorithms.policy_losses import PolicyOptions

    assert policy.PolicyOptions is PolicyOptions and pickle.loads(pickle.dumps(policy.PolicyOptions)) is PolicyOptions


def test_the_old_paths_are_looked_up_once_however_often_the_packages_are_loaded() -> None:
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before


def test_a_path_that_never_was_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("slimefsdp.loss.kl")
