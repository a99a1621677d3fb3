"""An agent of the task hidden_sum, written against the openai client alone: it would talk to any other server just so.

`play` is what psrl calls (agent.black_box.function=agent:play). The same file is a program
(agent.black_box.command="python /path/to/agent.py"), which finds everything in its environment.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

MAX_TURNS = 5


@functools.cache
def connections() -> DefaultAsyncHttpxClient:
    """Shared by all trajectories of a process: making one takes as long as several turns."""
    return DefaultAsyncHttpxClient()


async def play(base_url: str, api_key: str, prompt: dict[str, Any]) -> dict[str, float]:
    """Let the model ask for the hidden numbers until it answers; returns its score and how often it asked."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    values, messages, asked = prompt["extra_info"]["values"], list(prompt["messages"]), 0
    for _ in range(MAX_TURNS):
        try:
            reply = await client.chat.completions.create(model="policy", messages=messages)
        except BadRequestError as error:
            if error.code == "context_length_exceeded":  # it talked until there was no room: no answer
                break
            raise
        [choice] = reply.choices
        text = (choice.message.content or "").strip()
        if text.startswith("="):
            right = text.removeprefix("=").strip() == str(prompt["ground_truth"])
            return {"score": float(right), "asked": asked}
        if choice.finish_reason == "length":
            break
        asked += 1
        messages += [
            {"role": "assistant", "content": choice.message.content},
            {"role": "user", "content": str(values.get(text, "?"))},
        ]
    return {"score": 0.0, "asked": asked}


def main() -> None:
    prompt = json.loads(Path(os.environ["PSRL_PROMPT_FILE"]).read_text(encoding="utf-8"))
    result = asyncio.run(play(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], prompt))
    Path(os.environ["PSRL_RESULT_FILE"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
