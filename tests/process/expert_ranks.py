"""Two tensor-parallel ranks whose routers choose opposite experts, and what their expert layer gives: see test_megatron.py."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F

from psrl.trainer.backends.experts import ExpertLayer, Routing
from psrl.trainer.backends.megatron_layout import Dealt, Place

EXPERTS, PER_TOKEN, HIDDEN, WIDTH = 4, 2, 16, 8


def main(text: str) -> None:
    task, rank = json.loads(text), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{task['init']}", rank=rank, world_size=2)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    assert dist.group.WORLD is not None
    dealt = Dealt(exchange=Place(alone), tensor=Place(dist.group.WORLD))
    config = cast(TransformerConfig, SimpleNamespace(hidden_size=HIDDEN, params_dtype=torch.float32))
    layer = ExpertLayer(config, Routing(EXPERTS, PER_TOKEN, WIDTH, normalized=False), dealt)

    torch.manual_seed(0)
    router, tokens = torch.randn(EXPERTS, HIDDEN), torch.randn(10, 1, HIDDEN)
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    routers = [router, -router]
    here = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad():
        layer.router.copy_(routers[rank])
        layer.gate_up.copy_(gate_up[here])
        layer.down.copy_(down[here])
        given = layer(tokens)[0][:, 0]

        # Each expert that the first rank chooses, once, weighed by the rank that has it.
        weights = [F.linear(tokens[:, 0], each).softmax(-1) for each in routers]
        expected = torch.zeros(len(tokens), HIDDEN)
        for token, chosen in enumerate(weights[0].topk(PER_TOKEN).indices.tolist()):
            for expert in chosen:
                gate, up = F.linear(tokens[token, 0], gate_up[expert]).chunk(2)
                expected[token] += weights[expert // 2][token, expert] * F.linear(F.silu(gate) * up, down[expert])
    print(json.dumps({"gap": (given - expected).abs().max().item()}))
    dist.destroy_process_group()
