"""Streamed tokens on their way to an agent loop."""

from __future__ import annotations

from psrl.protocol.generation import TokenChunk


def join_chunks(chunks: list[TokenChunk]) -> list[TokenChunk]:
    """One chunk a sample: tokens of several decode steps joined in order. A finished chunk ends its sample's row, so a
    later request for the same sample starts a new one."""
    joined: dict[tuple[int, int], TokenChunk] = {}
    out: list[TokenChunk] = []
    for chunk in chunks:
        key = (chunk.group, chunk.sample)
        if (open_chunk := joined.get(key)) is None:
            joined[key] = chunk
            out.append(chunk)
        else:
            open_chunk.token_ids += chunk.token_ids
            open_chunk.logprobs += chunk.logprobs
            open_chunk.spans += chunk.spans
            open_chunk.finish = chunk.finish
        if chunk.finish:
            joined.pop(key, None)
    return out
