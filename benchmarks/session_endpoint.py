"""What the session endpoint costs: latency that it adds to a turn, and memory of a session, with 1,000 sessions at once.

    python benchmarks/session_endpoint.py [--sessions 1000] [--turns 10] [--turn-s 4] [--environment-s 4] [--save]

The endpoint runs in a process of its own, as in an agent loop, over a maker that needs exactly `turn-s` for a turn and hands out
its tokens in parts. Every session is one client with its own connection: it asks, waits `environment-s` (the tool), sends
its whole history again with the result, and so on; every other session streams. Added latency: from sending the request to
the last byte of the answer, less `turn-s`; it includes the client, which shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

import psutil
from report_machine import describe_machine

from psrl.models.tiny_tokenizer import END_ID, make_tokenizer, save_tokenizer
from psrl.models.tokenizer import load_tokenizer
from psrl.protocol.samples import VersionSpan
from psrl.sessions.app import make_app
from psrl.sessions.serve import SessionServer
from psrl.sessions.store import MemoryStore
from psrl.sessions.turns import TurnRequest, TurnTokens

RESULT = Path(__file__).parent / "results" / "2026-11-30-cpu-session-endpoint.txt"
TOKEN = "benchmark"
PARTS = 16
"""Chunks of a turn: what an engine hands over in a few decode steps each."""
TASK = "Find the file that holds the error, then say in one sentence how it is to be repaired. " * 8
RESULT_TEXT = "src/module.py:120: in function parse: expected a number, got a word; see the line above. " * 4
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "shell", "description": "Runs a command.", "parameters": {"properties": {"command": {}}}},
}


class SteadyMaker:
    """Every turn takes `turn_s` and has `tokens` tokens."""

    def __init__(self, turn_s: float, tokens: int):
        self._turn_s = turn_s
        self._tokens = tokens
        self._rng = random.Random(0)

    def room(self, prompt_tokens: int) -> int:
        return self._tokens

    async def turn(self, request: TurnRequest, on_tokens: Callable[[TurnTokens], None] | None = None) -> TurnTokens:
        due = asyncio.get_running_loop().time()
        whole = TurnTokens(finish="stop")
        for part in range(PARTS):
            due += self._turn_s / PARTS
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            start, end = self._tokens * part // PARTS, self._tokens * (part + 1) // PARTS
            ids = [self._rng.randrange(40, 120) for _ in range(start, end)]
            if part == PARTS - 1:
                ids[-1] = END_ID
            new = TurnTokens(ids, [-self._rng.random() for _ in ids], [VersionSpan(start, end, 0)])
            whole.token_ids += new.token_ids
            whole.logprobs += new.logprobs
            if on_tokens is not None:
                on_tokens(new)
        whole.spans = [VersionSpan(0, self._tokens, 0)]
        return whole


def serve(pipe: Connection, sessions: int, turn_s: float, tokens: int) -> None:
    """The endpoint's process: says its URL, then its memory and CPU time whenever it is asked, ends on None."""
    asyncio.run(_serve(pipe, sessions, turn_s, tokens))


