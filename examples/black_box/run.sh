#!/bin/bash
# Trains the model of an agent that knows nothing of psrl (agent.py), on the CPU: minutes on two cores. More KEY=VALUE may follow.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")"  # where agent.py is found

overrides=(
  preset=laptop
  data.task=hidden_sum
  data.max_response_length=32  # over all turns, the environment's included

  gen_actor_rollout_ref.rollout.agent.default_agent_loop=black_box_agent
  gen_actor_rollout_ref.rollout.agent.black_box.function=agent:play
  gen_actor_rollout_ref.rollout.agent.black_box.timeout_s=120

  model.tiny.num_layers=2
  model.tiny.hidden_size=64
  model.tiny.intermediate_size=192
  trainer.total_training_steps=100
)

exec "${PSRL_PYTHON:-python}" -m psrl.launch "${overrides[@]}" "$@"
