"""The Hydra launcher behind `hydra/launcher=submitit_slurm`. Hydra wants it in this namespace; the work is in psrl.slurm.

Hydra imports every module in here when it starts, whatever is run: nothing heavy at the top.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class SlurmLauncher(Launcher):
    """One heterogeneous job a member of the sweep."""

    def __init__(self, **params: Any) -> None:
        self.params = params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.hydra_context, self.task_function = config, hydra_context, task_function
        sweep_dir = Path(config.hydra.sweep.dir)
        self.new_directories = [path for path in (sweep_dir, *sweep_dir.parents) if not path.exists()]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from psrl.config.errors import ConfigError
        from psrl.slurm.launcher import exit_codes, launch_sweep
        from psrl.slurm.settings import SlurmConf

        settings = {key: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for key, v in self.params.items()}
        conf = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SlurmConf), settings))
        try:
            verdicts = launch_sweep(
                job_overrides,
                [self._run_dir(number, overrides) for number, overrides in enumerate(job_overrides, initial_job_idx)],
                conf,
                sweep_dir=Path(self.config.hydra.sweep.dir),
                first_number=initial_job_idx,
            )
        except ConfigError as error:  # Hydra would wrap it in a traceback
            print(f"psrl: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        finally:
            self._remove_empty_directories()
        codes = exit_codes(verdicts, conf.wait)
        self.task_function.codes.extend(codes)  # type: ignore[attr-defined]  # psrl.launch ends with the largest
        return [_returned(overrides, code) for overrides, code in zip(job_overrides, codes, strict=True)]

    def _run_dir(self, number: int, overrides: Sequence[str]) -> Path:
        member = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(member):
            member.hydra.job.num = number
        return Path(member.hydra.sweep.dir, member.hydra.sweep.subdir)

    def _remove_empty_directories(self) -> None:
        """Hydra makes the sweep's directory, with a copy of its own settings, before anything is submitted or refused."""
        for directory in self.new_directories:
            if not {entry.name for entry in directory.iterdir()} <= {"multirun.yaml"}:
                break
            (directory / "multirun.yaml").unlink(missing_ok=True)
            try:
                directory.rmdir()
            except OSError:  # another sweep has just begun in it
                break


def _returned(overrides: Sequence[str], code: int) -> JobReturn:
    job = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    job.return_value = code
    return job
