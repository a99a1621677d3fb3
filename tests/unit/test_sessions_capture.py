"""Token capture: what the engine saw and made is what trains, token for token, whatever the client does with its history."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_parts import ADD, END, TEMPLATES, THINKING, call_text, chat_tokenizer, turn_tokens, user
from transformers import AutoTokenizer

from psrl.models.tiny_tokenizer import CHAT_TEMPLATE, make_tokenizer, save_tokenizer
from psrl.models.tokenizer import ChatTokenizer, TransformersTokenizer, load_tokenizer
from psrl.sessions.capture import EndedTurn, SessionCapture, TurnStart
from psrl.sessions.errors import RefusedRequestError
from psrl.sessions.turns import TrainingArrays, TurnTokens

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    directory: Path = tmp_path_factory.mktemp("tokenizers")
    made = {name: chat_tokenizer(directory / name, template) for name, template in TEMPLATES.items()}
    (directory / "tiny").mkdir()
    save_tokenizer(make_tokenizer(["3 + 4 ="] * 4), directory / "tiny", 64)
    return made | {"tiny": load_tokenizer(directory / "tiny")}


def answer(capture: SessionCapture, start: TurnStart, text: str, finish: str = "stop") -> EndedTurn:
    """The model writes `text` and, unless it is cut short, the end of its turn."""
    ids = capture.tokenizer.encode(text) + ([END] if finish == "stop" else [])
    return capture.end_turn(start, turn_tokens(ids, finish))


def everything(sample: TrainingArrays) -> list[int]:
    return sample.prompt_ids + sample.response_ids


@pytest.mark.parametrize("name", ["default_system", "alternating", "tiny"])
def test_a_conversation_is_tokenised_as_if_it_had_been_rendered_whole(
    tokenizers: dict[str, ChatTokenizer], name: str
) -> None:
    """Where a template shows earlier turns as they were written and the model writes what the tokenizer would, keeping its
    tokens and inserting the glue once gives exactly the ids of the whole conversation."""
    capture = SessionCapture(tokenizers[name])
    messages = (
        [user("What is the sum?")] if name == "alternating" else [{"role": "system", "content": "S"}, user("1 2")]
    )
    for i in range(5):
        start = capture.begin_turn(messages)
        assert list(start.prompt_ids) == capture.tokenizer.encode_chat(messages)
        text = f"{' ' if name == 'alternating' else ''}The tool says {i}"
        ended = answer(capture, start, text + (" " if name == "alternating" else ""))
        assert (ended.message["content"].strip(), ended.finish_reason) == (text.strip(), "stop")
        messages += [ended.message, user(f"and {i} more?")]
    assert len(capture.branches()) == 1 and capture.num_turns == 5


@pytest.mark.parametrize("name", ["thinking", "tiny"])
def test_ten_turns_with_tools(tokenizers: dict[str, ChatTokenizer], name: str) -> None:
    """The engine's prompts and tokens, put together, are the training sample; thinking stays though the template drops it."""
    capture = SessionCapture(tokenizers[name])
    messages: list[dict[str, Any]] = [user("What is the sum?")]
    seen: list[tuple[list[int], list[int]]] = []
    for i in range(10):
        start = capture.begin_turn(messages, [ADD])
        text = f"<think>\nhm {i}\n</think>\n\n" + (call_text("add", a=i, b=1) if i % 3 else f"So {i}")
        ended = answer(capture, start, text)
        seen.append((list(start.prompt_ids), list(ended.turn.token_ids)))
        calls = ended.message.get("tool_calls", [])
        assert ended.finish_reason == ("tool_calls" if i % 3 else "stop") and len(calls) == (i % 3 > 0)
        messages.append(ended.message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": f"{i} is it"} for call in calls] or [
            user("Go on")
        ]
    for (prompt, made), (following, _) in pairwise(seen):
        assert following[: len(prompt) + len(made)] == prompt + made
    (branch,) = capture.branches()
    sample = capture.arrays(branch)
    assert everything(sample) == seen[-1][0] + seen[-1][1] and sample.prompt_ids == seen[0][0]
    trained = [token for token, kept in zip(sample.response_ids, sample.response_mask, strict=True) if kept]
    assert trained == [token for _, made in seen for token in made]
    assert sample.rollout_log_probs == [
        -token / 8 if kept else 0.0 for token, kept in zip(sample.response_ids, sample.response_mask, strict=True)
    ]
    covered = [i for span in sample.spans for i in range(span.start, span.end)]
    assert covered == [i for i, kept in enumerate(sample.response_mask) if kept]
    shown = capture.tokenizer.decode_batch([everything(sample)], skip_special_tokens=False)[0]
    assert all(f"hm {i}" in shown for i in range(10)) and shown.count("Adds two numbers.") == 1


