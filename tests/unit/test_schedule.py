"""The learning rate, by hand."""

import pytest

from psrl.algorithms.schedule import learning_rate

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("step", "settings", "expected"),
    [
        (0, {"warmup_steps": 0}, 1.0),
        (0, {"warmup_steps": 4}, 0.25),
        (3, {"warmup_steps": 4}, 1.0),
        (99, {"warmup_steps": 4}, 1.0),
        (0, {"warmup_steps": 0, "kind": "cosine", "total_steps": 10}, 1.0),
        (5, {"warmup_steps": 0, "kind": "cosine", "total_steps": 10}, 0.5),
        (7, {"warmup_steps": 2, "kind": "cosine", "total_steps": 12}, 0.5),
        (10, {"warmup_steps": 0, "kind": "cosine", "total_steps": 10}, 0.0),
        (10, {"warmup_steps": 0, "kind": "cosine", "total_steps": 10, "min_ratio": 0.1}, 0.1),
        (50, {"warmup_steps": 0, "kind": "cosine", "total_steps": 10, "min_ratio": 0.1}, 0.1),
        (5, {"warmup_steps": 0, "kind": "cosine"}, 1.0),
    ],
)
def test_learning_rate(step, settings, expected):
    assert learning_rate(step, peak=1.0, **settings) == pytest.approx(expected)
