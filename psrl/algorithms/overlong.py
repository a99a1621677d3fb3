"""DAPO's soft punishment of responses that come close to the length limit."""

from __future__ import annotations


def overlong_penalty(response_tokens: int, max_response_length: int, buffer: int, factor: float) -> float:
    """What is added to the reward, in [-factor, 0] (Yu et al. 2025, arXiv:2503.14476, eq. 13).

    0 up to max_response_length - buffer tokens, then linear down to -factor at max_response_length.
    `overlong_penalty(90, 100, 20, 1.0) == -0.5`; 80 tokens or fewer cost nothing.
    """
    excess = response_tokens - (max_response_length - buffer)
    return -min(max(excess, 0) / buffer, 1.0) * factor
