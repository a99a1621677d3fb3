"""A wheel built from the tree works elsewhere: the configuration is inside, the front door opens."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked into a directory of its own (a wheel is a zip file of what gets installed)."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = out.glob("psrl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def python(installed: Path, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def test_the_package_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    result = python(installed, tmp_path, "-c", "import psrl; print(psrl.__file__)")
    assert Path(result.stdout.strip()).is_relative_to(installed)


def test_launch_starts_with_the_configuration_inside(installed: Path, tmp_path: Path) -> None:
    result = python(installed, tmp_path, "-m", "psrl.launch", "--cfg", "job", "preset=laptop", "psrl.staleness=2")
    assert result.returncode == 0, result.stderr
    assert "staleness: 2" in result.stdout and "chain_sum" in result.stdout


def test_launch_refuses_from_the_wheel_as_from_the_tree(installed: Path, tmp_path: Path) -> None:
    result = python(installed, tmp_path, "-m", "psrl.launch", "psrl.staleness=-1")
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1] == "psrl: psrl.staleness=-1 is refused: it must be at least 0."
    assert list(tmp_path.iterdir()) == []


def test_shipped_cost_models_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    result = python(installed, tmp_path, "-m", "psrl.cost_model", "show", "qwen_32b", "--key", "TP2_PP1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("step [s] = max(0.0250194, 0.0183826 + 0.0002446 n)")


@pytest.mark.parametrize(
    "name",
    [
        "telemetry/page.html.j2",
        "py.typed",
        "conf/config.yaml",
        "conf/preset/laptop.yaml",
        "conf/cost_model/qwen_7b.json",
    ],
)
def test_package_data_is_in_the_wheel(installed: Path, name: str) -> None:
    assert (installed / "psrl" / name).is_file()
