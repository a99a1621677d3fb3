import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from psrl.conclusion import write_summary_and_report
from psrl.config.schema import Config
from psrl.coordinator.ledger import Ledger
from psrl.coordinator.records import DROPPED, Occupy, Publish, Release, Reserve, Start, Take
from psrl.protocol.samples import SampleRef
from psrl.report import main, write_report
from psrl.rundir.layout import RunDir
from psrl.telemetry.distribution_plots import staleness_histogram
from psrl.telemetry.figures import smooth, style
from psrl.telemetry.incidents import IncidentLog
from psrl.telemetry.metrics import MetricsWriter
from psrl.telemetry.page import headline
from psrl.telemetry.record import load_run
from psrl.telemetry.timeline import BUSY, CHECKPOINT, PULL, PUSH, READ, SWITCH, UPDATE, WAIT, Span, Timeline
from psrl.telemetry.timeline_plots import binned

pytestmark = pytest.mark.unit


def make_run(path, steps, *, instances=2, outcome=None, note=None):
    """A run directory such as the roles leave it; each step takes a second."""
    run_dir = RunDir(path)
    run_dir.create()
    config = OmegaConf.structured(Config)
    config.psrl.staleness, config.note, config.trainer.experiment_name = 1, note, "a-run"
    OmegaConf.save(config, run_dir.config)
    origin = 1000.0
    clocks = {"clock": lambda: origin, "wall": lambda: 2e9}
    trainer = Timeline(run_dir.timeline / "trainer-0.7.jsonl", "trainer", 0.0, name="trainer-0", **clocks)
    with MetricsWriter(run_dir.metrics, wall=lambda: 2e9) as metrics:
        for step in range(1, steps + 1):
            begin = origin + step
            parts = ((WAIT, 0.0, 0.3), (READ, 0.3, 0.4), (UPDATE, 0.4, 0.8), (PUSH, 0.8, 0.9), (CHECKPOINT, 0.9, 1.0))
            for name, start, end in parts:
                trainer.add(name, begin + start, begin + end, **({"version": step} if name == PUSH else {}))
            metrics.write(
                {
                    "training/global_step": step,
                    "critic/rewards/mean": step / steps,
                    "staleness/mean": 0.5,
                    "staleness/max": 1,
                    "staleness/hist": {"0": 1, "1": 1},
                    "response_length/mean": 9.0,
                    "response_length/hist": {"8": 1, "10": 1},
                    "rollout_corr/kl": 0.01,
                    "actor/grad_norm": None,
                    "perf/throughput": 100.0,
                    "perf/total_num_tokens": 100,
                    "timing_s/step": 1.0,
                    "timing_s/wait_buffer": 0.3,
                    "timing_s/update_actor": 0.4,
                }
            )
    trainer.close()
    for number in range(instances if steps else 0):
        attributes = {"transport": "nixl posix"}
        path = run_dir.timeline / f"instance-{number}.9.jsonl"
        line = Timeline(path, "instance", 0.0, name=f"instance-{number}", attributes=attributes, **clocks)
        line.add(BUSY, origin + 1, origin + 1 + steps / 2)
        line.add(PULL, origin + 1, origin + 1.5, version=1, nbytes=10)
        line.add(SWITCH, origin + 1.5, origin + 1.6, version=1)
        line.close()
    if outcome:
        run_dir.outcome.write_text(json.dumps(outcome))
    return run_dir


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", page.read_text(), flags=re.S))


