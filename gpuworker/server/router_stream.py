"""The stream of one router: its handles, its sequences with their deadlines and spans, and its outputs.

It lives on the I/O loop. The stream's single writer waits on `ready` and packs all collected outputs into one message.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple

from opentelemetry.trace import Tracer

from common.contracts.adapters import AdapterRef
from common.contracts.errors import (
    AlreadyExists,
    EngineFailure,
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    QuotaViolation,
    Unsupported,
)
from common.contracts.limits import (
    MAX_ADAPTER_LOADS,
    MAX_ENDED_BYTES,
    MAX_ENDED_SEQUENCES,
    MAX_GRAMMARS_WAITING,
    MAX_STREAM_OUTPUT_BYTES,
    MAX_STREAM_PROMPT_BYTES,
    MAX_STREAM_SEQUENCES,
)
from common.contracts.types import Constraint, ConstraintKind, FinishReason, SequenceId, Usage
from common.rpc.status import to_status
from common.telemetry import context_from, is_sampled
from common.wire.enum_codec import finish_from_proto
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs
from gpuworker.plane.adapters import AdapterStore
from gpuworker.scheduling.adapter_table import Adapter
from gpuworker.scheduling.outcomes import SequenceFinished
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.server.codec import constraint_of, engine_request, share_of
from gpuworker.server.live_sequence import LiveSequence, gather
from gpuworker.server.output_buffer import OutputBuffer
from gpuworker.server.spans import SequenceSpans
from gpuworker.server.submit_check import SubmitLimits
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb


# Sequences that have ended, and whose router may still be sending what they put out: it may die before it has.
class EndedSequences:
    """Those of one stream by handle, bounded: the oldest leave first."""

    def __init__(self) -> None:
        self._by_handle: dict[int, LiveSequence] = {}
        self._bytes = 0

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._by_handle.values())

    def put(self, ended: LiveSequence) -> None:
        """Keep a sequence, if any router may go on with it."""
        if not ended.ended:
            return
        self.pop(ended.handle)
        self._by_handle[ended.handle] = ended
        self._bytes += ended.bytes
        while len(self._by_handle) > MAX_ENDED_SEQUENCES or self._bytes > MAX_ENDED_BYTES:
            self.pop(next(iter(self._by_handle)))

    def pop(self, handle: int) -> None:
        ended = self._by_handle.pop(handle, None)
        if ended is not None:
            self._bytes -= ended.bytes

    def clear(self) -> None:
        self._by_handle.clear()
        self._bytes = 0


Compiled = Callable[[pb.Submit, float, "Grammar | QuireError"], None]
_RETRY_S: Final = 1.0


# Holds the submits of one router while their constraints are compiled, off the I/O loop.
class _Key(NamedTuple):
    """What is compiled once for all submits that wait for it; a tenant waits for its own turn alone."""

    tenant: str
    constraint: Constraint


class GrammarCompileQueue:
    """Lives on the I/O loop. Calls `compiled` with each submit, its arrival time, and its grammar or the refusal.

    Submits with the same constraint leave in the order of arrival, so a fork follows the sequence that it forks. When
    all places are taken, the tenant with the most constraints gives up its newest one for a tenant with fewer.
    """

    def __init__(self, compiler: GrammarCompiler, compiled: Compiled) -> None:
        self._compiler, self._compiled = compiler, compiled
        self._waiting: dict[_Key, list[tuple[pb.Submit, float]]] = {}
        self._work: dict[_Key, Future[Grammar]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, message: pb.Submit, constraint: Constraint, came: float) -> None:
        """Compile the constraint, then call `compiled`: at once if the constraint was compiled before."""
        self._compiler.know_ends(message.eos_token_ids)
        key = _Key(message.tenant, constraint)
        if key in self._waiting:
            self._waiting[key].append((message, came))
        elif (grammar := self._compiler.compiled(constraint)) is not None:
            self._compiled(message, came, grammar)
        elif self._has_room(key.tenant):
            self._waiting[key] = [(message, came)]
            work = self._work[key] = self._compiler.compile_soon(constraint, key.tenant)
            asyncio.wrap_future(work).add_done_callback(lambda done: self._done(key, done))
        else:
            self._compiled(message, came, _no_room())

    def withdraw(self, handle: int) -> pb.Submit | None:
        """Take back a waiting submit; None when none of this handle waits. A compilation without submits ends."""
        for key, waiting in self._waiting.items():
            for index, (message, _) in enumerate(waiting):
                if message.handle == handle:
                    del waiting[index]
                    self._cancel_if_unused(key)
                    return message
        return None

    def clear(self) -> None:
        for key in list(self._waiting):
            self._waiting[key].clear()
            self._cancel_if_unused(key)

    def _has_room(self, tenant: str) -> bool:
        """Return whether a constraint of the tenant may wait; make room for it at the cost of the longest line."""
        if len(self._work) < MAX_GRAMMARS_WAITING:
            return True
        held = Counter(key.tenant for key in self._work)
        longest, most = held.most_common(1)[0]
        newest = next(key for key in reversed(self._work) if key.tenant == longest)
        if most <= held[tenant] + 1 or not self._work[newest].cancel():
            return False
        del self._work[newest]
        for message, came in self._waiting.pop(newest):
            self._compiled(message, came, _no_room())
        return True

    def _cancel_if_unused(self, key: _Key) -> None:
        """Cancel a compilation that no submit waits for, unless it has begun."""
        if not self._waiting[key] and self._work[key].cancel():
            del self._waiting[key], self._work[key]

    def _done(self, key: _Key, done: asyncio.Future[Grammar]) -> None:
        if done.cancelled():
            return
        del self._work[key]
        error = done.exception()
        if error is not None and not isinstance(error, QuireError):
            error = EngineFailure(f"a constraint could not be compiled: {error!r}")
        for message, came in self._waiting.pop(key):
            self._compiled(message, came, error or done.result())


def _no_room() -> Overloaded:
    what = f"{MAX_GRAMMARS_WAITING} of {MAX_GRAMMARS_WAITING} constraints of this router wait to be compiled"
    return Overloaded(QuotaViolation("gpuworker.grammars", what), _RETRY_S)


log = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 1.0  # until a full stream may have room again
# Compiled for a sequence with a budget of thoughts alone: that reads the tokenizer, off the threads that must not wait.
_ANYTHING: Final = Constraint(ConstraintKind.REGEX, "(?s:.*)")
_LONGEST_SECONDS: Final = 365 * 86_400.0  # of a deadline: timers take no more than some hundred years


class RouterStream:
    """Connects one open stream with the engine. Calls `own` with each sequence that it hands to the engine.

    Without `grammars`, sequences with constraints are refused, and without `adapters` those with an adapter.
    """

    def __init__(
        self,
        engine: Engine,
        next_sequence: Callable[[], SequenceId],
        own: Callable[[SequenceId, RouterStream], None],
        limits: SubmitLimits,
        tracer: Tracer,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self._adapters, self._loads = adapters, set[asyncio.Task[None]]()
        self._engine, self._next_sequence, self._own, self._limits = engine, next_sequence, own, limits
        self._tracer = tracer
        self._compile_queue = GrammarCompileQueue(grammars, self._compiled) if grammars is not None else None
        self._live: dict[SequenceId, LiveSequence] = {}
        self._ended = EndedSequences()
        self._by_handle: dict[int, SequenceId] = {}
        self._sizes: dict[int, int] = {}  # bytes of each submit whose sequence has not ended, by handle
        self._held = 0  # their sum
        self._outputs = OutputBuffer()
        self._first: deque[pb.StreamResponse] = deque()
        self._first_bytes = 0
        self._heartbeat: pb.StreamResponse | None = None
        self.ready = asyncio.Event()
        self.closed = False
        self.ended_here = False
        """Whether the worker ended the stream, and not the router."""
        self.failure: QuireError | None = None
        """Why the worker ends the stream, if it is the worker that does."""

    @property
    def sequences(self) -> frozenset[SequenceId]:
        """The sequences that have not finished."""
        return frozenset(self._live)

    @property
    def compiling(self) -> int:
        """The number of sequences whose constraints are being compiled; `sequences` does not contain them."""
        return 0 if self._compile_queue is None else len(self._compile_queue)

    @property
    def handed_over(self) -> int:
        """The number of ended sequences that go on at other workers, which may not have them yet."""
        return 0 if self.closed else sum(live.handed_over for live in self._ended)

    # ------------------------------------------------------------ from the router

    def submit(self, message: pb.Submit) -> None:
        """Hand a sequence to the engine, once its constraint is compiled; send Refused when it cannot be served."""
        if self.closed:
            return
        if message.handle in self._sizes:
            self._refuse(message, AlreadyExists(f"handle {message.handle} names a sequence of this stream already"))
            return
        self._engine.standstill.begin()
        with self._refusing(message):
            self._take_room(message)
            self._limits.check(message)
            constraint, now = constraint_of(message), time.monotonic()
            if constraint is None and message.HasField("thought_budget"):
                constraint = _ANYTHING
            if constraint is None:
                self._start(message, now, None)
            elif self._compile_queue is None:
                what = "a worker that simulates its steps follows no constraints and no budgets; leave them out"
                raise Unsupported(what)
            else:
                self._compile_queue.put(message, constraint, now)

    @contextmanager
    def _refusing(self, message: pb.Submit) -> Iterator[None]:
        """Refuse the submit on any error; the stream and its other sequences go on."""
        try:
            yield
        except QuireError as refused:
            self._refuse_admitted(message, refused)
        except Exception:
            log.exception("a submit could not be taken")
            failure = EngineFailure("the worker could not take this submit; the worker's log has the details")
            self._refuse_admitted(message, failure)

    def _take_room(self, message: pb.Submit) -> None:
        """Count a submit against the limits of the stream. Raises Overloaded."""
        constraint = message.json_schema or message.regex or message.grammar
        size = len(message.prompt_token_ids) + len(constraint) + sum(map(len, message.bad_words))
        size += len(message.prediction_token_ids) + message.continuation.ByteSize()
        if len(self._sizes) >= MAX_STREAM_SEQUENCES:
            what = f"{len(self._sizes)} sequences of this router have not ended; at most {MAX_STREAM_SEQUENCES}"
            raise Overloaded(QuotaViolation("worker.stream.sequences", what), _RETRY_SECONDS)
        if self._held + size > MAX_STREAM_PROMPT_BYTES:
            what = f"{self._held} bytes of prompts and {size} more; at most {MAX_STREAM_PROMPT_BYTES}"
            raise Overloaded(QuotaViolation("worker.stream.prompts", what), _RETRY_SECONDS)
        self._sizes[message.handle] = size
        self._held += size

    def _give_room(self, handle: int) -> None:
        self._held -= self._sizes.pop(handle, 0)

    def _compiled(self, message: pb.Submit, came: float, grammar: Grammar | QuireError) -> None:
        if isinstance(grammar, QuireError):
            self._refuse_admitted(message, grammar)
        else:
            with self._refusing(message):
                self._start(message, came, grammar)

    def _start(self, message: pb.Submit, came: float, grammar: Grammar | None) -> None:
        sequence = self._next_sequence()
        spans = self._open_spans(message, sequence)
        try:
            traceparent = spans.reserve_traceparent if spans is not None else ""
            fork_of = self._by_handle.get(message.fork_of) if message.HasField("fork_of") else None
            adapter = self._adapter_of(message)
            weights = None if adapter is None else adapter.weights
            request = engine_request(message, sequence, fork_of, self._limits, traceparent, weights)
            self._check_fork(request.new)
        except Exception as refused:
            if spans is not None:
                spans.refused(refused)
            raise
        size = self._sizes[message.handle]
        live = LiveSequence(message.handle, request.new, came, message, size, grammar, spans)
        live.release_adapter = self._begin_use(adapter)
        live.compiled = 0.0 if grammar is None else time.monotonic() - came
        live.standstill = self._engine.standstill
        if message.HasField("timeout_seconds"):
            self._set_deadline(live, came + message.timeout_seconds - time.monotonic())
        self._take_over(live)
        self._engine.submit_request(request)

    def _adapter_of(self, message: pb.Submit) -> Adapter | None:
        """Return the adapter of a submit, which is in memory; None for the base. Raises NotFound and Unavailable."""
        if not message.adapter:
            return None
        if self._adapters is None:
            raise NotFound(f"adapter {message.adapter!r} is not known at this worker, which serves none")
        return self._adapters.find(message.adapter, message.adapter_fingerprint)

    def _begin_use(self, adapter: Adapter | None) -> Callable[[], None] | None:
        if adapter is None or self._adapters is None:
            return None
        self._adapters.use(adapter)
        return partial(self._adapters.release, adapter)

    def change_adapters(self, message: pb.StreamRequest) -> None:
        """Load an adapter beside what runs, or forget one; AdapterAnswer says when that is done, or why not."""
        if message.HasField("load_adapter"):
            self._begin_load(message.load_adapter)
        else:
            self._unload_adapter(message.unload_adapter)

    def _begin_load(self, message: pb.LoadAdapter) -> None:
        if len(self._loads) >= MAX_ADAPTER_LOADS:
            what = f"{len(self._loads)} loads of adapters of this router wait; at most {MAX_ADAPTER_LOADS}"
            self._answer_adapter(message.query, Overloaded(QuotaViolation("worker.stream.loads", what), _RETRY_SECONDS))
            return
        task = asyncio.create_task(self._load_adapter(message))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    async def _load_adapter(self, message: pb.LoadAdapter) -> None:
        error: QuireError | None = None
        try:
            wanted, share = AdapterRef(message.name, message.fingerprint), share_of(message)
            await self._served_adapters().load(wanted, message.path, share, message.folder)
        except QuireError as refused:
            error = refused
        except Exception:
            log.exception("an adapter could not be loaded")
            error = EngineFailure("the adapter could not be loaded; the worker's log has the details")
        self._answer_adapter(message.query, error)

    def _unload_adapter(self, message: pb.UnloadAdapter) -> None:
        error: QuireError | None = None
        try:
            self._served_adapters().unload(message.name)
        except QuireError as refused:
            error = refused
        self._answer_adapter(message.query, error)

    def _served_adapters(self) -> AdapterStore:
        if self._adapters is None:
            raise Unsupported("this worker serves no adapters; start it with --lora or --lora-dir")
        return self._adapters

    def _answer_adapter(self, query: int, error: QuireError | None) -> None:
        status = b"" if error is None else to_status(error).SerializeToString()
        if not self.closed:
            self.push(pb.StreamResponse(adapter_answer=pb.AdapterAnswer(query=query, status=status)))

    def tell_of_adapters(self) -> None:
        """Tell the router which adapters the worker has, if it serves any."""
        if self._adapters is not None and not self.closed:
            self.push(pb.StreamResponse(adapters=self._adapters.message()))

    def _set_deadline(self, live: LiveSequence, seconds: float) -> None:
        left = max(0.0, min(seconds, _LONGEST_SECONDS))
        cancel, loop = self._engine.cancel_request, asyncio.get_running_loop()
        live.deadline = loop.call_later(left, cancel, live.id, FinishReason.DEADLINE)

    def _take_over(self, live: LiveSequence) -> None:
        self._live[live.id], self._by_handle[live.handle] = live, live.id
        self._own(live.id, self)

    def _check_fork(self, new: NewSequence) -> None:
        """Raise InvalidRequest for a fork of another prompt or domain: the two would share computed blocks."""
        parent = self._live.get(new.fork_of) if new.fork_of is not None else None
        if parent is None:
            return
        ours = (new.tokens, new.parent_digest, new.no_cache)
        if ours != (parent.new.tokens, parent.new.parent_digest, parent.new.no_cache):
            what = f"names handle {parent.handle}, which has another prompt or cache domain; expected the same"
            raise InvalidRequest(FieldViolation("fork_of", what))

    def _refuse_admitted(self, message: pb.Submit, refused: QuireError) -> None:
        self._give_room(message.handle)
        self._refuse(message, refused)

    def _refuse(self, message: pb.Submit, refused: QuireError) -> None:
        status = to_status(refused).SerializeToString()
        self.push(pb.StreamResponse(refused=pb.Refused(handle=message.handle, status=status)))

    def _open_spans(self, message: pb.Submit, sequence: SequenceId) -> SequenceSpans | None:
        if not is_sampled(message.traceparent):
            return None
        attributes: dict[str, str | int] = {
            "quire.request_id": message.request_id,
            "quire.index": message.index,
            "quire.sequence": sequence,
            "quire.prompt_tokens": len(message.prompt_token_ids) // 4,
        }
        return SequenceSpans(self._tracer, context_from(message.traceparent, message.tracestate), attributes)

    def cancel(self, message: pb.Cancel) -> None:
        """End a sequence at the router's request; unknown handles are ignored."""
        sequence = self._by_handle.get(message.handle)
        reason = finish_from_proto(message.reason, unknown=FinishReason.CANCELLED)
        if message.hands_over:
            # One that has ended by itself meanwhile keeps its output until the router has it.
            if sequence is not None:
                self._live[sequence].handed_over = True
        elif reason is FinishReason.CANCELLED:
            self._forget_output(message.handle)
        if sequence is not None and message.hands_over:
            self._engine.hand_over(sequence)
        elif sequence is not None:
            self._engine.cancel_request(sequence, reason)
        elif self._compile_queue is not None and (waited := self._compile_queue.withdraw(message.handle)) is not None:
            self._give_room(message.handle)
            usage = Usage(prompt_tokens=len(waited.prompt_token_ids) // 4)
            self._outputs.finished(message.handle, SequenceFinished(self._next_sequence(), reason, usage))
            self.ready.set()

    def _forget_output(self, handle: int) -> None:
        """Keep nothing of a sequence whose client has gone."""
        self._ended.pop(handle)
        live = self._live.get(self._by_handle.get(handle, SequenceId(0)))
        if live is not None:
            live.kept = None

    def acknowledge(self, handles: Iterable[int]) -> None:
        """Forget the output of requests that have left their router, also of those that the engine still ends."""
        for handle in handles:
            self._forget_output(handle)

    def takes(self, message: pb.Adopt) -> bool:
        """Return whether an orphan can go on here."""
        return not self.closed and message.handle not in self._sizes

    def refuse_orphan(self, message: pb.Adopt, held: bool) -> None:
        """Say that a router has the sequence (`held`), or that it has ended: its time was over, or room was short."""
        what = "another stream has gone on with a sequence of this request; read that one"
        error: QuireError = AlreadyExists(what)
        if not held:
            error = NotFound("a sequence of this request has ended at its worker meanwhile; send the request again")
        self._refuse(pb.Submit(handle=message.handle), error)

    def adopt(self, message: pb.Adopt, orphan: LiveSequence) -> None:
        """Go on with an orphan, after all of its output so far."""
        handle = message.handle
        orphan.handle = handle
        self.push(pb.StreamResponse(adopted=pb.Adopted(handle=handle)))
        if orphan.deadline is not None:
            orphan.deadline.cancel()
            orphan.deadline = None
        if orphan.kept is not None:
            orphan.kept.replay(handle, self._outputs)
        if orphan.ended:
            self._ended.put(orphan)
        else:
            self._sizes[handle] = orphan.size
            self._held += orphan.size
            self._take_over(orphan)
            if message.HasField("timeout_seconds"):
                self._set_deadline(orphan, message.timeout_seconds)
            if orphan.spans is not None:
                orphan.spans.resumed()
        self.ready.set()

    def holds(self, request: tuple[str, str]) -> bool:
        """Return whether a request of this tenant and id has sequences here."""
        return any(live.request == request for live in (*self._live.values(), *self._ended))

    def spans_of(self, sequence: SequenceId) -> SequenceSpans | None:
        """Return the spans of a sequence that runs here; None when it is not traced."""
        live = self._live.get(sequence)
        return live.spans if live is not None else None

    def has(self, sequence: SequenceId) -> bool:
        """Return whether a sequence is here, also one that has ended while its router may still send its output."""
        return sequence in self._live or any(live.id == sequence for live in self._ended)

    def abandon(self) -> list[LiveSequence]:
        """Give up what another router may go on with, ended sequences first. The router's stream is lost."""
        left = [*self._ended, *(live for live in self._live.values() if live.kept is not None)]
        for live in left:
            self._live.pop(live.id, None)
        self._ended.clear()
        return left

    def lose(self, failure: QuireError | None = None) -> None:
        """Note that the router has gone; should it read again, the stream ends with `failure`."""
        if failure is not None and not self.closed:
            self.failure = failure
        self.closed = True
        self.ready.set()

    def close(self) -> None:
        """Cancel the remaining sequences when the router or the worker goes; the router sees only the stream's end."""
        self.ended_here = self.ended_here or not self.closed
        self.lose()
        if self._compile_queue is not None:
            self._compile_queue.clear()
        for load in self._loads:
            load.cancel()
        for sequence in list(self._live):
            self._engine.cancel_request(sequence, FinishReason.CANCELLED)

    def fail(self, failure: QuireError) -> None:
        """End the stream with an error, and forget what the router has not read.

        A writer whose router does not read waits in gRPC for as long: then the error is what the router reads next.
        """
        if not self.closed:
            self.failure = failure
        self._first.clear()
        self._outputs.clear()
        self._first_bytes, self._heartbeat = 0, None
        self.close()

    # ------------------------------------------------------------ to the router

    @property
    def backlog(self) -> int:
        """Bytes that the router has not read, beside those that are on their way."""
        return self._first_bytes + self._outputs.size

    def push(self, message: pb.StreamResponse) -> None:
        """Queue a message that is sent before gathered outputs."""
        self._first.append(message)
        self._first_bytes += message.ByteSize()
        self.ready.set()
        self._check_backlog()

    def _check_backlog(self) -> None:
        if self.backlog > MAX_STREAM_OUTPUT_BYTES:
            what = f"{self.backlog} bytes wait for a router that does not read; at most {MAX_STREAM_OUTPUT_BYTES}"
            log.warning("a stream ends: %s", what)
            self.fail(Overloaded(QuotaViolation("worker.stream.outputs", what), _RETRY_SECONDS))

    def beat(self, load: pb.Load) -> None:
        """Queue a heartbeat; it replaces one that a slow router has not received."""
        self._heartbeat = pb.StreamResponse(heartbeat=pb.Heartbeat(load=load))
        self.ready.set()

    def take(self) -> pb.StreamResponse | None:
        """Return the next message for the writer; None when there is nothing to send."""
        if self._first:
            first = self._first.popleft()
            self._first_bytes -= first.ByteSize()
            return first
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            return heartbeat
        if self._outputs:
            return pb.StreamResponse(outputs=self._outputs.take_outputs())
        self.ready.clear()
        return None

    def deliver(self, outputs: EngineOutputs) -> None:
        """Queue the outputs of this stream's sequences; an error ends the stream, and no sequence stays behind."""
        try:
            if not self.closed:
                gather(self._live, outputs, self._outputs)
        except Exception:
            log.exception("outputs could not be packed for a router")
            self.fail(EngineFailure("outputs could not be packed; the worker's log has the details"))
        finally:
            for end in outputs.finished:
                self._forget(end)
        if self._outputs:
            self.ready.set()
            self._check_backlog()

    def _forget(self, end: SequenceFinished) -> None:
        live = self._live.pop(end.sequence, None)
        if live is None:
            return
        self._by_handle.pop(live.handle, None)
        self._give_room(live.handle)
        live.close(end)
        if not self.closed:
            self._ended.put(live)
