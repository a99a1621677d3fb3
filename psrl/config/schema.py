"""The typed configuration. Every key is here with its meaning and its shipped (cluster) default; unknown keys are refused.

No torch import: the launcher composes and checks a configuration before anything heavy starts. The laptop preset
(`conf/preset/laptop.yaml`) overrides sizes and what fits a tiny model; keys of verl's vocabulary keep verl's names.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psrl.config.actor import ActorConfig as ActorConfig
from psrl.config.actor import OptimConfig as OptimConfig
from psrl.config.actor import TrainActorConfig
from psrl.config.agents import AgentConfig, MultiTurnConfig
from psrl.config.algorithm import AlgorithmConfig, OverlongBufferConfig
from psrl.config.colocate import TmsConfig
from psrl.config.coordination import GroupPostProcessConfig, RolloutCoordinationConfig
from psrl.config.critic import CriticConfig
from psrl.config.lmcache import LMCacheConfig
from psrl.config.overlap import FineGrainOverlapConfig


@dataclass
class StatusCollectionConfig:
    enable: bool = True
    """Instances report running, waiting and KV usage; without it admission_reject_on_waiting has nothing to go by."""
    engine_sync_interval_in_ms: int = 100
    """Upper bound between a change in an engine and its report."""
    coordinator_sync_interval_in_ms: int = 100
    """Upper bound between the coordinator's own housekeeping rounds."""


@dataclass
class LogProbConfig:
    enable_rollout_engine_log_prob: bool = True
    """Use the engine's log-prob of each sampled token: for a rollout correction, which needs it, and the rollout_corr/ metrics."""


@dataclass
class DeploymentConfig:
    n_rollout_instances: int = 2
    """Rollout instances, each with an engine of its own."""
    n_validate_instances: int = 0
    """Instances that do nothing but validate, beside the others on the rollout nodes; trainer.test_freq needs at least one."""
    rollout_nnodes_per_instance: int = 1
    """Nodes that one instance spans; 1: an instance lives on one node."""
    rollout_ngpus_per_node_per_instance: int = 1
    """GPUs of one instance (on a CPU it counts places of a node)."""
    rollout_ngpus_per_node: int = 8
    """GPUs (or places) of a rollout node that instances may use; with the two keys above it gives the number of rollout nodes."""
    train_nnodes: int = 1
    """Trainer nodes."""
    train_ngpus_per_node: int = 1
    """Trainer ranks a node (processes on a CPU)."""
    n_agent_loops: int = 1
    """Agent loop processes a rollout node."""
    train_cpu_threads: int = 1
    """Compute threads of each trainer rank on a CPU."""
    rollout_cpu_threads: int = 1
    """Compute threads of each instance on a CPU."""
    train_cores: list[int] | None = None
    """Pin trainer ranks and coordinator to these cores of the node; null: not pinned."""
    rollout_cores: list[int] | None = None
    """Pin instances, agent loops and rewards to these cores; null: not pinned."""


@dataclass
class FaultToleranceConfig:
    max_restarts: int = 3
    """How often one instance is started again in place."""
    agent_loop_max_restarts: int = 3
    """How often one agent loop is started again in place."""
    coordinator_max_restarts: int = 3
    """How often the coordinator is started again from its ledger."""
    hello_timeout_s: float = 60.0
    """A role that cannot say hello for this long gives up, and says so."""
    heartbeat_interval_s: float = 1.0
    """Pause between two signs of life on a quiet connection."""
    heartbeat_timeout_s: float = 20.0
    """Silence after which the other side counts as dead."""
    fence_s: float = 60.0
    """A role without a coordinator for this long leaves by itself."""
    startup_timeout_s: float = 600.0
    """Longest time without a single instance that has weights, or without any agent loop: at the start or later."""
    drain_grace_s: float = 30.0
    """Time for a drain (Ctrl-C, SIGTERM) to flush, seal and checkpoint."""
    turn_timeout_s: float = 600.0
    """psrl.colocate: longest wait for a GPU that the other side still holds; an engine's start counts."""
    join_wait_s: float = 600.0
    """`python -m psrl.join` waits this long for a run that is not there, or not there any more, and then leaves."""


