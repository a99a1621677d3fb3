"""Messages between the coordinator and every other role. One-way structs in both directions (an actor model):
after a reconnect a role says Hello with all that it holds, so nothing depends on a reply that was lost."""

# ruff: noqa: RUF012 (msgspec copies default lists and dicts for each message)
from __future__ import annotations

from psrl.protocol.generation import CacheEvents, EngineStats
from psrl.protocol.message import Message
from psrl.protocol.moves import Routed, RouteRequest, SampleMoves, TurnsEnded
from psrl.protocol.samples import SampleRef
from psrl.protocol.validation import Validate, ValidationDone, ValidationFailed, ValidatorState

JOINER = "join-"
"""What the name of everybody who joins a running run begins with."""


# ---- every role -> coordinator -------------------------------------------------------------------------------


class Hello(Message):
    """First message on each connection. `state` is the role's own snapshot (see the *State structs)."""

    role: str
    name: str
    node: str
    pid: int
    sent_s: float
    """The sender's monotonic clock, seconds; comes back in Welcome for the clock offset."""
    attempt: str = ""
    """The start of the whole run that the sender belongs to; a joiner's own name."""
    state: SupervisorState | InstanceState | AgentState | TrainerState | ValidatorState | None = None


class SupervisorState(Message):
    """What a node's supervisor runs, and which of its children are gone for good: a new coordinator has not heard."""

    children: list[str] = []
    gone: list[ChildDown] = []
    joined: bool = False
    """It came to a running run and may leave again at any time: nothing of it is counted on."""


class InstanceState(Message):
    """An instance: where agent loops reach it, and the weights that it holds (`version` -1: none yet)."""

    endpoint: str
    version: int
    incarnation: int
    max_concurrent: int
    retiring: bool = False
    """It has been told to retire, by this coordinator or the one before."""
    asleep: bool = False
    """It has left its GPUs to the trainer, or has just started."""


class GroupDone(Message):
    """Generated, rewarded, sealed and on disk (fsync done)."""

    group: int
    ref: SampleRef
    reward_mean: float
    response_tokens: int


class HeldGroup(Message):
    """A group in an agent loop's hands; `done` is set when it is sealed but not yet acknowledged."""

    group: int
    done: GroupDone | None = None
    on: dict[str, int] = {}
    """Samples now at each instance."""


class AgentState(Message):
    held: list[HeldGroup] = []


class TrainerState(Message):
    """Rank 0 of the trainer: `published` is the newest version that can be pulled from it (-1: none yet),
    `resumed_from` the version of the checkpoint that it started at (0: the initial weights)."""

    published: int
    resumed_from: int
    start_nonce: str
    """Made once per trainer start: a new nonce is a new incarnation, the same one a mere reconnect."""
    wants: int = -1
    """The buffer it waits for, -1 if none."""
    checkpoint: int = -1
    """Version of the newest complete checkpoint, -1 if none was made since the start."""
    taken: int = 0
    """Groups of the wanted buffer that it has."""
    count: int = 0
    """How many more it waits for (see WantBuffer)."""


class Leaving(Message):
    """An orderly goodbye: this role stops on purpose."""

    reason: str = ""


class Fatal(Message):
    """The sender cannot go on and no restart would help: the run ends with this cause."""

    cause: str


# ---- supervisor ----------------------------------------------------------------------------------------------


class ChildDown(Message):
    """A child ended. `restarting` says whether the supervisor starts it again; `cause` reads "signal SIGKILL" or "exit code 3"."""

    role: str
    name: str
    cause: str
    restarting: bool
    pid: int
    """Of the process that ended: its successor may have said hello before this is heard."""


class Drain(Message):
    """Flush, seal, checkpoint if it fits into `grace_s`, end. Sent on SIGTERM, SIGUSR2 and Ctrl-C."""

    reason: str
    grace_s: float


class Leave(Message):
    """These children leave on purpose, within `grace_s`; the run goes on without them. Sent by a supervisor that joined."""

    children: list[str]
    reason: str
    grace_s: float


# ---- rollout instance ----------------------------------------------------------------------------------------


class InstanceStatus(Message):
    """Sent on change, at most every `status_collection.engine_sync_interval_in_ms`."""

    stats: EngineStats
    at_s: float = 0.0
    """The sender's monotonic clock, seconds: rates are differences of it, so that a slow message does not look like speed."""
    cache: CacheEvents | None = None
    """What changed in its prefix cache; everything that is in it after a Welcome, then with `cleared`. None: nothing, or
    its engine does not say."""


class PullStarted(Message):
    version: int


class Switching(Message):
    """`version` has arrived here and decoding is about to stand still: send nothing new until PullDone."""

    version: int


class PullDone(Message):
    """The instance now serves `version`. `pull_s`: transfer, while decoding went on; `pause_s`: decoding stood still."""

    version: int
    incarnation: int
    pull_s: float
    pause_s: float
    nbytes: int


class PullFailed(Message):
    version: int
    cause: str


class Pull(Message):
    """Coordinator -> instance: fetch these weights. With `abort_running` partial requests are handed back at the switch,
    otherwise the instance finishes what it has first."""

    version: int
    incarnation: int
    abort_running: bool


