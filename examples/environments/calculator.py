"""Computes arithmetic expressions for a policy without `eval`, and without expressions that take long or grow large."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from tool_functions import ToolError

MOST_CHARACTERS = 1000  # limit on the length of an expression
MOST_DEPTH = 100  # limit on the depth of nested operations
MOST_BITS = 4096  # limit on the size of an integer; about 1,200 digits

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SIGNS: dict[type[ast.AST], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers with + - * / // % ** and brackets, as Python does.

    Args:
        expression: such as (12 + 3.5) * 4 ** 2
    """
    text = expression.strip()
    if len(text) > MOST_CHARACTERS:
        raise ToolError(f"the expression has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        tree = ast.parse(text, mode="eval").body
        return str(_value_of(tree, MOST_DEPTH))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the parser's errors, also on deep nesting
        raise ToolError(f"not an arithmetic expression: {getattr(error, 'msg', None) or error}") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError as error:
        raise ToolError("the result is too large") from error


def _value_of(node: ast.AST, depth: int) -> int | float:
    """Returns the value of a node; raises ToolError if the node is not arithmetic or exceeds a limit."""
    if depth < 0:
        raise ToolError(f"more than {MOST_DEPTH} operations inside each other")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        number: int | float = _SIGNS[type(node.op)](_value_of(node.operand, depth - 1))
        return number
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value_of(node.left, depth - 1), _value_of(node.right, depth - 1)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(_OPERATORS[type(node.op)](left, right))
    raise ToolError(f"{ast.unparse(node):.100} is no arithmetic of numbers")


def _check_power(base: int | float, exponent: int | float) -> None:
    """Refuses a power with a result that would be too large, before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1:
        # |base| >= 2 ** (bits - 1)
        if exponent * (base.bit_length() - 1) > MOST_BITS:
            raise ToolError("the result is too large")
        if -exponent > MOST_BITS:
            raise ToolError("the exponent is too large")


def _bounded(number: Any) -> int | float:
    if isinstance(number, complex):
        raise ToolError("the result is no real number")
    if isinstance(number, int) and number.bit_length() > MOST_BITS:
        raise ToolError("the result is too large")
    if isinstance(number, float) and not math.isfinite(number):
        raise ToolError("the result is too large")
    assert isinstance(number, int | float)
    return number
