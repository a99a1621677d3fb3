"""A checkpoint becomes a directory that transformers loads, with the very logits of what was trained."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import cast

import pytest
import torch
from fsdp2_ranks import make_actor, save
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from psrl import export as exporting
from psrl.algorithms.sequences import Sequences
from psrl.config.compose import compose_config
from psrl.config.schema import Config
from psrl.export import ExportError, export, main
from psrl.models.load import load_causal_lm
from psrl.models.resolve import resolve_model
from psrl.rollout.engines.weight_set import as_in_files
from psrl.rundir.layout import RunDir
from psrl.setup_run import lay_out
from psrl.trainer.backends.base import MicroBatch
from psrl.trainer.backends.core import BackendCore
from psrl.trainer.backends.make import make_backend

pytestmark = pytest.mark.process

STRATEGIES = [
    "fsdp2",
    pytest.param(
        "megatron",
        marks=pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
    ),
]


def trained_run(path: Path, model: Path, strategy: str = "fsdp2") -> tuple[RunDir, BackendCore]:
    """A run directory with a checkpoint of step 3, and the backend that wrote it."""
    run_dir = RunDir(path)
    run_dir.create()
    composed = compose_config(["preset=laptop", "task=chain_sum", "model=hf", f"model.path={model}"])
    config = cast(Config, OmegaConf.to_object(composed))
    lay_out(run_dir, config)
    resolve_model(config, run_dir)
    backend = make_backend(load_causal_lm(model, "float32"), make_actor(strategy=strategy), temperature=1.0)
    ids = torch.arange(24).view(2, 12)
    full = torch.ones(2, 12)
    mask = ids % 12 > 3
    batch = MicroBatch(ids, full.bool(), mask, full, full, Sequences.of_rows(mask))
    backend.update([batch], lambda log_probs, b: (-(log_probs * b.advantages).sum(), {"n": log_probs.detach().sum()}))
    save(backend, run_dir.checkpoints, 3)
    return run_dir, backend


def log_probs(backend: BackendCore, ids: torch.Tensor) -> torch.Tensor:
    full = torch.ones(ids.shape)
    mask = full.bool()
    mask[:, 0] = False
    return backend.log_probs(MicroBatch(ids, full.bool(), mask, full, full, Sequences.of_rows(mask)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("file_bytes", [10**9, 40_000])
def test_transformers_loads_what_was_trained(tiny_model, tmp_path, monkeypatch, strategy, file_bytes):
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", file_bytes)
    run_dir, backend = trained_run(tmp_path / "run", tiny_model, strategy)
    out = export(run_dir)
    assert out == run_dir.path / "export" / "step_3"
    assert len(list(out.glob("*.safetensors"))) > 1 if file_bytes < 10**6 else (out / "model.safetensors").is_file()

    loaded = AutoModelForCausalLM.from_pretrained(out, attn_implementation="sdpa")
    ids = torch.randint(0, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = loaded(ids).logits
        before = load_causal_lm(tiny_model, "float32")(ids).logits
        assert not torch.allclose(logits, before, atol=1e-3)
    again = make_backend(load_causal_lm(out, "float32"), make_actor(), temperature=1.0)
    if strategy == "fsdp2":
        with torch.no_grad():
            assert torch.equal(logits, backend._model(ids).logits)
        assert torch.equal(log_probs(again, ids), log_probs(backend, ids))
    torch.testing.assert_close(log_probs(again, ids), log_probs(backend, ids), rtol=0, atol=1e-5)

    text = "12 + 30 = 42"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(tiny_model)(text)
    theirs, ours = (json.loads((d / "config.json").read_text()) for d in (tiny_model, out))
    assert ours.pop("dtype") == "float32"
    assert ours == {k: v for k, v in theirs.items() if k not in ("dtype", "torch_dtype")}
    assert list(tmp_path.rglob("*.tmp")) == []


def test_another_dtype_and_directory(tiny_model, tmp_path, capsys):
    run_dir, backend = trained_run(tmp_path / "run", tiny_model)
    out = tmp_path / "elsewhere" / "model"
    assert main([str(run_dir.path), "--step", "3", "--out", str(out), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    weights = dict(loaded.named_parameters())
    assert all(torch.equal(weights[s.name], s.local.bfloat16()) for s in backend.weight_shards())


def test_refusals(tiny_model, tmp_path, capsys):
    with pytest.raises(ExportError, match=r"nothing is no run: it has no config\.yaml"):
        export(RunDir(tmp_path / "nothing"))
    run_dir, _ = trained_run(tmp_path / "run", tiny_model)
    with pytest.raises(ExportError, match=r"no complete checkpoint of step 4; there are those of 3"):
        export(run_dir, step=4)
    with pytest.raises(ExportError, match=r"--dtype fp8 is refused: allowed are float32 and bfloat16"):
        export(run_dir, dtype="fp8")
    with pytest.raises(ExportError, match=r"exists already: give another directory with --out"):
        export(run_dir, out=tmp_path)
    (run_dir.checkpoints / "step_3" / "complete.json").unlink()
    assert main([str(run_dir.path)]) == 2
    assert "has no complete checkpoint yet" in capsys.readouterr().err
    assert not (run_dir.path / "export").exists()


def test_a_model_whose_files_join_what_transformers_has_apart_is_refused():
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 16,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("sarvam_moe", **small))
    with pytest.raises(
        ValueError,
        match=r"files of sarvam_moe models have one tensor .*query_key_value.* where transformers has several",
    ):
        list(as_in_files(model, model.state_dict().items()))
