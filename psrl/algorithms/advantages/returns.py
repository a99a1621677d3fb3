"""Rewards of tokens, and their discounted sums over the tokens that follow in the same sample."""

from __future__ import annotations

import torch

from psrl.algorithms.advantages.base import RewardedBatch, SampleRewards
from psrl.algorithms.tensors import masked


def token_rewards(rewards: SampleRewards, batch: RewardedBatch) -> torch.Tensor:
    """float64 [rows, length]: the outcome at each sample's last trainable token, less the KL penalty of each token."""
    mask, sequences = batch.loss_mask, batch.sequences
    outcome = sequences.spread(rewards.outcome.to(mask.device))
    reward = masked(outcome, _last_tokens(batch))
    return reward if batch.kl_penalty is None else reward - masked(batch.kl_penalty.double(), mask)


def _last_tokens(batch: RewardedBatch) -> torch.Tensor:
    """bool [rows, length]: the last trainable token of each sample."""
    columns = torch.arange(batch.loss_mask.shape[1], device=batch.loss_mask.device).expand(batch.loss_mask.shape)
    last = batch.sequences.spread(batch.sequences.max(columns.double(), batch.loss_mask))
    return batch.loss_mask & (columns == last)


def discounted_sums(batch: RewardedBatch, grid: torch.Tensor, decay: float) -> torch.Tensor:
    """float64 [rows, length]: y_t = grid_t + decay y_t', t' the next trainable token of the same sample (y = 0 after the last
    one); 0 outside the mask. Tokens that are not trainable (another speaker's) are passed over and discount nothing."""
    goes_on = _goes_on(batch)
    factor = torch.where(batch.loss_mask, decay * goes_on, goes_on)
    return masked(_suffix_scan(masked(grid, batch.loss_mask), factor), batch.loss_mask)


def at_next_token(batch: RewardedBatch, grid: torch.Tensor) -> torch.Tensor:
    """float64 [rows, length]: `grid` at the next trainable token of the same sample, 0 at its last one."""
    goes_on = _goes_on(batch)
    here_or_next = _suffix_scan(masked(grid, batch.loss_mask), (~batch.loss_mask).double() * goes_on)
    return masked(_shifted(here_or_next, 1) * goes_on, batch.loss_mask)


def returns_to_go(rewards: SampleRewards, batch: RewardedBatch, gamma: float) -> torch.Tensor:
    """float64 [rows, length]: G_t = reward_t + gamma G_t+1 over the trainable tokens of each sample."""
    return discounted_sums(batch, token_rewards(rewards, batch), gamma)


def _goes_on(batch: RewardedBatch) -> torch.Tensor:
    """float64 [rows, length]: 1 where the next column belongs to the same sample."""
    ids = batch.sequences.ids
    same = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
    same[:, :-1] = ((ids[:, :-1] == ids[:, 1:]) & (ids[:, :-1] >= 0)).double()
    return same


def _suffix_scan(addend: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """y_t = addend_t + factor_t y_t+1 along the columns, in log2(length) steps over whole grids instead of one a column
    (Hillis and Steele 1986): after step s each place knows the sum over the next 2^s columns and the product of factors."""
    reach = 1
    while reach < addend.shape[1]:
        addend = addend + factor * _shifted(addend, reach)
        factor = factor * _shifted(factor, reach)
        reach *= 2
    return addend


def _shifted(grid: torch.Tensor, columns: int) -> torch.Tensor:
    """Column t gets what column t + `columns` has, 0 beyond the end."""
    return torch.nn.functional.pad(grid[:, columns:], (0, min(columns, grid.shape[1])))
