# What is trained: launch.sh and job.sbatch both read this. `python -m psrl.launch --help` explains every key.
overrides=(
  # Edit: both must be readable from every node.
  model.path=/models/Qwen2.5-32B
  data.train_files=/data/math/train.parquet

  # Nodes: 8 x 8 trainer ranks, 8 x 2 instances of four GPUs.
  psrl.deployment.train_nnodes=8
  psrl.deployment.train_ngpus_per_node=8
  psrl.deployment.n_rollout_instances=16
  psrl.deployment.rollout_ngpus_per_node_per_instance=4
  psrl.deployment.rollout_ngpus_per_node=8
  psrl.deployment.n_agent_loops=2

  # A step trains 512 groups of 16 samples, at most one version old, in 4 optimizer steps.
  psrl.staleness=1
  psrl.staleness_buffer_entries=512
  psrl.rollout_n=16
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.rollout_is=token
  train_actor_rollout_ref.actor.ppo_mini_batch_size=128
  data.max_prompt_length=2048
  data.max_response_length=8192

  train_actor_rollout_ref.actor.strategy=megatron
  train_actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8
  train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  train_actor_rollout_ref.actor.mixed_precision=bfloat16
  train_actor_rollout_ref.actor.gradient_checkpointing=true
  train_actor_rollout_ref.actor.optim.lr=1e-6

  gen_actor_rollout_ref.rollout.name=vllm
  gen_actor_rollout_ref.rollout.tensor_model_parallel_size=4
  gen_actor_rollout_ref.rollout.dtype=bfloat16
  reward.num_workers=4

  # A model of this size takes longer to load and to move.
  psrl.fault_tolerance.startup_timeout_s=1800
  psrl.weights.pull_timeout_s=600

  trainer.total_training_steps=200
  trainer.save_freq=10
)
