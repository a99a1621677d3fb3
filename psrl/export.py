"""A checkpoint of a run as a Hugging Face directory: `python -m psrl.export RUN_DIR [--step N] [--out DIR] [--dtype NAME]`.

transformers, vLLM and psrl itself (`model=DIR`) load the result. Whatever backend and number of ranks wrote the checkpoint,
its tensors have Hugging Face names; they are read and written a file's worth at a time, experts one by one as is usual in files.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from psrl.config.errors import ConfigError
from psrl.models.load import DTYPES, architecture
from psrl.models.resolve import run_model
from psrl.rollout.engines.weight_set import as_in_files
from psrl.rundir.layout import RunDir
from psrl.rundir.publish import sync_directory
from psrl.trainer.checkpoints import why_incomplete
from psrl.trainer.stored import Stored, quiet_single_process, stored_weights

MAX_FILE_BYTES = 5 * 10**9
"""Weights of one safetensors file; a larger tensor has a file of its own."""
INDEX = "model.safetensors.index.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
NOT_OF_THE_MODEL = (INDEX, "pytorch_model.bin.index.json", "warm_start.json")


class ExportError(Exception):
    """Why there is nothing to export, or nowhere to put it: one sentence."""


def export(run_dir: RunDir, step: int | None = None, out: Path | None = None, dtype: str | None = None) -> Path:
    """Write the checkpoint of `step` (None: the newest complete one) to `out` (None: RUN_DIR/export/step_N), which must not
    exist, and return it. `dtype`: that of the weights, None for the one that was trained. ExportError, ConfigError."""
    checkpoint = find_checkpoint(run_dir, step)
    out = out or run_dir.path / "export" / checkpoint.name
    if out.exists():
        raise ExportError(f"{out} exists already: give another directory with --out, or remove it.")
    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f"--dtype {dtype} is refused: allowed are {' and '.join(DTYPES)}.")
    source = run_model(run_dir).path
    out.parent.mkdir(parents=True, exist_ok=True)
    incoming = out.with_name(f".{out.name}.{secrets.token_hex(6)}.tmp")
    incoming.mkdir()
    try:
        copy_description(source, incoming)
        write_weights(checkpoint, incoming, DTYPES[dtype] if dtype else None)
        sync_directory(incoming)
        incoming.rename(out)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return out


def find_checkpoint(run_dir: RunDir, step: int | None) -> Path:
    """The complete checkpoint of `step`, or the newest; ExportError names the ones that there are."""
    if not run_dir.config.is_file():
        raise ExportError(f"{run_dir.path} is no run: it has no {run_dir.config.name}.")
    found = {
        int(path.name.removeprefix("step_")): path
        for path in run_dir.checkpoints.glob("step_*")
        if path.name.removeprefix("step_").isdecimal() and why_incomplete(path) is None
    }
    if not found:
        raise ExportError(
            f"{run_dir.path} has no complete checkpoint yet (trainer.save_freq says when one is written)."
        )
    wanted = max(found) if step is None else step
    if wanted not in found:
        there = ", ".join(map(str, sorted(found)))
        raise ExportError(f"{run_dir.path} has no complete checkpoint of step {wanted}; there are those of {there}.")
    return found[wanted]


def copy_description(source: Path, out: Path) -> None:
    """Everything of the model's directory but its weights: configuration, tokenizer, chat template, licence."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in NOT_OF_THE_MODEL:
            shutil.copyfile(path, out / path.name)


def write_weights(checkpoint: Path, out: Path, dtype: torch.dtype | None) -> None:
    """The checkpoint's weights as safetensors, with an index where it takes several files; config.json gets their dtype."""
    weights = stored_weights(checkpoint)
    files = list(_files(weights))
    model = architecture(out, "float32")
    where: dict[str, str] = {}
    total = 0
    for number, names in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        read = _read(checkpoint, weights, names)
        try:
            tensors = dict(as_in_files(model, ((n, t if dtype is None else t.to(dtype)) for n, t in read.items())))
        except ValueError as error:
            raise ExportError(f"{error}.") from error
        save_file(tensors, out / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
        written = next(iter(tensors.values())).dtype
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(written).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def _files(weights: Mapping[str, Stored]) -> Iterator[list[str]]:
    """Names in order, cut before a file would become too large."""
    names: list[str] = []
    size = 0
    for name, stored in weights.items():
        nbytes = prod(stored.shape) * stored.dtype.itemsize
        if names and size + nbytes > MAX_FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    yield names


def _read(checkpoint: Path, weights: Mapping[str, Stored], names: list[str]) -> dict[str, torch.Tensor]:
    tensors = {weights[n].key: torch.empty(weights[n].shape, dtype=weights[n].dtype) for n in names}
    with quiet_single_process():
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return {n: tensors[weights[n].key] for n in names}


@dataclass(frozen=True)
class _Arguments:
    run_dir: Path
    step: int | None
    out: Path | None
    dtype: str | None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m psrl.export", description="A checkpoint as a Hugging Face directory."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, help="of the checkpoint; the newest complete one if it is not given")
    parser.add_argument("--out", type=Path, help="a directory that does not exist yet; RUN_DIR/export/step_N")
    parser.add_argument("--dtype", help="float32 | bfloat16; as it was trained if it is not given")
    args = _Arguments(**vars(parser.parse_args(argv)))
    try:
        print(export(RunDir(args.run_dir.resolve()), args.step, args.out, args.dtype))
    except (ExportError, ConfigError, OSError) as error:
        print(f"psrl.export: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
