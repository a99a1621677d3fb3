"""What an agent loop has besides single responses: agents that play samples turn by turn, and sessions that it serves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from psrl.agents.base import AgentPrompt
from psrl.config.agents import plays_turns
from psrl.models.tokenizer import ChatTokenizer
from psrl.protocol.control import Assignment
from psrl.protocol.generation import SamplingParams, TokenChunk
from psrl.role import Role
from psrl.rollout.connections import Connections
from psrl.rollout.group_work import GroupWork

if TYPE_CHECKING:
    from psrl.rollout.session_host import Home


class Agents(Protocol):
    """An agent loop tells this of its groups, and of tokens and instances that others than its groups may care for."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def play(self, assignment: Assignment, prompt_ids: Sequence[int], prompt: AgentPrompt) -> GroupWork | None:
        """A group that agents play, begun; None: its samples are single responses."""
        ...

    def stop(self, group: int) -> None:
        """It is complete: agents that still run are cancelled."""
        ...

    def end(self, group: int) -> None:
        """It is in nobody's hands any more."""
        ...

    def tell_ended_turns(self, works: Collection[GroupWork]) -> None:
        """Tell the coordinator which turns of these groups have ended."""
        ...

    def tell_again(self) -> None:
        """Tell a new coordinator which samples are at their environment."""
        ...

    def add(self, chunk: TokenChunk, instance: str) -> None:
        """Tokens that belong to no group that is held."""
        ...

    def lose(self, instance: str) -> None: ...

    def serve(self, incarnation: int) -> None:
        """Which weights to ask instances for."""
        ...


class NoAgents:
    """Samples are single responses, and nobody is served."""

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def play(self, assignment: Assignment, prompt_ids: Sequence[int], prompt: AgentPrompt) -> None:
        return None

    def stop(self, group: int) -> None:
        pass

    def end(self, group: int) -> None:
        pass

    def tell_ended_turns(self, works: Collection[GroupWork]) -> None:
        pass

    def tell_again(self) -> None:
        pass

    def add(self, chunk: TokenChunk, instance: str) -> None:
        pass

    def lose(self, instance: str) -> None:
        pass

    def serve(self, incarnation: int) -> None:
        pass


def make_agents(
    role: Role, home: Home, tokenizer: ChatTokenizer, sampling: SamplingParams, connections: Connections
) -> Agents:
    """What the configuration asks for. The web server is imported only where there is something to serve or to play."""
    agent = role.config.gen_actor_rollout_ref.rollout.agent
    if not plays_turns(agent) and not agent.serve_sessions:
        return NoAgents()
    from psrl.rollout.session_agents import SessionAgents

    return SessionAgents(role, home, tokenizer, sampling, connections)
