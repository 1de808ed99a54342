"""Says what would happen to a request that came now, without serving it: the router's part of `Explain`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from common.contracts.clock import Clock
from common.contracts.errors import DeadlineExceeded, Overloaded
from router.contracts.embedding import check_kind
from router.contracts.events import ValidatedRequest
from router.contracts.identity import is_complete
from router.contracts.ports import Leaving
from router.contracts.refusals import reasons_against
from router.placement.admission import AdmissionLimiter, check_deadline
from router.placement.placement_request import PlacementOutcome
from router.placement.routing import TIE_SECONDS, Choice
from router.requests.dispatcher import Dispatcher, Foresight, Job
from router.requests.run import Prefix, placement_of


class Foreseen(StrEnum):
    """PLACED: it goes to a worker at once. QUEUED: it waits for one. The others are errors."""

    PLACED = "placed"
    QUEUED = "queued"
    REFUSED = "refused"
    TOO_LARGE = "too_large"
    NO_WORKER = "no_worker"
    TOO_LATE = "too_late"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would happen; `reason` is in words, and empty for PLACED. `shareable_tokens` are in full blocks."""

    outcome: Foreseen
    reason: str
    foresight: Foresight
    request: ValidatedRequest
    block_size: int
    shareable_tokens: int

    @property
    def choice(self) -> Choice:
        return self.foresight.choice

    @property
    def tied(self) -> tuple[str, ...]:
        """Return the workers of which chance takes one."""
        costs = [(each.cost, each.name) for each in self.choice.decision.candidates if each.cost is not None]
        cheapest = min(costs, default=(0.0, ""))[0]
        return tuple([name for cost, name in costs if cost <= cheapest + TIE_SECONDS])


class Explainer:
    """Asks admission and dispatcher what they would do; neither counts the request."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: AdmissionLimiter,
        router: Leaving,
        clock: Clock,
    ) -> None:
        self._dispatcher, self._admission, self._router, self._clock = dispatcher, admission, router, clock

    async def explain(self, request: ValidatedRequest, seconds: float | None = None) -> Explanation:
        """Return what would happen now; `seconds` is what the client would allow. Raises Unsupported as `generate`."""
        identity = self._dispatcher.pool.identity
        prefix = Prefix(request.prompt, (), b"", b"")
        if is_complete(identity):
            check_kind(request.embeds, identity.pooling)
            prefix = Prefix.of(request, identity, [])
        hashes = prefix.block_hashes if request.takes_hits else ()
        deadline = None if seconds is None else self._clock.monotonic() + seconds
        job = Job(placement_of(request, len(prefix.tokens), request.sampling.n), hashes, request.priority, deadline)
        foresight = await self._dispatcher.foresee_job(job, request.flow, request.session)
        outcome, reason = self._refusal(request) or self._outcome(foresight, seconds)
        return Explanation(outcome, reason, foresight, request, identity.block_size, len(hashes) * identity.block_size)

    def _refusal(self, request: ValidatedRequest) -> tuple[Foreseen, str] | None:
        if self._router.draining:
            return Foreseen.REFUSED, "this router is draining; another one takes new requests"
        try:
            now = self._clock.monotonic()
            tenant, session = request.caller.tenant, request.session
            self._admission.check_room(request.tokens, tenant, now, request.sampling.n, session)
        except Overloaded as refused:
            return Foreseen.REFUSED, f"{refused.violation.subject}: {refused.violation.description}"
        return None

    def _outcome(self, foresight: Foresight, seconds: float | None) -> tuple[Foreseen, str]:
        outcome, reason = _foreseen(foresight) or (Foreseen.PLACED, "")
        predicted = {Foreseen.PLACED: foresight.choice.least_s, Foreseen.QUEUED: foresight.soonest_s}
        if outcome not in predicted:
            return outcome, reason
        now = self._clock.monotonic()
        try:
            first_token = self._dispatcher.first_tokens.about(predicted[outcome])
            check_deadline(now, None if seconds is None else now + seconds, first_token)
        except DeadlineExceeded as late:
            return Foreseen.TOO_LATE, str(late)
        return outcome, reason


def _foreseen(foresight: Foresight) -> tuple[Foreseen, str] | None:
    """Return why a request would not get a worker at once; None if it would."""
    out = reasons_against(foresight.choice.decision)
    match foresight.choice.outcome:
        case PlacementOutcome.TOO_LARGE:
            return Foreseen.TOO_LARGE, f"prompt and output fit no worker: {out}"
        case PlacementOutcome.NO_WORKER:
            return Foreseen.NO_WORKER, out or "no worker is known"
        case PlacementOutcome.WAIT:
            return Foreseen.QUEUED, f"no worker has a free slot: {out}"
        case _ if not foresight.leads:
            return Foreseen.QUEUED, "another request waits for a worker and goes first"
        case _:
            return None
