"""One replay: the arrivals of a trace go through the router's dispatcher to engines and ledgers, in virtual time."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, TypeVarTuple

from cli.replay.links import Links, Moves
from cli.replay.notices import NoticeStream, Sharing
from cli.replay.router import ReplayIndex, ReplayRouter
from cli.replay.trace import Arrival, Trace
from cli.replay.worker import Listener, ReplayWorker, Timing
from common.contracts.errors import QuireError
from common.contracts.hashing import block_digests, block_hash_of, root_digest
from common.contracts.lease import Attach
from common.contracts.types import BlockHash, Decision, KvGeometry, KvGroup, PoolIdentity, SamplingParams, SequenceId
from gpuworker.engine.ports import EngineOutputs, EngineRequest
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from kvmanager.contracts.ledger_config import ManagerConfig
from kvmanager.ledger.registry import WorkerRegistry
from router.placement.fair_queue import Flow
from router.placement.placement_request import PlacementRequest
from router.placement.routing import Router
from router.placement.run_rule import rule_of
from router.placement.shared_load import SharedLoad
from router.placement.worker_model import Capacity
from router.requests.dispatcher import Job, LoadReservation
from router.tenants.tenancy import Tenant

# Tokens of blocks that nothing names begin here: each is of one request alone.
_NAMELESS = 1 << 30


# The tokens of replayed requests: made up, but equal where the recorded blocks were equal.
class Contents:
    """Names of blocks, numbered in the order in which they come; a block's number stands at each of its slots."""

    def __init__(self, block_size: int) -> None:
        """`block_size` is that of the trace."""
        self._size = block_size
        self._numbers: dict[int, int] = {}

    def tokens(self, request: int, arrival: Arrival) -> tuple[int, ...]:
        """Return the tokens of prompt and output."""
        total, numbers, found = arrival.prompt_tokens + arrival.output_tokens, self._numbers, list[int]()
        for name in arrival.blocks:
            found += [numbers.setdefault(name, len(numbers) % _NAMELESS)] * self._size
        del found[total:]
        return (*found, *[_NAMELESS + request % _NAMELESS] * (total - len(found)))


def chain(root: bytes, prompt: Sequence[int], block_size: int) -> tuple[tuple[BlockHash, ...], bytes]:
    """Return the hashes of a prompt's full blocks, and the digest of the last one, or the root."""
    digests = block_digests(root, prompt, block_size)
    return tuple([block_hash_of(each) for each in digests]), digests[-1] if digests else root


T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_FEW: Final = 1024


# An asyncio event loop whose time jumps to the next timer, so that hours of waiting take no time.
# Nothing waits for the outside: the loop is for coroutines and timers alone. Equal programs run equally: callbacks
# run in the order of their times, and those of one time in the order in which they were scheduled.
class Stuck(RuntimeError):
    """Every coroutine waits, and no timer would ever wake one."""


class _NoWait(selectors.SelectSelector):
    """Reports no event; instead of waiting it lets the time pass."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("every coroutine waits, and no timer would wake one")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; its time is in seconds since its beginning."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        # The time of the next timer that is scheduled for a time that others have.
        self._free: dict[float, float] = {}
        self._most = _FEW
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule a call. asyncio's heap keeps no order among equal times, so each timer gets the next float."""
        due = self._free.get(when, when)
        self._free[when] = math.nextafter(due, math.inf)
        if len(self._free) > self._most:
            self._free = {time: free for time, free in self._free.items() if time >= self.time()}
            self._most = max(_FEW, 2 * len(self._free))
        return super().call_at(due, callback, *args, context=context)


class VirtualClock:
    """The `Clock` of a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time_ns(self) -> int:
        return int(self._loop.time() * 1e9)


def run(loop: VirtualLoop, program: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on the loop. Raises what a callback raised, too."""
    raised: list[BaseException] = []

    def stop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        raised.append(context.get("exception") or RuntimeError(context["message"]))
        loop.stop()

    loop.set_exception_handler(stop)
    task = loop.create_task(program)
    try:
        return loop.run_until_complete(task)
    except RuntimeError:
        if not raised:
            raise
        task.cancel()
        raise raised[0] from None


