import json
import re
from itertools import pairwise

import pytest
from omegaconf import OmegaConf

from psrl.config.schema import Config
from psrl.report import main
from psrl.rundir.layout import RunDir
from psrl.telemetry.figures import style
from psrl.telemetry.members import sweep_members
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.sweep_page import definition, headline, table_columns
from psrl.telemetry.sweep_plots import (
    busy_shares,
    reward_over_samples,
    reward_over_time,
    staleness_histograms,
    step_times,
)
from psrl.telemetry.sweep_record import load_sweep, values_compared
from psrl.telemetry.timeline import BUSY, UPDATE, WAIT, Timeline

pytestmark = pytest.mark.unit

PARTIAL = "psrl.rollout_coordination.partial_rollout.enable"


def make_member(sweep, number, settings, *, steps=10, step_s=1.0, status="completed", cause="", busy=0.5):
    """A member whose first step takes 60 s and every other `step_s`, with 8 samples and 80 tokens each."""
    run_dir = RunDir(sweep / str(number))
    run_dir.create()
    config = OmegaConf.structured(Config)
    for key, value in settings.items():
        OmegaConf.update(config, key, value)
    config.trainer.total_training_steps = 10
    OmegaConf.save(config, run_dir.config)
    overrides = [f"{key}={value}" for key, value in settings.items()]
    entry = {"id": "ab12cd34", "dir": str(sweep), "number": number, "overrides": ["note=same", *overrides]}
    run_dir.run.write_text(json.dumps({"run_id": "x", "created": "2026-11-29T10:00:00+00:00", "sweep": entry}))
    lag = settings.get("psrl.staleness", 0)
    with MetricsWriter(run_dir.metrics, wall=lambda: 2e9) as metrics:
        for step in range(1, steps + 1):
            metrics.write(
                {
                    "training/global_step": step,
                    "critic/rewards/mean": (number + 1) * step / 100,
                    "staleness/max": lag,
                    "staleness/hist": {"0": 1, str(lag): 3} if lag else {"0": 4},
                    "training/num_samples": 8,
                    "perf/total_num_tokens": 80,
                    "timing_s/step": 60.0 if step == 1 else step_s,
                }
            )
    if steps:
        clocks = {"clock": lambda: 0.0, "wall": lambda: 2e9}
        trainer = Timeline(run_dir.timeline / "trainer-0.1.jsonl", "trainer", 0.0, name="trainer-0", **clocks)
        trainer.add(WAIT, 0.0, 10.0 * (1 - busy))
        trainer.add(UPDATE, 10.0 * (1 - busy), 10.0)
        trainer.close()
        instance = Timeline(run_dir.timeline / "instance-0.2.jsonl", "instance", 0.0, name="instance-0", **clocks)
        instance.add(BUSY, 0.0, 8.0)
        instance.close()
    if status:
        run_dir.outcome.write_text(json.dumps({"status": status, "cause": cause}))
    return run_dir


def load(sweep):
    return load_sweep(sweep, sweep_members(sweep))


def ratios(record):
    return [(m.row.name, m.row.reference, m.row.speedup, m.row.samples_ratio) for m in record.members]


