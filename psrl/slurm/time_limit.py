"""Time limits as Slurm writes them. Pure."""

from __future__ import annotations

import re

from psrl.config.errors import ConfigError

UNLIMITED = "UNLIMITED"
_FORM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


def parse_time_limit(text: str, *, key: str = "time") -> int | None:
    """Seconds; None for no limit, which is also what Slurm takes a limit of zero for.

    >>> [parse_time_limit(text) for text in ("90", "90:30", "1:30:00", "1-12", "1-12:30", "UNLIMITED")]
    [5400, 5430, 5400, 129600, 131400, None]

    Raises ConfigError naming `key` for every other form.
    """
    if text.upper() in (UNLIMITED, "INFINITE"):
        return None
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{key}={text} is refused: a time limit is minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
            f"days-hours:minutes:seconds or {UNLIMITED}; write for example 1-12:00:00."
        )
    days, first, second, third = match.groups()
    if days is None and third is None:
        return 60 * int(first) + int(second or 0) or None
    return 86400 * int(days or 0) + 3600 * int(first) + 60 * int(second or 0) + int(third or 0) or None


def format_time_limit(seconds: int | None) -> str:
    """`[D-]HH:MM:SS`, the inverse of `parse_time_limit`; None is no limit.

    >>> format_time_limit(129_600), format_time_limit(90), format_time_limit(None)
    ('1-12:00:00', '00:01:30', 'UNLIMITED')
    """
    if seconds is None:
        return UNLIMITED
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"