@dataclass
class NetConfig:
    interface: str | None = None
    """Network interface that everything binds to; null: loopback for a local run, else the host's own address."""


@dataclass
class WeightsConfig:
    pull_timeout_s: float = 120.0
    """Deadline of one weight transfer; then it is released and tried again."""
    route: str = "auto"
    """With ps_mode=nixl. auto: by where trainer and engine are | vram (one GPU, or GPUs that read each other) | shm (one host) | nixl."""


@dataclass
class PsrlConfig:
    staleness: int = 0
    """Most versions that a group may lag behind the policy that trains on it."""
    staleness_buffer_entries: int = 512
    """Prompt groups a training step (B)."""
    rollout_n: int = 1
    """Samples a prompt group."""
    ps_mode: str = "auto"
    """auto: nixl where it loads, else filesystem with a warning | nixl (refused where it does not load) | filesystem."""
    broadcast_init: bool = False
    """Nodes that have the first weights of a run pass them on to others, in a tree, instead of all reading from the trainers. With ps_mode=nixl and several rollout nodes; costs host memory for one more copy where weights would go from GPU to GPU."""
    max_group_retries: int = 1
    """How often a group is tried again after a failed or timed-out reward, then its prompt is dropped and replaced."""
    colocate: bool = False
    """Trainer and rollout use the same GPUs in turns: generate a buffer, release the memory, train it, release the memory. Local runs, and Slurm jobs with hydra.launcher.job=single_node."""
    tms: TmsConfig = field(default_factory=TmsConfig)
    fine_grain_overlap: FineGrainOverlapConfig = field(default_factory=FineGrainOverlapConfig)
    rollout_coordination: RolloutCoordinationConfig = field(default_factory=RolloutCoordinationConfig)
    group_post_process: GroupPostProcessConfig = field(default_factory=GroupPostProcessConfig)
    status_collection: StatusCollectionConfig = field(default_factory=StatusCollectionConfig)
    log_prob: LogProbConfig = field(default_factory=LogProbConfig)
    deployment: DeploymentConfig = field(default_factory=DeploymentConfig)
    fault_tolerance: FaultToleranceConfig = field(default_factory=FaultToleranceConfig)
    net: NetConfig = field(default_factory=NetConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    lmcache: LMCacheConfig = field(default_factory=LMCacheConfig)


@dataclass
class TinyModelConfig:
    hidden_size: int = 128
    """Width; a multiple of 2 x num_heads."""
    num_layers: int = 4
    """Decoder layers."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 2
    """Key-value heads; divides num_heads."""
    intermediate_size: int = 384
    """Width of the feed-forward layers, or of each expert."""
    num_experts: int = 0
    """Experts in each feed-forward layer, two of which see a token (a Qwen3-MoE-shaped model); 0 for a dense model."""
    max_position_embeddings: int = 1024
    """Least context of the model; more if prompt and response need it."""
    warm_start_steps: int = 600
    """Most supervised steps on solved examples of the task, so that RL has something to improve; 0 for random weights."""
    warm_start_accuracy: float = 0.45
    """The warm start ends as soon as the expected reward on held-out examples reaches this; above 1, not before its last step."""
    warm_start_lr: float = 2e-3
    """Learning rate of the warm start."""
    seed: int = 0
    """Seed of initial weights and warm start."""


@dataclass
class ModelConfig:
    name: str = "tiny"
    """tiny (made here, own tokenizer, short supervised warm start) | smollm2_135m (from its Python package) | hf."""
    path: str | None = None
    """A Hugging Face model directory; wins over `name`."""
    dtype: str = "float32"
    """Training master weights and, unless `gen_actor_rollout_ref.rollout.dtype` says otherwise, generation: float32 | bfloat16."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass
class ReasoningGymConfig:
    dataset: str | None = None
    """A reasoning-gym dataset by name, for example chain_sum; null when train_files is used."""
    size: int = 4096
    """Problems to generate."""
    params: dict[str, Any] = field(default_factory=dict)
    """Parameters of that dataset, passed as they are."""


@dataclass
class SyntheticLengthsConfig:
    mean_tokens: float | None = None
    """Benchmarks: each response ends at a length drawn for it (lognormal, by seed, prompt and sample), whatever is sampled; the mean before the cut at data.max_response_length. Needs ignore_eos. null: responses end by themselves."""
    sigma: float = 1.0
    """Standard deviation of the length's logarithm: 0 makes all alike, 1 has a long tail."""


@dataclass
class DataConfig:
    train_files: str | None = None
    """A parquet or jsonl file in verl's columns: prompt (chat messages), data_source, reward_model.ground_truth."""
    val_files: str | None = None
    """A file as train_files, for validation; null with a generated task: a part of it that training never sees."""
    val_max_samples: int = 128
    """Most validation prompts; a generated task holds so many different ones out of training. Below 0: all."""
    reasoning_gym: ReasoningGymConfig = field(default_factory=ReasoningGymConfig)
    task: str | None = None
    """A built-in synthetic task (digit_sum, longtail_count, hidden_sum) or your own as `module:object`; null when another source is used."""
    task_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of `data.task`, passed as they are beside seed=data.seed."""
    prompt_key: str = "prompt"
    """Column of train_files that holds the chat messages."""
    max_prompt_length: int = 1024
    """Tokens; see truncation for longer prompts."""
    max_response_length: int = 1024
    """Most tokens of a response, over all its parts."""
    synthetic_lengths: SyntheticLengthsConfig = field(default_factory=SyntheticLengthsConfig)
    truncation: str = "skip"
    """A prompt longer than max_prompt_length: skip (and count) | error (refuse to start)."""
    shuffle: bool = True
    """A new order in each pass over the data, by data.seed."""
    seed: int = 0
    """Seed of the order and of generated tasks."""
    drop_last: bool = True
    """At the end of the last epoch drop what fills no whole buffer; False: train it as one short last buffer."""


@dataclass
class RewardConfig:
    function: str | None = None
    """`module:function` called as function(data_source, solution_str, ground_truth, extra_info) -> float; null: the task's own verifier."""
    timeout_s: float = 30.0
    """Deadline of one sample's score."""
    num_workers: int = 1
    """Scoring processes of each agent loop."""
    max_memory_gb: float = 4.0
    """Address-space limit of a scoring process."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)


@dataclass
class ValKwargs:
    n: int = 1
    """Answers to each validation prompt."""
    temperature: float = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 switches it off."""
    top_k: int = -1
    """Sample among the k most likely tokens; -1 switches it off."""


@dataclass
class EngineKwargs:
    vllm: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM's engine, by vLLM's own name; docs/vllm.md says which are psrl's."""


@dataclass
class RolloutEngineConfig:
    name: str = "torch"
    """Engine: torch (embedded, for small models and for CPUs) | vllm (docs/vllm.md)."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 switches it off."""
    top_k: int = -1
    """Sample among the k most likely tokens; -1 switches it off."""
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    ignore_eos: bool = False
    """Go on to the length limit whatever is sampled (benchmarks)."""
    dtype: str | None = None
    """float32 | bfloat16; null: as the model."""
    max_num_seqs: int = 256
    """Most sequences that one engine decodes at once."""
    max_model_len: int | None = None
    """Context; null: max_prompt_length + max_response_length."""
    kv_cache_tokens: int = 262144
    """Tokens that one engine's KV cache may hold; beyond it the youngest sequences are preempted and recomputed. vLLM on a
    GPU goes by gpu_memory_utilization instead."""
    tensor_model_parallel_size: int = 1
    """vLLM: ranks that share each layer. Times pipeline_model_parallel_size it is the GPUs of an instance."""
    pipeline_model_parallel_size: int = 1
    """vLLM: ranks that share the layers out."""
    gpu_memory_utilization: float = 0.9
    """vLLM: share of a GPU's memory for weights, those that arrive beside them, and the KV cache."""
    enforce_eager: bool = False
    """vLLM: no compilation and no CUDA graphs; starts sooner, decodes slower."""
    max_num_batched_tokens: int | None = None
    """vLLM: most tokens of one step, prefill included; null: as vLLM chooses."""
    enable_prefix_caching: bool = True
    """Keys and values of tokens that begin another sequence are not computed again: a conversation's next turn, a prompt that others share.
    The cache takes what room running sequences leave and is emptied with each pull."""
    seed_samples: bool | None = None
    """vLLM: each sample draws by a seed of its own, so that its draws do not depend on what is decoded beside it. False: the engine
    draws for all together, validation and requests that name a seed apart. null: True on a CPU, False on a GPU, where
    vLLM handles samples with generators of their own one by one in each step."""
    engine_kwargs: EngineKwargs = field(default_factory=EngineKwargs)
    agent: AgentConfig = field(default_factory=AgentConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)


@dataclass
class GenConfig:
    rollout: RolloutEngineConfig = field(default_factory=RolloutEngineConfig)


@dataclass
class TrainerConfig:
    device: str = "auto"
    """Where trainer ranks compute: auto (a GPU each where their node has them and PyTorch can use them, else the CPU; the log says
    which) | cpu | cuda."""
    gpu_memory_fraction: float = 1.0
    """Most of its GPU's memory that a trainer rank may take; below 1 where an engine shares the GPU."""
    total_training_steps: int | None = None
    """Optimizer buffers to train; null: as total_epochs gives."""
    total_epochs: int | None = None
    """Passes over the data; null with total_training_steps set: as many as are needed."""
    critic_warmup: int = 0
    """Buffers at the start of a run that only the critic learns from (algorithm.adv_estimator=gae)."""
    test_freq: int = -1
    """Versions from one validation to the next, and one more at the end; 0 or less: no validation. Version v is validated
    while training goes on (`validation.jsonl`); if it is due while the validation instances are busy or not there yet, the
    version that is newest afterwards takes its place."""
    val_before_train: bool = True
    """With test_freq: the initial weights are validated too."""
    val_timeout_s: float = 600.0
    """A validation that takes longer is given up, and the end of the run waits no longer than this for the last one."""
    save_freq: int = 20
    """Steps between checkpoints; the last step always writes one. 0 or less: only the last."""
    keep_last: int = 2
    """Complete checkpoints kept."""
    keep_samples: bool = False
    """Keep sealed samples that a complete checkpoint covers."""
    project_name: str = "psrl"
    """wandb project."""
    experiment_name: str | None = None
    """wandb run name; null: the run directory's name."""
    logger: list[str] = field(default_factory=lambda: ["console", "wandb"])
    """console, wandb (offline unless WANDB_MODE says otherwise)."""
    report: bool = True
    """Draw `report/index.html` at the end, which takes seconds; `summary.json` is written always, and `python -m psrl.report`
    draws the page later."""


@dataclass
class Config:
    psrl: PsrlConfig = field(default_factory=PsrlConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    gen_actor_rollout_ref: GenConfig = field(default_factory=GenConfig)
    train_actor_rollout_ref: TrainActorConfig = field(default_factory=TrainActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run_dir: str | None = None
    """Where the run lives; null: a fresh name under runs/. The same directory again resumes the run."""
    note: str | None = None
    """Free text, kept with the run."""
    seed: int = 0
    """Seed of sampling and routing; data.seed shuffles the data."""
