"""GPUs of a node: each rank and instance its own, none hidden from a neighbour, and too few of them said in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.deployment import one_host, one_node
from psrl.gpus import check_gpus, visible_gpus
from psrl.rundir.layout import RunDir
from psrl.supervisor.specs import share_children
from psrl.trainer import device

pytestmark = pytest.mark.unit


def config(ranks: int = 1, instances: int = 1, each: int = 1, device: str = "auto", engine: str = "torch") -> Config:
    made = Config()
    made.psrl.deployment.train_ngpus_per_node, made.psrl.deployment.n_rollout_instances = ranks, instances
    made.psrl.deployment.rollout_ngpus_per_node_per_instance = each
    made.psrl.deployment.rollout_ngpus_per_node = each * instances
    made.trainer.device, made.gen_actor_rollout_ref.rollout.name = device, engine
    made.trainer.logger = ["console"]
    return made


def shown(config: Config, gpus: tuple[str, ...], *, merged: bool) -> dict[str, list[str]]:
    """What each rank and instance sees, on one host with one or two supervisors."""
    shares = [one_node(config.psrl.deployment)] if merged else one_host(config.psrl.deployment)
    children = [c for share in shares for c in share_children(config, RunDir(Path("/run")), share, gpus)]
    seen = {c.name: c.env["CUDA_VISIBLE_DEVICES"] for c in children if "CUDA_VISIBLE_DEVICES" in c.env}
    return {name: value.split(",") if value else [] for name, value in seen.items()}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.booleans())
def test_everybody_has_its_own_first_and_sees_all(ranks: int, instances: int, each: int, spare: int, merged: bool):
    gpus = tuple(map(str, range(ranks + instances * each + spare)))
    seen = shown(config(ranks, instances, each), gpus, merged=merged)
    own = [seen[f"trainer-{r}"][:1] for r in range(ranks)] + [seen[f"instance-{i}"][:each] for i in range(instances)]
    assert [name for names in own for name in names] == list(gpus[: ranks + instances * each])
    assert all(sorted(names) == sorted(gpus) for names in seen.values())


def test_too_few_are_shared_by_instances_and_unused_on_the_cpu():
    assert shown(config(1, 1), ("7",), merged=False) == {"trainer-0": ["7"], "instance-0": ["7"]}
    assert shown(config(1, 1, device="cpu"), ("4", "7"), merged=False) == {"trainer-0": [], "instance-0": ["4", "7"]}
    assert shown(config(2, 1), (), merged=True) == {"trainer-0": [], "trainer-1": []}
    shared = check_gpus(config(engine="vllm"), ("0",), one_host=True)
    assert len(shared) == 1 and "share the 1 GPUs" in shared[0] and "trainer.gpu_memory_fraction" in shared[0]
    assert check_gpus(config(engine="vllm"), ("0", "1"), one_host=True) == []
    assert check_gpus(config(engine="torch"), ("0",), one_host=True) == []


@pytest.mark.parametrize(("device", "gpus"), [("cuda", ()), ("cuda", ("0",)), ("auto", ("0",))])
def test_ranks_without_a_gpu_each_are_refused(device: str, gpus: tuple[str, ...]):
    with pytest.raises(ConfigError, match=rf"trainer.device={device} .* this node has {len(gpus)} for 2 ranks"):
        check_gpus(config(2, device=device), gpus, one_host=True)
    assert check_gpus(config(2), (), one_host=True) == check_gpus(config(2, device="cpu"), gpus, one_host=True) == []


@pytest.mark.parametrize(
    ("engine", "device", "gpus", "missing"),
    [("torch", "auto", ("0",), "embedded"), ("vllm", "cpu", ("0",), "trainer.device=cpu"), ("vllm", "auto", (), "has none")],
)  # fmt: skip
def test_weights_go_from_gpu_to_gpu_only_where_both_are(engine: str, device: str, gpus: tuple[str, ...], missing: str):
    asked = config(engine=engine, device=device)
    asked.psrl.weights.route = "vram"
    with pytest.raises(ConfigError, match=rf"psrl.weights.route=vram .*{missing}.* use auto"):
        check_gpus(asked, gpus, one_host=True)
    asked = config(engine="vllm")
    asked.psrl.weights.route = "vram"
    assert len(check_gpus(asked, ("0",), one_host=True)) == 1


@pytest.mark.parametrize(
    ("value", "names"), [("0,1", ("0", "1")), ("", ()), ("NoDevFiles", ()), ("2,-1,3", ("2",)), ("MIG-a, 1", ("MIG-a", "1"))]
)  # fmt: skip
def test_what_an_environment_shows(value: str, names: tuple[str, ...], tmp_path: Path):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


@pytest.mark.parametrize("build", [None, "13.0"])
def test_cuda_by_name_without_cuda_is_one_sentence(build: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device.torch.version, "cuda", build)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    why = "this PyTorch is built without CUDA" if build is None else "PyTorch finds no usable GPU"
    with pytest.raises(ConfigError, match=f"trainer.device=cuda but {why}.*: set trainer.device=cpu"):
        device.take_device("cuda", 1.0)
    assert device.take_device("auto", 1.0) == device.take_device("cpu", 1.0) == device.torch.device("cpu")
