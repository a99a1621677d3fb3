"""The kinds of bugs. Each is a small module that works, one passage of it and what stands there in the buggy repository."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`source` with `right` in it works; the repository has `wrong` instead. `NAME` stands for the function's name, of which
    there are several, `LIMIT` for a number; both are drawn for each repository."""

    names: tuple[str, ...]
    source: str
    right: str
    wrong: str
    issue: str
    """What somebody complains about."""
    example: str
    """A call that works in the buggy repository, too: what its own test has."""
    hidden: tuple[str, ...]
    """Calls that decide whether the bug is mended; some of them go wrong in the buggy repository."""
    limits: tuple[int, ...] = (0,)


def _text(source: str) -> str:
    return dedent(source).strip() + "\n"


KINDS: dict[str, Kind] = {
    "off_by_one": Kind(
        names=("window_sums", "moving_totals", "rolling_sums"),
        source=_text('''
            def NAME(values, size):
                """Sums of all runs of `size` neighbours, from left to right."""
                return [sum(values[start : start + size]) for start in range(len(values) - size + 1)]
        '''),
        right="range(len(values) - size + 1)",
        wrong="range(len(values) - size)",
        issue="NAME([1, 2, 3, 4], 2) leaves out the last sum, 7.",
        example="NAME([], 1)",
        hidden=("NAME([1, 2, 3, 4], 2)", "NAME([5], 1)", "NAME([1, 2], 3)", "NAME([4, -4, 4], 3)"),
    ),
    "shared_default": Kind(
        names=("collect", "append_to", "gather"),
        source=_text('''
            def NAME(item, into=None):
                """`into` with `item` behind it; without `into` a new list."""
                into = [] if into is None else into
                into.append(item)
                return into
        '''),
        right="into=None):",
        wrong="into=[]):",
        issue="The second call of NAME without a list still has what the first call put in.",
        example="NAME(1, [0])",
        hidden=("NAME(1)", "NAME(2)", "NAME(3, [1])", "(NAME(4), NAME(5))"),
    ),
    "whole_division": Kind(
        names=("mean", "average", "mean_of"),
        source=_text('''
            def NAME(values):
                """The arithmetic mean; 0.0 of nothing."""
                if not values:
                    return 0.0
                return sum(values) / len(values)
        '''),
        right="sum(values) / len(values)",
        wrong="sum(values) // len(values)",
        issue="NAME([1, 2]) gives 1, I expected 1.5.",
        example="NAME([])",
        hidden=("NAME([1, 2])", "NAME([])", "NAME([2, 2])", "NAME([-1, 0])"),
    ),
    "boundary": Kind(
        names=("shipping", "delivery_cost", "postage"),
        limits=(20, 35, 50, 80),
        source=_text('''
            FREE_FROM = LIMIT


            def NAME(total):
                """What delivery costs: nothing for orders of FREE_FROM or more, else 4."""
                return 0 if total >= FREE_FROM else 4
        '''),
        right="total >= FREE_FROM",
        wrong="total > FREE_FROM",
        issue="An order of exactly LIMIT still pays for delivery.",
        example="NAME(LIMIT + 1)",
        hidden=("NAME(LIMIT)", "NAME(LIMIT - 1)", "NAME(LIMIT + 1)", "NAME(0)"),
    ),
    "letter_case": Kind(
        names=("slug", "slugify", "url_name"),
        source=_text('''
            def NAME(title):
                """A title as part of an address: lower case, words joined by hyphens."""
                return "-".join(title.lower().split())
        '''),
        right="title.lower().split()",
        wrong='title.split(" ")',
        issue="NAME('Two  Words') keeps the capitals and has two hyphens where there were two spaces.",
        example="NAME('plain')",
        hidden=("NAME('Two  Words')", "NAME('plain')", "NAME(' a B ')", "NAME('')"),
    ),
    "sort_order": Kind(
        names=("ranking", "leaderboard", "standings"),
        source=_text('''
            def NAME(scores):
                """Names, the highest score first; equal scores in the order of the alphabet."""
                return sorted(scores, key=lambda name: (-scores[name], name))
        '''),
        right="(-scores[name], name)",
        wrong="(scores[name], name)",
        issue="NAME puts the player with the fewest points first.",
        example="NAME({'ann': 3})",
        hidden=("NAME({'ann': 3, 'bo': 5})", "NAME({'cy': 2, 'bo': 2, 'di': 1})", "NAME({})"),
    ),
    "early_return": Kind(
        names=("all_even", "only_even", "every_even"),
        source=_text('''
            def NAME(numbers):
                """Whether all of the numbers are even; True of none."""
                for number in numbers:
                    if number % 2:
                        return False
                return True
        '''),
        right="            return False\n    return True",
        wrong="            return False\n        return True\n    return True",
        issue="NAME([2, 3]) says True: it seems to look at the first number only.",
        example="NAME([2, 4])",
        hidden=("NAME([2, 3])", "NAME([])", "NAME([4, 6, 7])", "NAME([1])", "NAME([2, 4, 6])"),
    ),
    "shared_defaults": Kind(
        names=("settings", "options", "preferences"),
        limits=(3, 5, 8),
        source=_text('''
            DEFAULTS = {"retries": LIMIT, "verbose": False}


            def NAME(**given):
                """The defaults with what is given in their place."""
                merged = dict(DEFAULTS)
                merged.update(given)
                return merged
        '''),
        right="dict(DEFAULTS)",
        wrong="DEFAULTS",
        issue="After NAME(verbose=True), every later call of NAME() is verbose, too.",
        example="NAME()",
        hidden=("NAME(verbose=True)", "NAME()", "NAME(retries=0)", "(NAME(extra=1), NAME())"),
    ),
    "wrong_start": Kind(
        names=("product", "multiply_all", "times_all"),
        source=_text('''
            def NAME(values):
                """The product of all values; 1 of none."""
                result = 1
                for value in values:
                    result *= value
                return result
        '''),
        right="result = 1\n",
        wrong="result = 0\n",
        issue="NAME gives 0 whatever I multiply.",
        example="NAME([0, 3])",
        hidden=("NAME([2, 3])", "NAME([])", "NAME([5, 0])", "NAME([-1, 4])"),
    ),
    "leap_year": Kind(
        names=("is_leap", "leap_year", "has_leap_day"),
        source=_text('''
            def NAME(year):
                """Whether the year has a 29th of February (Gregorian calendar)."""
                return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        '''),
        right=" and (year % 100 != 0 or year % 400 == 0)",
        wrong=" and year % 100 != 0",
        issue="NAME(2000) says False, but there was a 29 February 2000.",
        example="NAME(2023)",
        hidden=("NAME(2000)", "NAME(1900)", "NAME(2024)", "NAME(2023)", "NAME(2400)"),
    ),
    "swapped_arguments": Kind(
        names=("share", "percentage", "portion"),
        source=_text('''
            def ratio(part, whole):
                return part / whole if whole else 0.0


            def NAME(part, whole):
                """How many percent of `whole` are `part`; 0.0 of nothing."""
                return 100 * ratio(part, whole)
        '''),
        right="100 * ratio(part, whole)",
        wrong="100 * ratio(whole, part)",
        issue="NAME(1, 4) gives 400.0. It should be 25.0.",
        example="NAME(2, 2)",
        hidden=("NAME(1, 4)", "NAME(3, 2)", "NAME(0, 5)", "NAME(5, 0)"),
    ),
    "missing_check": Kind(
        names=("parse_port", "port_number", "read_port"),
        source=_text('''
            def NAME(text):
                """A port from text. ValueError unless it is a number from 1 to 65535."""
                port = int(text)
                if not 1 <= port <= 65535:
                    raise ValueError(f"no port: {text}")
                return port
        '''),
        right="not 1 <= port <= 65535",
        wrong="port < 0",
        issue="NAME accepts '70000' and '0'. It should raise ValueError.",
        example="NAME('8080')",
        hidden=("NAME('70000')", "NAME('0')", "NAME('65535')", "NAME('1')", "NAME('-1')", "NAME('x')"),
    ),
    "missing_type": Kind(
        names=("flatten", "flat", "unnested"),
        source=_text('''
            def NAME(nested):
                """All items of nested lists and tuples in one list."""
                found = []
                for item in nested:
                    if isinstance(item, (list, tuple)):
                        found.extend(NAME(item))
                    else:
                        found.append(item)
                return found
        '''),
        right="isinstance(item, (list, tuple))",
        wrong="isinstance(item, list)",
        issue="NAME([1, (2, 3)]) still has a tuple in it.",
        example="NAME([1, [2]])",
        hidden=("NAME([1, (2, 3)])", "NAME([[1], ([2],)])", "NAME([])", "NAME(['ab'])"),
    ),
    "padding": Kind(
        names=("clock", "duration", "minutes_and_seconds"),
        source=_text('''
            def NAME(seconds):
                """Seconds as minutes and seconds, for example 2:05."""
                return f"{seconds // 60}:{seconds % 60:02d}"
        '''),
        right="{seconds % 60:02d}",
        wrong="{seconds % 60}",
        issue="NAME(125) gives '2:5', it should be '2:05'.",
        example="NAME(130)",
        hidden=("NAME(125)", "NAME(59)", "NAME(0)", "NAME(600)"),
    ),
}
