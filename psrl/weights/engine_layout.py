"""Where published tensors lie in an engine that fuses and cuts them: q, k, v in one tensor, gate and up in another, each
tensor-parallel rank its part. Pure.

Names stay Hugging Face's; a fused tensor takes the place of its parts: `...self_attn.qkv_proj.weight`,
`...mlp.gate_up_proj.weight`. The vocabulary is padded as `weights.split` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from psrl.weights.plan import Part, Place, Shapes
from psrl.weights.split import Split

FUSED = {
    "q_proj": ("qkv_proj", ()),
    "k_proj": ("qkv_proj", ("q_proj",)),
    "v_proj": ("qkv_proj", ("q_proj", "k_proj")),
    "gate_proj": ("gate_up_proj", ()),
    "up_proj": ("gate_up_proj", ("gate_proj",)),
}
"""Module -> (the fused one, what lies before it there)."""


def fused_place(split: Split, rank: int) -> Place:
    """The place of each published tensor in engine rank `rank` of `split.ways`.

    With more ranks than key-value heads, several ranks hold the same head. ValueError if they cannot be dealt evenly, or if
    a part of a fused tensor is published without one that lies before it there.
    """

    def wanted(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        blocks = split.blocks(name, shape)
        if len(blocks) == split.ways:
            return blocks[rank].rows
        return _shared_heads(name, shape, split, rank) if _module(name) in ("k_proj", "v_proj") else blocks[0].rows

    def place(name: str, shapes: Shapes) -> Sequence[Part]:
        module = _module(name)
        if module in FUSED:
            fused, before = FUSED[module]
            others = [name.replace(module, one) for one in before]
            if absent := [other for other in others if other not in shapes]:
                raise ValueError(f"{name} is published without {', '.join(absent)}: the engine has them in one {fused}")
            earlier = [wanted(other, shapes[other]) for other in others]
            at = sum(stop - start for start, stop in earlier)
            return (Part(name.replace(module, fused), at, wanted(name, shapes[name])),)
        blocks = split.blocks(name, shapes[name])
        if len(blocks) == 1 and not blocks[0].padding:
            return (Part(name),)
        block = blocks[rank]
        return (Part(name, 0, block.rows, block.columns, block.padding),)

    return place


def stage_place(place: Place, elsewhere: Collection[str]) -> Place:
    """`place` in one pipeline stage of an engine: published tensors named in `elsewhere` are other stages' and belong nowhere
    here. Any other name goes on to `place`, so that one which no stage has stays an error.

    >>> from psrl.weights.plan import same_place
    >>> place = stage_place(same_place, {"model.layers.1.mlp.up_proj.weight"})
    >>> [len(place(f"model.layers.{layer}.mlp.up_proj.weight", {})) for layer in (0, 1, 2)]
    [1, 0, 1]
    """
    return lambda name, shapes: () if name in elsewhere else place(name, shapes)


def _module(name: str) -> str:
    return (["", *name.split(".")])[-2]


def _shared_heads(name: str, shape: tuple[int, ...], split: Split, rank: int) -> tuple[int, int]:
    """The rows of the one head that this rank shares with others."""
    if split.ways % split.num_kv_heads:
        raise ValueError(
            f"{name}: {split.num_kv_heads} key-value heads cannot be dealt to {split.ways} tensor-parallel ranks"
        )
    head_dim = shape[0] // split.num_kv_heads
    head = rank * split.num_kv_heads // split.ways
    return head * head_dim, (head + 1) * head_dim
