"""Small tokenizers with chat templates that behave as those of well-known models do, and a maker of turns that plays a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from psrl.models.tokenizer import ChatTokenizer, load_tokenizer
from psrl.protocol.samples import VersionSpan
from psrl.sessions.turns import TurnRequest, TurnTokens

THINKING = """
{%- if tools %}
  {{- '<|im_start|>system\n' + (messages[0].content + '\n\n' if messages[0].role == 'system' else '') + 'Tools:' }}
  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
  {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
  {%- elif m.role == 'assistant' %}
    {%- set answer = m.content.split('</think>')[-1].lstrip('\n') %}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > last.query and (loop.last or thought) %}
      {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- answer }}
    {%- for call in m.tool_calls or [] %}
      {{- '\n' if answer or not loop.first else '' }}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen3's: thinking is taken out of earlier turns, results of tools are grouped under a user's turn."""

DEFAULT_SYSTEM = """
{%- for m in messages %}
  {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As SmolLM2's: a system prompt of its own where there is none, and any role as it comes."""

ALTERNATING = """
{{- bos_token }}
{%- for m in messages %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
  {%- if m.role == 'user' %}{{- '[INST] ' + m.content.strip() + ' [/INST]' }}
  {%- else %}{{- ' ' + m.content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}
"""
"""As Llama 2's: users and assistants take turns, text is stripped, a space comes before the end of a turn."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END, NEVER = 2, -1
TEXTS = ["What is the sum of these?", "The tool says so.", "Tools: add, look", "<think>\n\n</think>\n\n"] * 4
TEMPLATES = {"thinking": THINKING, "default_system": DEFAULT_SYSTEM, "alternating": ALTERNATING, "plain": None}


def chat_tokenizer(directory: Path, template: str | None) -> ChatTokenizer:
    """Byte-level BPE with the end of a turn as token 2 and `template`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=2, show_progress=False, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[END], "bos_token": SPECIAL[0], "pad_token": SPECIAL[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


def turn_tokens(ids: Sequence[int], finish: str = "stop", version: int = 0) -> TurnTokens:
    """A turn of these tokens; each log-prob says which token it belongs to."""
    return TurnTokens(list(ids), [-float(i) / 8 for i in ids], [VersionSpan(0, len(ids), version)], finish)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedMaker:
    """Plays turns: each entry of `script` is the token ids of one turn (at NEVER it waits until it is cancelled) or an exception
    to raise. Ends of turn are as in an engine: END ends one with "stop", the request's budget with "length"."""

    def __init__(self, script: Iterable[Any], room: Callable[[int], int] = lambda prompt: 4096, part: int = 1):
        self.script = iter(script)
        self.room = room
        self.part = part
        """Tokens a chunk."""
        self.requests: list[TurnRequest] = []
        self.made: list[TurnTokens] = []
        self.cancelled = 0
        self.running = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        """Cleared: the maker waits before each further part."""

    async def turn(self, request: TurnRequest, on_tokens: Callable[[TurnTokens], None] | None = None) -> TurnTokens:
        self.requests.append(request)
        self.running += 1
        try:
            return await self._play(next(self.script), request, on_tokens)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _play(
        self, entry: Any, request: TurnRequest, on_tokens: Callable[[TurnTokens], None] | None
    ) -> TurnTokens:
        if isinstance(entry, Exception):
            raise entry
        ids = list(entry)[: request.max_new_tokens]
        finish = "stop" if ids and ids[-1] == END else "length"
        whole = turn_tokens(ids, finish, version=len(self.made))
        for at in range(0, len(ids), self.part):
            await asyncio.sleep(0)
            await self.go_on.wait()
            if ids[at] == NEVER:
                await asyncio.Event().wait()
            if on_tokens is not None:
                on_tokens(_part(whole, at, min(at + self.part, len(ids))))
        self.made.append(whole)
        return whole


def _part(whole: TurnTokens, start: int, end: int) -> TurnTokens:
    version = whole.spans[0].version
    finish = whole.finish if end == len(whole.token_ids) else ""
    return TurnTokens(whole.token_ids[start:end], whole.logprobs[start:end], [VersionSpan(start, end, version)], finish)
