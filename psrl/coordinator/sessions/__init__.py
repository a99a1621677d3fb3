"""Sessions: samples of several turns, and the KV cache that is kept for them between two (docs/decisions/0028)."""
