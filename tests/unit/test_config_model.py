"""The choice of a model: what no run could begin with is refused with the other settings, before anything is read or started."""

from __future__ import annotations

import pytest
from test_config_algorithm import composed

from psrl.config.checks import check
from psrl.config.errors import ConfigError
from psrl.config.model_checks import check_model_choice
from psrl.config.schema import ModelConfig, TinyModelConfig

pytestmark = pytest.mark.unit

REFUSED = [
    (["model.name=hf"], "model.name=hf needs model.path"),
    (["model.name=gpt"], "model.name=gpt is unknown: allowed are tiny, smollm2_135m, or hf"),
    (["model.tiny.hidden_size=33"], "model.tiny.hidden_size=33 must be a multiple of 2 x model.tiny.num_heads=4"),
    (["model.tiny.num_kv_heads=3"], "model.tiny.num_heads=4 must be a multiple of model.tiny.num_kv_heads=3"),
    (["model.tiny.num_heads=0"], "model.tiny.num_heads=0 is refused: it must be at least 1"),
    (["model.tiny.hidden_size=-64"], "model.tiny.hidden_size=-64 is refused: it must be at least 1"),
    (["model.tiny.warm_start_steps=-1"], "model.tiny.warm_start_steps=-1 is refused: it must be at least 0"),
    (["model.tiny.warm_start_lr=0"], "model.tiny.warm_start_lr=0.0 is refused: it must be greater than 0"),
    (["model.tiny.num_experts=1"], "model.tiny.num_experts=1 must be 0, for a dense model, or at least 2"),
    (
        ["model.tiny.num_experts=4", "model.tiny.intermediate_size=100"],
        "model.tiny.intermediate_size=100 must be a multiple of 8 with model.tiny.num_experts",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "said"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_an_impossible_model_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check(composed(*overrides))
    assert said in str(refusal.value)


def test_a_path_wins_over_a_shape_that_nothing_is_made_of() -> None:
    impossible = TinyModelConfig(num_experts=1)
    with pytest.raises(ConfigError):
        check_model_choice(ModelConfig(tiny=impossible))
    check_model_choice(ModelConfig(path="/models/some", tiny=impossible))
