"""What the spans of one sampled request take of each service: the work that the services do, in one process.

Processor time, so that neighbours on the machine disturb it little. A request has one sequence, one prefill chunk and
eight workers to choose from. What a service sends is encoded, and the router keeps it; sockets and threads are left
out. The code that makes decision records is too: it runs whether a request is sampled or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace import SpanKind

from bench.lib.decision_records import records_of
from common.contracts.clock import SystemClock
from common.contracts.lease import Admit, GrantBatch, Report, Reserve
from common.contracts.types import BlockId, Decision, DecisionKind, FinishReason, SamplingParams, SequenceId, Usage
from common.telemetry import context_from
from common.telemetry.delivery import otlp_request
from common.telemetry.provider import origin_of
from common.telemetry.spans import RecordedSpan, SpanTracer
from gpuworker.engine.ports import Chunk
from gpuworker.scheduling.outcomes import SequenceFinished
from gpuworker.server.spans import SequenceSpans
from kvmanager.sessions.reserve_spans import ReserveSpans
from router.contracts.events import Finished, Timings, ValidatedRequest
from router.contracts.index_answer import IndexAnswer, IndexSaid
from router.observe.request_trace import RequestTrace
from router.observe.sampling import ChosenTraceIds, RequestSampler
from router.observe.trace_store import TraceStore

SERVICES = ROUTER, WORKER, MANAGER = "router", "gpuworker", "kvmanager"
_TOGETHER: Final = 64
_USAGE: Final = Usage(prompt_tokens=64, output_tokens=128)
_REQUEST: Final = ValidatedRequest(tuple(range(64)), SamplingParams(max_tokens=128), 0.0)
_METHOD: Final = "quire.inference.v1.InferenceService/Generate"
_RPC: Final = {"rpc.system.name": "grpc", "rpc.method": _METHOD}
_ASKED: Final = IndexAnswer({}, IndexSaid.ANSWERED, "", 0.001)
_BLOCKS: Final = tuple(map(BlockId, range(4)))


def microseconds(turns: int) -> dict[str, float]:
    """Return the processor time of each service for one request, of the best of some turns."""
    made = records_of(_TOGETHER)
    decisions = [tuple(islice(made, 4)) for _ in range(_TOGETHER)]
    store = TraceStore(16 * _TOGETHER)
    every = [_Turn(store, decisions).seconds for _ in range(turns)]
    return {service: 1e6 / _TOGETHER * min(each[service] for each in every) for service in SERVICES}


class _Turn:
    """Requests that run at the same time, and the seconds of processor time that their spans take."""

    def __init__(self, store: TraceStore, decisions: Sequence[Sequence[Decision]]) -> None:
        self.seconds = dict.fromkeys(SERVICES, 0.0)
        self._store, self._clock = store, SystemClock()
        self._records = [{each.kind: each for each in some} for some in decisions]
        self._ended: dict[str, list[RecordedSpan]] = {WORKER: [], MANAGER: []}
        traces = self._arrive()
        self._reserve(self._run(traces))
        self._end(traces)
        self._deliver()

    @contextmanager
    def _spent(self, service: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[service] += time.process_time() - began

    def _tracer(self, service: str) -> SpanTracer:
        return SpanTracer(origin_of(service, "1"), DEFAULT_ON, RandomIdGenerator(), self._ended[service].append)

    def _arrive(self) -> list[RequestTrace]:
        """Let the router take the requests, and place each."""
        tracer = SpanTracer(origin_of(ROUTER, "1"), RequestSampler(1.0), ChosenTraceIds(), self._store.add_own)
        traces = list[RequestTrace]()
        with self._spent(ROUTER):
            for records in self._records:
                admission, now = records[DecisionKind.ADMISSION], self._clock.time_ns()
                rpc = tracer.start_span(_METHOD, kind=SpanKind.SERVER, attributes=_RPC)
                trace = RequestTrace(tracer, self._clock, _REQUEST, admission.request_id, "small")
                trace.decided(admission)
                trace.placed(records[DecisionKind.ROUTING], now, now, _ASKED)
                rpc.set_attribute("rpc.response.status_code", "OK")
                rpc.end()
                traces.append(trace)
        return traces

    def _run(self, traces: Sequence[RequestTrace]) -> list[str]:
        """Run the sequences at the worker; return the parents of the manager's spans."""
        tracer, parents = self._tracer(WORKER), list[str]()
        with self._spent(WORKER):
            for number, trace in enumerate(traces):
                sequence = SequenceId(number)
                named: dict[str, str | int] = {"quire.request_id": f"quire-{number:016x}", "quire.sequence": number}
                parent = context_from(trace.parent)
                spans = SequenceSpans(tracer, parent, named | {"quire.index": 0, "quire.prompt_tokens": 64})
                parents.append(spans.reserve_traceparent)
                spans.admitted(Admit(sequence, _BLOCKS, 0, decision_id="m-1"))
                spans.chunk(Chunk(sequence, 0, 64, 1, 2))
                spans.chunk(Chunk(sequence, 64, 127, 2, 3, decode=True, steps=127))
                spans.finished(SequenceFinished(sequence, FinishReason.LENGTH, _USAGE))
        return parents

    def _reserve(self, parents: Sequence[str]) -> None:
        """Let the manager grant the blocks."""
        spans = ReserveSpans(self._tracer(MANAGER), "worker-0")
        numbered = [(SequenceId(number), parent) for number, parent in enumerate(parents)]
        report = Report(reserve=tuple(Reserve(each, 64, 192, traceparent=parent) for each, parent in numbered))
        grants = [records[DecisionKind.GRANT] for records in self._records]
        names = enumerate(each.decision_id for each in grants)
        admits = [Admit(SequenceId(number), _BLOCKS, 0, decision_id=name) for number, name in names]
        with self._spent(MANAGER):
            spans.reported(report, GrantBatch(64, admit=tuple(admits)), grants, time.time_ns())
            finished = Report(finished=tuple((each, FinishReason.LENGTH) for each, _ in numbered))
            spans.reported(finished, None, (), time.time_ns())

    def _end(self, traces: Sequence[RequestTrace]) -> None:
        finished = Finished(0, FinishReason.LENGTH, _USAGE, Timings(0.0, 0.1, 0.01, 1.0))
        with self._spent(ROUTER):
            for trace in traces:
                trace.first_token()
                trace.finished(finished)
                trace.end("")

    def _deliver(self) -> None:
        """Send the spans of worker and manager to the router."""
        for service, spans in self._ended.items():
            with self._spent(service):
                data = otlp_request(spans).SerializeToString()
            with self._spent(ROUTER):
                self._store.add_otlp(ExportTraceServiceRequest.FromString(data), service)
