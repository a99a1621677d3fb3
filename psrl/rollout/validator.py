"""A validator: an engine of its own that answers the validation prompts at the versions that the coordinator names.

It pulls weights like an instance, but no agent loop talks to it: prompts come from the run directory, answers are scored
here, sums go to the coordinator. So validation takes nothing from training but cores, and may die at any time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread

from psrl.models.resolve import run_model
from psrl.models.tokenizer import load_tokenizer
from psrl.net.link import CoordinatorGoneError, CoordinatorLink
from psrl.net.waiting import wait
from psrl.protocol import control as c
from psrl.protocol.generation import SamplingParams
from psrl.protocol.validation import SourceScores
from psrl.role import Role, run_role, start_role
from psrl.rollout.engines.base import Engine
from psrl.rollout.make_engine import make_engine
from psrl.rollout.make_puller import make_engine_puller
from psrl.rollout.score_worker import ScoringSpec
from psrl.rollout.scoring import RewardTypeError, ScoreResult, ScoringPool
from psrl.rollout.validation_work import ValidationWork
from psrl.tasks.prepared import PreparedReader
from psrl.tasks.validation import VALIDATION_PROMPTS, validation_spec
from psrl.weights.channel.background import BackgroundPull
from psrl.weights.channel.base import PullError, Staged

log = logging.getLogger("psrl.validator")

LOOK_S = 0.02
"""While nothing is decoded, how soon weights that have arrived, or scores, are seen."""

Scores = Mapping[str, SourceScores]


class Validator:
    """One order at a time: pull, decode, score, report. A new order takes the place of the one in hand."""

    def __init__(self, role: Role, engine: Engine, stop_ids: tuple[int, ...]) -> None:
        config = role.config
        self.role, self.engine = role, engine
        self.prompts = PreparedReader(role.run_dir.data / VALIDATION_PROMPTS)
        self.tokenizer = load_tokenizer(run_model(role.run_dir).path)
        self.link = CoordinatorLink(role.run_dir, "validator", role.name, c.ValidatorState, config.psrl.fault_tolerance)
        self.pull = BackgroundPull(make_engine_puller(role, engine), config.psrl.weights.pull_timeout_s)
        sampling, ignore_eos = config.gen_actor_rollout_ref.rollout.val_kwargs, config.gen_actor_rollout_ref.rollout
        self.sampling = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=() if ignore_eos.ignore_eos else stop_ids,
            ignore_eos=ignore_eos.ignore_eos,
        )
        self.incarnation = -1
        self.order: c.Validate | None = None
        """To be begun once its version is here."""
        self.pulling: c.Validate | None = None
        self.work: ValidationWork | None = None
        """Being decoded, then scored."""
        self.scoring: Future[Scores] | None = None
        self.over = ""

    def run(self) -> None:
        """Until the run is over."""
        self.link.open()
        while not self.over:
            if self.engine.due_in_s() > 0:
                wait([self.link, self.engine], LOOK_S if self.pull.busy or self.scoring else 1.0)
            self._hear()
            self._follow_pull()
            self._decode()
            self._follow_scores()
        log.info("%s", self.over)

    def close(self) -> None:
        self.pull.close()
        self.link.close("leaving")
        self.engine.close()

    # ---- orders ----------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        for message in self.link.poll(0.0):
            match message:
                case c.Validate():
                    self._drop()
                    self.order = message
                case c.Shutdown():
                    self.over = f"the run is over: {message.status} {message.cause}"

    def _drop(self) -> None:
        """Forget what is in hand; a score that is being computed comes to nobody."""
        self.engine.abort()
        self.order = self.work = self.scoring = None

    def _follow_pull(self) -> None:
        outcome = self.pull.poll()
        if isinstance(outcome, PullError):
            if self.order is not None and self.order is self.pulling:
                self._failed(self.order, f"its weights could not be pulled: {outcome.cause}")
        elif outcome is not None and self.work is None:
            self._switch(outcome)
        if self.order is None or self.pull.busy:
            return
        if (self.engine.version, self.incarnation) == (self.order.version, self.order.incarnation):
            self._begin(self.order)
        else:
            self.pulling = self.order
            self.pull.start(self.order.version, self.order.incarnation)

    def _switch(self, staged: Staged) -> None:
        self.engine.update_weights(staged.version, staged.tensors())
        self.incarnation = staged.incarnation

    def _begin(self, order: c.Validate) -> None:
        gen = self.role.config.gen_actor_rollout_ref.rollout
        self.order = None
        self.work = ValidationWork(
            order,
            self.prompts,
            self.sampling,
            samples=gen.val_kwargs.n,
            max_response=self.role.config.data.max_response_length,
            seed=self.role.config.seed,
        )
        for request in self.work.requests():
            self.engine.submit(request)

    def _failed(self, order: c.Validate, cause: str) -> None:
        log.warning("version %d is not validated here: %s", order.version, cause)
        self.link.send(c.ValidationFailed(version=order.version, cause=cause))
        self._drop()

    # ---- answers ---------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        chunks = self.engine.step()
        if self.work is None or self.scoring is not None:
            return
        for chunk in chunks:
            self.work.add(chunk)
        if self.work.complete:
            self.scoring = Future()
            # A daemon: a reward that hangs must not keep this process when the run is over.
            Thread(target=self._score_into, args=(self.scoring, self.work), name="scoring", daemon=True).start()

    def _score_into(self, scoring: Future[Scores], work: ValidationWork) -> None:
        try:
            scoring.set_result(self._score(work))
        except Exception as error:  # raised again where the result is asked for
            scoring.set_exception(error)

    def _score(self, work: ValidationWork) -> Scores:
        config = self.role.config
        spec = ScoringSpec(
            task=validation_spec(config), function=config.reward.function, max_memory_gb=config.reward.max_memory_gb
        )

        async def score() -> list[list[ScoreResult]]:
            async with ScoringPool(spec, config.reward.num_workers, config.reward.timeout_s) as pool:
                return await asyncio.gather(*map(pool.score, work.answers(self.tokenizer.decode)))

        return work.scores(asyncio.run(score()))

    def _follow_scores(self) -> None:
        if self.work is None or self.scoring is None or not self.scoring.done():
            return
        order = self.work.order
        try:
            scores = dict(self.scoring.result())
        except RewardTypeError as error:
            self._failed(order, str(error))
            return
        self.link.send(c.ValidationDone(version=order.version, incarnation=order.incarnation, scores=scores))
        self._drop()


def main() -> int:
    role = start_role()
    source = run_model(role.run_dir)
    validator = Validator(role, make_engine(role, source), tuple(source.eos_token_ids))
    try:
        validator.run()
        return 0
    except CoordinatorGoneError as error:
        log.error("%s", error)
        return 1
    finally:
        validator.close()


if __name__ == "__main__":
    run_role(main)
