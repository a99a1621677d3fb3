"""The Task protocol: where prompts come from, and what an answer is worth."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import msgspec


class TaskItem(msgspec.Struct, kw_only=True):
    """One prompt before tokenisation. `solution` is a text that deserves full reward, where one is known
    (the tiny model's warm start learns from it); `ground_truth` and `extra_info` go to the reward function.
    `dialogue`: for a task of several turns instead of `solution`, the messages that follow and deserve full reward, the
    assistant's and its environment's, an assistant's last. `agent_messages`: what an agent is given in place of `messages`, where
    what it adds itself (the tools, which the chat template writes into the system message) stands in `messages` already."""

    messages: list[dict[str, Any]]
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    solution: str | None = None
    dialogue: list[dict[str, Any]] = []
    agent_messages: list[dict[str, Any]] = []


class PreparedPrompt(msgspec.Struct, array_like=True, kw_only=True):
    """One tokenised prompt. `prompt_ids` is little-endian int32; everyone refers to a prompt by `index`. `messages` are what
    agents begin with; they are empty in a run without."""

    index: int
    prompt_ids: bytes
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []


class Answer(msgspec.Struct, array_like=True, kw_only=True):
    """What a verifier sees: the response as text, and the prompt's own fields."""

    solution_str: str
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = {}


@runtime_checkable
class Task(Protocol):
    """A source of prompts with a verifier. `items` gives the same sequence each time it is called.

    `score` runs in a scoring process of its own (see `psrl.rollout.score_worker`), which builds the task again from
    the same configuration: it may rely on `answer.extra_info` and on the task's parameters, on nothing else.
    """

    def items(self) -> Iterable[TaskItem]: ...

    def score(self, answer: Answer) -> float | None: ...


def user_message(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
