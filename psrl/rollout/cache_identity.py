"""Under which name an engine and its offload tier file a request's keys and values: those of one version of one run."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

TAG = "lmcache.tag.weights"
"""What LMCache's in-process connector makes part of each key. It ignores the salt; its multi-process connector and vLLM's own
prefix cache go by the salt and ignore tags. So every request carries both."""


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """A request's `cache_salt` and what goes into its `extra_args["kv_transfer_params"]`."""

    cache_salt: str
    kv_transfer_params: dict[str, str] = field(default_factory=dict)


def cache_identity(run: str, incarnation: int, version: int, *, multi_version: bool = True) -> CacheIdentity:
    """The identity for weights (incarnation, version). `run`: any text that no other run has, since a controller or a server
    may outlive a run and serve the next one. Tags may have letters and digits only.

    >>> cache_identity("mine", 0, 7)
    CacheIdentity(cache_salt='r9eee0b46i0v7', kv_transfer_params={'lmcache.tag.weights': 'r9eee0b46i0v7'})
    """
    name = f"r{blake2b(run.encode(), digest_size=4).hexdigest()}i{incarnation}v{version}"
    return CacheIdentity(name, {TAG: name} if multi_version else {})
