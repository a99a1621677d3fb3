"""What one decode step of an engine costs: five measured coefficients and the two formulas on them. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Latency of a decode step as a function of the sequences in it and the tokens that they hold in the KV cache.

    The weight part is flat until the batch makes it compute-bound, then linear in the number of sequences; the attention
    part is linear in the KV tokens. All values are seconds (`_k`: seconds a sequence, seconds a KV token).
    """

    other_threshold: float
    """Least time of everything but attention: reading the weights once."""
    other_latency_b: float
    other_latency_k: float
    attn_latency_b: float
    attn_latency_k: float

    def latency_s(self, num_seqs: float, kv_tokens: float) -> float:
        """Seconds of one decode step of `num_seqs` sequences that hold `kv_tokens` tokens together."""
        other = max(self.other_threshold, self.other_latency_b + self.other_latency_k * num_seqs)
        return other + self.attn_latency_b + self.attn_latency_k * kv_tokens

    def throughput(self, num_seqs: float, kv_tokens: float) -> float:
        """Decoded tokens a second; 0 for an idle engine.

        >>> m = CostModel(other_threshold=0.02, other_latency_b=0.0, other_latency_k=0.005, attn_latency_b=0.0, attn_latency_k=0.0)
        >>> [m.throughput(n, 0) for n in (0, 1, 4, 8)]
        [0.0, 50.0, 200.0, 200.0]
        """
        return num_seqs / self.latency_s(num_seqs, kv_tokens) if num_seqs > 0 else 0.0
