"""When a version is validated, by whom, and what came of it. Pure; none of it is in the ledger.

Validators are processes beside the rollout: they hold an engine of their own, pull weights like an instance, and know
nothing of training groups. All of them share the prompts of one validation, at exactly one version, and take the newest
version that is due once they are through. A version that is due while they are at work is passed over for a newer one. A
validator that dies costs the validation that it worked on and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from psrl.protocol import validation as c

log = logging.getLogger("psrl.coordinator")

NEVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSettings:
    every: int
    """Versions from one validation to the next."""
    timeout_s: float
    """For one validation, and for what is still to be validated when training is done."""
    before_train: bool = True
    """Version 0 is validated too."""
    num_validators: int = 1
    validated: int = NEVER
    """The newest version that was validated before this coordinator started."""


@dataclass(slots=True)
class _Round:
    """One validation under way: `parts` says who makes which part of the prompts."""

    version: int
    incarnation: int
    begun_s: float
    parts: dict[str, int]
    scores: dict[str, Mapping[str, c.SourceScores]] = field(default_factory=dict)


class Validation:
    """`look` after each change; take `rows`, metrics of finished validations. Without settings nothing is ever due."""

    def __init__(self, settings: ValidationSettings | None, counters: Counter[str]) -> None:
        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        self.counters = counters
        self.validators: set[str] = set()
        self._gone: set[str] = set()
        self._newest_begun = settings.validated if settings else NEVER
        self._round: _Round | None = None
        self._finish_by_s: float | None = None
        self._last_version = NEVER

    # ---- who is there ----------------------------------------------------------------------------------------

    def here(self, name: str) -> None:
        self.validators.add(name)
        self._gone.discard(name)

    def lost(self, name: str, cause: str) -> None:
        """Its connection is gone. What it had in hand is lost, and with it the validation."""
        if name in self.validators:
            self.validators.discard(name)
            log.warning("%s is gone (%s)", name, cause)
            self._give_up_if(name, f"{name} is gone")

    def gone_for_good(self, name: str) -> None:
        self._gone.add(name)

    def restart(self, version: int) -> None:
        """Training goes on from a checkpoint at `version`: later validations were of another history."""
        self._newest_begun = min(self._newest_begun, version)
        self._round = None

    # ---- rounds ----------------------------------------------------------------------------------------------

    def look(self, newest: int, incarnation: int, now_s: float) -> list[tuple[str, c.Validate]]:
        """Orders for a validation of version `newest`, which can be pulled (-1: none yet), if one is due and all
        validators that are there are free."""
        if self.settings is None:
            return []
        if self._round is not None and now_s - self._round.begun_s >= self.settings.timeout_s:
            self._give_up(f"it took longer than trainer.val_timeout_s={self.settings.timeout_s:g} s")
        if self._round is not None or not self.validators or not (due := self._due(newest)):
            return []
        self.counters["validation/passed_over"] += due - 1
        names = sorted(self.validators)
        self._newest_begun = newest
        self._round = _Round(newest, incarnation, now_s, {name: part for part, name in enumerate(names)})
        return [
            (name, c.Validate(version=newest, incarnation=incarnation, part=part, parts=len(names)))
            for name, part in self._round.parts.items()
        ]

    def _due(self, newest: int) -> int:
        """How many versions up to `newest` are due that no validation was begun for.

        >>> v = Validation(ValidationSettings(every=4, timeout_s=1.0, validated=4), Counter())
        >>> [v._due(newest) for newest in (4, 7, 8, 9, 12)]
        [0, 0, 1, 1, 2]
        """
        settings, begun = self.settings, self._newest_begun
        if settings is None or newest <= begun:
            return 0
        before = begun if settings.before_train else max(begun, 0)  # NEVER // every is -1: version 0 is due then
        due = newest // settings.every - before // settings.every
        return due or int(newest == self._last_version)

    def done(self, name: str, done: c.ValidationDone, now_s: float) -> None:
        """One validator's part; the last one completes the row."""
        found = self._round
        if (
            found is None
            or name not in found.parts
            or (done.version, done.incarnation)
            != (
                found.version,
                found.incarnation,
            )
        ):
            return
        found.scores[name] = done.scores
        if found.scores.keys() == found.parts.keys():
            self._round = None
            self.counters["validation/done"] += 1
            row = validation_row(found.version, now_s - found.begun_s, found.scores.values())
            log.info("version %d is validated: mean reward %s", found.version, row.get("val/reward_mean"))
            self.rows.append(row)

    def failed(self, name: str, failed: c.ValidationFailed) -> None:
        if self._round is not None and self._round.version == failed.version:
            self._give_up_if(name, f"{name}: {failed.cause}")

    def _give_up_if(self, name: str, cause: str) -> None:
        if self._round is not None and name in self._round.parts and name not in self._round.scores:
            self._give_up(cause)

    def _give_up(self, cause: str) -> None:
        assert self._round is not None
        log.warning("the validation of version %d is given up: %s", self._round.version, cause)
        self.counters["validation/lost"] += 1
        self._round = None

    # ---- the end ---------------------------------------------------------------------------------------------

    def finish(self, version: int, now_s: float) -> None:
        """Training is done at `version`, which is due whatever `every` says. Saying it again changes nothing."""
        if self._finish_by_s is None:
            self._last_version = version
            self._finish_by_s = now_s + (self.settings.timeout_s if self.settings else 0.0)

    def finished(self, now_s: float) -> bool:
        """After `finish`: nothing is under way or due any more, nobody is left to do it, or the time is up."""
        if self._finish_by_s is None:
            return False
        if self.settings is None or now_s >= self._finish_by_s:
            return True
        if not self.validators and len(self._gone) >= self.settings.num_validators:
            return True
        return self._round is None and not self._due(self._last_version)


def validation_row(version: int, seconds: float, parts: Iterable[Mapping[str, c.SourceScores]]) -> dict[str, Any]:
    """One row of metrics out of all parts. Means are over samples; one without a reward counts in `val/num_failed` alone."""
    by_source: dict[str, list[c.SourceScores]] = {}
    for part in parts:
        for source, scores in part.items():
            by_source.setdefault(source, []).append(scores)
    everything = _total(scores for found in by_source.values() for scores in found)
    row: dict[str, Any] = {
        "training/global_step": version,
        "val/version": version,
        "val/num_samples": everything.samples,
        "val/num_failed": everything.failed,
        "val/seconds": round(seconds, 3),
    }
    row |= _means("val", everything)
    if everything.samples:
        row["val/response_length_clip_ratio"] = everything.cut_off / everything.samples
    for source, found in sorted(by_source.items()):
        row |= _means(f"val/{source}", _total(found))
    return row


def _means(prefix: str, scores: c.SourceScores) -> dict[str, float]:
    row: dict[str, float] = {}
    if rewarded := scores.samples - scores.failed:
        row[f"{prefix}/reward_mean"] = scores.reward_sum / rewarded
    if scores.samples:
        row[f"{prefix}/response_length_mean"] = scores.response_tokens / scores.samples
    return row


def _total(found: Iterable[c.SourceScores]) -> c.SourceScores:
    total = c.SourceScores()
    for scores in found:
        total.samples += scores.samples
        total.failed += scores.failed
        total.reward_sum += scores.reward_sum
        total.response_tokens += scores.response_tokens
        total.cut_off += scores.cut_off
    return total