async def _serve(pipe: Connection, sessions: int, turn_s: float, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        save_tokenizer(make_tokenizer([TASK, RESULT_TEXT] * 2), Path(directory), 32768)
        tokenizer = load_tokenizer(directory)
    store = MemoryStore("fake", tokenizer, lambda _: SteadyMaker(turn_s, tokens), max_sessions=sessions)
    server = SessionServer(make_app(store, TOKEN), "127.0.0.1")
    await server.start()
    pipe.send(server.url)
    while await asyncio.to_thread(pipe.recv) is not None:
        held = [turn for s in store.sessions.values() for b in s.capture.branches() for turn in b.line()]
        memory, cpu = psutil.Process().memory_info().rss, psutil.Process().cpu_times()
        pipe.send(
            (memory, cpu.user + cpu.system, sum(len(t.added_ids) + len(t.token_ids) for t in held), len(store.sessions))
        )
    await server.stop()


class Client:
    """One session over one connection; just enough HTTP that the client costs little."""

    def __init__(self, port: int, turn_s: float, environment_s: float, stream: bool):
        self._port, self._turn_s, self._environment_s, self._stream = port, turn_s, environment_s, stream
        self.added_s: list[float] = []
        self.first_s: list[float] = []
        """Streaming: added latency of the first token."""

    async def run(self, turns: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        session = json.loads(await self._request("POST", "/sessions", b"{}"))
        messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
        for turn in range(turns):
            body = {"model": "fake", "messages": messages, "tools": [TOOL], "stream": self._stream}
            encoded = json.dumps(body).encode()
            began = time.perf_counter()
            answer = await self._request("POST", f"/sessions/{session['id']}/v1/chat/completions", encoded)
            self.added_s.append(time.perf_counter() - began - self._turn_s)
            if self._stream:
                self.first_s.append(self._first - began - self._turn_s / PARTS)
            text = self._text(answer)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{turn}: {RESULT_TEXT}"}]
            if turn < turns - 1:
                await asyncio.sleep(self._environment_s)
        self._writer.close()

    def _text(self, answer: bytes) -> str:
        if not self._stream:
            return str(json.loads(answer)["choices"][0]["message"]["content"])
        events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: {")]
        return "".join(choice["delta"].get("content") or "" for e in events for choice in json.loads(e)["choices"])

    async def _request(self, method: str, path: str, body: bytes) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        header = await self._reader.readuntil(b"\r\n\r\n")
        self._first = time.perf_counter()
        if b" 200 " not in header[:20] and b" 201 " not in header[:20]:
            raise RuntimeError(header.decode())
        fields = dict(line.split(b": ", 1) for line in header.lower().split(b"\r\n")[1:-2])
        if b"content-length" in fields:
            return await self._reader.readexactly(int(fields[b"content-length"]))
        answer = b""
        while size := int(await self._reader.readline(), 16):
            answer += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()
        return answer


async def drive(url: str, args: argparse.Namespace) -> list[Client]:
    port = int(url.rpartition(":")[2])
    clients = [Client(port, args.turn_s, args.environment_s, bool(i % 2)) for i in range(args.sessions)]
    spread_s = args.turn_s + args.environment_s
    await asyncio.gather(*(c.run(args.turns, spread_s * i / args.sessions) for i, c in enumerate(clients)))
    return clients


def row(name: str, seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=1000)
    figures = (mean(seconds), cuts[499], cuts[949], cuts[989], max(seconds))
    return f"{name:<32}" + "".join(f"{1e3 * figure:>10.1f}" for figure in figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--turn-s", type=float, default=4.0)
    parser.add_argument("--environment-s", type=float, default=4.0)
    parser.add_argument("--tokens", type=int, default=128, help="tokens that the model writes in a turn")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULT.name}")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load_before = os.getloadavg()[0]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, args.sessions, args.turn_s, args.tokens))
    process.start()
    try:
        url = pipe.recv()
        pipe.send("figures")
        empty, cpu_before, _, _ = pipe.recv()
        began = time.perf_counter()
        clients = asyncio.run(drive(url, args))
        elapsed = time.perf_counter() - began
        pipe.send("figures")
        full, cpu_after, held_tokens, held_sessions = pipe.recv()
        pipe.send(None)
        process.join(30)
    finally:
        if process.is_alive():
            process.kill()
    whole = [s for c in clients for s in c.added_s if not c.first_s]
    streamed = [s for c in clients for s in c.added_s if c.first_s]
    first = [s for c in clients for s in c.first_s]
    turns = len(whole) + len(streamed)
    lines = [
        f"$ python benchmarks/session_endpoint.py {' '.join(a for a in sys.argv[1:] if a != '--save')}".rstrip(),
        f"{describe_machine()}; load {load_before:.1f} at the beginning",
        f"{args.sessions} sessions at once, {args.turns} turns each of {args.tokens} tokens in {PARTS} parts over {args.turn_s:g} s, "
        f"{args.environment_s:g} s between them: {turns / elapsed:.0f} turns/s",
        "",
        f"{'added latency, ms':<32}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p95", "p99", "max")),
        row("whole answer", whole),
        row("streamed, to its end", streamed),
        row("streamed, to the first token", first),
        "",
        f"memory of a session, KiB        {(full - empty) / args.sessions / 1024:>10.1f}   ({held_sessions} held, {held_tokens / held_sessions:,.0f} tokens each, connections closed)",
        f"CPU of the endpoint, ms a turn  {1e3 * (cpu_after - cpu_before) / turns:>10.2f}   ({100 * (cpu_after - cpu_before) / elapsed:.0f} % of one core)",
    ]
    print("\n".join(lines))
    if args.save:
        RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
