"""A short supervised start for the tiny model: just good enough that RL has something to reward."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from psrl.config.schema import TinyModelConfig

log = logging.getLogger(__name__)
BATCH = 32
WARMUP_STEPS = 30
HELD_OUT = 64
EVALUATE_EVERY = 5


@dataclass(frozen=True, slots=True)
class Example:
    """A solved item; `answer_ids` is all that follows the prompt and ends with the end-of-text token. `written` says which of
    these the model writes (in a task of several turns the others are its environment's and the template's); None: all."""

    prompt_ids: list[int]
    answer_ids: list[int]
    written: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    steps: int
    loss: float
    """Mean cross-entropy of an answer token in the last step."""
    accuracy: float
    """Probability, averaged over held-out examples, that sampling at temperature 1 gives exactly the known answer."""
    seconds: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def warm_start(model: PreTrainedModel, examples: list[Example], config: TinyModelConfig) -> WarmStartReport:
    """AdamW on the answers until the held-out accuracy reaches `warm_start_accuracy`, at most `warm_start_steps` steps.

    Stopping at an accuracy rather than after a number of steps starts RL at the same place for every task and seed:
    with room to improve, and with something to reward. Deterministic: one thread, batches drawn by `config.seed`.
    """
    began = time.monotonic()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = _train(model, examples, config, began)
    finally:
        torch.set_num_threads(threads)
    log.info(
        "tiny model: warm start of %d steps in %.1f s, loss %.3f, expected reward about %.2f",
        report.steps,
        report.seconds,
        report.loss,
        report.accuracy,
    )
    return report


def _train(model: PreTrainedModel, examples: list[Example], config: TinyModelConfig, began: float) -> WarmStartReport:
    held_out = examples[: min(HELD_OUT, len(examples) // 4)] or examples
    batches = _batches(examples[len(held_out) :] or examples, random.Random(config.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.warm_start_lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / WARMUP_STEPS))
    model.train()
    loss, accuracy, step = float("nan"), 0.0, 0
    while step < config.warm_start_steps and accuracy < config.warm_start_accuracy:
        log_probs, mask = _answer_log_probs(model, next(batches))
        mean_loss = -log_probs.sum() / mask.sum()
        mean_loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        step, loss = step + 1, mean_loss.item()
        if step % EVALUATE_EVERY == 0 or step == config.warm_start_steps:
            accuracy = expected_accuracy(model, held_out)
    model.eval()
    return WarmStartReport(step, loss, accuracy, time.monotonic() - began)


@torch.no_grad()
def expected_accuracy(model: PreTrainedModel, examples: list[Example]) -> float:
    """Mean over `examples` of P(sampling at temperature 1 gives exactly the answer): exact, no sampling."""
    total = 0.0
    for start in range(0, len(examples), BATCH):
        log_probs, _ = _answer_log_probs(model, examples[start : start + BATCH])
        total += log_probs.sum(-1).exp().sum().item()
    return total / len(examples)


def _answer_log_probs(model: PreTrainedModel, batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the answer tokens that the model writes (0 elsewhere) and their mask, both [rows, length - 1]."""
    longest = max(len(e.prompt_ids) + len(e.answer_ids) for e in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    mask = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        end = len(example.prompt_ids) + len(example.answer_ids)
        ids[row, :end] = torch.tensor(example.prompt_ids + example.answer_ids)
        written = True if example.written is None else torch.tensor(example.written)
        mask[row, len(example.prompt_ids) : end] = written
    # Padding stands at the end, where causal attention cannot see it: no attention mask is needed.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    nll = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(batch), -1)
    return -nll * mask[:, 1:], mask[:, 1:]


def _batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Endless batches; within a window of eight batches neighbours have like lengths, so that little is padding."""
    while True:
        shuffled = rng.sample(examples, len(examples))
        for start in range(0, len(shuffled), 8 * BATCH):
            window = sorted(shuffled[start : start + 8 * BATCH], key=lambda e: len(e.prompt_ids) + len(e.answer_ids))
            cut = [window[at : at + BATCH] for at in range(0, len(window), BATCH)]
            yield from rng.sample(cut, len(cut))
