"""`Explain` over gRPC: validates the request as `Generate` does, and answers what would happen to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from common.contracts.clock import Clock
from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation, RateLimited
from common.contracts.limits import MAX_EXPLANATIONS_A_TENANT, MAX_EXPLANATIONS_AT_ONCE
from common.wire.decision_codec import candidate_to_proto
from quire.decision.v1 import decision_pb2 as pb
from quire.inference.v1 import inference_pb2
from router.contracts.ports import CallContext, RequestValidator
from router.requests.explainer import Explainer, Explanation, Foreseen
from router.tenants.tenancy import Caller


class Explanations:
    """Answers `Explain`; few at once, because each costs what the beginning of a request costs."""

    def __init__(self, explainer: Explainer, validator: RequestValidator, clock: Clock) -> None:
        self._explainer, self._validator, self._clock = explainer, validator, clock
        self._running: Counter[str] = Counter()

    async def answer(self, asked: pb.ExplainRequest, caller: Caller) -> pb.ExplainResponse:
        """Raises what `Generate` raises for a wrong request, and Overloaded when too many are asked at once."""
        seconds = asked.deadline_seconds
        if not (math.isfinite(seconds) and seconds >= 0.0):
            raise InvalidRequest(FieldViolation("deadline_seconds", f"is {seconds:g}; expected 0 (none) or more"))
        with self._counted(caller.tenant.name):
            call = CallContext(self._clock.monotonic(), caller=caller)
            request = await self._validator.validate(_unnamed(asked.request), call)
            return explanation_to_proto(await self._explainer.explain(request, seconds or None))

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        total, own = self._running.total(), self._running[tenant]
        if total >= MAX_EXPLANATIONS_AT_ONCE:
            words = f"{total} requests are being explained; at most {MAX_EXPLANATIONS_AT_ONCE} at once"
            raise Overloaded(QuotaViolation("router.explanations", words), 1.0)
        if own >= MAX_EXPLANATIONS_A_TENANT:
            words = f"{own} requests of this tenant are being explained; at most {MAX_EXPLANATIONS_A_TENANT} at once"
            raise RateLimited(QuotaViolation(f"tenant {tenant}.explanations", words), 1.0)
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]


def _unnamed(given: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(given)
    request.ClearField("request_id")
    request.ClearField("traceparent")
    return request


def explanation_to_proto(found: Explanation) -> pb.ExplainResponse:
    choice, request = found.choice, found.request
    worker = choice.worker.worker_id if choice.worker is not None else ""
    placed = found.outcome in (Foreseen.PLACED, Foreseen.TOO_LATE)
    return pb.ExplainResponse(
        outcome=found.outcome,
        reason=found.reason,
        worker_id=worker,
        tied=found.tied if worker else (),
        workers=map(candidate_to_proto, choice.decision.candidates),
        signal_ages=dict(choice.decision.signal_ages),
        prompt_tokens=len(request.prompt),
        max_tokens=request.sampling.max_tokens,
        sequences=request.sampling.n,
        block_size=found.block_size,
        cached_tokens=choice.hit_blocks * found.block_size,
        first_token_seconds=choice.first_token_s if placed else None,
        requests_before=found.foresight.before,
        index_answered=found.foresight.index_answered,
        shareable_tokens=found.shareable_tokens,
    )
