"""How each launched sample ended, and with how many response tokens: what keeps the statistics of lengths honest.

Redundancy and filters favour some answers over others (short ones most of all), so every sample that was launched is
counted once, whatever became of it. An end is *complete* if the sample finished by itself; otherwise its length is
*censored*: the answer would have been longer.
"""

from __future__ import annotations

from psrl.protocol.generation import FINISH_REDUNDANT, FINISH_TRUNCATED
from psrl.rollout.group_work import GroupWork

CONSUMED = "consumed"  # finished, in a group that was handed to the trainer
FILTERED = "filtered"  # finished, in a group that was dropped for carrying no signal
FAILED = "failed"  # finished, in a group that has no rewards
UNUSED = "unused"  # finished, but others had finished first
TRUNCATED = "truncated"  # ended where it was, because the trainer waited for its group
REDUNDANT = "redundant"  # ended because enough others had finished
RETURNED = "returned"  # ended for another reason: its prompt is tried again, or its group has failed


def group_ends(work: GroupWork, outcome: str) -> list[tuple[str, int]]:
    """(kind, response tokens) of each sample of a group that is over. `outcome` is what became of its kept samples:
    CONSUMED, FILTERED or FAILED; REDUNDANT or RETURNED if the group was taken away before it was done."""
    kept = set(work.kept()) if outcome in (CONSUMED, FILTERED, FAILED) else set()
    return [(_kind(s.finish, s.sample in kept, outcome), len(s.token_ids)) for s in work.samples]


def _kind(finish: str, kept: bool, outcome: str) -> str:
    if finish == FINISH_TRUNCATED:
        return TRUNCATED
    if finish == FINISH_REDUNDANT:
        return REDUNDANT
    if not finish:
        return REDUNDANT if outcome == REDUNDANT else RETURNED
    return outcome if kept else UNUSED
