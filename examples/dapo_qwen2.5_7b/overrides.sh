# What is trained: launch.sh and job.sbatch both read this. `python -m psrl.launch --help` explains every key.
overrides=(
  # Edit: both must be readable from every node.
  model.path=/models/Qwen2.5-7B
  data.train_files=/data/dapo_math/train.parquet

  # Nodes: 2 x 8 trainer ranks, 2 x 8 instances of one GPU.
  psrl.deployment.train_nnodes=2
  psrl.deployment.train_ngpus_per_node=8
  psrl.deployment.n_rollout_instances=16
  psrl.deployment.rollout_ngpus_per_node_per_instance=1
  psrl.deployment.rollout_ngpus_per_node=8
  psrl.deployment.n_agent_loops=4

  # A step trains 512 groups of 16 samples, at most two versions old, in 16 optimizer steps.
  psrl.staleness=2
  psrl.staleness_buffer_entries=512
  psrl.rollout_n=16
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.rollout_is=token
  algorithm.rollout_correction.rollout_is_threshold=2.0
  train_actor_rollout_ref.actor.ppo_mini_batch_size=32

  # DAPO: clip-higher, every token of the step weighs the same, long responses.
  train_actor_rollout_ref.actor.clip_ratio_low=0.2
  train_actor_rollout_ref.actor.clip_ratio_high=0.28
  train_actor_rollout_ref.actor.loss_agg_mode=token-mean
  data.max_prompt_length=2048
  data.max_response_length=20480

  # An instance pulls new weights in the middle of a response; a response goes where it adds most tokens a second.
  psrl.rollout_coordination.partial_rollout.enable=true
  psrl.rollout_coordination.routing_strategy.method=throughput_optimal
  psrl.rollout_coordination.routing_strategy.cost_model_path=qwen_7b

  train_actor_rollout_ref.actor.strategy=fsdp2
  train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
  train_actor_rollout_ref.actor.mixed_precision=bfloat16
  train_actor_rollout_ref.actor.gradient_checkpointing=true
  train_actor_rollout_ref.actor.optim.lr=1e-6
  train_actor_rollout_ref.actor.optim.weight_decay=0.1
  train_actor_rollout_ref.actor.optim.lr_warmup_steps=160

  gen_actor_rollout_ref.rollout.name=vllm
  gen_actor_rollout_ref.rollout.dtype=bfloat16
  reward.num_workers=4

  trainer.total_training_steps=200
  trainer.save_freq=10
)
