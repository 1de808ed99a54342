"""The router's model of one worker: its last heartbeat, the load sent to it since then, and its measured rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.contracts.lease import blocks_needed, held_blocks, unread_blocks
from common.contracts.types import KvGroup, KvGroupKind
from router.placement.adapters import NO_ADAPTERS, WorkerAdapters
from router.placement.rates import CountRate, Rates, StepLine
from router.placement.run_rule import groups_of, runs_of
from router.placement.shared_load import WorkerShare


class WorkerState(StrEnum):
    """Whether a worker may be given work; all but CONNECTED come with a reason."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    DRAINING = "draining"
    HUNG = "hung"
    MISMATCHED = "mismatched"
    DETACHED = "detached"


class Disaggregation(StrEnum):
    """What a worker does of a request."""

    NONE = ""
    PREFILL = "prefill"
    DECODE = "decode"


HUNG_FACTOR = 10.0
HUNG_FLOOR_S = 5.0
# For a step that the worker cannot predict yet, such as the first prefill of a large model on a CPU.
HUNG_UNPREDICTED_S = 60.0
HEARTBEAT_LIMIT_S = 5.0
# A worker without work sends a heartbeat every 3.3 s, and one at once when it gets work.
IDLE_HEARTBEAT_S = 3.4


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits that a worker reported when it connected.

    Where the pool has groups of layers, `num_blocks` and all counts of blocks that a worker holds or needs are of
    pages. Hits are blocks of tokens at every pool.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    # Slots of the widest window where every layer has one, else 0.
    window: int = 0
    # Whether the worker keeps blocks for prompts to come.
    prefix_caching: bool = True
    groups: tuple[KvGroup, ...] = ()
    disaggregation: Disaggregation = Disaggregation.NONE
    # Whether it fetches cached blocks from other workers, and they from it.
    fetches_blocks: bool = False

    @property
    def unit(self) -> str:
        """What the pool counts, in the plural."""
        return "pages" if self.groups else "blocks"

    def blocks(self, tokens: int, max_len: int) -> int:
        """Return the blocks that a sequence of so many tokens needs at once; `max_len` bounds prompt and output."""
        return blocks_needed(tokens, max_len, self.block_size, self.window, self.groups)

    def fresh_blocks(self, tokens: int, hit_blocks: int) -> int:
        """Return the blocks that so many tokens need beside hits. Hits that left the window hold no block."""
        whole = -(-tokens // self.block_size)
        return sum([each.pages * self._fresh(each, whole, hit_blocks) for each in groups_of(self.window, self.groups)])

    def _fresh(self, group: KvGroup, whole: int, hit_blocks: int) -> int:
        size = self.block_size
        read = hit_blocks - unread_blocks(group, hit_blocks * size, size)
        return max(0, min(held_blocks(group, whole, size) - read, whole - hit_blocks))

    def fork_shares(self, tokens: int, hit_blocks: int) -> int:
        """Return how many blocks of its prompt a fork does not compute; its parent has so many hits.

        They are all full blocks before the last token. Where layers have windows or chunks, they are among the blocks
        of the parent's first grant. If hits left a window, no sequence shares a block before it is full: the hits are
        all.
        """
        size, most = self.block_size, (tokens - 1) // self.block_size
        runs = runs_of(self.window, self.groups)
        if any(each.kind is KvGroupKind.STATE for each in runs):
            return min(most, hit_blocks)  # a fork goes on from checkpoints alone
        if any(unread_blocks(each, hit_blocks * size, size) for each in runs):
            return min(most, hit_blocks)
        granted = [max(held_blocks(each, -(-tokens // size), size), hit_blocks + 1) for each in runs]
        return min([most, *granted])

    def fork_load(self, tokens: int, hit_blocks: int) -> tuple[int, int]:
        """Return the tokens that a fork of a prompt computes, and the blocks that it needs."""
        shared = self.fork_shares(tokens, hit_blocks)
        if not self.groups and shared == (tokens - 1) // self.block_size:
            # The last block is copied where it can be; the last token has to be computed again.
            return 1, 1
        return tokens - shared * self.block_size, max(1, self.fresh_blocks(tokens, shared))


@dataclass(frozen=True, slots=True)
class Load:
    """One heartbeat. Rates are 0 until the worker has measured them (seconds a decode step, seconds a prompt token)."""

    running: int = 0
    waiting: int = 0
    unheld_blocks: int = 0
    pending_prefill_tokens: int = 0
    decode_step_seconds: float = 0.0
    prefill_seconds_per_token: float = 0.0
    step_age_seconds: float = 0.0
    step_predicted_seconds: float = 0.0
    steps: int = 0
    manager_attached: bool = True
    draining: bool = False
    # It drains, and its sequences are to go on at other workers.
    migrating: bool = False
    # Rising counts.
    sampled_tokens: int = 0
    computed_tokens: int = 0
    # Of the pending prefill tokens: those in the steps that run or are planned.
    prefill_tokens_in_flight: int = 0
    # Of a block that another worker had; 0 until the worker has fetched one.
    fetch_seconds_per_block: float = 0.0
    # Of each fetch beside its blocks; 0 also from a worker that does not say so.
    fetch_setup_seconds: float = 0.0


@dataclass(slots=True)
class _Placed:
    """Load that this router sent to a worker."""

    sequences: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    # The sequences with blocks: those that were adopted have none, since heartbeats showed theirs before.
    sized: int = 0
    # The sequences whose greatest number of output tokens is known, and the sum of these numbers.
    limited: int = 0
    most_output: int = 0


@dataclass(slots=True)
class WorkerModel:
    """One incarnation of a worker as routing sees it.

    A heartbeat is up to 0.1 s old, so the load that this router placed since then is added. No figure is taken to be
    below what this router itself has outstanding there: a submit may cross a heartbeat on the wire.
    """

    worker_id: str
    capacity: Capacity
    load: Load
    heartbeat_at: float
    rates: Rates = field(init=False)
    draining: bool = False
    # Seconds for which it may be without a KV manager: its leases last for a while, and a manager comes back soon.
    manager_patience: float = float("inf")
    # When a heartbeat first said that it has no manager; None while it has one.
    detached_at: float | None = None
    # When a heartbeat last brought new measurements of steps (seconds).
    shown_at: float = float("-inf")
    sampled: CountRate = field(default_factory=CountRate)
    computed: CountRate = field(default_factory=CountRate)
    # When it is predicted to have served what this router sent others to fetch from it.
    serves_until: float = float("-inf")
    adapters: WorkerAdapters = NO_ADAPTERS
    # What this router tells others of the worker, and was told; None where no router is told anything.
    share: WorkerShare | None = None
    _since: _Placed = field(default_factory=_Placed)
    _outstanding: _Placed = field(default_factory=_Placed)

    def __post_init__(self) -> None:
        self.rates = Rates(StepLine(full_batch=max(1, self.capacity.max_num_seqs)))

    def heartbeat(self, load: Load, now: float) -> None:
        """Replace the load estimated since the last heartbeat; add new measurements to the rates.

        An idle worker repeats its last measurements; these do not count again.
        """
        self.sampled.add(load.sampled_tokens, now)
        self.computed.add(load.computed_tokens, now)
        if load.manager_attached:
            self.detached_at = None
        elif self.detached_at is None:
            self.detached_at = now
        news = _shown(load) != _shown(self.load)
        self.load, self.heartbeat_at, self._since = load, now, _Placed()
        if not news:
            return
        self.shown_at = now
        if load.decode_step_seconds > 0:
            self.rates.step.add(load.running, load.decode_step_seconds, now)
        if load.prefill_seconds_per_token > 0:
            self.rates.prefill_token.add(load.prefill_seconds_per_token, now)

    def router_paused(self, seconds: float, now: float) -> None:
        """Leave out of the heartbeat's age what the router itself did not run, and so could not read one."""
        self.heartbeat_at = min(now, self.heartbeat_at + seconds)
        if self.detached_at is not None:
            self.detached_at = min(now, self.detached_at + seconds)

    def placed(self, sequences: int, prefill_tokens: int, blocks: int, most_output: int = 0) -> None:
        """Count load that was just placed; negative numbers take back what was released.

        `most_output` is how many tokens the sequences may sample; 0: unknown.
        """
        for placed in (self._since, self._outstanding):
            placed.sequences += sequences
            placed.prefill_tokens += prefill_tokens
            placed.blocks += blocks
            placed.sized += sequences if blocks else 0
        if most_output:
            self._outstanding.limited += sequences
            self._outstanding.most_output += most_output
        if self.share is not None:
            self.share.set_own(self._outstanding.sequences, self._outstanding.prefill_tokens)

    def serve_fetch(self, seconds: float, now: float) -> None:
        """Count a fetch from this worker, behind those before it."""
        self.serves_until = max(now, self.serves_until) + seconds

    @property
    def most_output(self) -> float:
        """How many tokens a sequence there may sample, as the mean of those that this router placed."""
        placed = self._outstanding
        return placed.most_output / placed.limited if placed.limited else float("inf")

    @property
    def outstanding(self) -> int:
        return self._outstanding.sequences

    @property
    def sequences(self) -> int:
        """Sequences at the worker now, waiting ones included."""
        reported = self.load.running + self.load.waiting + self._since.sequences
        return max(reported, self._outstanding.sequences)

    @property
    def unreported(self) -> tuple[int, int]:
        """Sequences, and prompt tokens to be computed, that other routers told of beyond what the heartbeats show.

        Of two figures for the same load the greater one counts, so no sequence counts twice: what all routers have
        outstanding here, and what the worker reported with what this router placed since. They change prices alone;
        whether the worker is full, or too late for a deadline, follows from what it reports.
        """
        share, own = self.share, self._outstanding
        if share is None or not (share.sequences or share.prefill_tokens):
            return 0, 0
        tokens = own.prefill_tokens + share.prefill_tokens - self.pending_prefill_tokens
        return max(0, own.sequences + share.sequences - self.sequences), max(0, tokens)

    def has_batch_slot(self, sequences: int = 1) -> bool:
        """Return whether the batch has room for so many more sequences; beyond it they would wait at the worker."""
        return self.sequences + sequences <= self.capacity.max_num_seqs

    @property
    def drains(self) -> bool:
        return self.draining or self.load.draining

    @property
    def pending_prefill_tokens(self) -> int:
        reported = self.load.pending_prefill_tokens + self._since.prefill_tokens
        return max(reported, self._outstanding.prefill_tokens)

    @property
    def unplanned_prefill_tokens(self) -> int:
        """Pending ones that were in no step yet as of the heartbeat."""
        return max(0, self.pending_prefill_tokens - self.load.prefill_tokens_in_flight)

    @property
    def unheld_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        reported = self.load.unheld_blocks - self._since.blocks
        return min(max(reported, 0), self.capacity.num_blocks)

    @property
    def wanted_blocks(self) -> float:
        """Blocks that one sequence waits for, as the mean of those that this router placed; 0: unknown."""
        placed = self._outstanding
        return placed.blocks / placed.sized if placed.sized else 0.0

    @property
    def spare_blocks(self) -> float:
        """Blocks that are left once those that wait there have theirs; below 0: so many are missing."""
        return self.load.unheld_blocks - self._since.blocks - self.load.waiting * self.wanted_blocks

    def silent(self, now: float) -> bool:
        """Return whether the heartbeat is late.

        When it is due follows from the last one alone: a late worker from which everything was taken is still late.
        """
        idle = not (self.load.running or self.load.waiting)
        return now - self.heartbeat_at > HEARTBEAT_LIMIT_S + (IDLE_HEARTBEAT_S if idle else 0.0)

    def detached(self, now: float) -> bool:
        """Return whether it has had no KV manager for too long, also where another state is shown."""
        return self.detached_at is not None and now - self.detached_at >= self.manager_patience

    @property
    def detached_words(self) -> str:
        words = f"it has had no KV manager for {self.manager_patience:g} s (--manager-patience)"
        return f"{words}, so its sequences get no more blocks"

    def trouble(self, now: float) -> tuple[WorkerState, str] | None:
        """Return why the worker may not get work; None if it may.

        It drains, its step or its heartbeat is late, or it has had no KV manager for too long.
        """
        load = self.load
        limit = max(HUNG_FACTOR * load.step_predicted_seconds, HUNG_FLOOR_S)
        if not load.step_predicted_seconds:
            limit = HUNG_UNPREDICTED_S
        if load.step_age_seconds > limit:
            return WorkerState.HUNG, f"its step runs for {load.step_age_seconds:.1f} s; at most {limit:.1f} s expected"
        if self.silent(now):
            return WorkerState.HUNG, f"no heartbeat for {now - self.heartbeat_at:.1f} s"
        if self.drains:
            does = "hands over" if load.migrating else "finishes"
            return WorkerState.DRAINING, f"it {does} what it has and takes nothing new"
        if self.detached(now):
            return WorkerState.DETACHED, self.detached_words
        return None


def _shown(load: Load) -> tuple[int, float, float]:
    """Return the part of a heartbeat that measures completed steps."""
    return load.steps, load.decode_step_seconds, load.prefill_seconds_per_token
