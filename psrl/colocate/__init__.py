"""Trainer and rollout on the same GPUs, in turns (`psrl.colocate`): locks that keep them apart, memory that is released."""
