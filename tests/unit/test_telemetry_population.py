"""What is said of the samples that were launched but not trained."""

from __future__ import annotations

import pytest

from psrl.rollout import sample_ends
from psrl.telemetry.figures import style
from psrl.telemetry.population import (
    CENSORED,
    COMPLETE,
    Ends,
    Population,
    describe,
    population_between,
    population_metrics,
    run_population,
)
from psrl.telemetry.population_plots import ends_by_kind, mean_lengths
from psrl.telemetry.summary import summarise

pytestmark = pytest.mark.unit


def counters(**ends: tuple[int, int]) -> dict[str, int]:
    counted: dict[str, int] = {"redundant": 3}
    for kind, (count, tokens) in ends.items():
        counted |= {f"samples/{kind}": count, f"response_tokens/{kind}": tokens}
    return counted


FIRST = counters(consumed=(4, 40), redundant=(2, 60))
SECOND = counters(consumed=(8, 120), redundant=(3, 100), unused=(1, 30))


def test_every_kind_of_end_is_complete_or_censored() -> None:
    kinds = {value for name, value in vars(sample_ends).items() if name.isupper() and not name.startswith("FINISH")}
    assert kinds == {*COMPLETE, *CENSORED} and len(COMPLETE) + len(CENSORED) == 7


def test_figures_of_a_step() -> None:
    """Consumed: 4 samples of 80 tokens; unused: 1 of 30; redundant: 1 of 40, in two seconds."""
    assert population_metrics(FIRST, SECOND, 2.0) == {
        "rollout/mean_length/consumed": 20.0,
        "rollout/mean_length/complete": 22.0,
        "rollout/mean_length/censored": 40.0,
        "rollout/mean_length/at_least": 25.0,
        "rollout/censored_ratio": pytest.approx(1 / 6),
        "rollout/ended_tokens_per_s": 75.0,
    }
    assert population_metrics(SECOND, SECOND, 2.0) == {}


def test_a_new_coordinator_begins_to_count_anew() -> None:
    assert population_between(SECOND, FIRST).of("consumed") == Ends(4, 40)
    rows = [
        {"training/global_step": step, **{f"rollout/{name}": value for name, value in seen.items()}}
        for step, seen in enumerate((FIRST, SECOND, FIRST), 1)
    ]
    population = run_population(rows)
    assert population.of("consumed") == Ends(12, 160)
    assert population.of(*CENSORED) == Ends(5, 160)


def test_the_summary_sets_consumed_against_launched() -> None:
    row = {"training/global_step": 1, "timing_s/step": 4.0}
    got = summarise([row | {f"rollout/{name}": value for name, value in SECOND.items()}], [])
    names = ("consumed_tokens_per_s", "length_consumed", "length_complete", "length_at_least", "censored_ratio")
    assert [got[name] for name in names] == [30.0, 15.0, pytest.approx(150 / 9), pytest.approx(250 / 12), 0.25]


def test_it_is_said_in_words_and_drawn() -> None:
    population = population_between({}, SECOND)
    assert describe(population) == (
        "8 samples were consumed, 15.0 tokens long on average; all 9 that finished by themselves, 16.7. 3 more were cut "
        "short at 33.3 tokens on average, so the mean length of all that was launched is at least 20.8."
    )
    assert describe(population_between({}, counters(consumed=(2, 8)))).endswith("4.0. None was cut short.")
    assert describe(Population({})) == "No sample has ended yet."
    rows = [
        {"training/global_step": 1, **{f"rollout/{name}": value for name, value in SECOND.items()}}
        | population_metrics({}, SECOND, 1.0)
    ]
    with style():
        assert ends_by_kind(rows) is not None and mean_lengths(rows) is not None
        assert ends_by_kind([{"training/global_step": 1}]) is None
        assert mean_lengths([{"training/global_step": 1}]) is None
