"""Time limits as Slurm writes them. What each form means was read back from a real Slurm (TimeLimit of a held job)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.errors import ConfigError
from psrl.slurm.time_limit import format_time_limit, parse_time_limit

pytestmark = pytest.mark.unit

MINUTE, HOUR, DAY = 60, 3600, 86400


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5 * MINUTE),
        ("008", 8 * MINUTE),
        ("5:30", 5 * MINUTE + 30),
        ("0:30", 30),
        ("90:00", 90 * MINUTE),
        ("1:00:00", HOUR),
        ("1:75:00", HOUR + 75 * MINUTE),
        ("1-2", DAY + 2 * HOUR),
        ("1-30", DAY + 30 * HOUR),
        ("1-2:3", DAY + 2 * HOUR + 3 * MINUTE),
        ("1-2:3:4", DAY + 2 * HOUR + 3 * MINUTE + 4),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        ("0-0", None),
        ("00:00:00", None),
    ],
)
def test_each_form_has_slurms_meaning(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1.5", "5m", "5 ", "+5", "-5", ":5", "5:", "1-", "1:2:3:4", "1-2:3:4:5", "1h", "none", "٥"]
)
def test_every_other_form_is_refused_with_key_value_and_forms(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_time_limit(text, key="hydra.launcher.time")
    assert str(caught.value) == (
        f"hydra.launcher.time={text} is refused: a time limit is minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
        "days-hours:minutes, days-hours:minutes:seconds or UNLIMITED; write for example 1-12:00:00."
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1, "00:00:01"),
        (90, "00:01:30"),
        (DAY - 1, "23:59:59"),
        (DAY, "1-00:00:00"),
        (36 * HOUR, "1-12:00:00"),
        (100 * DAY + 61, "100-00:01:01"),
        (None, "UNLIMITED"),
    ],
)
def test_limits_are_written_with_days_only_where_there_are_some(seconds: int | None, text: str) -> None:
    assert format_time_limit(seconds) == text


@given(st.none() | st.integers(1, 10**8))
def test_reading_undoes_writing(seconds: int | None) -> None:
    assert parse_time_limit(format_time_limit(seconds)) == seconds