def text_of(page):
    return re.sub(r"[\s\u200b]+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page.read_text(), flags=re.S))


def test_the_first_step_is_not_steady(tmp_path):
    make_member(tmp_path, 0, {}, step_s=0.5)
    row = load(tmp_path).members[0].row
    assert (row.step_s, row.samples_per_s, row.tokens_per_s) == (0.5, 16.0, 160.0)
    assert (row.train_busy_fraction, row.rollout_busy_fraction) == (0.5, pytest.approx(0.8))


def test_one_step_is_no_step_time(tmp_path):
    make_member(tmp_path, 0, {}, steps=1)
    row = load(tmp_path).members[0].row
    assert (row.steps, row.step_s, row.samples_per_s, row.speedup) == (1, None, None, None)


def test_speed_up_is_over_the_member_with_staleness_0_and_otherwise_equal_settings(tmp_path):
    for number, (staleness, partial, step_s) in enumerate(
        [(0, True, 2.0), (1, True, 1.0), (0, False, 3.0), (1, False, 1.5), (2, False, 1.0)]
    ):
        make_member(tmp_path, number, {"psrl.staleness": staleness, PARTIAL: partial}, step_s=step_s)
    record = load(tmp_path)
    assert ratios(record) == [
        ("0", "0", 1.0, 1.0),
        ("1", "0", 2.0, 2.0),
        ("2", "2", 1.0, 1.0),
        ("3", "2", 2.0, 2.0),
        ("4", "2", 3.0, 3.0),
    ]
    assert "the member with staleness 0 and otherwise equal settings" in definition(record)
    assert (
        "The largest speed-up, 3.00, is that of member 4 (staleness=2 partial_rollout.enable=False) over"
        in headline(record)
    )
    compared = [(key, value, [row.name for row in rows]) for key, value, rows in values_compared(record)]
    assert ("psrl.staleness", "1", ["1", "3"]) in compared and (PARTIAL, "False", ["2", "3", "4"]) in compared


def test_a_member_without_such_a_reference_has_no_speed_up(tmp_path):
    make_member(tmp_path, 0, {"psrl.staleness": 0, "seed": 1}, step_s=2.0)
    make_member(tmp_path, 1, {"psrl.staleness": 1, "seed": 2})
    make_member(tmp_path, 2, {"psrl.staleness": 1, "seed": 1}, steps=0, status=None)
    assert ratios(load(tmp_path)) == [("0", "0", 1.0, 1.0), ("1", None, None, None), ("2", None, None, None)]


@pytest.mark.parametrize("staleness", [0, 1])
def test_without_a_staleness_0_to_compare_with_the_first_member_is_the_reference(tmp_path, staleness):
    make_member(tmp_path, 0, {"psrl.staleness": staleness, PARTIAL: True}, steps=0, status=None)
    make_member(tmp_path, 1, {"psrl.staleness": staleness, PARTIAL: True}, step_s=2.0)
    make_member(tmp_path, 2, {"psrl.staleness": staleness, PARTIAL: False})
    record = load(tmp_path)
    assert ratios(record)[1:] == [("1", "1", 1.0, 1.0), ("2", "1", 2.0, 2.0)]
    assert "Speed-up: step time of member 1 (partial_rollout.enable=True), divided by" in definition(record)


@pytest.fixture
def mixed(tmp_path):
    """A completed, a failed and a running member, and one without steps."""
    sweep = tmp_path / "multirun" / "10-00-00"
    make_member(sweep, 0, {"psrl.staleness": 0}, step_s=2.0)
    make_member(sweep, 1, {"psrl.staleness": 1}, steps=4, status="failed", cause="<b>trainer-0</b> ended")
    make_member(sweep, 2, {"psrl.staleness": 2}, steps=5, status=None)
    make_member(sweep, 10, {"psrl.staleness": 3}, steps=0, status=None)
    return sweep


def test_runs_of_no_sweep_are_compared_by_what_their_configurations_differ_in(tmp_path):
    for number, settings in enumerate(({"psrl.staleness": 1}, {"psrl.staleness": 1, PARTIAL: False})):
        run_dir = make_member(tmp_path, number, settings, step_s=1.0 + number)
        run_dir.run.write_text(json.dumps({"run_id": "x", "created": "2026-11-29T10:00:00+00:00"}))
    record = load(tmp_path)
    assert [m.row.settings for m in record.members] == [{PARTIAL: "True"}, {PARTIAL: "False"}]
    assert ratios(record) == [("0", "0", 1.0, 1.0), ("1", "0", 0.5, 0.5)]


def test_page_data_and_links_of_a_sweep(mixed, capsys):
    own = mixed / "1" / "report" / "index.html"
    own.write_text("kept")
    assert main([str(mixed)]) == 0
    page = mixed / "report" / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    text, html = text_of(page), page.read_text()
    assert "Sweep 10-00-00 failed" in text and "4 members: 2 unfinished, 1 completed, 1 failed" in text
    rows = re.findall(r"<tr>(.*?)</tr>", html, flags=re.S)
    cells = [
        [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row, flags=re.S)] for row in rows[1:]
    ]
    assert [row[:4] for row in cells] == [
        ["0", "0", "completed", "10 / 10"],
        ["1", "1", "failed", "4 / 10"],
        ["2", "2", "unfinished", "5 / 10"],
        ["10", "3", "no steps yet", "0 / 10"],
    ]
    assert [row[6:9] for row in cells] == [
        ["2.00 s", "1.00", "4"], ["1.00 s", "2.00", "8"], ["1.00 s", "2.00", "8"], ["–", "–", "–"],
    ]  # fmt: skip
    assert "1: &lt;b&gt;trainer-0&lt;/b&gt; ended" in re.sub(r"</?strong>", "", html)
    for title in ("Members", "Reward", "Speed", "Staleness"):
        assert f"<h2>{title}</h2>" in html
    assert "Settings compared" not in text  # a single setting: the table of members says it all
    data = json.loads((mixed / "sweep.json").read_text())
    assert data["sweep"] == "ab12cd34" and [row["speedup"] for row in data["members"]] == [1.0, 2.0, 2.0, None]
    assert own.read_text() == "kept"  # only what is missing is made
    links = [link for link in re.findall(r'(?:src|href)="([^"]*)"', html) if not link.startswith("data:image/")]
    assert links == [f"../{number}/report/index.html" for number in (0, 1, 2, 10)]
    assert all((mixed / "report" / link).resolve().is_file() for link in links)
    assert "<script" not in html and "@import" not in html and "<link" not in html


