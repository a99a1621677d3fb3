"""Keys of agents: which loop makes a sample, and what its turns may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SINGLE_TURN, TOOL, BLACK_BOX = "single_turn_agent", "tool_agent", "black_box_agent"
AGENT_LOOPS = (SINGLE_TURN, TOOL, BLACK_BOX)
END, GO_ON = "end", "go_on"
TRUNCATE_SIDES = ("left", "right", "middle")


@dataclass
class BlackBoxConfig:
    function: str | None = None
    """`module:function`, called as function(base_url, api_key, prompt) -> reward, {"score": reward, ...figures} or None (the task's verifier scores the last answer); a coroutine function, or an ordinary one in a thread."""
    command: str | None = None
    """A program and its arguments, without a shell. It finds OPENAI_BASE_URL, OPENAI_API_KEY, PSRL_PROMPT_FILE and PSRL_RESULT_FILE in its environment."""
    timeout_s: float = 600.0
    """Deadline of one trajectory, the model's time included; beyond it the trajectory failed and is not trained."""
    max_concurrent: int = 64
    """Most trajectories that run at once in an agent loop process; further ones wait."""
    max_memory_gb: float | None = 16.0
    """Address-space limit of each of a command's processes; null: none, for programs that reserve far more than they use (Node, CUDA)."""


@dataclass
class AgentConfig:
    default_agent_loop: str = SINGLE_TURN
    """What makes a sample: single_turn_agent (one response to the prompt) | tool_agent (turns with an environment or tools, see multi_turn) | black_box_agent (your own program against an OpenAI-compatible endpoint)."""
    serve_sessions: bool = False
    """Serve an OpenAI-compatible endpoint in each agent loop process though no agent of the run needs it; `python -m psrl.sessions RUN_DIR` says where."""
    turn_timeout_s: float = 1800.0
    """Deadline of one turn of a session, from its request to its last token, waiting for an instance included; beyond it the turn leaves no trace and its caller gets an error (HTTP 504)."""
    max_body_mb: float = 8.0
    """Largest body of a request to the OpenAI-compatible endpoint, which holds the whole conversation; a larger one is refused (HTTP 413)."""
    black_box: BlackBoxConfig = field(default_factory=BlackBoxConfig)


def plays_turns(agent: AgentConfig) -> bool:
    """Whether samples are conversations: a single response has no session, and nothing happens between its turns."""
    return agent.default_agent_loop != SINGLE_TURN


def serves_sessions(agent: AgentConfig) -> bool:
    """Whether agent loop processes serve an endpoint."""
    return agent.serve_sessions or agent.default_agent_loop == BLACK_BOX


@dataclass
class SandboxConfig:
    timeout_s: float = 10.0
    """Wall-clock deadline of one program; then it and all that it started is killed."""
    max_memory_gb: float = 1.0
    """Address-space limit of each process."""
    max_processes: int = 32
    """Most processes at once."""
    max_file_mb: float = 64.0
    """Most bytes of one file that it writes."""


@dataclass
class MultiTurnConfig:
    max_assistant_turns: int | None = None
    """Most messages of the model in a trajectory; null: as many as data.max_response_length has room for."""
    max_tokens_per_turn: int | None = None
    """Most tokens of one message; null: what is left of data.max_response_length."""
    cut_message: str = END
    """What follows a message that was cut at max_tokens_per_turn: end (the trajectory ends and is scored as it is) | go_on (the environment answers it like a whole one)."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call: calculator, python, or your own as `module:object`."""
    max_parallel_calls: int = 1
    """Most tool calls of one message that are made; the model is told of the others that they were not."""
    max_tool_response_length: int = 256
    """Most characters of a tool's answer."""
    tool_response_truncate_side: str = "middle"
    """What is kept of a longer answer: left (its beginning) | right (its end) | middle (half of each)."""
    environment: str | None = None
    """What answers the model: a built-in environment (hidden_sum), your own as `module:factory`; null: the tools."""
    environment_params: dict[str, Any] = field(default_factory=dict)
    """Parameters of `environment`, passed as they are."""
    step_timeout_s: float = 60.0
    """Deadline of one call of the environment; beyond it the trajectory failed and is not trained."""
    max_env_retries: int = 2
    """How often a call is made again that the environment asks to have made again."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
