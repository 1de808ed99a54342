"""Whether a request may enter: bounded queue, bounded tokens in flight, a unique id, a deadline that can be met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.errors import AlreadyExists, DeadlineExceeded, Overloaded, QuotaViolation
from router.core.rates import Average

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_tokens_in_flight` bounds prompt and output tokens of all requests inside; None leaves them unbounded."""

    max_queued: int = 1024
    max_tokens_in_flight: int | None = None


class TenantPolicy(Protocol):
    """Quotas of tenants, checked before a request is counted."""

    def check(self, tenant: str, tokens: int, tokens_in_flight: int) -> QuotaViolation | None:
        """Return the quota that the tenant would overrun with `tokens` more, or None."""
        ...


class NoTenantQuotas:
    """Every tenant may use everything."""

    def check(self, tenant: str, tokens: int, tokens_in_flight: int) -> QuotaViolation | None:
        return None


@dataclass(slots=True)
class _Inside:
    tenant: str
    tokens: int
    queued: bool = True


class AdmissionLimiter:
    """Counts the requests inside the router and refuses more than the limits. One `leave` follows every `enter`."""

    def __init__(self, limits: AdmissionLimits, policy: TenantPolicy | None = None) -> None:
        self._limits, self._policy = limits, policy or NoTenantQuotas()
        self._inside: dict[str, _Inside] = {}
        self._by_tenant: dict[str, int] = {}
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

    def enter(self, request_id: str, tokens: int, tenant: str, now: float) -> None:
        """Take a request into the queue. Raises AlreadyExists or Overloaded; then nothing was counted."""
        if request_id in self._inside:
            raise AlreadyExists(f"request {request_id} is running; choose another request_id")
        if violation := self._violation(tokens, tenant):
            raise Overloaded(violation, self.retry_after(now))
        self._inside[request_id] = _Inside(tenant, tokens)
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + tokens
        self.queued += 1
        self.tokens_in_flight += tokens

    def start(self, request_id: str, now: float) -> None:
        inside = self._inside[request_id]
        if inside.queued:
            inside.queued = False
            self.queued -= 1
            if self._last_start is not None:
                self._gap.add(now - self._last_start, now)
            self._last_start = now

    def requeue(self, request_id: str) -> None:
        """Count a request that lost its worker as queued again, even when the queue is full."""
        inside = self._inside[request_id]
        if not inside.queued:
            inside.queued = True
            self.queued += 1

    def leave(self, request_id: str) -> None:
        inside = self._inside.pop(request_id)
        self.queued -= inside.queued
        self.tokens_in_flight -= inside.tokens
        rest = self._by_tenant[inside.tenant] - inside.tokens
        if rest:
            self._by_tenant[inside.tenant] = rest
        else:
            del self._by_tenant[inside.tenant]

    def retry_after(self, now: float) -> float:
        """Return seconds until a place is likely: the mean gap between starts, or the current gap if it is longer."""
        if self._gap.value is None or self._last_start is None:
            return 1.0
        return min(max(self._gap.value, now - self._last_start, _MIN_RETRY_S), _MAX_RETRY_S)

    def _violation(self, tokens: int, tenant: str) -> QuotaViolation | None:
        if self.queued >= self._limits.max_queued:
            return QuotaViolation("router.queue", f"{self.queued} requests wait; at most {self._limits.max_queued}")
        bound = self._limits.max_tokens_in_flight
        if bound is not None and self.tokens_in_flight + tokens > bound:
            text = f"{self.tokens_in_flight} tokens in flight and {tokens} more requested; at most {bound}"
            return QuotaViolation("router.tokens_in_flight", text)
        return self._policy.check(tenant, tokens, self._by_tenant.get(tenant, 0))


def check_deadline(now: float, deadline: float | None, first_token_s: float) -> None:
    """Raise DeadlineExceeded when the deadline has passed, or the first token is predicted to come after it."""
    if deadline is None:
        return
    if now >= deadline:
        raise DeadlineExceeded(f"the deadline passed {now - deadline:.3f} s ago, before a worker was found")
    if now + first_token_s > deadline:
        left = deadline - now
        raise DeadlineExceeded(f"{left:.3f} s are left, and the first token is predicted in {first_token_s:.3f} s")
