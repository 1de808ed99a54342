"""Whether a request may enter: bounded queue, bounded tokens in flight, a unique id, a deadline that can be met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.contracts.errors import AlreadyExists, Overloaded, QueueExpired, QuotaViolation
from router.placement.first_tokens import Prediction
from router.placement.rates import Average
from router.tenants.tenancy import Tenant, TenantQuotas

# What the words of a deadline that cannot be met say of the prediction.
PREDICTED = "the first token is predicted in"
# What they say where the request has waited for a worker until then.
ANY_WORKER = "even at a worker that is free, and none is"
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_tokens_in_flight` bounds prompt and output tokens of all requests inside; None leaves them unbounded."""

    max_queued: int = 1024
    max_tokens_in_flight: int | None = None


@dataclass(slots=True)
class _Inside:
    tenant: Tenant
    tokens: int
    sequences: int
    session: str = ""
    queued: bool = True


class AdmissionLimiter:
    """Counts the requests inside the router and refuses more than the limits. One `leave` follows every `enter`."""

    def __init__(self, limits: AdmissionLimits, quotas: TenantQuotas | None = None) -> None:
        self._limits, self._quotas = limits, quotas or TenantQuotas()
        # By tenant and request id: the ids of one tenant do not concern another.
        self._inside: dict[tuple[str, str], _Inside] = {}
        # Queued requests of each tenant that has any, by session; those without one are together.
        self._queued_by: dict[str, Counter[str]] = {}
        self._gap = Average()
        self._last_start: float | None = None
        self.queued = 0
        self.tokens_in_flight = 0

    @property
    def inside(self) -> int:
        """Requests that are queued or running."""
        return len(self._inside)

    @property
    def running(self) -> int:
        return len(self._inside) - self.queued

    def admit_request(
        self,
        request_id: str,
        tokens: int,
        tenant: Tenant,
        now: float,
        sequences: int = 1,
        paid: int | None = None,
        session: str = "",
    ) -> None:
        """Take a request into the queue. Raises AlreadyExists or Overloaded; then nothing was counted.

        `paid` are the tokens that the tenant's rate was charged before; it gets them back where a limit refuses.
        """
        if (tenant.name, request_id) in self._inside:
            what = f"request {request_id} is running, sent with the same request_id"
            raise AlreadyExists(f"{what}; choose another one, or none: the router then makes one")
        try:
            self._check_limits(tokens, tenant, now, session)
        except Overloaded:
            self._quotas.settle(tenant, -(paid or 0))
            raise
        self._quotas.enter(tenant, tokens, sequences, now, paid)
        self._inside[tenant.name, request_id] = inside = _Inside(tenant, tokens, sequences, session)
        self._queue(inside, 1)
        self.tokens_in_flight += tokens

    def check_room(self, tokens: int, tenant: Tenant, now: float, sequences: int = 1, session: str = "") -> None:
        """Raise Overloaded as `admit_request` would; nothing is counted."""
        self._check_limits(tokens, tenant, now, session)
        self._quotas.check_quota(tenant, tokens, sequences, now)

    def start_request(self, request_id: str, now: float, tenant: str = "") -> None:
        inside = self._inside[tenant, request_id]
        if inside.queued:
            inside.queued = False
            self._queue(inside, -1)
            if self._last_start is not None:
                self._gap.add(now - self._last_start, now)
            self._last_start = now

    def requeue(self, request_id: str, tenant: str = "") -> None:
        """Count a request that lost its worker as queued again, even when the queue is full."""
        inside = self._inside[tenant, request_id]
        if not inside.queued:
            inside.queued = True
            self._queue(inside, 1)

    def release_request(self, request_id: str, tenant: str = "", used_tokens: int | None = None) -> None:
        """Stop counting a request. The tenant's rate is charged for `used_tokens` of its tokens; None: for all."""
        inside = self._inside.pop((tenant, request_id))
        if inside.queued:
            self._queue(inside, -1)
        self.tokens_in_flight -= inside.tokens
        unused = 0 if used_tokens is None else max(0, inside.tokens - used_tokens)
        self._quotas.release_request(inside.tenant, unused, inside.sequences)

    def retry_after(self, now: float) -> float:
        """Return seconds until a slot is likely: the mean time between starts, or that since the last one if longer."""
        if self._gap.value is None or self._last_start is None:
            return 1.0
        return min(max(self._gap.value, now - self._last_start, _MIN_RETRY_S), _MAX_RETRY_S)

    def _queue(self, inside: _Inside, more: int) -> None:
        self.queued += more
        sessions = self._queued_by.setdefault(inside.tenant.name, Counter())
        sessions[inside.session] += more
        if not sessions[inside.session]:
            del sessions[inside.session]
        if not sessions:
            del self._queued_by[inside.tenant.name]

    def _may_queue(self, tenant: Tenant, session: str) -> bool:
        """Return whether a request may wait. One tenant cannot fill the queue for the others, nor one session for
        those of its tenant.

        When the queue is full, a tenant may still queue its part of it, up to twice the bound in all. A session may
        queue its part of what its tenant has there, up to 5/4 of the bound: ids cost nothing, and the places above are
        those of other tenants.
        """
        most = self._limits.max_queued
        if self.queued < most:
            return True
        sessions = self._queued_by.get(tenant.name, Counter())
        waiting, of_session = sessions.total(), sessions[session]
        tenants = len(self._queued_by) + (not waiting)
        if waiting < most // tenants and self.queued < 2 * most and tenants > 1:
            return True
        count = len(sessions) + (not of_session)
        return of_session < waiting // count and self.queued < most + most // 4

    def _check_limits(self, tokens: int, tenant: Tenant, now: float, session: str) -> None:
        if violation := self._violation(tokens, tenant, session):
            raise Overloaded(violation, self.retry_after(now))

    def _violation(self, tokens: int, tenant: Tenant, session: str) -> QuotaViolation | None:
        if not self._may_queue(tenant, session):
            return QuotaViolation("router.queue", f"{self.queued} requests wait; at most {self._limits.max_queued}")
        bound = self._limits.max_tokens_in_flight
        if bound is not None and self.tokens_in_flight + tokens > bound:
            text = f"{self.tokens_in_flight} tokens in flight and {tokens} more requested; at most {bound}"
            return QuotaViolation("router.tokens_in_flight", text)
        return None


def check_deadline(now: float, deadline: float | None, first_token: Prediction) -> None:
    """Raise QueueExpired when the deadline has passed, or the first token is predicted to come after it."""
    if deadline is None:
        return
    if now >= deadline:
        raise QueueExpired(f"the deadline passed {now - deadline:.3f} s ago, before a worker was found")
    if now + first_token.seconds > deadline:
        raise QueueExpired(too_late_words(deadline - now, first_token))


def too_late_words(left: float, first_token: Prediction, where: str = "") -> str:
    """Return why a deadline cannot be met, and how sure that is; `where` says at which worker."""
    predicted = f"{PREDICTED} {first_token.seconds:.3f} s{where and ' '}{where}"
    return f"{left:.3f} s are left, and {predicted} ({first_token.how_sure})"
