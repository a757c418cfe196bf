"""Functions of the user's own: found by their name, or refused under the setting that names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slimefsdp.errors import ConfigError
from slimefsdp.functions import load_function

SOURCE = """
def double(x):
    return 2 * x
class Add:
    def __init__(self, x):
        self.x = x
    def __call__(self, y):
        return self.x + y
add_three = Add(3)
number = 7
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_own").mkdir()
    (tmp_path / "package_of_own" / "inner.py").write_text(SOURCE)
    (tmp_path / "needs_another.py").write_text("import no_such_package_at_all")
    (tmp_path / "raises_at_once.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "wrong_syntax.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))  # what is imported here is forgotten again


def test_a_function_or_anything_that_can_be_called_is_given_as_it_is() -> None:
    double = load_function("package_of_own.inner:double", field="a.b", example="m:f")
    assert double(4) == 8 and double.__name__ == "double"
    assert load_function("package_of_own.inner:add_three", field="a.b", example="m:f")(4) == 7
    assert load_function("package_of_own.inner:Add", field="a.b", example="m:f")(1)(2) == 3


@pytest.mark.parametrize(
    ("name", "said", "hint"),
    [
        ("double", "'double' does not name a function", "my_module:my_function"),
        (":double", "':double' does not name a function", "my_module:my_function"),
        ("package_of_own.inner:", "does not name a function", "my_module:my_function"),
        ("no_such_module:f", "'no_such_module' of 'no_such_module:f' cannot be imported: ModuleNotFound", "PYTHONPATH"),
        ("package_of_own.no_such:f", "cannot be imported: ModuleNotFoundError", "PYTHONPATH"),
        ("needs_another:f", "No module named 'no_such_package_at_all'", "install the module"),
        ("raises_at_once:f", "cannot be imported: RuntimeError: no licence", "PYTHONPATH"),
        ("wrong_syntax:f", "cannot be imported: SyntaxError", "PYTHONPATH"),
        ("package_of_own.inner:triple", "module 'package_of_own.inner' has no 'triple'", "name a function"),
        ("package_of_own.inner:number", "'package_of_own.inner:number' is a int", "name a function"),
    ],
)
def test_what_cannot_be_had_is_told_with_the_setting_the_name_and_a_way_out(name: str, said: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(name, field="section.setting", example="my_module:my_function")
    error = caught.value
    assert error.field == "section.setting" and said in error.message and hint in str(error.hint)