HEARTBEAT_S = 0.1
# Objects until the collector looks for cycles: a replay makes few, and the usual 700 cost a fifth of its time.
_GC_THRESHOLD = 100_000
# One manager for workers of any number.
_ROOMY = ManagerConfig(max_workers=1 << 20, max_blocks=1 << 40)
_GEOMETRY = KvGeometry(1, 1, 1, 1, "float32")
_SAMPLING = SamplingParams()
_NO_MOVES: Final = Moves(0)
_KEY: Final = bytes(32)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The suite that a trace is replayed on. Its workers are alike; its routers take the requests in turn."""

    workers: int = 1
    routers: int = 1
    num_blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 1 << 20
    max_queued: int = 1024
    # Slots of the widest attention window where every layer of the model has one, else 0.
    window: int = 0
    # Those of layers that keep K/V for different times; then `num_blocks` are pages.
    groups: tuple[KvGroup, ...] = ()
    prefix_caching: bool = True
    manager: ManagerConfig = _ROOMY
    timing: Timing = field(default_factory=Timing)
    # What each worker has beside its pool; None: nothing moves.
    moves: Moves | None = None
    router: type[Router] = Router
    # How several routers tell each other of their load; None: they do not.
    sharing: Sharing | None = field(default_factory=Sharing)
    seed: int = 0


@dataclass(slots=True)
class Replayed:
    """What became of one arrival, in seconds of virtual time; `refused` says why where it was."""

    arrival: Arrival
    worker: str = ""
    first_token_at: float | None = None
    finished_at: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    refused: str = ""
    # Of the cached ones.
    host_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival.at

    @property
    def token_s(self) -> float | None:
        """Mean seconds from one token to the next."""
        if self.first_token_at is None or self.finished_at is None or self.tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Replay:
    """The results of one replay; `digest` is equal for replays that decided equally.

    `reports` are those of the workers to the KV manager, `index_changes` the blocks that it published or withdrew, and
    `index_entries` the entries of the prefix index at the end. `moves` is whether blocks could move; `replicated` are
    blocks that came to a worker before a request there asked for them.
    """

    requests: tuple[Replayed, ...]
    decisions: Mapping[str, int]
    digest: str
    seconds: float
    reports: int = 0
    index_changes: int = 0
    index_entries: int = 0
    moves: bool = False
    replicated: int = 0


def replay(trace: Trace, options: ReplayOptions) -> Replay:
    """Replay a trace. Equal traces and options give equal results."""
    thresholds = gc.get_threshold()
    gc.set_threshold(_GC_THRESHOLD, *thresholds[1:])
    try:
        with closing(VirtualLoop()) as loop:
            return run(loop, _Simulation(loop, trace, options).run())
    finally:
        gc.set_threshold(*thresholds)


class _Decisions:
    """Counts decisions, and chains their content into one digest."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._digest = hashlib.sha256()

    def record(self, decision: Decision) -> None:
        kind = decision.kind.value
        self.counts[kind] = self.counts.get(kind, 0) + 1
        said = (kind, decision.time_ns, decision.request_id, decision.chosen, decision.victim, decision.beneficiary)
        self._digest.update(repr(said).encode())

    def record_all(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            self.record(decision)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


@dataclass(slots=True)
class _Live:
    """A request that is at its worker."""

    replayed: Replayed
    reservation: LoadReservation
    done: asyncio.Future[None]


class _Simulation:
    def __init__(self, loop: VirtualLoop, trace: Trace, options: ReplayOptions) -> None:
        self._loop, self._clock, self._trace, self._options = loop, VirtualClock(loop), trace, options
        self._decisions, self._contents = _Decisions(), Contents(trace.block_size)
        geometry = replace(_GEOMETRY, window=options.window, groups=options.groups)
        self._index = ReplayIndex(rule_of(geometry, options.block_size))
        identity = PoolIdentity("replay", "none", options.block_size, geometry)
        self._root = root_digest("replay", "none", options.block_size)
        self._identity, ids = identity, itertools.count(1)
        self._routers = [self._router(options.seed + number) for number in range(options.routers)]
        self._manager = WorkerRegistry(options.manager, self._clock, lambda: f"m{next(ids)}", epoch=1)
        self._links = None
        if options.moves:
            self._links = Links(options.moves, options.block_size, self._clock, loop, options.groups)
        self._manager.transfer_key = _KEY if options.moves is not None and options.moves.peers else b""
        self._workers: dict[str, ReplayWorker] = {}
        # Their ids are unique over all workers.
        self._live: dict[SequenceId, _Live] = {}
        self._sequences = itertools.count(1)
        self._tenants: dict[str, Tenant] = {}

    def _router(self, seed: int) -> ReplayRouter:
        ids, options = itertools.count(1), self._options
        chooser = options.router(self._clock, lambda: f"d{seed}-{next(ids)}", seed)
        bounds = options.max_queued, options.manager.max_wait
        router = ReplayRouter(self._identity, chooser, self._index, self._decisions, self._clock, *bounds)
        if options.sharing is not None and options.routers > 1:
            router.share_load(SharedLoad(hashlib.sha256(b"router-%d" % seed).digest()))
        return router

    async def run(self) -> Replay:
        for number in range(self._options.workers):
            self._add_worker(f"worker-{number}")
        for router in self._routers:
            router.dispatcher.capacity_changed()
        if (sharing := self._options.sharing) is not None:
            shared = [each.pool.shared for each in self._routers if each.pool.shared is not None]
            NoticeStream(self._loop, self._clock, sharing, shared, self._options.seed)
        began = self._loop.time() + HEARTBEAT_S  # the workers are attached by then
        first = self._trace.arrivals[0].at
        async with asyncio.TaskGroup() as tasks:
            requests = []
            for number, arrival in enumerate(self._trace.arrivals):
                at = began + arrival.at - first
                if at > self._loop.time():
                    await asyncio.sleep(at - self._loop.time())
                requests.append(Replayed(replace(arrival, at=self._loop.time())))
                tasks.create_task(self._serve(number, requests[-1]))
        seconds = self._loop.time() - began
        return Replay(
            tuple(requests),
            dict(sorted(self._decisions.counts.items())),
            self._decisions.digest,
            seconds,
            sum(each.reports for each in self._workers.values()),
            self._index.changes,
            self._index.entries,
            self._links is not None,
            sum(each.replicated for each in self._workers.values()),
        )

    def _add_worker(self, worker_id: str) -> None:
        options, moves = self._options, self._options.moves or _NO_MOVES
        config = AgentConfig(
            options.num_blocks,
            options.block_size,
            options.max_num_batched_tokens,
            prefix_caching=options.prefix_caching,
            runway_slots=options.manager.runway_slots,
            max_num_seqs=options.max_num_seqs,
            window=options.window,
            groups=options.groups,
            host_frames=moves.host_blocks,
            disk_frames=moves.disk_blocks,
            serves_peers=moves.peers,
        )
        attach = Attach(
            worker_id,
            hashlib.sha256(worker_id.encode()).digest()[:16],
            0,
            0,
            self._identity,
            options.num_blocks,
            prefix_caching=options.prefix_caching,
            max_num_seqs=options.max_num_seqs,
            host_frames=moves.host_blocks,
            disk_frames=moves.disk_blocks,
            data_address=worker_id if moves.peers else "",
            image_format=_KEY if moves.peers else b"",
        )
        listener = Listener(
            lambda outputs: self._later(lambda: self._take(worker_id, outputs)),
            lambda events: self._index.apply(worker_id, events),
            lambda prompts: self._replicate(worker_id, prompts),
            self._decisions.record_all,
        )
        timing = options.timing
        if self._links is not None:
            timing = replace(timing, costs=replace(timing.costs, frame=self._links.frame_seconds))
        worker = ReplayWorker(self._loop, self._clock, attach, config, timing, self._manager, listener)
        if self._links is not None:
            worker.move_by(self._links)
        sizes = (options.num_blocks, options.block_size, options.max_num_seqs, options.max_model_len)
        kinds = (options.window, options.prefix_caching, options.groups)
        capacity = Capacity(*sizes, *kinds, fetches_blocks=moves.peers)
        self._workers[worker_id] = worker
        for router in self._routers:
            router.pool.add(worker, capacity, self._loop.time())
        self._loop.call_later(HEARTBEAT_S, self._heartbeat, worker)

    def _replicate(self, asked: str, prompts: Sequence[Sequence[BlockHash]]) -> None:
        """Let hot prefixes come to other workers, as the manager's sessions do."""
        for each in sorted(self._manager.note_prompts(asked, prompts)):
            self._workers[each].order_ahead()

    def _later(self, call: Callable[[], None]) -> None:
        """Call something after the time of a message."""
        self._loop.call_later(self._options.timing.message, call)

    def _heartbeat(self, worker: ReplayWorker) -> None:
        load = worker.load()
        for router in self._routers:
            router.pool.heartbeat(worker.worker_id, load, self._loop.time())
        self._loop.call_later(HEARTBEAT_S, self._heartbeat, worker)

    # ------------------------------------------------------------ requests

    async def _serve(self, number: int, replayed: Replayed) -> None:
        arrival, name = replayed.arrival, f"r{number}"
        tenant = self._tenants.setdefault(arrival.tenant, Tenant(arrival.tenant))
        router = self._routers[number % len(self._routers)]
        try:
            total = arrival.prompt_tokens + arrival.output_tokens
            router.admission.admit_request(name, total, tenant, self._loop.time())
        except QuireError as refused:
            replayed.refused = type(refused).__name__
            return
        try:
            await self._place(router, number, name, replayed)
        except QuireError as refused:
            replayed.refused = type(refused).__name__
        finally:
            router.admission.release_request(name, arrival.tenant)

    async def _place(self, router: ReplayRouter, number: int, name: str, replayed: Replayed) -> None:
        arrival = replayed.arrival
        tokens = self._contents.tokens(number, arrival)
        prompt = tokens[: arrival.prompt_tokens]
        hashes, parent = chain(self._root, prompt, self._options.block_size)
        wanted = PlacementRequest(name, arrival.prompt_tokens, len(tokens), max(1, arrival.output_tokens))
        job = Job(wanted, hashes if self._options.prefix_caching else (), arrival.priority, None)
        ticket = router.dispatcher.ticket(arrival.priority, Flow(arrival.tenant))
        placement = await router.dispatcher.place_job(job, ticket)
        router.admission.start_request(name, self._loop.time(), arrival.tenant)
        replayed.worker = placement.worker_id
        sequence = SequenceId(next(self._sequences))
        new = NewSequence(
            sequence,
            name,
            prompt,
            hashes,
            parent,
            len(tokens),
            StopRule(arrival.output_tokens),
            arrival.priority,
            tenant=arrival.tenant,
        )
        live = _Live(replayed, placement.reservations[0], self._loop.create_future())
        self._live[sequence] = live
        worker = self._workers[placement.worker_id]
        self._later(lambda: worker.submit(EngineRequest(new, _SAMPLING, len(prompt)), tokens))
        await live.done

    def _take(self, worker_id: str, outputs: EngineOutputs) -> None:
        now, live = self._loop.time(), self._live
        for sequence, tokens in outputs.tokens:
            each = live[sequence]
            replayed = each.replayed
            if replayed.first_token_at is None:
                replayed.first_token_at = now
                each.reservation.prefilled()
            replayed.tokens += len(tokens)
        for sequence in outputs.preempted:
            live[sequence].replayed.preemptions += 1
        for ended in outputs.finished:
            each = live.pop(ended.sequence)
            each.replayed.finished_at, usage = now, ended.usage
            each.replayed.cached_tokens, each.replayed.host_tokens = usage.cached_tokens, usage.host_cached_tokens
            each.replayed.disk_tokens, each.replayed.peer_tokens = usage.disk_cached_tokens, usage.peer_cached_tokens
            each.reservation.complete(each.replayed.tokens)
            self._workers[worker_id].forget(ended.sequence)
            each.done.set_result(None)
