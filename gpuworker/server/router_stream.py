"""The stream of one router: its handles, its sequences with their deadlines and spans, and its outputs.

It lives on the I/O loop. The stream's single writer waits on `ready` and packs all collected outputs into one message.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from opentelemetry.trace import Tracer

from common.errors import AlreadyExists, QuireError, Unsupported
from common.lease import Admit
from common.rpc.status import to_status
from common.telemetry import is_sampled
from common.types import FinishReason, SequenceId, Usage
from common.wire.enum_codec import finish_from_proto
from gpuworker.core.outcomes import SequenceFinished
from gpuworker.engine.engine import Engine
from gpuworker.engine.ports import EngineOutputs
from gpuworker.server.codec import SubmitLimits, constraint_of, engine_request
from gpuworker.server.grammar_compile_queue import GrammarCompileQueue
from gpuworker.server.output_buffer import OutputBuffer
from gpuworker.server.spans import SequenceSpans
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb


@dataclass(slots=True)
class _Live:
    """A sequence that the router of this stream waits for; its grammar stays compiled meanwhile."""

    handle: int
    submitted: float
    output_before: int
    grammar: Grammar | None = None
    spans: SequenceSpans | None = None
    deadline: asyncio.TimerHandle | None = None


class RouterStream:
    """Connects one open stream with the engine. Calls `own` with each sequence that it hands to the engine.

    Without `grammars`, sequences with constraints are refused.
    """

    def __init__(
        self,
        engine: Engine,
        next_sequence: Callable[[], SequenceId],
        own: Callable[[SequenceId, RouterStream], None],
        limits: SubmitLimits,
        tracer: Tracer,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._engine, self._next_sequence, self._own, self._limits = engine, next_sequence, own, limits
        self._tracer = tracer
        self._compile_queue = GrammarCompileQueue(grammars, self._compiled) if grammars is not None else None
        self._live: dict[SequenceId, _Live] = {}
        self._by_handle: dict[int, SequenceId] = {}
        self._outputs = OutputBuffer()
        self._first: deque[pb.StreamResponse] = deque()
        self._heartbeat: pb.StreamResponse | None = None
        self.ready = asyncio.Event()
        self.closed = False

    @property
    def sequences(self) -> frozenset[SequenceId]:
        """The sequences that have not finished."""
        return frozenset(self._live)

    @property
    def compiling(self) -> int:
        """The number of sequences whose constraints are being compiled; `sequences` does not contain them."""
        return 0 if self._compile_queue is None else len(self._compile_queue)

    # ------------------------------------------------------------ from the router

    def submit(self, message: pb.Submit) -> None:
        """Hand a sequence to the engine, once its constraint is compiled; send Refused when it cannot be served."""
        constraint, now = constraint_of(message), time.monotonic()
        if constraint is None:
            self._start(message, now, None)
        elif self._compile_queue is None:
            self._refuse(message, Unsupported("a worker that simulates its steps follows no constraints; leave it out"))
        elif message.handle in self._compile_queue:
            self._refuse(message, _taken(message))
        else:
            self._compile_queue.put(message, constraint, now)

    def _compiled(self, message: pb.Submit, came: float, grammar: Grammar | QuireError) -> None:
        if isinstance(grammar, QuireError):
            self._refuse(message, grammar)
        else:
            self._start(message, came, grammar)

    def _start(self, message: pb.Submit, came: float, grammar: Grammar | None) -> None:
        sequence = self._next_sequence()
        live = _Live(message.handle, came, message.output_tokens_before, grammar)
        try:
            if message.handle in self._by_handle:
                raise _taken(message)
            live.spans = self._open_spans(message, sequence)
            traceparent = live.spans.reserve_traceparent if live.spans is not None else ""
            fork_of = self._by_handle.get(message.fork_of) if message.HasField("fork_of") else None
            request = engine_request(message, sequence, fork_of, self._limits.max_model_len, traceparent)
            self._limits.check(request.new)
        except QuireError as refused:
            if live.spans is not None:
                live.spans.refused(str(refused))
            self._refuse(message, refused)
            return
        if message.HasField("timeout_seconds"):
            left = max(0.0, came + message.timeout_seconds - time.monotonic())
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_later(left, self._engine.cancel, sequence, FinishReason.DEADLINE)
        self._live[sequence], self._by_handle[message.handle] = live, sequence
        self._own(sequence, self)
        self._engine.submit(request)

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
        return SequenceSpans(self._tracer, message.traceparent, attributes)

    def cancel(self, message: pb.Cancel) -> None:
        """End a sequence at the router's request; unknown handles are ignored."""
        sequence = self._by_handle.get(message.handle)
        reason = finish_from_proto(message.reason, unknown=FinishReason.CANCELLED)
        if sequence is not None:
            self._engine.cancel(sequence, reason)
        elif self._compile_queue is not None and (waited := self._compile_queue.withdraw(message.handle)) is not None:
            usage = Usage(prompt_tokens=len(waited.prompt_token_ids) // 4)
            self._outputs.finished(message.handle, SequenceFinished(self._next_sequence(), reason, usage))
            self.ready.set()

    def close(self) -> None:
        """Cancel the remaining sequences when the router or the worker goes; the router sees only the stream's end."""
        self.closed = True
        self.ready.set()
        if self._compile_queue is not None:
            self._compile_queue.clear()
        for sequence in list(self._live):
            self._engine.cancel(sequence, FinishReason.CANCELLED)

    # ------------------------------------------------------------ to the router

    def push(self, message: pb.StreamResponse) -> None:
        """Queue a message that is sent before gathered outputs."""
        self._first.append(message)
        self.ready.set()

    def beat(self, load: pb.Load) -> None:
        """Queue a heartbeat; it replaces one that a slow router has not received."""
        self._heartbeat = pb.StreamResponse(heartbeat=pb.Heartbeat(load=load))
        self.ready.set()

    def take(self) -> pb.StreamResponse | None:
        """Return the next message for the writer; None when there is nothing to send."""
        if self._first:
            return self._first.popleft()
        if self._heartbeat is not None:
            heartbeat, self._heartbeat = self._heartbeat, None
            return heartbeat
        if self._outputs:
            return pb.StreamResponse(outputs=self._outputs.take())
        self.ready.clear()
        return None

    def deliver(self, outputs: EngineOutputs) -> None:
        """Queue the outputs of this stream's sequences, in the order in which a router must see them."""
        for admit in outputs.admitted:
            self._deliver_admit(admit)
        self._trace_chunks(outputs)
        logprobs = dict(outputs.logprobs)  # with the first tokens of a sequence; there are several when two steps ended
        for sequence, tokens in outputs.tokens:
            if (live := self._live.get(sequence)) is not None:
                self._outputs.tokens(outputs.step, live.handle, tokens, logprobs.pop(sequence, ()))
        for sequence in outputs.preempted:
            if (live := self._live.get(sequence)) is not None:
                self._outputs.preempted(live.handle)
                if live.spans is not None:
                    live.spans.preempted()
        for end in outputs.finished:
            self._deliver_end(end)
        if self._outputs:
            self.ready.set()

    def _deliver_admit(self, admit: Admit) -> None:
        live = self._live.get(admit.sequence)
        if live is None:
            return
        self._outputs.admitted(live.handle, admit, time.monotonic() - live.submitted)
        if live.spans is not None:
            live.spans.admitted(admit)

    def _deliver_end(self, end: SequenceFinished) -> None:
        live = self._live.pop(end.sequence, None)
        if live is None:
            return
        self._by_handle.pop(live.handle, None)
        if not self.closed:
            self._outputs.finished(live.handle, _over_all_runs(end, live.output_before))
        if live.deadline is not None:
            live.deadline.cancel()
        if live.spans is not None:
            live.spans.finished(end)

    def _trace_chunks(self, outputs: EngineOutputs) -> None:
        for chunk in outputs.chunks:
            live = self._live.get(chunk.sequence)
            if live is not None and live.spans is not None:
                live.spans.chunk(chunk)


def _taken(message: pb.Submit) -> AlreadyExists:
    return AlreadyExists(f"handle {message.handle} names a sequence of this stream already")


def _over_all_runs(end: SequenceFinished, output_before: int) -> SequenceFinished:
    """Count the output of an earlier run of the sequence as output, although this run got it in its prompt."""
    if not output_before:
        return end
    usage = end.usage
    prompt, output = usage.prompt_tokens - output_before, usage.output_tokens + output_before
    return replace(end, usage=replace(usage, prompt_tokens=prompt, output_tokens=output))
