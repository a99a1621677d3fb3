"""Arithmetic, read as a syntax tree and computed node by node: no eval, no names, nothing that grows without bound."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from psrl.agents.tools.base import ToolError

Number = int | float
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
MAX_CHARACTERS = 400
"""Of an expression: also a bound on the depth of its tree and, with MAX_BITS, on the time that it takes."""
MAX_BITS = 2048
"""Of any integer on the way."""


def calculate(expression: str) -> Number:
    """The value of an arithmetic expression. Raises ToolError for anything else.

    >>> calculate("2 * (3 + 4) ** 2")
    98
    """
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"an expression has at most {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("a number became too large") from None


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(OPERATORS[type(node.op)](left, right))
    raise ToolError("only numbers, + - * / // % ** and parentheses")


def _check_power(base: Number, exponent: Number) -> None:
    """A power is refused before it is computed: 9**9**9 would take for ever."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    return value


class Calculator:
    """`calculator(expression)`."""

    name = "calculator"
    description = "Computes an arithmetic expression: numbers, + - * / // % ** and parentheses."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (12 + 7) * 3"}},
        "required": ["expression"],
    }

    async def run(self, expression: str) -> str:
        return str(calculate(str(expression)))
