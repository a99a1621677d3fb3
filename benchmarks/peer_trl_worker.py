"""TRL's side of peer_trl.py; runs in TRL's own environment: `peer_trl_worker.py SPEC.json RESULT.json`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

REWARDS = {}


def reward(name):
    return lambda function: REWARDS.setdefault(name, function)


@reward("digit_sum")
def digit_sum(text: str, truth: str) -> float:
    return float(text.strip() == truth)


@reward("longtail_count")
def longtail_count(text: str, truth: str) -> float:
    wanted, given = ",".join(str(i) for i in range(int(truth), 0, -1)), text.strip()
    if given == wanted:
        return 1.0
    right = next(
        (i for i, (a, b) in enumerate(zip(wanted, given, strict=False)) if a != b), min(len(wanted), len(given))
    )
    return min(right, len(wanted) - 1) / len(wanted)


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rewards: list[float] = []

    def on_step_end(self, *_args, **_kwargs) -> None:
        self.ends.append(time.monotonic())

    def on_log(self, _args, _state, _control, logs=None, **_kwargs) -> None:
        if logs and "reward" in logs:
            self.rewards.append(logs["reward"])


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    score = REWARDS[spec["task"]]

    def rewards(completions, truth, **_kwargs):
        return [score(c, t) for c, t in zip(completions, truth, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    data = Dataset.from_list([{"prompt": p["prompt"], "truth": p["truth"]} for p in spec["prompts"]])
    samples = spec["groups"] * spec["samples"]
    config = GRPOConfig(
        output_dir=spec["output_dir"],
        per_device_train_batch_size=samples,
        num_generations=spec["samples"],
        max_completion_length=spec["max_tokens"],
        max_steps=spec["steps"],
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype="float32"),
        reward_funcs=rewards,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
    )
    begun = time.monotonic()
    trainer.train()
    skip = spec["warmup"]
    seconds = clock.ends[-1] - clock.ends[skip - 1]
    result = {
        "samples_per_s": samples * (len(clock.ends) - skip) / seconds,
        "step_s": seconds / (len(clock.ends) - skip),
        "rewards": clock.rewards,
        "train_s": time.monotonic() - begun,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
