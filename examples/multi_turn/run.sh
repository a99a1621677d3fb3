#!/bin/bash
# Trains a model of two layers on a task of several turns, on the CPU: minutes on two cores. More KEY=VALUE may follow.
set -euo pipefail

overrides=(
  preset=laptop
  data.task=hidden_sum
  data.max_response_length=32  # over all turns, the environment's included

  gen_actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
  gen_actor_rollout_ref.rollout.multi_turn.environment=hidden_sum
  gen_actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5

  model.tiny.num_layers=2
  model.tiny.hidden_size=64
  model.tiny.intermediate_size=192
  trainer.total_training_steps=100
)

exec "${PSRL_PYTHON:-python}" -m psrl.launch "${overrides[@]}" "$@"
