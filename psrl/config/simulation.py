"""Keys of `simulation.*`: what `python -m psrl.simulate` assumes where a run would measure. A launch has no such section."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.config.schema import Config


@dataclass
class LengthConfig:
    """How long responses are. No policy sees a length before the response is finished."""

    distribution: str | None = None
    """lognormal (long-tailed) | fixed (every response has `mean_tokens`) | trace (those of an earlier run); null: trace with a calibration, else lognormal."""
    mean_tokens: float | None = None
    """Mean before the cut at data.max_response_length; null: a quarter of data.max_response_length."""
    sigma: float = 0.8
    """lognormal: standard deviation of the logarithm; 0.5 is mild, 1 has a long tail."""
    prompt_share: float = 0.5
    """lognormal: share of that variance that belongs to the prompt, so that the samples of one group resemble each other, in [0, 1]."""
    trace: str | None = None
    """trace: a run directory, or a JSON file with a list of groups, each a list of lengths."""


@dataclass
class EnvironmentConfig:
    """Multi-turn work: between two turns a sample is away at its environment and holds no place at an instance."""

    turns: int = 1
    """Turns of a sample; its response tokens are spread evenly over them."""
    seconds: float = 0.0
    """Mean time at the environment between two turns."""
    sigma: float = 0.0
    """Standard deviation of that time's logarithm; 0: always the same."""
    tokens: int = 0
    """Tokens that the environment adds at each turn; they are prefilled, not trained."""
    prefix_cached: bool = True
    """With several turns: engines keep what they computed, in blocks of routing_strategy.cache_aware_policy.block_size, until the
    room is needed or new weights come; a turn prefills only what is not there. False: they keep nothing."""


@dataclass
class CostConfig:
    """Seconds that things take. With `simulation.calibration` a value that is null here comes from there."""

    cost_model: str | None = None
    """Decode cost model: a JSON file or a shipped name, for example qwen_32b; null: the calibration's, else that of routing_strategy.cost_model_path."""
    step_overhead_s: float | None = None
    """Time of an instance between two decode steps; null: 0."""
    prefill_s: float | None = None
    """Of each prefill, whatever its size; null: 0."""
    prefill_s_per_token: float | None = None
    """null: the cost model's other_latency_k, what one more token costs in a forward pass."""
    train_s: float | None = None
    """Of each training step, whatever its size; null: 0."""
    train_s_per_token: float | None = None
    """Of each prompt or response token that trains; null: four marginal forward passes (old log-probs, forward, twice for the backward pass) of
    the cost model, spread over the trainer's GPUs in proportion to those of one instance."""
    push_s: float | None = None
    """The trainer publishes a version; null: 0."""
    pull_s: float | None = None
    """An instance fetches a version while decoding goes on; null: 0."""
    switch_s: float | None = None
    """Decoding stands still for the new weights; null: 0."""
    checkpoint_s: float | None = None
    """One checkpoint; null: 0."""
    reward_s: float | None = None
    """From a group's last token to its reward being sealed; null: 0."""
    dispatch_s: float | None = None
    """From the coordinator's decision to the request's arrival at an instance; null: 0."""


@dataclass
class SimulationConfig:
    steps: int = 30
    """Training steps to simulate, out of the middle of a long run: neither its end nor the size of the data matters."""
    warmup_steps: int | None = None
    """First steps that no figure counts, while the pipeline fills; null: 2 x (psrl.staleness + 1)."""
    compare_synchronous: bool = True
    """Also simulate the same with psrl.staleness=0, for the speed-up."""
    prompt_tokens: int | None = None
    """Tokens of a prompt; null: the calibration's mean, else half of data.max_prompt_length."""
    shared_prompt_tokens: int = 0
    """First tokens of every prompt that are the same in all of them: a system prompt, descriptions of tools."""
    lengths: LengthConfig = field(default_factory=LengthConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    costs: CostConfig = field(default_factory=CostConfig)
    calibration: str | None = None
    """What `python -m psrl.simulate calibrate RUN_DIR` wrote: costs, lengths and prompt sizes of a real run, where the keys above are null."""
    uniform_reward_share: float = 0.0
    """Share of prompts whose samples all get the same reward (what the dynamic sampling filter drops), in [0, 1]."""
    round_s: float | None = None
    """Least time between two rounds of the coordinator: what arrives meanwhile is decided together; 0: a round for each event. null: 0 with a
    calibration, whose costs hold it, else 0.01."""
    tick_s: float = 1.0
    """Upper bound between two housekeeping rounds on the virtual clock, where a run has psrl.status_collection.coordinator_sync_interval_in_ms."""
    timelines: int = 32
    """Instances whose timeline is recorded for the report; figures count all of them."""
    write: bool = True
    """Write run_dir with the report page; False: print the figures only."""


@dataclass
class SimulatedConfig(Config):
    """What a launch is given, and what a simulation assumes."""

    simulation: SimulationConfig = field(default_factory=SimulationConfig)
