"""The agents of an agent loop process out of its configuration: sessions, the endpoint that serves them, who plays them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from psrl.agents.base import AgentPrompt, Endpoint
from psrl.agents.select import make_agent
from psrl.config.agents import AgentConfig, MultiTurnConfig, serves_sessions
from psrl.config.algorithm_checks import greedy_samples
from psrl.models.tokenizer import ChatTokenizer
from psrl.protocol.control import Assignment
from psrl.protocol.generation import SamplingParams, TokenChunk
from psrl.role import Role
from psrl.rollout.connections import Connections
from psrl.rollout.group_work import GroupWork
from psrl.rollout.guests import Guests
from psrl.rollout.session_group import SessionGroup
from psrl.rollout.session_host import Home, SessionHost
from psrl.rollout.session_store import RunSessions
from psrl.rollout.trajectory import TokenLimits
from psrl.rundir.endpoints import Endpoint as Published
from psrl.rundir.endpoints import publish_next_endpoint
from psrl.rundir.keys import load_keys, session_token
from psrl.sessions.__main__ import SUFFIX
from psrl.sessions.session import SessionLimits
from psrl.tasks.prepare import context_length

if TYPE_CHECKING:
    from psrl.sessions.serve import SessionServer
    from psrl.sessions.store import SessionStore

log = logging.getLogger("psrl.agent_loop")

WATCH_S = 1.0


def session_limits(agent: AgentConfig, multi_turn: MultiTurnConfig) -> SessionLimits:
    """What the run's keys say, and the defaults of the rest."""
    limits = SessionLimits(turn_timeout_s=agent.turn_timeout_s)
    turns = multi_turn.max_assistant_turns
    return limits if turns is None else replace(limits, max_turns=turns)


def make_server(store: SessionStore, token: str, host: str, agent: AgentConfig) -> SessionServer:
    """The web server's packages are imported here: whoever serves nobody needs none."""
    from psrl.sessions.app import EndpointLimits, make_app
    from psrl.sessions.serve import SessionServer

    return SessionServer(make_app(store, token, EndpointLimits(max_body_bytes=int(agent.max_body_mb * 2**20))), host)


class SessionAgents:
    """Implements psrl.rollout.agents.Agents: groups that agents play, and guests."""

    def __init__(
        self, role: Role, home: Home, tokenizer: ChatTokenizer, sampling: SamplingParams, connections: Connections
    ) -> None:
        config, rollout = role.config, role.config.gen_actor_rollout_ref.rollout
        agent = rollout.agent
        self.role, self.home, self.sampling = role, home, sampling
        self.limits = TokenLimits(context=context_length(config), response=config.data.max_response_length)
        self.guests = Guests(sampling, self.limits, connections.names, connections.send)
        limits = session_limits(agent, rollout.multi_turn)
        self.store = RunSessions(config.model.name, tokenizer, self.guests, config.seed, limits)
        serves = serves_sessions(agent)
        token = session_token(load_keys(role.run_dir)) if serves else ""
        self.server = make_server(self.store, token, role.address, agent) if serves else None
        endpoint = Endpoint(self.server.url, token) if self.server is not None else None
        player = make_agent(config, endpoint)
        self.host = SessionHost(home, player, self.store) if player is not None else None

    async def start(self) -> None:
        """Serve, and say where."""
        if self.server is not None:
            await self.server.start()
            published = Published(address=self.server.url, node=self.role.node, pid=os.getpid())
            publish_next_endpoint(self.role.run_dir, self.role.name + SUFFIX, published)
            log.info("sessions are served at %s", self.server.url)
            self.home.spawn(self._watch(self.server))

    async def _watch(self, server: SessionServer) -> None:
        """An endpoint that is gone ends this process: nobody waits for answers that cannot come."""
        while not server.failed:
            await asyncio.sleep(WATCH_S)
        raise RuntimeError(f"the session endpoint {server.url} has ended by itself")

    async def close(self) -> None:
        if self.server is not None:
            await self.server.stop()

    # ---- groups ------------------------------------------------------------------------------------------------

    def play(self, assignment: Assignment, prompt_ids: Sequence[int], prompt: AgentPrompt) -> SessionGroup | None:
        """A group that agents play, begun; None: its samples are single responses."""
        if (host := self.host) is None:
            return None
        group, config = assignment.group, self.role.config
        work = SessionGroup(
            assignment,
            prompt_ids,
            self.sampling,
            self.limits,
            config.seed,
            places=host.places,
            captured=lambda sample: host.captured(group, sample),
            greedy=greedy_samples(config.algorithm.adv_estimator),
        )
        host.begin(work, prompt, assignment.instance)
        return work

    def stop(self, group: int) -> None:
        """It is complete: agents that still run are cancelled."""
        if self.host is not None:
            self.host.stop(group)

    def end(self, group: int) -> None:
        """It is in nobody's hands any more."""
        if self.host is not None:
            self.host.end(group)

    def tell_ended_turns(self, works: Collection[GroupWork]) -> None:
        if self.host is not None:
            self.host.tell_ended_turns([work for work in works if isinstance(work, SessionGroup)])

    def tell_again(self) -> None:
        if self.host is not None:
            self.host.tell_again()

    # ---- guests ------------------------------------------------------------------------------------------------

    def add(self, chunk: TokenChunk, instance: str) -> None:
        """Tokens that belong to no group that is held."""
        self.guests.add(chunk, instance)

    def lose(self, instance: str) -> None:
        self.guests.lose(instance)

    def serve(self, incarnation: int) -> None:
        """Of the weights that instances are asked for."""
        self.guests.incarnation = incarnation
