"""Rule-based verifiers for answers that are a number or a short text."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def numeric_match(solution_str: str, ground_truth: Any) -> float:
    r"""1.0 if the response's final answer equals the ground truth, else 0.0.

    The final answer is what stands in the last \boxed{...}, else after the last "####", else the last number.
    Numbers are compared as numbers ("1,000.0" equals "1000"), anything else as text without outer spaces.
    """
    wanted = str(ground_truth).strip()
    given = final_answer(solution_str)
    if given is None:
        return 0.0
    wanted_number, given_number = _as_number(wanted), _as_number(given)
    if wanted_number is not None:
        return float(given_number is not None and given_number == wanted_number)
    return float(given == wanted or solution_str.strip() == wanted)


def final_answer(text: str) -> str | None:
    r"""The part of a response that counts. `final_answer(r"so \boxed{7} it is 8") == "7"`; None if there is nothing."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if "####" in text:
        return text.rpartition("####")[2].strip()
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else (text.strip() or None)


def _last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces inside it balanced."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len(r"\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at]
    return None


def _as_number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip().strip("$").rstrip(".").replace(",", ""))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def math_match(solution_str: str, ground_truth: Any) -> float:
    """As `numeric_match`; where `math_verify` is installed, also expressions that are equal without looking equal."""
    if numeric_match(solution_str, ground_truth) == 1.0:
        return 1.0
    try:
        from math_verify import parse, verify
    except ImportError:
        return 0.0
    # math_verify's own timeouts use signals and threads; the scoring process has its own deadline.
    wanted = parse(f"${ground_truth}$", parsing_timeout=None)
    return float(verify(wanted, parse(solution_str, parsing_timeout=None), timeout_seconds=None))


VERIFIERS: dict[str, Callable[[str, Any], float]] = {
    "openai/gsm8k": numeric_match,
    "gsm8k": numeric_match,
    "digit_sum": numeric_match,
    "lighteval/MATH": math_match,
    "DigitalLearningGmbH/MATH-lighteval": math_match,
    "HuggingFaceH4/MATH-500": math_match,
    "math": math_match,
    "math_dapo": math_match,
    "aime": math_match,
}
"""Data sources (verl's names) that a file task can score without a reward function."""
