import json

import pytest

from psrl.config.errors import ConfigError
from psrl.cost_model.__main__ import main
from psrl.cost_model.files import load_cost_model, load_cost_models, parallel_key, save_cost_model, shipped_cost_models
from psrl.protocol.cost_model import CostModel

pytestmark = pytest.mark.unit

FIELDS = ("other_threshold", "other_latency_b", "other_latency_k", "attn_latency_b", "attn_latency_k")
PUBLISHED = {
    ("qwen_7b", "TP1_PP1"): (0.0064, 0.0027, 0.0001231, 0.0028, 3.35e-08),
    ("qwen_7b", "TP2_PP1"): (0.0073, 0.0053, 0.000085, 0.0007, 1.879e-08),
    ("qwen_14b", "TP1_PP1"): (0.012303, 0.0049075, 0.0002441, 0.0019663689, 1.165e-07),
    ("qwen_32b", "TP1_PP1"): (0.0259592, 0.0181759, 0.0002838, 1e-10, 5.7e-08),
    ("qwen_32b", "TP2_PP1"): (0.0250194, 0.0183826, 0.0002446, 2e-10, 6.3e-08),
    ("qwen_moe_30b", "TP1_PP1"): (0.0115108, 0.0097899, 0.0001249, 0.0008671926, 7.28e-08),
}
SMALL = {"TP1_PP1": dict.fromkeys(FIELDS, 0.5)}


def test_shipped_models_hold_the_published_values():
    found = {(name, key): model for name in shipped_cost_models() for key, model in load_cost_models(name).items()}
    assert found == {at: CostModel(**dict(zip(FIELDS, values, strict=True))) for at, values in PUBLISHED.items()}


@pytest.mark.parametrize(
    ("num_seqs", "kv_tokens", "milliseconds"),
    [
        # qwen_7b TP1: max(6.4, 2.7 + 0.1231 n) + 2.8 + 3.35e-5 kv [ms]; the regimes meet at n = 30.06
        (1, 0, 9.2),
        (30, 0, 9.2),
        (31, 0, 2.7 + 3.8161 + 2.8),
        (64, 0, 2.7 + 7.8784 + 2.8),
        (64, 100_000, 2.7 + 7.8784 + 2.8 + 3.35),
        (1, 100_000, 9.2 + 3.35),
    ],
)
def test_latency_by_hand(num_seqs, kv_tokens, milliseconds):
    model = load_cost_model("qwen_7b", parallel_key())
    assert model.latency_s(num_seqs, kv_tokens) * 1e3 == pytest.approx(milliseconds, rel=1e-9)
    assert model.throughput(num_seqs, kv_tokens) == pytest.approx(num_seqs / milliseconds * 1e3, rel=1e-9)


def test_a_saved_model_comes_back_and_other_entries_stay(tmp_path):
    path = tmp_path / "made" / "mine.json"
    one, two = load_cost_model("qwen_7b", "TP1_PP1"), load_cost_model("qwen_7b", "TP2_PP1")
    save_cost_model(path, "TP2_PP1", one)
    save_cost_model(path, "TP1_PP1", one)
    save_cost_model(path, "TP2_PP1", two)
    assert load_cost_models(path) == {"TP1_PP1": one, "TP2_PP1": two}
    assert [p.name for p in path.parent.iterdir()] == ["mine.json"]


def broken(**change):
    return {"TP1_PP1": {**SMALL["TP1_PP1"], **change}}


def lacking(field):
    return {"TP1_PP1": {k: v for k, v in SMALL["TP1_PP1"].items() if k != field}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([1], "must be an object with at least one entry"),
        ({}, "must be an object with at least one entry"),
        ({"tp1": SMALL["TP1_PP1"]}, 'entry tp1, is not named like "TP1_PP1"'),
        ({"TP1_PP1": 3}, "entry TP1_PP1, must be an object with the numbers other_threshold, other_latency_b"),
        (lacking("attn_latency_k"), "lacks attn_latency_k"),
        (broken(prefill=1.0), "unknown field prefill"),
        (broken(attn_latency_b="fast"), "attn_latency_b='fast'"),
        (broken(other_latency_k=-1e-9), "other_latency_k=-1e-09: it must be a number of seconds, at least 0"),
        (broken(other_latency_b=float("nan")), "other_latency_b=nan"),
        (broken(other_latency_b=True), "other_latency_b=True"),
        ({"TP1_PP1": dict.fromkeys(FIELDS, 0)}, "no time at all"),
    ],
)
def test_a_malformed_file_is_refused_by_field(tmp_path, content, says):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as refusal:
        load_cost_model(path, "TP1_PP1")
    assert says in str(refusal.value) and str(path) in str(refusal.value)


def test_what_is_not_there_is_refused_with_what_is(tmp_path):
    with pytest.raises(ConfigError, match=r"qwen_8b is neither .* qwen_14b, qwen_32b, qwen_7b, qwen_moe_30b"):
        load_cost_model("qwen_8b", "TP1_PP1")
    with pytest.raises(ConfigError, match="qwen_7b has no entry TP4_PP1, only TP1_PP1, TP2_PP1"):
        load_cost_model("qwen_7b", "TP4_PP1")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ConfigError, match=r"text\.json is not JSON"):
        load_cost_model(tmp_path / "text.json", "TP1_PP1")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["fit", "--out", "{tmp}/a.json", "--key", "tp1"], "The key tp1 is refused"),
        (["fit", "--out", "{tmp}/a.json", "--hold-out", "1"], "--hold-out 1.0 is refused"),
        (["fit", "--out", "{tmp}/a.json", "--num-seqs", "4"], "at least two different values"),
        (["fit", "--out", "{tmp}/a.json", "--model", "{tmp}/none"], "is not a directory"),
        (["show", "qwen_9b"], "neither a file nor a shipped name"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, capsys, argv, says):
    assert main([arg.format(tmp=tmp_path) for arg in argv]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_show_prints_and_plots(tmp_path, capsys):
    plot = tmp_path / "m.svg"
    assert main(["show", "qwen_7b", "--num-seqs", "1", "64", "--tokens-per-seq", "1000", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step [s] = max(0.0064, 0.0027 + 0.0001231 n) + 0.0028 + 3.35e-08 kv_tokens"
    assert lines[2].split() == ["1", "1000", "9.234", "108.3"]
    assert lines[3].split() == ["64", "64000", "15.522", "4123.1"]
    assert b"<svg" in plot.read_bytes()