def test_a_sweep_without_any_step(tmp_path):
    make_member(tmp_path, 0, {"psrl.staleness": 0}, steps=0, status=None)
    make_member(tmp_path, 1, {"psrl.staleness": 1}, steps=0, status=None)
    assert main([str(tmp_path)]) == 0
    text = text_of(tmp_path / "report" / "index.html")
    assert "No member has finished a training step" in text and "2 members: 2 unfinished" in text


def test_a_member_alone_is_reported_as_a_run(mixed):
    assert main([str(mixed / "0")]) == 0
    assert (mixed / "0" / "summary.json").is_file() and not (mixed / "sweep.json").exists()


def test_curves_are_over_time_and_samples_of_each_member(mixed):
    members = load(mixed).members
    with style():
        time_axes, sample_axes = (plot(members).axes[0] for plot in (reward_over_time, reward_over_samples))
    seconds, samples = (
        [list(line.get_xdata()) for line in axes.get_lines()] for axes in (time_axes, sample_axes)
    )  # fmt: skip
    assert [len(line) for line in seconds] == [10, 4, 5]
    assert seconds[1] == [60.0, 61.0, 62.0, 63.0] and samples[1] == [8.0, 16.0, 24.0, 32.0]
    assert [line.get_label() for line in sample_axes.get_lines()] == [
        "0: staleness=0",
        "1: staleness=1",
        "2: staleness=2",
    ]


def test_bars_and_histograms(mixed):
    members = load(mixed).members
    with style():
        bars = step_times(members).axes[0]
        shares = busy_shares(members).axes[0]
        histograms = staleness_histograms(members).axes
    assert [bar.get_width() for bar in bars.patches] == [2.0, 1.0, 1.0]
    assert [text.get_text() for text in bars.texts] == ["2 s", "1 s, 2.00 x", "1 s, 2.00 x"]
    assert [bar.get_width() for bar in shares.patches] == pytest.approx([0.8] * 3 + [0.5] * 3)
    assert [[bar.get_height() for bar in axes.patches] for axes in histograms[:3]] == [
        [1.0, 0.0, 0.0, 0.0][:3], [0.25, 0.75, 0.0], [0.25, 0.0, 0.75],
    ]  # fmt: skip
    colours = [axes.patches[0].get_facecolor() for axes in histograms[:3]]
    assert all(one != other for one, other in pairwise(colours))


def test_a_staleness_beyond_the_bound_is_red(tmp_path):
    run_dir = make_member(tmp_path, 0, {"psrl.staleness": 0}, steps=0)
    with MetricsWriter(run_dir.metrics) as metrics:
        metrics.write({"training/global_step": 1, "staleness/hist": {"0": 1, "1": 1}})
    with style():
        inside, beyond = (bar.get_facecolor() for bar in staleness_histograms(load(tmp_path).members).axes[0].patches)
    assert inside != beyond


def test_many_members_and_long_settings_still_draw(tmp_path):
    for number in range(18):
        make_member(tmp_path, number, {"psrl.staleness": number % 3, "note": f"{'long ' * 12}{number}"}, steps=2)
    record = load(tmp_path)
    with style():
        assert len(reward_over_time(record.members).axes[0].get_lines()) == 18
        assert len([a for a in staleness_histograms(record.members).axes if a.get_visible()]) == 16
    assert [column.title for column in table_columns(record)][:3] == ["member", "note", "staleness"]
