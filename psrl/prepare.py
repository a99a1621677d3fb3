"""Before any role starts: the model and the prompts of a run. `python -m psrl.prepare RUN_DIR`; doing it again is cheap.

Runs as a process of its own, so that the launcher stays small and bad input is told before anything else happens.
`--check -` only checks data, reward and model, of a configuration on standard input: what can be told before a
submission, where no run directory is there yet and the machine may be a small one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from psrl.agents.base import Endpoint
from psrl.agents.select import make_agent
from psrl.config.checks import check_data_size
from psrl.config.colocate_checks import refuse_without_saver
from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.configured_routing import check_cost_model
from psrl.gpus import check_gpus, visible_gpus
from psrl.models.resolve import check_model, resolve_model
from psrl.models.tokenizer import load_tokenizer
from psrl.role import load_config, parse_config, setup_logging
from psrl.rollout.scoring import check_scoring
from psrl.rundir.layout import RunDir
from psrl.supervisor.process import die_with_parent
from psrl.tasks.base import Task
from psrl.tasks.prepare import prepare
from psrl.tasks.registry import build_task, task_spec
from psrl.tasks.validation import VALIDATION_PROMPTS, training_task, validates, validation_task
from psrl.weights.mode import settle_mode

log = logging.getLogger("psrl.prepare")

PROMPTS = "prompts.bin"
EXIT_REFUSED = 2
NO_ENDPOINT = Endpoint("http://127.0.0.1:0", "")
"""For agents that are built only to see whether they can be."""


def prepare_run(run_dir: RunDir) -> None:
    """Check task and reward, make or find the model, write the prompt file. Raises ConfigError with one sentence."""
    config = load_config(run_dir)
    if config.trainer.device == "cuda":
        from psrl.trainer.device import check_device  # torch comes with it

        check_device("cuda")
    gpus = visible_gpus(os.environ)
    refuse_without_saver(config, has_gpu=bool(gpus), installed=find_spec("torch_memory_saver") is not None)
    for warning in check_gpus(config, gpus, one_host=os.environ.get("PSRL_LOCAL") == "1"):
        log.warning("%s", warning)
    task = check_inputs(config)
    settle_mode(config, run_dir)

    def write_prompts(model: Path) -> None:
        stats = prepare(config, task, load_tokenizer(model), run_dir.data / PROMPTS)
        check_data_size(config, stats.kept, stats.skipped)

    model = resolve_model(config, run_dir, before_training=write_prompts)
    write_prompts(model.path)
    if validates(config):
        prepare(config, validation_task(config), load_tokenizer(model.path), run_dir.data / VALIDATION_PROMPTS)


def check_inputs(config: Config) -> Task:
    """The task, if its data fills a buffer, its rewards can be computed, agents can be made and the model is there. ConfigError
    if not."""
    task = training_task(config, build_task(task_spec(config)))
    enough = config.psrl.staleness_buffer_entries
    found = sum(1 for _ in islice(task.items(), enough))
    if validates(config) and not found:
        raise ConfigError(
            f"data.val_max_samples={config.data.val_max_samples} holds out every prompt that the task has: lower it, so that some are left to train on."
        )
    check_data_size(config, found, skipped=0)  # before anything slow
    check_model(config)
    check_cost_model(config)
    make_agent(config, NO_ENDPOINT)
    check_scoring(config)
    return task


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent", type=int, help="leave when this process is gone")
    parser.add_argument(
        "--check", action="store_true", help="only check a configuration; RUN_DIR is - for standard input"
    )
    args = parser.parse_args()
    if args.parent is not None:
        die_with_parent(args.parent)
    os.umask(0o077)
    setup_logging("prepare")
    try:
        if args.check:
            check_inputs(parse_config(sys.stdin.read()))
        else:
            prepare_run(RunDir(args.run_dir.resolve()))
        return 0
    except ConfigError as error:
        print(f"psrl: {error}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    raise SystemExit(main())
