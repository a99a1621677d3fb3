"""Text of a turn as its tokens arrive, stop strings, tool calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_parts import END, chat_tokenizer

from psrl.models.tokenizer import ChatTokenizer
from psrl.sessions.text import TextStream, TurnText
from psrl.sessions.tool_calls import split_tool_calls

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return chat_tokenizer(directory, None)


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 350), max_size=30))
def test_a_stream_of_tokens_gives_the_text_of_all_of_them(tokenizer: ChatTokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer)
    assert "".join([*(stream.add(i) for i in ids), stream.end()]) == tokenizer.decode(ids)


def test_half_a_character_waits_for_the_rest(tokenizer: ChatTokenizer) -> None:
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("日")
    assert len(ids) == 3 and [stream.add(i) for i in ids] == ["", "", "日"]
    assert (stream.add(ids[0]), stream.end(), stream.end()) == ("", "\N{REPLACEMENT CHARACTER}", "")


PIECES = st.lists(
    st.sampled_from(["a", "b", "ab", "<", "tool", "<tool_call>", "_call>", "日", " ", "STOP", "ST", "OP"])
)


@settings(max_examples=300)
@given(
    pieces=PIECES,
    stop=st.lists(st.sampled_from(["ab", "STOP", "ba", "日日", "P"]), max_size=3),
    hide=st.sampled_from(["", "<tool_call>"]),
)
def test_what_is_shown_is_never_taken_back(
    tokenizer: ChatTokenizer, pieces: list[str], stop: list[str], hide: str
) -> None:
    """All that has been shown is a beginning of the final text in front of the hidden mark, and the text ends before the
    stop string that is complete first."""
    ids = tokenizer.encode("".join(pieces))
    written = TurnText(tokenizer, stop, hide)
    shown, kept = "", 0
    for token in ids:
        kept += 1
        stopped = written.add(token)
        shown += written.fresh()
        if stopped:
            break
    else:
        written.end()
        shown += written.fresh()
    whole = tokenizer.decode(ids[:kept])
    cuts = [at for text in stop if (at := whole.find(text)) >= 0]
    assert written.stopped == bool(cuts)
    assert written.text == (whole[: min(cuts)] if cuts else whole)
    assert written.text.startswith(shown)
    if hide:
        assert hide not in shown
    if not hide and written.stopped:
        assert shown == written.text
    assert not any(text in tokenizer.decode(ids[: kept - 1]) for text in stop)


def test_only_what_may_become_a_stop_string_waits(tokenizer: ChatTokenizer) -> None:
    written = TurnText(tokenizer, ["###"], "<tool_call>")
    shown = []
    for token in tokenizer.encode("1 # 2 ## 3<<tool"):
        written.add(token)
        shown.append(written.fresh())
    assert "".join(shown) == "1 # 2 ## 3<"
    assert not written.add(END) and written.fresh() == ""


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


READ: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call", "no call", []),
    (call("f", a=1), "", [("f", '{"a": 1}')]),
    (f"x {call('f')}\n{call('g', s='ü')} y", "x \n y", [("f", "{}"), ("g", '{"s": "ü"}')]),
    ('<tool_call>\n{"name": "f"}\n</tool_call>', "", [("f", "{}")]),
]


@pytest.mark.parametrize(("text", "around", "calls"), READ)
def test_tool_calls_are_read(text: str, around: str, calls: list[tuple[str, str]]) -> None:
    content, found = split_tool_calls(text, "id")
    assert content == around
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert [c["id"] for c in found] == [f"id{i}" for i in range(len(calls))]


MALFORMED = [
    '<tool_call>{"name": "f", "arguments": {}}',
    "<tool_call>not json</tool_call>",
    '<tool_call>["f"]</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',
    "<tool_call>" + "[" * 20_000 + "</tool_call>",
    call("f") + "<tool_call>{</tool_call>",
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_call_stays_text(text: str) -> None:
    assert split_tool_calls(text, "id") == (text, [])
