#!/usr/bin/env python3
"""Creates a saved W&B workspace view for the runs of psrl in a project: `scripts/wandb_dashboard.py ENTITY/PROJECT`.

Reward over samples and over time, staleness, step time, rollout correction, throughput; runs grouped by their sweep and
by the settings that `--by` names. Needs the extra `dashboard` (the package wandb-workspaces) and a W&B login. Each call
creates a new view and changes none that is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

try:
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
    from wandb.errors import Error as WandbError
except ImportError as error:
    raise SystemExit("wandb_dashboard: wandb-workspaces is missing: pip install -e '.[dashboard]'") from error

STEP, SAMPLES, TIME = "training/global_step", "training/total_samples", "training/total_time_s"
PANEL_SECTIONS: dict[str, list[tuple[str, str, list[str]]]] = {
    "Reward": [
        ("Reward over samples", SAMPLES, ["critic/rewards/mean"]),
        ("Reward over time", TIME, ["critic/rewards/mean"]),
        ("Reward over steps", STEP, ["critic/rewards/mean"]),
        ("Response length", STEP, ["response_length/mean"]),
        ("Cut off", STEP, ["response_length/clip_ratio"]),
    ],
    "Speed": [
        ("Step time, s", STEP, ["timing_s/step"]),
        ("Wait for samples, s", STEP, ["timing_s/wait_buffer"]),
        ("Update, s", STEP, ["timing_s/update_actor"]),
        ("Publish weights, s", STEP, ["timing_s/push_weights"]),
        ("Trained tokens a second", STEP, ["perf/throughput"]),
    ],
    "Staleness": [
        ("Versions behind, mean", STEP, ["staleness/mean"]),
        ("Versions behind, greatest", STEP, ["staleness/max"]),
        ("Responses over several versions", STEP, ["rollout/multi_version_ratio"]),
    ],
    "Rollout correction": [
        ("KL to the sampling weights", STEP, ["rollout_corr/kl"]),
        ("k3 estimate of it", STEP, ["rollout_corr/k3_kl"]),
        ("Effective sample size", STEP, ["rollout_corr/rollout_is_eff_sample_size"]),
        ("Importance weight, mean", STEP, ["rollout_corr/rollout_is_mean"]),
        ("Masked by rejection", STEP, ["rollout_corr/rs_masked_fraction"]),
    ],
    "Optimisation": [
        ("Policy loss", STEP, ["actor/pg_loss"]),
        ("Gradient norm", STEP, ["actor/grad_norm"]),
        ("KL to the old policy", STEP, ["actor/ppo_kl"]),
        ("Clipped tokens", STEP, ["actor/pg_clipfrac"]),
    ],
}
"""Section to its line plots: (title, x axis, metrics)."""
COLUMNS, WIDTH, HEIGHT = 3, 8, 6
"""W&B's grid is 24 wide."""


def dashboard(entity: str, project: str, by: Sequence[str], name: str) -> workspaces.Workspace:
    """The view's definition; nothing is contacted."""
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(name=title, is_open=True, panels=[_plot(i, *plot) for i, plot in enumerate(plots)])
            for title, plots in PANEL_SECTIONS.items()
        ],
        settings=workspaces.WorkspaceSettings(x_axis=STEP, smoothing_type="none", max_runs=50),
        runset_settings=workspaces.RunsetSettings(
            groupby=[workspaces.Metric("Group"), *(workspaces.Config(key) for key in by)],
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    parser.add_argument(
        "--by",
        nargs="+",
        default=["psrl.staleness"],
        metavar="KEY",
        help="configuration keys that runs are grouped by, within their sweep (default: psrl.staleness)",
    )
    parser.add_argument("--name", default="psrl", help="name of the view (default: psrl)")
    args = parser.parse_args(argv)
    entity, _, project = args.project.partition("/")
    if not entity or not project or "/" in project:
        parser.error(f"{args.project!r} is no project: write ENTITY/PROJECT")
    try:
        print(dashboard(entity, project, args.by, args.name).save().url)
    except (WandbError, OSError) as error:
        print(f"wandb_dashboard: the view was not saved: {error}", file=sys.stderr)
        return 1
    return 0


def _plot(index: int, title: str, x: str, metrics: list[str]) -> reports.LinePlot:
    row, column = divmod(index, COLUMNS)
    return reports.LinePlot(
        title=title,
        x=x,
        y=list(metrics),
        layout=reports.Layout(x=column * WIDTH, y=row * HEIGHT, w=WIDTH, h=HEIGHT),
    )


if __name__ == "__main__":
    sys.exit(main())
