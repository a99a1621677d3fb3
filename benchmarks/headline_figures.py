"""The figures of `gpu_headline.py`: measured from run directories, predicted by the simulator, shown as a table and a plot."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

WARMUP = 3
"""First steps that no figure counts: caches fill, the pipeline fills."""
Row = dict[str, float]


def measure(run_dir: Path, gpus: int) -> Row:
    """Of a run, without the first steps and the last, which writes a checkpoint."""
    from psrl.telemetry.metrics import read_metrics
    from psrl.telemetry.summary import TRAIN_BUSY, busy_over
    from psrl.telemetry.timeline import BUSY, PULL, PUSH, SLEEP, SWITCH, WAKE
    from psrl.telemetry.timeline_read import by_name, read_timeline

    rows = read_metrics(run_dir / "metrics.jsonl")[WARMUP:-1]
    tracks = read_timeline(run_dir / "timeline")
    instances, trainers = by_name(tracks, "instance").values(), by_name(tracks, "trainer")
    pushed = [span.end_s for span in next(iter(trainers.values())) if span.name == PUSH]
    windows = [(pushed[WARMUP], pushed[-2])]
    pulls = [s for own in instances for s in own if s.name == PULL and s.start_s >= pushed[0]]
    switches = [s.seconds for own in instances for s in own if s.name == SWITCH and s.start_s >= pushed[0]]
    changes = [
        s
        for own in (*instances, *trainers.values())
        for s in own
        if s.name in (SLEEP, WAKE) and s.start_s >= windows[0][0]
    ]
    step_s = statistics.fmean(row["timing_s/step"] for row in rows)
    tokens = statistics.fmean(row["response_length/mean"] * row["training/num_samples"] for row in rows)
    return {
        "step_s": step_s,
        "tokens_s_gpu": tokens / step_s / gpus,
        "rollout": statistics.fmean(busy_over(spans, windows, (BUSY,)) for spans in instances),
        "train": statistics.fmean(busy_over(spans, windows, TRAIN_BUSY) for spans in trainers.values()),
        "lag": max(row["staleness/max"] for row in rows),
        "nbytes": max((s.attributes["nbytes"] for s in pulls), default=0),
        "pull_gb_s": statistics.median(s.attributes["nbytes"] / s.seconds / 1e9 for s in pulls) if pulls else 0.0,
        "pause_ms": 1e3 * statistics.median(switches) if switches else 0.0,
        "turns_s": sum(s.seconds for s in changes) / max(1, len(rows)),
        **released(run_dir),
    }


def released(run_dir: Path) -> Row:
    """GiB of GPU memory that each side gives the other for its turn (median of what its log says)."""
    found = {}
    for role in ("trainer", "instance"):
        logs = "".join(path.read_text(errors="replace") for path in (run_dir / "logs").glob(f"{role}-*.log"))
        said = re.findall(r"(-?[\d.]+) GiB of GPU memory are released|Sleep mode freed (-?[\d.]+) GiB", logs)
        if given := [one or other for one, other in said]:
            found[f"{role}_gives_gib"] = statistics.median(map(float, given))
    return found


def predict(
    rows: dict[str, Row], chosen: Mapping[str, list[str]], common: Sequence[str], out: Path, steps: int
) -> None:
    """Add the simulator's step time to each row that it can predict, where the synchronous run is there to calibrate on, or was once."""
    from psrl.config.command_line import prepare_overrides
    from psrl.config.errors import ConfigError
    from psrl.simulate.__main__ import prepare
    from psrl.simulate.build import simulate
    from psrl.simulate.calibrate import calibrate

    calibration = out / "calibration.json"
    try:
        if (out / "synchronous").exists() or not calibration.exists():
            calibrate(out / "synchronous").save(calibration)
    except ConfigError as error:
        print(f"nothing is predicted: {error}")
        return
    own = [
        f"simulation.calibration={calibration}",
        f"simulation.steps={steps}",
        f"simulation.warmup_steps={WARMUP}",
    ]
    for name in rows:
        try:
            config, simulation = prepare(prepare_overrides([*common, *chosen[name], *own]))
        except ConfigError as error:
            print(f"{name} is not predicted: {error}")
        else:
            rows[name]["predicted_s"] = simulate(config, simulation).step_s


