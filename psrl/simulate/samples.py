"""Samples and groups on the virtual clock. A sample's `length` is known to its engine alone, and only as its end."""

from __future__ import annotations


class SimSample:
    """One response: `made` of `length` tokens so far (exact only while it runs nowhere), the next stop at `turn_end`."""

    __slots__ = (
        "added",
        "came_from",
        "done",
        "finish",
        "first_version",
        "group",
        "index",
        "instance",
        "last_version",
        "length",
        "made",
        "order",
        "start_step",
        "stop_step",
        "turn",
        "turn_end",
    )

    def __init__(self, group: SimGroup, index: int, length: int, turn_end: int) -> None:
        self.group = group
        self.index = index
        self.length = length
        self.turn_end = turn_end
        """Tokens at which the present turn ends; `length` in the last one."""
        self.turn = 1
        self.made = 0
        self.added = 0
        """Tokens that its environment added."""
        self.instance = ""
        """Where it is, "" while it looks for a place or is at its environment."""
        self.order = 0
        """Arrival number at its engine; 0 while it is in none."""
        self.start_step = -1
        """The engine's step counter when it began to run there, -1 while it waits."""
        self.stop_step = -1
        """The engine's step counter at which its turn ends."""
        self.first_version = self.last_version = -1
        """Weights of the first and of the newest token."""
        self.came_from = ""
        """Where it was before it went to its environment."""
        self.done = False
        self.finish = ""
        """How it ended, in the words of psrl.protocol.generation; "" while it goes on, or if its group was taken away."""

    @property
    def tokens(self) -> int:
        """Prompt, response and environment so far."""
        return self.group.prompt_tokens + self.made + self.added


class SimGroup:
    """The samples of one prompt in an agent loop's hands."""

    __slots__ = (
        "agent",
        "data_epoch",
        "finished",
        "keep",
        "number",
        "prompt",
        "prompt_tokens",
        "samples",
        "sealed",
        "uniform",
        "version",
    )

    def __init__(
        self, number: int, agent: str, data_epoch: int, prompt: int, version: int, prompt_tokens: int, keep: int
    ) -> None:
        self.number = number
        self.agent = agent
        self.data_epoch = data_epoch
        self.prompt = prompt
        self.version = version
        self.prompt_tokens = prompt_tokens
        self.keep = keep
        """Samples that train: the first that finish."""
        self.samples: list[SimSample] = []
        self.finished: list[SimSample] = []
        self.sealed = False
        self.uniform = False
        """All its samples get the same reward."""
