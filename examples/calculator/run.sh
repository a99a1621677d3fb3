#!/bin/bash
# Trains a model of two layers to call a calculator, on the CPU: minutes on two cores. More KEY=VALUE may follow.
set -euo pipefail
cd "$(dirname "$(realpath "$0")")"  # where task.py is found

overrides=(
  preset=laptop
  data.task=task:CalculatorTask
  data.task_params.dataset=products  # of reasoning-gym; its own parameters follow
  data.task_params.min_digits=3
  data.task_params.max_digits=3
  data.max_response_length=64  # over all turns, the calculator's answers included

  gen_actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
  gen_actor_rollout_ref.rollout.multi_turn.tools=[calculator]
  gen_actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3

  model.tiny.num_layers=2
  model.tiny.hidden_size=64
  model.tiny.intermediate_size=192
  model.tiny.warm_start_steps=1000
  model.tiny.warm_start_accuracy=0.15  # of both habits; sampled answers are right about twice as often
  train_actor_rollout_ref.actor.optim.lr=1.5e-3
  trainer.total_training_steps=150
)

exec "${PSRL_PYTHON:-python}" -m psrl.launch "${overrides[@]}" "$@"
