"""Lengths, calibration arithmetic, refusals and the command line of the simulator."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from psrl.config.errors import ConfigError
from psrl.config.simulation import LengthConfig, SimulationConfig
from psrl.config.simulation_checks import check_simulation
from psrl.cost_model.files import load_cost_model
from psrl.rundir.layout import RunDir
from psrl.setup_run import completed_before
from psrl.simulate.__main__ import main
from psrl.simulate.calibrate import (
    between_roles,
    calibrate,
    fit_decode,
    fit_prefill,
    fit_training,
    load_calibration,
    non_negative,
    step_overhead,
)
from psrl.simulate.compose import compose_simulation
from psrl.simulate.lengths import make_lengths
from psrl.telemetry.timeline import BUSY, PUSH, SWITCH, WAIT, Span

pytestmark = pytest.mark.unit

LAPTOP = ["preset=laptop", "task=chain_sum"]
QWEN_7B = load_cost_model("qwen_7b", "TP1_PP1")


# ---- lengths -------------------------------------------------------------------------------------------------


def test_lengths_belong_to_the_prompt_and_not_to_who_asks_when() -> None:
    lengths = make_lengths(LengthConfig(mean_tokens=100), 1000, seed=3)
    first = lengths.draw(0, 7, 4)
    assert lengths.draw(0, 8, 4) != first
    assert lengths.draw(0, 7, 6)[:4] == first, "redundant samples come on top of the others"
    assert lengths.draw(1, 7, 4) != first
    assert make_lengths(LengthConfig(mean_tokens=100), 1000, seed=4).draw(0, 7, 4) != first


def test_lognormal_has_the_mean_that_it_is_given_and_resembles_within_a_prompt() -> None:
    lengths = make_lengths(LengthConfig(mean_tokens=100, sigma=0.8, prompt_share=0.5), 10**6, seed=0)
    groups = np.log([lengths.draw(0, prompt, 4) for prompt in range(4000)])
    assert np.exp(groups).mean() == pytest.approx(100, rel=0.05)
    assert groups.var() == pytest.approx(0.64, rel=0.05)
    assert np.corrcoef(groups[:, 0], groups[:, 1])[0, 1] == pytest.approx(0.5, abs=0.05)


def test_lengths_are_cut_at_the_budget() -> None:
    assert max(make_lengths(LengthConfig(mean_tokens=900, sigma=1.0), 1000, 0).draw(0, 0, 200)) == 1000


def test_a_trace_keeps_groups_together(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([[1, 2, 3], [100, 200, 300]]))
    lengths = make_lengths(LengthConfig(distribution="trace", trace=str(path)), 250, 0)
    drawn = {tuple(sorted(lengths.draw(0, prompt, 3))) for prompt in range(20)}
    assert drawn == {(1, 2, 3), (100, 200, 250)}
    with pytest.raises(ConfigError, match="cannot be read"):
        make_lengths(LengthConfig(distribution="trace", trace=str(tmp_path / "none.json")), 250, 0)


# ---- calibration ---------------------------------------------------------------------------------------------


def switch(steps: int, tokens: int, held: int, prefilled: int, busy_s: float) -> Span:
    work = {
        "decode_steps": steps,
        "generated_tokens": tokens,
        "decode_kv_tokens": held,
        "prompt_tokens": prefilled,
        "prefills": 2,
        "prefill_s": 0.01 + 5e-5 * prefilled,
        "busy_s": busy_s,
    }
    return Span(SWITCH, 0.0, 0.0, attributes={"version": 1, **work})


def test_decode_coefficients_are_found_again_despite_a_stall() -> None:
    rng = random.Random(0)
    spans = []
    for _ in range(40):
        steps = rng.randint(50, 250)
        tokens, held, prefilled = steps * rng.randint(2, 60), steps * rng.randint(100, 9000), rng.randint(50, 4000)
        busy_s = 2e-3 * steps + 1e-5 * tokens + 3e-8 * held
        busy_s = busy_s * rng.uniform(0.99, 1.01) + 0.01 + 5e-5 * prefilled
        spans.append(switch(steps, tokens, held, prefilled, busy_s))
    spans[7] = switch(100, 1000, 10_000, 100, 50.0)
    model, error = fit_decode(spans)
    assert model.other_latency_b == pytest.approx(2e-3, rel=0.1)
    assert model.other_latency_k == pytest.approx(1e-5, rel=0.3)
    assert model.attn_latency_k == pytest.approx(3e-8, rel=0.3)
    assert error < 0.02
    assert fit_prefill(spans, 1e-5) == pytest.approx((5e-3, 5e-5))


def test_prefills_of_one_size_count_a_token_as_decoding_does() -> None:
    spans = [switch(10, 10, 10, 100, 1.0) for _ in range(8)]  # 15 ms for two prefills of 50 tokens
    assert fit_prefill(spans, 1e-5) == pytest.approx((7e-3, 1e-5))


def test_non_negative_is_the_best_of_what_is_allowed() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(columns, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def test_training_is_a_constant_and_a_rate() -> None:
    rows = [
        {"timing_s/step": 5 + 0.5 + 2e-3 * n, "timing_s/wait_buffer": 5, "perf/total_num_tokens": n}
        for n in (100, 200, 300, 500)
    ]
    constant, per_token, error = fit_training(rows)
    assert (constant, per_token) == pytest.approx((0.5, 2e-3))
    assert error == pytest.approx(0, abs=1e-9)


def test_a_simulated_run_is_calibrated_back_to_its_own_costs(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    costs = {
        "train_s": 3.0, "train_s_per_token": 0.001, "push_s": 0.5, "pull_s": 1.0, "switch_s": 0.25, "reward_s": 0.125, "dispatch_s": 0.2,
    }  # fmt: skip
    command = [
        *LAPTOP, "psrl.staleness=0", "psrl.deployment.n_rollout_instances=1", "data.max_response_length=256",
        "gen_actor_rollout_ref.rollout.max_num_seqs=64", "trainer.save_freq=0", "simulation.steps=30", "simulation.round_s=0",
        "simulation.costs.cost_model=qwen_7b", "simulation.costs.prefill_s=0.05", f"run_dir={run_dir}",
        *(f"simulation.costs.{name}={value}" for name, value in costs.items()),
    ]  # fmt: skip
    assert main(command) == 0
    found = calibrate(run_dir)
    for name, value in costs.items():
        assert found.costs[name] == pytest.approx(value, rel=0.05), name
    for n in (8, 32, 64):  # what it costs matters, not how it is split; below the shipped model's threshold it is flat
        assert found.decode.latency_s(n, 100 * n) == pytest.approx(QWEN_7B.latency_s(n, 100 * n), rel=0.15)
    assert found.errors["decode"] < 0.02
    found.save(tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == found
    assert (
        main([*command[:-1], f"simulation.calibration={tmp_path / 'calibration.json'}", "simulation.write=False"]) == 0
    )


def test_what_lies_between_the_roles() -> None:
    trainer, instance = [], []
    for i in range(6):
        t = 10.0 * i
        trainer += [Span(WAIT, t, t + 5.0), Span(PUSH, t + 7.0, t + 8.0)]
        instance.append(Span(BUSY, t - 0.5, t + 4.75))  # ends 0.25 s before the buffer, begins 1.5 s after the push
    found = between_roles(trainer, instance, 1.0)
    assert found == pytest.approx({"reward_s": 0.25, "dispatch_s": 0.5})


def test_overhead_is_what_busy_spans_do_not_cover() -> None:
    spans = [Span(BUSY, 0.0, 10.0, seconds=8.0), Span(BUSY, 20.0, 120.0, seconds=1.0), switch(100, 0, 0, 0, 8.0)]
    assert step_overhead(spans) == pytest.approx(0.02), "mostly idle spans tell nothing"


# ---- configuration and command line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("lengths.distribution", "normal", "allowed is lognormal"),
        ("lengths.trace", "x.json", "distribution=trace"),
        ("lengths.prompt_share", 1.5, "from 0 to 1"),
        ("lengths.mean_tokens", 0.0, "greater than 0"),
        ("uniform_reward_share", -0.1, "from 0 to 1"),
        ("environment.turns", 0, "at least 1"),
        ("steps", 0, "at least 1"),
        ("costs.pull_s", -1.0, "at least 0"),
        ("tick_s", 0.0, "greater than 0"),
        ("warmup_steps", 30, "simulate more steps"),
    ],
)
def test_refusals_name_key_and_value(key: str, value: object, words: str) -> None:
    simulation = SimulationConfig()
    target, (*path, last) = simulation, key.split(".")
    for name in path:
        target = getattr(target, name)
    setattr(target, last, value)
    with pytest.raises(ConfigError, match=words) as refused:
        check_simulation(simulation)
    assert f"simulation.{key}={value}" in str(refused.value)


def test_the_section_is_composed_beside_a_launch() -> None:
    config, simulation = compose_simulation([*LAPTOP, "psrl.staleness=2", "simulation.costs.pull_s=3"])
    assert (config.psrl.staleness, simulation.costs.pull_s) == (2, 3.0)
    assert not hasattr(config, "simulation")
    with pytest.raises(ConfigError, match=r"Unknown key simulation.costs.pul_s: did you mean simulation.costs.pull_s"):
        compose_simulation([*LAPTOP, "simulation.costs.pul_s=3"])


def test_a_simulation_leaves_a_report_and_a_clean_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from psrl.audit import main as audit

    run_dir = tmp_path / "run"
    command = [
        *LAPTOP, "simulation.steps=6", "simulation.warmup_steps=1", "simulation.costs.cost_model=qwen_7b", f"run_dir={run_dir}",
    ]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "speed-up over synchronous" in told
    page = (run_dir / "report" / "index.html").read_text()
    assert "Simulated, not measured" in page
    assert "simulation.costs.cost_model" in page
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 6
    assert audit([str(run_dir)]) == 0
    assert main(command) == 2, "a directory is used once"
    with pytest.raises(ConfigError, match="holds a simulation"):
        completed_before(RunDir(run_dir), compose_simulation(LAPTOP)[0])


def test_a_sweep_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "-m", *LAPTOP, "simulation.steps=6", "simulation.warmup_steps=1", "simulation.costs.cost_model=qwen_7b", "psrl.staleness=0,1",
        f"hydra.sweep.dir={tmp_path}",
    ]  # fmt: skip
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "[0] psrl.staleness=0" in told and "[1] psrl.staleness=1" in told
    assert (tmp_path / "report" / "index.html").is_file()


def test_without_a_decode_cost_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAPTOP, "simulation.write=False"]) == 2
    assert "simulation.costs.cost_model" in capsys.readouterr().err
