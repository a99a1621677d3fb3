"""What vLLM's KV events say, in psrl's names of blocks. Pure; imports no vLLM.

vLLM names blocks by hashes that no other process can know before it has heard of them, so each hash is kept with the names that
its tokens have. A block of vLLM's is one or more of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.protocol.blocks import ROOT, block_names
from psrl.rollout.held_blocks import HeldBlocks

log = logging.getLogger(__name__)

STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
_FIELDS: dict[str, tuple[str, ...]] = {
    STORED: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    REMOVED: ("block_hashes", "medium"),
    CLEARED: (),
}
"""Of events that come as arrays, as they did in earlier versions; later fields are not needed. Others are maps."""

Hash = bytes | int


@dataclass(slots=True)
class _Block:
    names: list[int]
    parent: Hash | None
    copies: int = 0
    """How many of vLLM's blocks have this content now."""


class VllmBlocks:
    """Follows the events; `held` is what results.

    >>> blocks = VllmBlocks(block_size=2)
    >>> blocks.hear(["BlockStored", [b"x"], None, [5, 6, 7, 8], 4])
    >>> blocks.hear({"type": "BlockStored", "block_hashes": [b"y"], "parent_block_hash": b"x", "token_ids": [9] * 4, "block_size": 4})
    >>> blocks.held.news().stored == block_names([5, 6, 7, 8, 9, 9, 9, 9], 2)
    True
    """

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of one of our blocks."""
        self.held = HeldBlocks()
        self._size = block_size
        self._blocks: dict[Hash, _Block] = {}

    def hear(self, event: Mapping[str, Any] | Sequence[Any]) -> None:
        """One event, in order. Kinds that later versions may have are passed over, and so is what lies outside of the GPU (or of a
        CPU engine's own memory)."""
        kind, fields = _kind_and_fields(event)
        if kind == CLEARED:
            self.clear()
        elif fields.get("medium") not in (None, "GPU") or fields.get("group_idx"):
            return
        elif kind == STORED:
            self._store(fields)
        elif kind == REMOVED:
            for block_hash in fields["block_hashes"]:
                self._remove(block_hash)

    def clear(self) -> None:
        """Nothing is cached any more."""
        self._blocks.clear()
        self.held.clear()

    def lose(self) -> None:
        """Some events never came: what is cached now is not known. What is stored from here on is, and all that it follows,
        since vLLM stores a block for a sequence that holds all of its blocks."""
        for block in self._blocks.values():
            block.copies = 0
        self.held.clear()

    def _store(self, fields: Mapping[str, Any]) -> None:
        hashes, size, ids, parent = (
            fields[name] for name in ("block_hashes", "block_size", "token_ids", "parent_block_hash")
        )
        before = ROOT if parent is None else self._last_name(parent)
        if before is None or size % self._size or len(ids) != size * len(hashes):
            return  # follows what was lost, or has no names of ours
        self._hold_again(parent)
        names = block_names(ids, self._size, before)
        each = size // self._size
        for number, block_hash in enumerate(hashes):
            block = self._blocks.setdefault(block_hash, _Block(names[number * each : (number + 1) * each], parent))
            block.copies += 1
            self.held.store(block.names)
            parent = block_hash

    def _last_name(self, block_hash: Hash) -> int | None:
        block = self._blocks.get(block_hash)
        return block.names[-1] if block else None

    def _hold_again(self, block_hash: Hash | None) -> None:
        """After a loss: this block and those before it are there after all."""
        found = []
        while block_hash is not None and (block := self._blocks.get(block_hash)) and not block.copies:
            block.copies = 1
            found.append(block)
            block_hash = block.parent
        for block in reversed(found):
            self.held.store(block.names)

    def _remove(self, block_hash: Hash) -> None:
        block = self._blocks.get(block_hash)
        if block is None:
            return
        block.copies = max(0, block.copies - 1)
        if not block.copies:
            del self._blocks[block_hash]
            self.held.remove(block.names)


def _kind_and_fields(event: Mapping[str, Any] | Sequence[Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        return event["type"], event
    kind = event[0]
    return kind, dict(zip(_FIELDS.get(kind, ()), event[1:], strict=False))


def names_blocks_of(vllm_block_size: int, block_size: int) -> bool:
    """Whether blocks of vLLM's can be named in blocks of `block_size` tokens; the log says so if not."""
    if vllm_block_size % block_size == 0:
        return True
    log.warning(
        "this instance tells nothing of its prefix cache: vLLM's blocks of %d tokens are no whole number of the router's %d "
        "(psrl.rollout_coordination.routing_strategy.cache_aware_policy.block_size)",
        vllm_block_size,
        block_size,
    )
    return False
