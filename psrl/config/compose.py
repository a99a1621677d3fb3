"""From a command line to a checked configuration: Hydra composes, this file words its errors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from psrl.config.conf_dir import conf_dir
from psrl.config.errors import ConfigError
from psrl.config.flat import flatten
from psrl.config.help import documented_keys
from psrl.config.schema import Config

ALIASES = {
    ("psrl.ps_mode", "nixl_cpu"): "nixl",
    ("psrl.ps_mode", "cpu"): "filesystem",
    ("psrl.ps_mode", "cpu_ref"): "filesystem",
}
"""Spellings of an earlier system, accepted with one notice."""
DATA_SOURCES = {"task", "data.task", "data.train_files", "data.reasoning_gym.dataset"}
"""Whoever names one of these does not get the laptop preset's own task."""
OPEN = (
    "data.task_params",
    "data.reasoning_gym.params",
    "gen_actor_rollout_ref.rollout.multi_turn.environment_params",
    "gen_actor_rollout_ref.rollout.engine_kwargs.vllm",
)
"""Mappings whose keys belong to a task, an environment or vLLM: any may be set."""
BANDS = ("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.rollout_rs_threshold")
"""Their "lo_hi" must not be read as one number: 0.5_5 is 0.55 in Python's, YAML's and Hydra's spelling."""


def register_schema(schema: type[Config] = Config) -> None:
    ConfigStore.instance().store(name="schema", node=schema)


def _quoted_band(text: str) -> str:
    """`_quoted_band("0.5_5") == "'0.5_5'"`; a plain number, or what is quoted already, stays as it is."""
    return f"'{text}'" if re.fullmatch(r"[0-9.]+_[0-9._]*", text) else text


def normalise(overrides: Sequence[str], *, has_accelerator: bool, on_slurm: bool) -> tuple[list[str], list[str]]:
    """(overrides for Hydra, notices). Chooses the laptop preset and its task, accepts `model=/a/path` and old spellings.

    >>> normalise(["model=/m/q"], has_accelerator=True, on_slurm=False)[0]
    ['model=hf', 'model.path=/m/q']
    >>> normalise(["data.task_params.size=64"], has_accelerator=True, on_slurm=False)[0]
    ['++data.task_params.size=64']
    """
    result: list[str] = []
    notices: list[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "model" and ("/" in value or value in (".", "..")):
            result += ["model=hf", f"model.path={value}"]
        elif any((key, part) in ALIASES for part in value.split(",")):  # of a sweep, too
            new = ",".join(ALIASES.get((key, part), part) for part in value.split(","))
            result.append(f"{key}={new}")
            notices.append(f"{override} is the old spelling of {key}={new}")
        elif key.startswith(OPEN):
            result.append(f"++{override}")  # Hydra's word for: set it, whether it is there or not
        elif key in BANDS:
            result.append(f"{key}={','.join(_quoted_band(part) for part in value.split(','))}")
        else:
            result.append(override)
    given = dict(o.lstrip("+").partition("=")[::2] for o in overrides)
    laptop = "preset" not in given and not has_accelerator and not on_slurm
    if (laptop or given.get("preset") == "laptop") and not given.keys() & DATA_SOURCES:
        result.insert(0, "task=chain_sum")
    if laptop:
        result.insert(0, "preset=laptop")
        notices.append(
            "preset=laptop: neither a GPU nor Slurm is used, so sizes are small (preset=cluster for the shipped defaults)"
        )
    return result, notices


def compose_config(overrides: Sequence[str], schema: type[Config] = Config) -> DictConfig:
    """The typed configuration of one run; `schema` may add sections of its own (see `help.add_section`). Raises
    ConfigError with one sentence for anything that Hydra refuses."""
    register_schema(schema)
    GlobalHydra.instance().clear()
    _parse_each(overrides)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            config = compose(config_name="config", overrides=list(overrides))
            OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error
    _refuse_unknown(config)
    return config


def sweep_members(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each member of a sweep, as Hydra's own sweeper multiplies them out.

    >>> sweep_members(["psrl.staleness=0,1", "note='a,b'"])
    [['psrl.staleness=0', "note='a,b'"], ['psrl.staleness=1', "note='a,b'"]]
    """
    batches = BasicSweeper.split_arguments([_parse(override) for override in overrides], max_batch_size=None)
    return [list(member) for batch in batches for member in batch]


def _parse_each(overrides: Sequence[str]) -> None:
    for override in overrides:
        if _parse(override).is_sweep_override():
            raise ConfigError(
                f"{override} names several values: sweeps need -m, and a comma inside a value needs quotes as in 'note=\"a,b\"'."
            )


def _parse(override: str) -> Override:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        reason = _first_line(str(error.__cause__ or error))
        raise ConfigError(
            f"Cannot read the override {override!r}: {reason}; quote the value as in 'note=\"a=b\"'."
        ) from error


def _refuse_unknown(config: DictConfig) -> None:
    """`+key=` opens Hydra's structs: what it added is refused all the same."""
    known = documented_keys()
    for key in flatten(OmegaConf.to_container(config)):
        if key not in known and not any(
            key.startswith(f"{k}.") for k, e in known.items() if e.type_name == "a mapping"
        ):
            raise ConfigError(_unknown(key, known))


def _unknown(given: str, keys: Mapping[str, object]) -> str:
    """A sentence that names the keys of which it is the end, or those that are spelt almost like it."""
    near = [key for key in keys if key.endswith(f".{given}")]
    if not 1 <= len(near) <= 3:  # of `enable` there are many
        near = difflib.get_close_matches(given, keys, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else "`python -m psrl.launch --help` lists every key."
    return f"Unknown key {given}: {hint}"


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """One sentence for a Hydra or OmegaConf error."""
    text = " ".join(str(part) for part in (error, error.__cause__) if part)
    keys = documented_keys()
    if found := re.search(r"Key '([^']+)' is not in struct|Key '([^']+)' not in '|Could not override '([^']+)'", text):
        wanted = next((g for g in reversed(found.groups()) if g), "")
        names = [override.lstrip("+~").partition("=")[0] for override in overrides]
        last = wanted.split(".")[-1]
        exact = [name for name in names if name == wanted or name.split(".")[-1] == last]
        given = next(iter([*exact, *(name for name in names if last in name)]), wanted)
        if given in keys:
            return _bad_value(given, overrides, text)
        return _unknown(given, keys)
    if found := re.search(r"Could not find '([^'/]+)/([^']+)'", text):
        group, name = found.groups()
        options = sorted(p.stem for p in (conf_dir() / group).glob("*.yaml"))
        return f"{group}={name} does not exist; allowed: {', '.join(options) or 'no options'}."
    if found := re.search(r"full_key: (\S+)", text):
        return _bad_value(found.group(1), overrides, text)
    for override in overrides:
        if override.partition("=")[0] in text or override in text:
            return f"Cannot read the override {override!r}: {_first_line(text)}"
    return _first_line(text)


def _bad_value(key: str, overrides: Sequence[str], text: str) -> str:
    given = next((o.partition("=")[2] for o in reversed(overrides) if o.lstrip("+").partition("=")[0] == key), None)
    entry = documented_keys().get(key)
    allowed = (
        f"allowed is {entry.type_name} ({entry.doc})"
        if entry and entry.doc
        else f"allowed is {entry.type_name}"
        if entry
        else _first_line(text)
    )
    return f"{key}={given} is refused: {allowed}."


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")
