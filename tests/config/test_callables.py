"""Functions of the user's own: found by their name, or refused under the setting that names them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused

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
def needs_three(a, b, c): ...
def by_name_only(*, tokens, options): ...
async def later(tokens, options): ...
def anything(*arguments): ...
def with_default(a, b, c=1): ...
"""


@pytest.mark.parametrize(
    ("name", "is_class", "hint"),
    [
        ("duoble", False, "did you mean double?"),
        ("add", True, "did you mean Add?"),
        ("doubl", True, "name a class that package_of_own.inner defines"),
        ("numbe", False, "name a function that package_of_own.inner defines"),
    ],
)
def test_a_name_that_is_like_one_of_the_module_is_answered_by_that(name: str, is_class: bool, hint: str) -> None:
    with refused(ConfigError, "rollout.filter", name) as caught:
        load_function(f"package_of_own.inner:{name}", field="rollout.filter", example="a:b", is_class=is_class)
    assert caught.value.hint == hint


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
    ("name", "values", "hint"),
    [
        ("double", ["'double'"], "my_module:my_function"),
        (":double", ["':double'"], "my_module:my_function"),
        ("package_of_own.inner:", ["'package_of_own.inner:'"], "my_module:my_function"),
        ("no_such_module:f", ["'no_such_module:f'", "ModuleNotFoundError"], "PYTHONPATH"),
        ("package_of_own.no_such:f", ["'package_of_own.no_such:f'", "ModuleNotFoundError"], "PYTHONPATH"),
        ("needs_another:f", ["ModuleNotFoundError", "'no_such_package_at_all'"], "install"),
        ("raises_at_once:f", ["'raises_at_once:f'", "RuntimeError: no licence"], "correct the module"),
        ("wrong_syntax:f", ["'wrong_syntax:f'", "SyntaxError"], "correct the module"),
        ("package_of_own.inner:triple", ["'package_of_own.inner'", "'triple'"], ""),
        ("package_of_own.inner:number", ["'package_of_own.inner:number'", "int"], ""),
    ],
)
def test_what_cannot_be_had_is_told_with_the_setting_the_name_and_a_way_out(
    name: str, values: list[str], hint: str
) -> None:
    with refused(ConfigError, "section.setting", *values) as caught:
        load_function(name, field="section.setting", example="my_module:my_function")
    assert hint in str(caught.value.hint)


def test_a_function_in_a_file_is_found_with_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "beside_own_file.py").write_text("factor = 3")
    (tmp_path / "elsewhere" / "own-file.py").write_text(
        "import beside_own_file\ndef triple(x): return beside_own_file.factor * x\n"
    )
    name = f"{tmp_path / 'elsewhere' / 'own-file.py'}"
    assert load_function(f"{name}:triple", field="a.b", example="m:f")(4) == 12
    with refused(ConfigError, "a.b", "own-file.py", "tripel") as caught:
        load_function(f"{name}:tripel", field="a.b", example="m:f")
    assert "triple" in str(caught.value.hint)


def test_a_module_that_is_a_file_here_is_told_how_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file_of_here.py").write_text("def f(): ...")
    with refused(ConfigError, "a.b", "file_of_here") as caught:
        monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(tmp_path))])
        load_function("file_of_here:f", field="a.b", example="m:f")
    assert "file_of_here.py:f" in str(caught.value.hint)
    with refused(ConfigError, "a.b", "none.py", "FileNotFoundError") as caught:
        load_function("none.py:f", field="a.b", example="m:f")
    assert "settings file" in str(caught.value.hint)
    (tmp_path / "wrong.py").write_text("def f(")
    with refused(ConfigError, "a.b", "wrong.py", "SyntaxError") as caught:
        load_function("wrong.py:f", field="a.b", example="m:f")
    assert "correct the file" in str(caught.value.hint)


TAKES = ("tokens", "options")


@pytest.mark.parametrize("name", ["double", "needs_three", "by_name_only", "later"])
def test_a_function_that_cannot_be_called_with_what_it_gets_is_refused_before_it_is(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(f"package_of_own.inner:{name}", field="section.setting", example="m:f", takes=TAKES)
    assert caught.value.field == "section.setting" and caught.value.hint and name in caught.value.message


@pytest.mark.parametrize("name", ["anything", "with_default"])
def test_a_function_may_take_more_than_it_gets(name: str) -> None:
    assert callable(load_function(f"package_of_own.inner:{name}", field="a.b", example="m:f", takes=TAKES))


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_what_a_function_raised_is_told_with_its_line_whatever_it_is() -> None:
    for error in (ZeroDivisionError("by nothing"), SystemExit(3), Untold(), ValueError("x" * 10_000)):
        try:
            raise error
        except BaseException as raised:
            told = failure_of("m:f", raised)
        assert "m:f" in told and type(error).__name__ in told and f"{__file__}:" in told and len(told) < 1000
