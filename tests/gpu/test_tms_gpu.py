"""GPU memory of one turn: really released, back with its content, and what stays outside stays readable."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys

import pytest
import torch
from fsdp2_ranks import log_probs_by_row, make_actor, make_model, settings, train_step
from runs import ONE_INSTANCE, Run

from psrl.colocate.gpu_lock import TurnError
from psrl.colocate.memory import HostCopies, Memory, SaverRegion, free_bytes, wait_for_memory
from psrl.telemetry.metrics import read_metrics
from psrl.trainer.backends.make import make_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

GIB = 2**30
SAVER = pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="no torch-memory-saver")
NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl")), reason="nixl is not installed"
)


@pytest.fixture(autouse=True)
def alone():
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("kind", ["host", pytest.param("saver", marks=SAVER)])
def test_two_gib_go_and_come_back(kind):
    held: list[torch.Tensor] = []
    memory: Memory = SaverRegion() if kind == "saver" else HostCopies(lambda: held)
    with memory.region():
        held.append(torch.randint(0, 2**31, (2 * GIB // 8,), dtype=torch.int64, device="cuda"))
    view = held[0][1000:2000]
    outside = torch.arange(1000, device="cuda")
    expected, address, before = held[0][::4097].cpu(), held[0].data_ptr(), free_bytes()
    part = view.cpu()
    for _ in range(2):
        memory.pause()
        assert free_bytes() - before > 1.9 * GIB
        assert int(outside.sum()) == 499500, "what was allocated outside is still there"
        memory.resume()
        assert torch.equal(held[0][::4097].cpu(), expected) and torch.equal(view.cpu(), part)
    if kind == "saver":
        assert held[0].data_ptr() == address


@pytest.mark.parametrize("kind", ["host", pytest.param("saver", marks=SAVER)])
@pytest.mark.parametrize("actor", [{}, {"mixed_precision": "bfloat16"}], ids=["whole", "sharded"])
def test_a_trainer_goes_on_after_its_pause(kind, actor):
    """Same log-probs, and the next step is that of a trainer which was never paused."""

    def make():
        return make_backend(
            make_model(seed=0), make_actor(**settings({"actor": actor})), temperature=0.8, device="cuda"
        )

    memory: Memory = SaverRegion() if kind == "saver" else HostCopies(lambda: paused.resident_tensors())
    with memory.region():
        paused = make()
    steady = make()
    for step in range(3):
        assert train_step(paused, step) == pytest.approx(train_step(steady, step), rel=1e-5)
        memory.pause()
        memory.resume()
    got, expected = log_probs_by_row(paused), log_probs_by_row(steady)
    for row, values in expected.items():
        torch.testing.assert_close(got[row], values, rtol=0, atol=1e-5)


def test_what_cannot_fit_is_told_with_the_numbers():
    with pytest.raises(TurnError, match=r"are needed for this turn but .* GiB of the GPU are free"):
        wait_for_memory(10**15, limit_s=0.2)


@pytest.mark.parametrize("chosen", ["null", pytest.param("train", marks=SAVER)])
def test_a_run_in_turns_learns_what_it_learns_without_and_releases_memory(chosen, tmp_path):
    """The trainer on the GPU, the embedded engine on the CPU: the same turns as with an engine that needs the GPU."""
    common = {
        **ONE_INSTANCE,
        "trainer.device": "cuda",
        "psrl.staleness": 0,
        "train_actor_rollout_ref.actor.use_torch_compile": "False",
        "model.tiny.warm_start_steps": 0,
        "trainer.total_training_steps": 4,
    }
    plain, turns = (Run(tmp_path / name, common) for name in ("plain", "turns"))
    turns.overrides |= {"psrl.colocate": True, "psrl.tms.range": chosen}
    try:
        for run in (plain, turns):
            assert run.launch() == 0, run.story()
        losses = [[row["actor/pg_loss"] for row in read_metrics(run.dir.metrics)] for run in (plain, turns)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3, abs=1e-5)
        assert turns.log("trainer-0").count("GiB of GPU memory are released") == 4
        turns.audit()
    finally:
        plain.close()
        turns.close()


READER = """
import sys, torch
from nixl_cu13._api import nixl_agent, nixl_agent_config
agent = nixl_agent("reader", nixl_agent_config(backends=["UCX"]))
name = agent.add_remote_agent(bytes.fromhex(sys.stdin.readline().strip()))
name = name.decode() if isinstance(name, bytes) else name
address, size = map(int, sys.stdin.readline().split())
own = torch.zeros(size, dtype=torch.uint8, device="cuda")
agent.register_memory([(own.data_ptr(), size, 0, "")], mem_type="VRAM")
local = agent.get_xfer_descs([(own.data_ptr(), size, 0)], mem_type="VRAM")
remote = agent.get_xfer_descs([(address, size, 0)], mem_type="VRAM")
print("ready", flush=True)
for _ in range(2):
    sys.stdin.readline()
    own.zero_()
    torch.cuda.synchronize()
    handle = agent.initialize_xfer("READ", local, remote, name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    torch.cuda.synchronize()
    print(state, int(own.long().sum()), flush=True)
    agent.release_xfer_handle(handle)
"""


@SAVER
@NIXL
def test_a_published_buffer_is_read_while_the_trainer_is_paused(monkeypatch):
    """The transfer buffer is a plain allocation: its registration holds over pause and resume, never made again."""
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    memory = SaverRegion()
    with memory.region():
        weights = torch.full((GIB,), 3, dtype=torch.uint8, device="cuda")
    slot = torch.full((2**24,), 7, dtype=torch.uint8, device="cuda")
    agent = nixl_agent("trainer", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(slot.data_ptr(), slot.nbytes, 0, "")], mem_type="VRAM")
    with subprocess.Popen(
        [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        reader.stdin.write(f"{agent.get_agent_metadata().hex()}\n{slot.data_ptr()} {slot.numel()}\n")
        reader.stdin.flush()
        assert "ready\n" in iter(reader.stdout.readline, "")  # NIXL says things first
        for value, change in ((7, memory.pause), (9, memory.resume)):
            change()
            slot.fill_(value)
            torch.cuda.synchronize()
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"DONE {value * slot.numel()}\n"
    assert int(weights[::4096].long().sum()) == 3 * (GIB // 4096)
