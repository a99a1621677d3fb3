"""Keys of `psrl.rollout_coordination.*`: which samples are made, where, with which weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.config.session_strategy import SessionStrategyConfig


@dataclass
class PartialRolloutConfig:
    enable: bool = True
    """A weight pull interrupts generation at the version boundary; tokens and log-probs are kept, the request goes on."""
    interrupt_as_prompt: bool = False
    """Tokens made before an interruption count as prompt from then on: their loss mask is 0. What trains are the tokens after
    the last pull that interrupted the sample or the last change of weights, whichever is later; a sample of which nothing
    is left counts as empty. Rewards see the whole response. Needs partial_rollout.enable."""


@dataclass
class RedundantRolloutConfig:
    enable: bool = False
    """Launch more groups, or more samples a group, than are trained; keep those that finish first and abort the rest. A
    prompt whose group was aborted comes again, and then keeps its place."""
    alg_global_batch_size: int | None = None
    """Groups a step that train; null: psrl.staleness_buffer_entries, which it must equal."""
    redundant_global_batch_size: int | None = None
    """Groups a step that are launched; null: as many as train."""
    alg_rollout_n: int | None = None
    """Samples a group that train; null: psrl.rollout_n, which it must equal."""
    redundant_rollout_n: int | None = None
    """Samples a group that are launched; null: as many as train."""


@dataclass
class CacheAwarePolicyConfig:
    cache_threshold: float = 0.0
    """Least share of the prompt that must be cached at an instance before its cache counts, in [0, 1]."""
    gpu_overlap_weight: float = 1.0
    """Worth of a cached token in the engine's own cache, against a token to be computed (cache_aware_v1)."""
    lmcache_overlap_weight: float = 0.0
    """Worth of a cached token in the offload tier (cache_aware_v1)."""
    balance_abs_threshold: int = 16
    """Load counts as uneven when the busiest instance has this many requests more than the least busy ..."""
    balance_rel_threshold: float = 1.5
    """... and this many times as many; then the least busy takes the request, whatever is cached."""
    balance_token_usage_threshold: float = 0.75
    """KV usage above which an instance is passed over for one with less, whatever is cached, in [0, 1]."""
    overload_token_usage_threshold: float = 1.0
    """KV usage from which an instance takes nothing as long as another one may, in [0, 1]."""
    eviction_interval_secs: float = 60.0
    """Upper bound between two trims of the router's prefix trees."""
    max_tree_size: int = 67108864
    """Most tokens that the router remembers for one instance; the longest unused go first."""
    block_size: int = 16
    """Tokens a cache block: prefixes are compared in whole blocks."""
    kv_capacity_threshold: float = 2.0
    """What the router remembers of an instance is at most this many times its KV capacity."""


@dataclass
class KVTransferConfig:
    enable: bool = False
    """A sample that goes on at another instance finds its keys and values there in time, or computes them again; needs
    psrl.lmcache.enable_p2p."""
    transfer_mode: str = "async"
    """async: it goes to the new engine at once, which asks LMCache's controller who has them and loads them while it decodes
    other samples | sync: the new instance fetches them from the one where it was, and then gives it to its engine |
    pin_sync: as sync, and there they are kept from being evicted from when the sample arrives here until they have been
    read. Sync and pin_sync need no controller."""
    transfer_timeout_ms: int = 5000
    """A transfer that takes longer is given up and the prefix computed."""


@dataclass
class RoutingStrategyConfig:
    method: str = "request_num_balance"
    """request_num_balance | round_robin | random | throughput_optimal | throughput_optimal_with_budget | cache_aware | cache_aware_v1."""
    admission_reject_on_waiting: bool = True
    """Send nothing new to an instance whose own queue has begun to wait."""
    max_num_waiting_reqs_after_preemption: int = 1024
    """An engine that preempted and then has more waiting requests than this hands them back to the router."""
    max_concurrent_seqs_per_instance: int = 1024
    """Most sequences that the router places on one instance at a time."""
    request_sort_indicator: str = "small_id"
    """Which waiting request goes first: small_id (oldest group) | short_length | long_length (tokens made so far). One that
    has waited 60 check intervals goes before all others."""
    candidate_sort_indicator: str = "version"
    """Which of equally good instances a new group takes: version (newest weights) | reserve_capability (the weights that the
    most groups may still be reserved with)."""
    enable_multi_priority_queue: bool = False
    """Waiting requests of groups with older versions go first."""
    enable_group_sticky: bool = False
    """A sample that goes on elsewhere goes where most of its group is, if that instance may take it."""
    enable_trajectory_sticky: bool = False
    """A sample goes on at the instance where it was before, unless it was migrated away or the instance may not take it."""
    check_interval_in_ms: int = 500
    """Upper bound on how long a request waits before it is considered again."""
    cost_model_path: str | None = None
    """Cost model of throughput_optimal: a JSON file or a shipped name, for example qwen_7b."""
    delta_throughput_threshold: float = 0.5
    """throughput_optimal holds a request back while its best gain is below this share, in [0, 1], of the gain at an empty
    instance; for 60 check intervals at most once it is on its way."""
    request_budget: int = 1024
    """throughput_optimal_with_budget: response tokens expected of a request when nothing is known of its prompt or data source."""
    cache_aware_policy: CacheAwarePolicyConfig = field(default_factory=CacheAwarePolicyConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)


