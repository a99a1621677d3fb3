"""The set of tensors that an engine holds, and what is wrong with a set that shall replace it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def weight_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, tied ones once under their first name, and the floating-point buffers that a checkpoint holds."""
    saved = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if n in saved and b.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


def as_in_files(
    model: PreTrainedModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same as the model's files and other programs know them: transformers joins some when it loads them (the experts of a layer);
    here they are taken apart again, each as its turn comes. `model` tells the architecture and may be on the meta device. ValueError for
    a model whose files join what transformers has apart."""
    seen: set[str] = set()
    for name, tensor in tensors:
        found = revert_weight_conversion(model, {name: tensor})
        if again := seen.intersection(found):
            raise ValueError(
                f"files of {model.config.model_type} models have one tensor {min(again)} where transformers has several, {name} among "
                "them: train such a model with gen_actor_rollout_ref.rollout.name=torch; psrl cannot write its files"
            )
        seen.update(found)
        yield from found.items()


def weight_faults(
    specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], given: Iterable[tuple[str, torch.Tensor]], first: int = 5
) -> str:
    """What keeps `given` from replacing exactly the tensors of `specs`, "" if nothing does.

    Names at most `first` tensors of each kind of fault.
    """
    seen: dict[str, torch.Tensor] = {}
    twice = []
    for name, tensor in given:
        if name in seen:
            twice.append(name)
        seen[name] = tensor
    wrong = [
        f"{name} is {_describe(tuple(tensor.shape), tensor.dtype)} but must be {_describe(*specs[name])}"
        for name, tensor in seen.items()
        if name in specs and (tuple(tensor.shape), tensor.dtype) != specs[name]
    ]
    kinds = [
        ("unexpected", [name for name in seen if name not in specs]),
        ("missing", [name for name in specs if name not in seen]),
        ("given twice", twice),
        ("unlike the engine's:", wrong),
    ]
    return "; ".join(
        f"{kind} {', '.join(names[:first])}" + (f" and {len(names) - first} more" if len(names) > first else "")
        for kind, names in kinds
        if names
    )


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
