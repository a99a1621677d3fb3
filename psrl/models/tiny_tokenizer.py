"""A tokenizer for the tiny model: bytes, single digits, and the phrases that the task's own texts repeat.

Merges run across spaces, so the fixed part of a prompt becomes one or two tokens ("State the final answer to the
following arithmetic problem: 4 + 3 =" has 9 with the chat template, not 80 bytes); digits stay apart, so that a small
model can calculate with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SPECIAL_TOKENS = [PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n' }}{% endif %}{{ 'Tools:' }}"
    "{% for tool in tools %}{{ '\\n' + tool['function']['name'] }}"
    "{{ '(' + tool['function'].get('parameters', {}).get('properties', {}) | join(', ') + ')' }}"
    "{% if tool['function'].get('description') %}{{ ': ' + tool['function']['description'] }}{% endif %}{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response>' + eos_token }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}{% for call in message.get('tool_calls') or [] %}"
    "{% set arguments = call['function']['arguments'] %}"
    "{{ '<tool_call>{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": ' }}"
    "{{ (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Tools are one line each in the system message, a call is `<tool_call>` with JSON in the answer, a result is a user's message
in `<tool_response>`. None of these is a special token: the ids of a vocabulary stay what they are without tools."""


END_ID, PAD_ID = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(PAD)


def make_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> Tokenizer:
    """Byte-level BPE over `texts`: the special tokens, 256 bytes, then merges; any text can be encoded.

    Ids of PAD, BEGIN and END are 0, 1 and 2. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained(directory)` reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": SPECIAL_TOKENS[3:],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