def test_page_and_summary_of_a_completed_run(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", 40, outcome={"status": "completed"}, note="<b>a & b</b>")
    incident = {"role": "instance", "name": "instance-1", "cause": "signal SIGKILL", "restarting": True}
    IncidentLog(run_dir.logs, "supervisor-rollout").write(**incident)
    assert main([str(run_dir.path)]) == 0
    page = run_dir.report / "index.html"
    assert capsys.readouterr().out.strip() == str(page)
    text = text_of(page)
    for piece in ("a-run", "completed", "0.07 → 0.95", "instance-1 signal SIGKILL started again", "psrl.staleness 1 0"):
        assert piece in text, piece
    for title in ("Reward", "Who was busy when", "Where the time went", "Staleness", "Responses", "Rollout correction"):
        assert f"<h2>{title}</h2>" in page.read_text()
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in page.read_text()  # what users write is text, not markup
    summary = json.loads(run_dir.summary.read_text())
    assert (summary["status"], summary["steps"], summary["restarts"]) == ("completed", 40, 1)
    assert summary["transport"] == "nixl posix"
    assert summary["rollout_busy_fraction"] == pytest.approx(0.5, abs=1e-3)
    assert summary["train_busy_fraction"] == pytest.approx(0.7, abs=1e-3)


def test_page_needs_nothing_from_elsewhere(tmp_path):
    html = write_report(make_run(tmp_path / "run", 3)).read_text()
    assert "<script" not in html and "@import" not in html and "<link" not in html
    assert all(source.startswith("data:image/") for source in re.findall(r'(?:src|href)="([^"]*)"', html))


@pytest.mark.parametrize(
    ("steps", "outcome", "pieces"),
    [
        (0, None, ["unfinished", "No training step was finished", "No steps yet"]),
        (0, {"status": "failed", "cause": "trainer-0 ended by exit code 1"}, ["Cause: trainer-0 ended by exit code 1"]),
        (1, None, ["This run is not finished", "The one step had reward 1.00"]),
        (2, {"status": "failed", "cause": "x"}, ["This run failed: what follows is as far as it got", "Cause: x"]),
        (2, {"status": "interrupted"}, ["This run was interrupted"]),
    ],
)
def test_runs_that_did_not_get_far(tmp_path, steps, outcome, pieces):
    text = text_of(write_report(make_run(tmp_path / "run", steps, outcome=outcome)))
    assert [piece for piece in pieces if piece not in text] == []


def test_a_run_that_only_has_its_directory(tmp_path):
    (tmp_path / "run").mkdir()
    assert "No steps yet" in text_of(write_report(RunDir(tmp_path / "run")))


def test_torn_files_are_an_unfinished_run(tmp_path):
    run_dir = make_run(tmp_path / "run", 5)
    run_dir.outcome.write_text('{"status": "comp')
    run_dir.metrics.write_bytes(run_dir.metrics.read_bytes()[:-30])
    summary = json.loads((write_report(run_dir), run_dir.summary)[1].read_text())
    assert (summary["status"], summary["steps"]) == ("unfinished", 4)


def test_no_such_run_directory(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 2
    assert f"no run directory at {tmp_path / 'none'}" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def write_ledger(run_dir):
    """Two groups trained, one dropped; then a second coordinator start."""
    ref = SampleRef(segment="s", offset=0, length=1, crc=0, tokens=[3])
    config = OmegaConf.load(run_dir.config)
    config.psrl.staleness_buffer_entries = 2
    OmegaConf.save(config, run_dir.config)
    ledger = Ledger.open(run_dir.ledger)
    ledger.append([Start(0, 0, "nonce"), *(Reserve(g, 0, g, 0, "instance-0", 0) for g in range(3))])
    ledger.append([Release(2, "error", DROPPED), *(Occupy(g, 0, ref, 0.5, 3) for g in range(2))])
    ledger.append([Take(0, [0, 1]), Publish(1)])
    ledger.flush()
    ledger.close()
    Ledger.open(run_dir.ledger).close()


def test_the_ledger_counts_in_the_summary_and_is_audited_on_the_page(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    write_ledger(run_dir)
    text = text_of(write_report(run_dir))
    assert "groups: 3 reserved = 2 trained" in text and "FINDING" not in text
    summary = json.loads(run_dir.summary.read_text())
    assert [summary[f"groups_{fate}"] for fate in ("trained", "dropped", "requeued")] == [2, 1, 0]
    assert (summary["version"], summary["max_staleness"]) == (1, 0)


def test_a_ledger_that_cannot_be_read_is_told_on_the_page(tmp_path):
    run_dir = make_run(tmp_path / "run", 1)
    write_ledger(run_dir)
    first = min(run_dir.ledger.iterdir())
    first.write_bytes(first.read_bytes()[:-4])
    assert "the ledger cannot be read: " in text_of(write_report(run_dir))


def test_without_the_page_there_is_the_summary(tmp_path):
    run_dir = make_run(tmp_path / "run", 2, outcome="completed")
    write_summary_and_report(run_dir, page=False)
    assert json.loads(run_dir.summary.read_text())["steps"] == 2 and not (run_dir.report / "index.html").exists()


def test_writing_it_again_replaces_it(tmp_path):
    run_dir = make_run(tmp_path / "run", 2)
    first = write_report(run_dir).read_bytes()
    assert write_report(run_dir).read_bytes() == first
    assert [path.name for path in run_dir.report.iterdir()] == ["index.html"]


def test_headline_tells_a_broken_bound(tmp_path):
    record = load_run(make_run(tmp_path / "run", 2, outcome={"status": "completed"}).path)
    stale = replace(record, summary=record.summary | {"max_staleness": 3})
    assert "more than 3 versions old (1 allowed)" in headline(stale)
    with style():
        axes = staleness_histogram([{"training/global_step": 1, "staleness/hist": {"0": 1, "3": 1}}], 1).axes[0]
    colours = [bar.get_facecolor()[:3] for bar in axes.patches]
    assert colours[3] != colours[0] and len(colours) == 4


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([Span(BUSY, 1, 4)], [0.5, 1.0, 0.0, 0.0]),
        ([Span(BUSY, -5, 1), Span(BUSY, 7, 99)], [0.5, 0.0, 0.0, 0.5]),
        ([Span(BUSY, 0, 8, seconds=4)], [0.5] * 4),
        ([Span(BUSY, 0, 2), Span(BUSY, 0, 2)], [1.0, 0.0, 0.0, 0.0]),
        ([], [0.0] * 4),
    ],
)
def test_binned(spans, expected):
    assert binned(spans, (0.0, 8.0), 4) == pytest.approx(expected)


def test_smooth():
    assert smooth([0, 3, 6], 3) == [1.5, 3, 4.5]
    assert smooth([5], 9) == [5]


def test_telemetry_starts_without_heavy_imports():
    modules = "metrics step_metrics timeline timeline_read summary progress wandb_logger record".split()  # noqa: SIM905
    code = "\n".join(
        [f"import psrl.telemetry.{name}" for name in modules]
        + [
            "import sys",
            "print([m for m in ('torch', 'matplotlib', 'wandb', 'rich', 'omegaconf') if m in sys.modules])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
