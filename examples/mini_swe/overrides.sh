# What is trained: launch.sh reads this. `python -m psrl.launch --help` explains every key.
overrides=(
  # Edit: a Hugging Face directory of a model that calls tools the way Hermes and Qwen models do.
  model.path=/models/Qwen2.5-Coder-3B-Instruct

  # Many turns that share a long prefix: turns go where their prefix is in the cache.
  +profile=agentic

  data.task=mini_swe.task:MiniSwe
  gen_actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
  gen_actor_rollout_ref.rollout.multi_turn.environment=mini_swe.environment:SweEnvironment
  gen_actor_rollout_ref.rollout.multi_turn.max_assistant_turns=12
  gen_actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=768
  data.max_prompt_length=512
  data.max_response_length=6144

  # One node of 8 GPUs trains, one generates.
  psrl.deployment.train_nnodes=1
  psrl.deployment.train_ngpus_per_node=8
  psrl.deployment.n_rollout_instances=8
  psrl.deployment.rollout_ngpus_per_node_per_instance=1
  psrl.deployment.rollout_ngpus_per_node=8
  psrl.deployment.n_agent_loops=2

  psrl.staleness=1
  psrl.staleness_buffer_entries=64
  psrl.rollout_n=8
  algorithm.adv_estimator=grpo
  algorithm.rollout_correction.rollout_is=token

  train_actor_rollout_ref.actor.strategy=fsdp2
  train_actor_rollout_ref.actor.ppo_mini_batch_size=64
  train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  train_actor_rollout_ref.actor.mixed_precision=bfloat16
  train_actor_rollout_ref.actor.gradient_checkpointing=true
  train_actor_rollout_ref.actor.optim.lr=1e-6

  gen_actor_rollout_ref.rollout.name=vllm
  gen_actor_rollout_ref.rollout.dtype=bfloat16

  trainer.total_training_steps=100
  trainer.save_freq=20
)
