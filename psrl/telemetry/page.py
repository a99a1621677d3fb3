"""The report as one self-contained HTML page: no script, no font, no image from anywhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psrl.telemetry.figures import series, style
from psrl.telemetry.progress import duration
from psrl.telemetry.record import Incident, RunRecord
from psrl.telemetry.sections import build_sections

UNKNOWN = "–"
"""Shown where nothing tells."""


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    value: str
    note: str = ""


def render(template: str, **values: Any) -> str:
    """A template of this package; whatever is put in is text, not markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("psrl.telemetry", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def render_page(record: RunRecord) -> str:
    """The HTML of a run, finished or not; sections without data are left out."""
    zero_s = _zero_s(record)
    with style():
        sections = build_sections(record, zero_s)
    return render(
        "page.html.j2",
        title=record.config.get("trainer.experiment_name") or record.run_dir.name,
        status=record.summary["status"],
        cause=record.summary["cause"],
        lead=headline(record),
        where=str(record.run_dir),
        logs=str(record.run_dir / "logs"),
        cards=cards(record),
        sections=sections,
        incidents=[_incident_row(incident, zero_s) for incident in record.incidents],
        changed=[(key, _shown(value), _shown(default)) for key, value, default in record.changed()],
        config=[(key, _shown(value)) for key, value in record.config.items()],
        audit=record.audit,
    )


def headline(record: RunRecord) -> str:
    """What one would say of the run in two sentences."""
    summary = record.summary
    if not record.rows:
        return "No training step was finished."
    steps = summary["steps"]
    words = ["Simulated, not measured: no model was run."] if record.simulated else []
    if summary["reward_first"] is not None:
        first, last = f"{summary['reward_first']:.2f}", f"{summary['reward_last']:.2f}"
        moved = f"stayed at {last}" if first == last else f"went from {first} to {last}"
        words.append(f"The mean reward {moved} in {steps} steps." if steps > 1 else f"The one step had reward {last}.")
    if summary["max_staleness"] is not None:
        most, bound = summary["max_staleness"], record.config.get("psrl.staleness")
        allowed = "" if bound is None else f" ({bound} allowed)"
        old = f"more than {most} version{'s' if most != 1 else ''} old" if most else "old"
        words.append(f"No trained group was {old}{allowed}.")
    if summary["rollout_busy_fraction"] is not None:
        rollout, train = summary["rollout_busy_fraction"], summary["train_busy_fraction"]
        words.append(f"Instances decoded {rollout:.0%} of the time, the trainer worked {train:.0%} of it.")
    if not record.finished:
        how = {"failed": "failed", "interrupted": "was interrupted"}.get(summary["status"], "is not finished")
        words.insert(0, f"This run {how}: what follows is as far as it got.")
    return " ".join(words)


def cards(record: RunRecord) -> list[Card]:
    """The headline numbers, the most asked-for first; "–" where nothing tells."""
    s, bound = record.summary, record.config.get("psrl.staleness")
    asked = record.config.get("trainer.total_training_steps")
    means = series(record.rows, "staleness/mean")[1]
    rewards = f"{known(s['reward_first'], '.2f')} → {known(s['reward_last'], '.2f')}"
    stale = known(sum(means) / len(means) if means else None, ".2f")
    pull = f"pause; pull {seconds(s['pull_s_mean'])}, {s['transport'] or 'transport unknown'}"
    lost = f"{known(s['groups_dropped'], 'd')} dropped, {known(s['groups_requeued'], 'd')} requeued"
    return [
        Card("Reward", rewards, "first and last five steps"),
        Card("Steps", f"{s['steps']} / {asked}" if asked else str(s["steps"]), f"version {s['version']}"),
        Card("Speed", f"{big(s['tokens_per_s'])} tok/s", f"{known(s['samples_per_s'], '.1f')} samples/s trained"),
        Card("Step", seconds(s["step_s_mean"]), f"{span(s['wall_s'])} in all"),
        Card("Instances busy", known(s["rollout_busy_fraction"], ".0%"), "of the training time, decoding"),
        Card("Trainer busy", known(s["train_busy_fraction"], ".0%"), "not waiting for samples"),
        Card("Staleness", f"{stale} mean", f"{known(s['max_staleness'], 'd')} at most, {known(bound, 'd')} allowed"),
        Card("New weights", seconds(s["pause_s_mean"]), pull),
        Card("Groups trained", big(s["groups_trained"]), lost),
        Card("Incidents", str(len(record.incidents)), f"processes started again: {known(s['restarts'], 'd')}"),
    ]


def _zero_s(record: RunRecord) -> float:
    starts = [span.start_s for track in record.tracks for span in track.spans]
    return min(starts, default=record.incidents[0].time_s if record.incidents else 0.0)


def _incident_row(incident: Incident, zero_s: float) -> dict[str, str]:
    followed = "started again" if incident.restarting else "not started again"
    when = f"{duration(incident.time_s - zero_s)} after the start"
    return {"when": when, "who": incident.name or incident.role, "cause": incident.cause, "then": followed}


def known(value: Any, spec: str) -> str:
    """`value` by a format spec; UNKNOWN for None, as of the others."""
    return UNKNOWN if value is None else format(value, spec)


def big(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}".replace(",", " ")


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value * 1000:.0f} ms" if value < 0.9995 else f"{value:.2f} s"


def span(value: float | None) -> str:
    return UNKNOWN if value is None else duration(value)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
