"""Rows of a training batch: which samples of a group stand behind one copy of their prompt. Pure.

The samples of a group share their prompt, and a causal model computes the same thing for it each time. A row may hold
the prompt once and several responses after it, each of which attends to the prompt and to itself only; positions go on
from the prompt for each. Log-probs and gradients are those of separate rows (up to the order of additions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`samples` are positions in the flat batch order, all of one group; `length` is prompt + their responses."""

    samples: tuple[int, ...]
    length: int


def separate_rows(lengths: Sequence[int]) -> list[Row]:
    """One row a sample; samples of length 0 have none. `separate_rows([5, 0]) == [Row((0,), 5)]`."""
    return [Row((i,), length) for i, length in enumerate(lengths) if length > 0]


def shared_rows(
    lengths: Sequence[int], group_of: Sequence[int], prompt_tokens: Sequence[int], hidden_size: int, max_tokens: int
) -> list[Row]:
    """Rows with shared prompts, wherever sharing saves work.

    `lengths[i]`: prompt + response of sample i, 0 if it is left out; `group_of[i]` its group, whose prompt has
    `prompt_tokens[group]` tokens. Joining a response of r tokens to a row whose responses have s saves the prompt's p
    tokens (about 24 h^2 operations a token and layer) and adds 2 r s masked attention scores (about 4 h each), so it
    pays while r s < 3 h p. No row is longer than `max_tokens`.

    `shared_rows([4, 5, 6], [0, 0, 1], [3, 3], 64, 100)` joins the first two: Row((0, 1), 6) and Row((2,), 6).
    """
    rows: list[Row] = []
    by_group: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        if length > 0:
            by_group.setdefault(group_of[i], []).append(i)
    for group, samples in by_group.items():
        prompt = prompt_tokens[group]
        members: list[int] = []
        responses = 0
        for i in sorted(samples, key=lambda i: (lengths[i], i)):
            response = lengths[i] - prompt
            pays = response * responses < 3 * hidden_size * prompt and prompt + responses + response <= max_tokens
            if members and not pays:
                rows.append(Row(tuple(members), prompt + responses))
                members, responses = [], 0
            members.append(i)
            responses += response
        rows.append(Row(tuple(members), prompt + responses))
    return rows
