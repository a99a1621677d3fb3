"""psrl: asynchronous RL post-training for LLMs as an ordinary Slurm batch job."""

__version__ = "0.1.0"
