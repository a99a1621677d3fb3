"""Messages between workers of two instances that move keys and values, and between an instance and its own workers."""

from __future__ import annotations

import msgspec

LONGEST_LEASE_S = 120.0
"""LMCache unpins by force after 300 s."""


class Want(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="want"):
    """Target -> source: keep these chunks where they are for `lease_s` seconds, I am about to read them.

    `hashes` of the chunks of one prefix, in order; `tags` are the rest of their names (psrl.rollout.cache_identity). `layout`
    says what a chunk is: a source whose chunks are otherwise has none of them. `known_agent`: the source's NIXL agent that
    the target has met, "" for none.
    """

    pull: int
    hashes: list[int]
    tags: dict[str, str]
    lease_s: float
    layout: str
    known_agent: str = ""


class Have(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="have"):
    """Source -> target: the first `len(addresses)` of the chunks lie here, kept. `metadata` of `agent` is empty if it is known."""

    pull: int
    addresses: list[int]
    agent: str
    metadata: bytes
    cause: str = ""
    """Why there are fewer than wanted, if for another reason than that they are not here."""


class Done(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="done"):
    """Target -> source: read, or given up; let go of them."""

    pull: int


ToSource = Want | Done


class PullOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Instance -> its workers: bring the prefix of `token_ids` here from the instance `source`, or give up after `timeout_s`."""

    pull: int
    source: str
    token_ids: list[int]
    tags: dict[str, str]
    timeout_s: float


class PullEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Worker -> its instance: the first `tokens` of the prefix are here now, `moved` of them by this pull. `cause` says why
    it ended early; empty if the source had no more."""

    pull: int
    tokens: int = 0
    moved: int = 0
    cause: str = ""