GLUE = {
    "thinking": "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n",
    "default_system": "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n",
    "alternating": "[INST] More [/INST]",
    "plain": "\nMore",
    "tiny": "<|user|>More<|end|><|assistant|>",
}
CLOSED = {
    "thinking": "<|im_end|>",
    "default_system": "<|im_end|>",
    "alternating": " <|im_end|>",
    "plain": "",
    "tiny": "<|end|>",
}


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_glue_closes_the_turn_only_where_the_model_has_not(
    tokenizers: dict[str, ChatTokenizer], name: str, finish: str
) -> None:
    capture = SessionCapture(tokenizers[name])
    ended = answer(capture, capture.begin_turn([user("Hi")]), "Well", finish)
    assert ended.finish_reason == finish
    start = capture.begin_turn([user("Hi"), ended.message, user("More")])
    assert start.parent is ended.turn
    glue = capture.tokenizer.decode_batch([list(start.added_ids)], skip_special_tokens=False)[0]
    assert glue == (GLUE[name] if finish == "stop" else CLOSED[name] + GLUE[name])


def as_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"] or ""}]}


def as_sdk(message: dict[str, Any]) -> dict[str, Any]:
    return {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "annotations": []} | message


def stripped(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": (message["content"] or "").strip()}


def respaced(message: dict[str, Any]) -> dict[str, Any]:
    message = copy.deepcopy(message)
    for i, call in enumerate(message["tool_calls"]):
        call["id"] = f"mine{i}"
        call["function"]["arguments"] = '{ "b":2,\n"a":1 }'
    return message


@pytest.mark.parametrize("sent", [as_parts, as_sdk, stripped, respaced])
def test_our_message_is_recognised_however_the_client_writes_it(
    tokenizers: dict[str, ChatTokenizer], sent: Any
) -> None:
    capture = SessionCapture(tokenizers["thinking"])
    ended = answer(capture, capture.begin_turn([user("Hi")], [ADD]), "\nSo " + call_text("add", a=1, b=2))
    start = capture.begin_turn([user("Hi"), sent(ended.message), {"role": "tool", "content": "3"}], [ADD])
    assert start.parent is ended.turn


def test_an_edited_history_is_a_new_branch_from_the_last_turn_that_is_the_same(
    tokenizers: dict[str, ChatTokenizer],
) -> None:
    capture = SessionCapture(tokenizers["thinking"])
    messages = [user("a")]
    turns = []
    for text in ("one", "two", "three"):
        turns.append(answer(capture, capture.begin_turn(messages), text))
        messages += [turns[-1].message, user("b")]
    before = capture.arrays(capture.branches()[0])
    edited = [*messages[:3], {"role": "assistant", "content": "TWO"}, user("c")]
    start = capture.begin_turn(edited)
    assert start.parent is turns[0].turn and "TWO" in capture.tokenizer.decode(list(start.added_ids))
    fork = answer(capture, start, "four")
    anew = answer(capture, capture.begin_turn([user("summary")]), "five")
    assert capture.branches() == [turns[2].turn, fork.turn, anew.turn] and capture.trained_branch() is anew.turn
    assert capture.arrays(turns[2].turn) == before
    assert everything(capture.arrays(fork.turn)) == [*start.prompt_ids, *fork.turn.token_ids]
    assert (
        capture.begin_turn([user("a"), turns[0].message, user("b")], [ADD]).parent is None
    )  # other tools: another prompt


def test_a_turn_that_fails_leaves_no_trace_and_may_come_again(tokenizers: dict[str, ChatTokenizer]) -> None:
    capture = SessionCapture(tokenizers["thinking"])
    first = answer(capture, capture.begin_turn([user("a")]), "one")
    messages = [user("a"), first.message, user("b")]
    failed = capture.begin_turn(messages)
    with pytest.raises(ValueError, match="log-probs"):
        capture.end_turn(failed, TurnTokens([5, 6], [-1.0], [], "stop"))
    assert capture.branches() == [first.turn] and capture.num_turns == 1
    again = capture.begin_turn(messages)
    assert (again.parent, again.prompt_ids, again.history) == (failed.parent, failed.prompt_ids, failed.history)
    second = answer(capture, again, "two")
    assert capture.branches() == [second.turn]


def test_two_answers_to_one_question_are_two_branches_with_one_prompt(tokenizers: dict[str, ChatTokenizer]) -> None:
    capture = SessionCapture(tokenizers["default_system"])
    ends = [answer(capture, capture.begin_turn([user("a")]), text) for text in ("one", "two")]
    assert capture.branches() == [end.turn for end in ends]
    for end in ends:
        assert capture.begin_turn([user("a"), end.message, user("b")]).parent is end.turn


def test_a_template_that_cannot_go_on_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It shows the last message only."""
    capture = SessionCapture(chat_tokenizer(tmp_path, "{{ messages[-1].content }}"))
    ended = answer(capture, capture.begin_turn([user("a")]), "one")
    start = capture.begin_turn([user("a"), ended.message, user("b")])
    assert start.parent is None and capture.tokenizer.decode(list(start.prompt_ids)) == "b"


def test_the_mark_is_never_part_of_the_conversation(tokenizers: dict[str, ChatTokenizer]) -> None:
    capture = SessionCapture(tokenizers["default_system"])
    ended = answer(capture, capture.begin_turn([user("TURN0HERE")]), "TURN1HERE")
    start = capture.begin_turn([user("TURN0HERE"), ended.message, user("TURN2HERE TURN0HERE")])
    assert capture.tokenizer.decode(list(start.added_ids)) == "\nuser\nTURN2HERE TURN0HERE\nassistant\n"


CALLED: list[dict[str, Any]] = [
    user("What is the sum?"),
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": "3"},
]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, THINKING])
@pytest.mark.parametrize("messages", [CALLED, [{"role": "system", "content": "S"}, *CALLED], CALLED[:1]])
@pytest.mark.parametrize("tools", [[], [ADD]])
def test_tools_are_rendered_as_transformers_renders_them(
    tmp_path: Path, template: str, messages: list[Any], tools: list[Any]
) -> None:
    ours, same = chat_tokenizer(tmp_path, template), TransformersTokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (True, False):
        text = theirs.apply_chat_template(messages, tools=tools or None, add_generation_prompt=prompt, tokenize=False)
        assert ours.render_chat(messages, tools, prompt) == same.render_chat(messages, tools, prompt) == text
    assert ours.encode_chat(messages) == same.encode_chat(messages)


MALFORMED: list[tuple[Any, str]] = [
    ([], "messages is empty"),
    (["hi"], r"messages\[0\] must be an object"),
    ([{"role": "robot", "content": ""}], "role='robot' is unknown: allowed are system"),
    ([user("a"), {"role": "tool"}], r"messages\[1\].content is missing"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "part of type 'image_url'"),
    ([{"role": "user", "content": 3}], "must be a string or a list"),
    ([{"role": "user", "content": "", "tool_calls": [{}]}], "only an assistant"),
    ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "a function call with a name"),
    ([user("a"), user("b")], "roles must alternate"),
]


@pytest.mark.parametrize(("messages", "reason"), MALFORMED)
def test_a_malformed_conversation_is_refused(tokenizers: dict[str, ChatTokenizer], messages: Any, reason: str) -> None:
    with pytest.raises(RefusedRequestError, match=reason):
        SessionCapture(tokenizers["alternating"]).begin_turn(messages)


STEP = st.tuples(
    st.sampled_from(["go_on", "go_on", "go_on", "edit", "again", "fail", "cut"]),
    st.integers(0, 5),
    st.lists(st.integers(3, 399), max_size=6),
)


@settings(max_examples=60)
@given(name=st.sampled_from(["thinking", "default_system", "tiny"]), steps=st.lists(STEP, max_size=14))
def test_every_branch_is_what_the_engine_saw_and_made(
    tokenizers: dict[str, ChatTokenizer], name: str, steps: list[tuple[str, int, list[int]]]
) -> None:
    """Random walks over a tree of conversations, with random bytes from the model: each branch that was ever finished is still
    exactly its last prompt and what was made of it, each trained token is trained where it was sampled."""
    tokenizer = tokenizers[name]
    capture = SessionCapture(tokenizer)
    done: list[tuple[list[dict[str, Any]], list[int], set[int]]] = []  # messages, all ids, where the model wrote
    asked: list[dict[str, Any]] = [user("What?")]
    for kind, pick, made in steps:
        made = [i % tokenizer.vocab_size for i in made]
        messages, ids, wrote = done[pick % len(done)] if done else ([], [], set())
        if kind != "again":
            asked = [*messages, user(f"q{pick}")]
        if kind == "edit" and messages:
            asked = [*messages[:-1], {"role": "assistant", "content": f"edited {len(done)}"}, user("so?")]
        start = capture.begin_turn(asked)
        told = [told for told, _, _ in done]
        if kind in ("go_on", "cut") and done:
            assert list(start.prompt_ids[: len(ids)]) == ids or told.count(messages) > 1
            assert start.parent is not None
        if kind == "fail":
            continue
        tokens = turn_tokens(made if kind == "cut" else [*made, END], "length" if kind == "cut" else "stop")
        ended = capture.end_turn(start, tokens)
        before = len(start.prompt_ids)
        parent_wrote: set[int] = set()
        if start.parent is not None:
            parent_wrote = next(w for _, i, w in reversed(done) if i == list(start.parent.ids()))
        done.append(
            (
                [*asked, ended.message],
                [*start.prompt_ids, *tokens.token_ids],
                parent_wrote | set(range(before, before + len(tokens.token_ids))),
            )
        )
    known = {tuple(ids): wrote for _, ids, wrote in done}
    for branch in capture.branches():
        sample = capture.arrays(branch)
        wrote = known[tuple(everything(sample))]
        first = len(sample.prompt_ids)
        assert [first + i for i, kept in enumerate(sample.response_mask) if kept] == sorted(wrote)
    if done:
        newest = capture.trained_branch()
        assert newest is not None and everything(capture.arrays(newest)) == done[-1][1]
