"""Submission through submitit: its executor writes the script, calls sbatch and reads the job's id. Nothing more of it
is used: no pickle, no watcher, no process inside the job, since each of these has lost runs (see docs/decisions)."""

from __future__ import annotations

import os
from pathlib import Path

from submitit.core import core, utils
from submitit.slurm.slurm import SlurmExecutor

from psrl.config.errors import ConfigError
from psrl.slurm.environment import inherited_names
from psrl.slurm.job_text import Job, job_text


class _SubmittedJob(core.Job):
    """The id and where the script is kept; its state is read from the run directory."""

    def _register_in_watcher(self) -> None:
        pass


class Executor(SlurmExecutor):
    """Submits jobs of `psrl.slurm.job_text`, each with an environment that an outer allocation has not marked."""

    job_class = _SubmittedJob  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except RuntimeError as error:
            raise ConfigError(
                "hydra/launcher=submitit_slurm needs Slurm's commands, but there is no srun here: submit from a login node, "
                "or leave the launcher out to run on this host."
            ) from error
        self._job: Job | None = None

    def submit_job(self, job: Job) -> str:
        """The leader's job id. Raises ConfigError with what sbatch said."""
        self._job = job
        utils.JobPaths.get_first_id_independent_folder(self.folder).mkdir(parents=True, exist_ok=True)
        try:
            return self._submit_command(self._submitit_command_str).job_id
        except (utils.FailedJobError, utils.FailedSubmissionError) as error:
            reason = " ".join(str(error).removeprefix("sbatch: ").split())
            raise ConfigError(f"sbatch refused the job of {job.run_dir}: {reason}") from error

    @property
    def _submitit_command_str(self) -> str:
        return ""  # the command is part of the job's text

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        assert self._job is not None
        return job_text(self._job)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [part for name in inherited_names(os.environ) for part in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]

    def _num_tasks(self) -> int:
        return 1