def plain_copy(device: str, nbytes: int) -> float:
    """GB/s of a plain copy between the first and the last GPU (on a CPU: in memory), in a process that leaves the GPUs afterwards."""
    code = (
        "import sys, time, torch\n"
        "device, size = sys.argv[1], int(sys.argv[2])\n"
        "last = f'cuda:{torch.cuda.device_count() - 1}' if device == 'cuda' else 'cpu'\n"
        "a = torch.ones(size, dtype=torch.uint8, device='cuda:0' if device == 'cuda' else 'cpu')\n"
        "b = torch.empty(size, dtype=torch.uint8, device=last)\n"
        "best = 1e9\n"
        "for _ in range(6):\n"
        "    begun = time.perf_counter(); b.copy_(a)\n"
        "    _ = [torch.cuda.synchronize(d) for d in {a.device, b.device} if d.type == 'cuda']\n"
        "    best = min(best, time.perf_counter() - begun)\n"
        "print(size / best / 1e9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, device, str(max(1, nbytes))], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def table(rows: Mapping[str, Row], copy_gb_s: float) -> list[str]:
    base = rows.get("synchronous", next(iter(rows.values())))["step_s"]
    lines = [
        f"{'':22}{'step s':>9}{'steps/h':>9}{'speed-up':>10}{'predicted':>11}{'tokens/s/GPU':>14}{'rollout busy':>14}{'train busy':>12}{'ceiling':>9}"
        f"{'max lag':>9}{'pull GB/s':>11}{'of a copy':>11}{'pause ms':>10}"
    ]
    for name, row in rows.items():
        predicted = f"{row['predicted_s']:.2f}" if "predicted_s" in row else "-"
        lines.append(
            f"{name:22}{row['step_s']:9.2f}{3600 / row['step_s']:9.0f}{base / row['step_s']:10.2f}{predicted:>11}{row['tokens_s_gpu']:14.0f}{row['rollout']:14.2f}"
            f"{row['train']:12.2f}{max(row['rollout'], row['train']):9.2f}{row['lag']:9.0f}{row['pull_gb_s']:11.2f}"
            f"{row['pull_gb_s'] / copy_gb_s:11.2f}{row['pause_ms']:10.1f}"
        )
    for name, row in rows.items():
        if row["turns_s"] > 0:
            gives = ", ".join(
                f"{role} {row[f'{role}_gives_gib']:.1f} GiB"
                for role in ("trainer", "instance")
                if f"{role}_gives_gib" in row
            )
            lines.append(
                f"{name}: changing turns takes {row['turns_s']:.2f} s of a step; memory that is given away: {gives or 'see the log'}"
            )
    return [*lines, f"a plain copy of {max(row['nbytes'] for row in rows.values()) / 1e9:.2f} GB: {copy_gb_s:.1f} GB/s"]


def plot(rows: Mapping[str, Row], path: Path) -> None:
    """Step time by setting: measured, predicted, and what the busier side alone would take."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4))
    bars: list[tuple[str, str, list[float]]] = [
        ("measured", "#2563eb", [row["step_s"] for row in rows.values()]),
        ("predicted", "#93c5fd", [row.get("predicted_s", 0.0) for row in rows.values()]),
        (
            "the busier side alone",
            "#cbd5e1",
            [row["step_s"] * max(row["rollout"], row["train"]) for row in rows.values()],
        ),
    ]
    for i, (label, colour, heights) in enumerate(bars):
        places = [x + 0.27 * (i - 1) for x in range(len(rows))]
        axes.bar(places, heights, 0.25, label=label, color=colour)
    axes.set_xticks(range(len(rows)), list(rows), rotation=15, ha="right")
    axes.set_ylabel("seconds a step")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
