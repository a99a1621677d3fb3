# What is trained: launch.sh and job.sbatch both read this. `python -m psrl.launch --help` explains every key.
overrides=(
  # Edit: both must be readable from every node.
  model.path=/models/Qwen2.5-3B-Instruct
  data.train_files=/data/gsm8k/train.parquet

  # Nodes: 1 x 8 trainer ranks, 1 x 8 instances of one GPU.
  psrl.deployment.train_nnodes=1
  psrl.deployment.train_ngpus_per_node=8
  psrl.deployment.n_rollout_instances=8
  psrl.deployment.rollout_ngpus_per_node_per_instance=1
  psrl.deployment.rollout_ngpus_per_node=8

  # A step trains 256 groups of 8 samples, at most one version old.
  psrl.staleness=1
  psrl.staleness_buffer_entries=256
  psrl.rollout_n=8
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.rollout_is=token
  data.max_prompt_length=512
  data.max_response_length=1024

  train_actor_rollout_ref.actor.strategy=fsdp2
  train_actor_rollout_ref.actor.ppo_mini_batch_size=128
  train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  train_actor_rollout_ref.actor.mixed_precision=bfloat16
  train_actor_rollout_ref.actor.gradient_checkpointing=true
  train_actor_rollout_ref.actor.optim.lr=1e-6

  gen_actor_rollout_ref.rollout.name=vllm
  gen_actor_rollout_ref.rollout.dtype=bfloat16

  trainer.total_epochs=10
  trainer.save_freq=20
)
