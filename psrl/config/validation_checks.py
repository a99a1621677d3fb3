"""What is refused of validation."""

from __future__ import annotations

from psrl.config.errors import ConfigError
from psrl.config.schema import Config


def check_validation(config: Config) -> None:
    """Raises ConfigError with one sentence."""
    freq, count = config.trainer.test_freq, config.psrl.deployment.n_validate_instances
    if count < 0:
        raise ConfigError(f"psrl.deployment.n_validate_instances={count} is refused: it must be at least 0.")
    if freq > 0 and count == 0:
        raise ConfigError(
            f"trainer.test_freq={freq} needs instances of its own, so that training is not disturbed: set "
            "psrl.deployment.n_validate_instances to at least 1, or trainer.test_freq=-1."
        )
    if count > 0 and freq <= 0:
        raise ConfigError(
            f"psrl.deployment.n_validate_instances={count} would stay idle with trainer.test_freq={freq}: set trainer.test_freq to the number "
            "of versions between two validations, or n_validate_instances=0."
        )
    if freq > 0 and config.data.train_files is not None and config.data.val_files is None:
        raise ConfigError(
            f"trainer.test_freq={freq} with data.train_files needs data.val_files: name a file of held-out prompts."
        )
    if config.data.val_max_samples == 0:
        raise ConfigError("data.val_max_samples=0 is refused: use at least 1, or -1 for all.")
    val = config.gen_actor_rollout_ref.rollout.val_kwargs
    for key, value, allowed in (
        ("n", val.n, val.n >= 1),
        ("temperature", val.temperature, val.temperature >= 0),
        ("top_p", val.top_p, val.top_p > 0),
    ):
        if not allowed:
            least = {"n": "at least 1", "temperature": "at least 0", "top_p": "greater than 0"}[key]
            raise ConfigError(f"gen_actor_rollout_ref.rollout.val_kwargs.{key}={value} is refused: it must be {least}.")
    if not config.trainer.val_timeout_s > 0:
        raise ConfigError(
            f"trainer.val_timeout_s={config.trainer.val_timeout_s:g} is refused: it must be greater than 0."
        )
