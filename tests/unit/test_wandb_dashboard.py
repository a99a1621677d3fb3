"""The dashboard's definition is built by the real wandb-workspaces, without any server."""

import importlib.util
import json
import re
import socket
from pathlib import Path

import pytest

pytest.importorskip("wandb_workspaces", reason="the extra `dashboard` is not installed")

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dashboard(monkeypatch):
    """The script as a module; a connection would raise."""

    def refuse(*_):
        raise AssertionError("the dashboard's definition contacted a server")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    spec = importlib.util.spec_from_file_location("wandb_dashboard", ROOT / "scripts" / "wandb_dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def view(dashboard, *by):
    model = dashboard.dashboard("a-team", "a-project", by or ["psrl.staleness"], "psrl")._to_model()
    return json.loads(model.spec.model_dump_json(by_alias=True))["section"]


def test_runs_are_grouped_by_sweep_and_settings(dashboard):
    keys = [
        (key["section"], key["name"]) for key in view(dashboard, "psrl.staleness", "a.b.c")["runSets"][0]["grouping"]
    ]
    assert keys == [("run", "group"), ("config", "psrl.value.staleness"), ("config", "a.value.b.c")]


def test_sections_and_axes(dashboard):
    sections = {section["name"]: section["panels"] for section in view(dashboard)["panelBankConfig"]["sections"]}
    assert list(sections) == ["Reward", "Speed", "Staleness", "Rollout correction", "Optimisation"]
    axes = [panel["config"]["xAxis"] for panel in sections["Reward"]]
    assert axes[:2] == ["training/total_samples", "training/total_time_s"]
    places = [tuple(panel["layout"].values()) for panel in sections["Reward"]]
    assert len(set(places)) == len(places) and all(panel["layout"]["x"] <= 16 for panel in sections["Reward"])


def test_every_metric_is_one_that_a_run_logs(dashboard):
    """Names are those in the source of the metrics: a renamed metric would leave an empty panel."""
    writers = [*(ROOT / "psrl/trainer").rglob("*.py"), *(ROOT / "psrl/algorithms").rglob("*.py")]
    writers += [ROOT / "psrl/telemetry" / name for name in ("step_metrics.py", "metrics.py", "totals.py")]
    source = "\n".join(path.read_text() for path in writers)
    names = set(re.findall(r'"([\w/]+)"', source))
    names |= {
        f"{base}/{figure}" for base in re.findall(r'_spread\("(\w+(?:/\w+)*)"', source) for figure in ("mean", "max")
    }
    written = names | {f"{prefix}/{name}" for prefix in ("timing_s", "rollout_corr") for name in names}
    plots = [plot for plots in dashboard.PANEL_SECTIONS.values() for plot in plots]
    shown = {name for _, x, metrics in plots for name in (x, *metrics)}
    assert shown - written == set()


@pytest.mark.parametrize("project", ["psrl", "/psrl", "team/", "a/b/c"])
def test_bad_project(dashboard, project, capsys):
    with pytest.raises(SystemExit, match="2"):
        dashboard.main([project])
    assert "write ENTITY/PROJECT" in capsys.readouterr().err