@dataclass
class SyncConfig:
    indicator: str = "request_num"
    """status_based: what decides about a pull: request_num | throughput | kv_cache | hypothesis_test."""
    threshold: float | None = None
    """Pull when the indicator of a lagging instance is at or below this: requests, tokens/s, percent of the KV cache. For
    hypothesis_test: when the estimated gain is above so many tokens. An instance with nothing to do pulls in any case."""
    check_req_before_sync: bool = True
    """status_based: do not pull while requests wait that this instance may still serve: of its version or older, and it
    has a free place."""
    seamless_train_version: int = 0
    """status_based: while the newest version is below this, an instance with work pulls only if the next buffer is READY."""


@dataclass
class MigrationConfig:
    enable: bool = False
    """Move requests away from an instance that is far busier than the least busy one."""
    indicator: str = "request_num"
    """What is compared: request_num | throughput | kv_cache."""
    threshold: float | None = None
    """Migrate when the busiest has at least this many times the least busy of those that could take over all of its requests
    (less than 1 counts as 1)."""
    stop_indicator: str = "request_num"
    """What stop_threshold measures: request_num | throughput | kv_cache."""
    stop_threshold: float | None = None
    """Never migrate from an instance that has no more than this: requests, tokens/s or percent of the KV cache."""


@dataclass
class SyncAndMigStrategyConfig:
    method: str = "greedy"
    """greedy: pull whenever a newer version is published | status_based: pull when `sync.indicator` says so."""
    check_interval_in_ms: int = 100
    """Upper bound between two looks at sync and migration; most looks follow events."""
    sync: SyncConfig = field(default_factory=SyncConfig)
    mig: MigrationConfig = field(default_factory=MigrationConfig)


@dataclass
class ProactiveFilterConfig:
    method: str | None = None
    """What happens to the oldest groups while the trainer waits for its buffer, as many as it lacks: null (nothing) | retry
    (abort them, their prompts return and are then left alone; helps against a slow instance, not against a long answer where the
    sample's seed draws it again) | truncate (end their unfinished samples where they are; one that leaves fewer than two
    samples with a token is dropped and counted as empty_truncation)."""
    threshold: float | None = None
    """Share of the buffer, in (0, 1), that must be filled before it acts; at most once a group."""


@dataclass
class RolloutCoordinationConfig:
    partial_rollout: PartialRolloutConfig = field(default_factory=PartialRolloutConfig)
    redundant_rollout: RedundantRolloutConfig = field(default_factory=RedundantRolloutConfig)
    routing_strategy: RoutingStrategyConfig = field(default_factory=RoutingStrategyConfig)
    session_strategy: SessionStrategyConfig = field(default_factory=SessionStrategyConfig)
    sync_and_mig_strategy: SyncAndMigStrategyConfig = field(default_factory=SyncAndMigStrategyConfig)
    proactive_filter_strategy: ProactiveFilterConfig = field(default_factory=ProactiveFilterConfig)


@dataclass
class GroupPostProcessConfig:
    enable: bool = False
    """Filter finished groups before they occupy a place."""
    name: str = "dynamic_sampling_filter"
    """dynamic_sampling_filter: drops groups whose metric is the same for all samples."""


@dataclass
class FilterGroupsConfig:
    metric: str = "seq_reward"
    """What must differ within a group: seq_reward (or score), or a key that the reward function returns beside the score, in a
    mapping such as {"score": 0.7, "acc": 1.0}."""
    max_num_gen_batches: int = 10
    """The run ends with an error once more than this many buffers' worth of groups was dropped without one that was kept
    in between."""