class HandBack(Message):
    """Coordinator -> instance: hand every sample back with the tokens that it has (finish "migrated"), and go on taking
    new ones."""


class Retire(Message):
    """Coordinator -> instance: hand back what you have, take nothing new, wait for Dismissed. Coordinator -> agent loop:
    leave now, your open groups return to the queue. Either ends with exit code 0."""

    reason: str


class Sleep(Message):
    """Coordinator -> instance: hand back what you have, release the GPU memory, weights included, and leave the GPUs."""


class Wake(Message):
    """Coordinator -> instance: take the GPUs again as soon as they are free; new weights are pulled next."""


class Dismissed(Message):
    """Coordinator -> retiring instance: all that you had has been taken over, end."""


# ---- agent loop ----------------------------------------------------------------------------------------------


class InstanceInfo(Message):
    name: str
    endpoint: str
    alive: bool


class Instances(Message):
    """Coordinator -> agent loops: who can be reached; sent on each change."""

    instances: list[InstanceInfo]


class Assignment(Message):
    """Coordinator -> agent loop: make `n` samples of this prompt, starting at `instance`."""

    group: int
    data_epoch: int
    prompt: int
    n: int
    version: int
    incarnation: int
    instance: str
    attempt: int = 0
    keep: int = 0
    """The group is complete when so many samples have finished, the others are aborted; 0: all `n`."""


class Assign(Message):
    groups: list[Assignment]


class GroupFailed(Message):
    """The group could not be finished. `reason` is one of error | timeout | invalid_rewards | too_long | filtered |
    empty_truncation."""

    group: int
    reason: str
    detail: str
    retry: bool


class SampleEnds(Message):
    """Agent loop -> coordinator: how launched samples ended, (kind, response tokens) each; see psrl.rollout.sample_ends."""

    ends: list[tuple[str, int]]


class GroupAck(Message):
    """Coordinator -> agent loop: these are in the ledger; forget them."""

    groups: list[int]


class GroupAbort(Message):
    """Coordinator -> agent loop: stop work on these; nothing is to be sent for them any more."""

    groups: list[int]
    reason: str


class GroupTruncate(Message):
    """Coordinator -> agent loop: end the unfinished samples of these where they are; the trainer waits for them."""

    groups: list[int]


# ---- trainer rank 0 ------------------------------------------------------------------------------------------


class TakenGroup(Message):
    group: int
    prompt: int
    data_epoch: int
    version: int
    ref: SampleRef


class WantBuffer(Message):
    """Trainer -> coordinator: ready to train buffer `buffer` with weights of that version. It has the first `taken` groups
    and wants the next `count`, or as many as are left; `count` 0: all that is left, once it is there. Idempotent."""

    buffer: int
    incarnation: int
    taken: int = 0
    count: int = 0


class Buffer(Message):
    """Coordinator -> trainer: groups `first`, `first` + 1, ... of one buffer in batch order. `last`: the buffer ends with
    them. A buffer without any group: the data is used up."""

    buffer: int
    groups: list[TakenGroup]
    counters: dict[str, int]
    first: int = 0
    last: bool = True
    filled_s: float = -1.0
    """When the buffer's last group was finished, on the coordinator's monotonic clock; -1: not yet, or not known."""


class Published(Message):
    """Trainer -> coordinator: weights `version` can be pulled. Idempotent."""

    version: int
    incarnation: int


class CheckpointDone(Message):
    """Trainer -> coordinator: the checkpoint at `version` is complete (its marker is on disk)."""

    version: int
    seconds: float


class TrainerDone(Message):
    """All steps done, or drained (`drained`), and the last checkpoint complete."""

    version: int
    drained: bool


# ---- coordinator -> every role -------------------------------------------------------------------------------


class Welcome(Message):
    """`hello_sent_s` echoes Hello, `now_s` is the coordinator's monotonic clock."""

    epoch: int
    incarnation: int
    hello_sent_s: float
    now_s: float


class DrainNow(Message):
    """Coordinator -> trainer: finish the step in hand, checkpoint if one of the usual length fits, say TrainerDone."""

    reason: str
    grace_s: float


class Shutdown(Message):
    """Coordinator -> all: the run is over. status: completed | failed | interrupted. To a supervisor that joined there is
    a fourth, refused: it has no place in this run (`cause` says why), which goes on without it."""

    status: str
    cause: str


ToCoordinator = (
    Hello | Leaving | Fatal | ChildDown | Drain | Leave | InstanceStatus | PullStarted | Switching | PullDone | PullFailed | SampleMoves
    | TurnsEnded | RouteRequest | GroupDone | GroupFailed | SampleEnds | WantBuffer | Published | CheckpointDone | TrainerDone
    | ValidationDone | ValidationFailed
)  # fmt: skip
FromCoordinator = (
    Welcome | Pull | HandBack | Retire | Sleep | Wake | Dismissed | Instances | Assign | Routed | GroupAck | GroupAbort | GroupTruncate | Buffer | DrainNow | Shutdown
    | Validate
)  # fmt: skip
