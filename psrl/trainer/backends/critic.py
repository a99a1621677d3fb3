"""The critic on FSDP2: the policy's own architecture, with one number a token in place of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from psrl.config.critic import CriticConfig
from psrl.config.critic_checks import ranks_of_a_critic_row
from psrl.config.schema import ActorConfig
from psrl.trainer.backends.base import LossFn, MicroBatch
from psrl.trainer.backends.core import TokenOutputs
from psrl.trainer.backends.fsdp2 import FSDP2Backend


class FSDP2Critic(FSDP2Backend):
    """Value model of one trainer rank, sharded as the policy is (`actor`), with an optimizer of its own (`critic`). Whatever
    backend the policy has: ranks that share its samples, by tensor or context parallelism, share the rows here (Ulysses), which then
    keep their padding.

    `model`: a causal language model, which this takes over; its output layer gives way to a scalar head of zeros. So all values
    are exactly 0 at first, and GAE is then the sum of later rewards, discounted by gamma x lambda. Rows may share prompts: the value of a response's
    first token is the prompt's last hidden state, the same for all responses behind it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        actor: ActorConfig,
        critic: CriticConfig,
        *,
        total_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        sharing = ranks_of_a_critic_row(actor)
        super().__init__(
            with_scalar_head(model),
            replace(
                actor,
                optim=critic.optim,
                grad_clip=critic.grad_clip,
                ulysses_sequence_parallel_size=sharing,
                use_remove_padding=actor.use_remove_padding if sharing == 1 else False,
            ),
            temperature=1.0,
            total_steps=total_steps,
            device=device,
        )

    @torch.no_grad()
    def values(self, batch: MicroBatch) -> torch.Tensor:
        """See ValueBackend. Collective: every rank must call it equally often."""
        return self._token_outputs(batch)[0]

    def update(self, batches: Sequence[MicroBatch], loss_fn: LossFn) -> dict[str, float]:
        """See ValueBackend; as the policy's `update` otherwise."""
        return {name.replace("actor/", "critic/"): value for name, value in super().update(batches, loss_fn).items()}

    def _of_outputs(self, outputs: torch.Tensor, tokens: torch.Tensor, entropy: bool) -> TokenOutputs:
        return outputs.squeeze(-1).float(), None


def with_scalar_head(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with an output layer of one zero row, tied to nothing. Shares all else with `model`."""
    head = torch.nn.Linear(model.config.hidden_size, 1, bias=False, device=model.device, dtype=model.dtype)
    torch.nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False
    return model
