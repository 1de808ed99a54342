"""The exception tree of Quire, for clients and services. This module has no dependency on gRPC.

`common/rpc/status.py` maps errors to status codes, `quire/api/status.py` maps status codes to errors.

QuireError
├── InvalidRequest          a request or option is wrong; carries every field violation at once      INVALID_ARGUMENT
│   └── InvalidConfig       a flag, environment variable or TOML key is wrong (never on the wire)
│       └── PortTaken       a service cannot listen on a port (never on the wire)
├── Unauthenticated         the caller showed no key or token that is known here                     UNAUTHENTICATED
├── PermissionDenied        the caller is known, and its tenant may not do this                      PERMISSION_DENIED
├── NotFound                a request, sequence, response or trace id that is unknown                NOT_FOUND
│   └── ModelNotFound       a model that is not served here                                          NOT_FOUND
├── AlreadyExists           a request id that is in use                                              ALREADY_EXISTS
├── Overloaded              the service is full; carries which bound, and when to try again          RESOURCE_EXHAUSTED
│   └── RateLimited         a tenant is over a limit of its own, while the service may have room     RESOURCE_EXHAUSTED
├── Unavailable             a service that is needed is down or draining; carries when to try again  UNAVAILABLE
│   ├── NoWorker            no worker could be used for as long as a request waits for one           UNAVAILABLE
│   └── Draining            the service stops, and another one takes the request                     UNAVAILABLE
├── DeadlineExceeded        the deadline passed, or cannot be met                                    DEADLINE_EXCEEDED
│   └── QueueExpired        it passed, or cannot be met, while the request waited to be served       DEADLINE_EXCEEDED
├── Cancelled               the client went away or asked to stop                                    CANCELLED
├── Unsupported             known and not offered (a model class, a constraint)                      UNIMPLEMENTED
├── IdentityMismatch        two services differ in block size, model, tokenizer or KV geometry       FAILED_PRECONDITION
├── StaleEpoch              a manager that was replaced still sends messages                         FAILED_PRECONDITION
├── ProtocolViolation       the other side broke the lease protocol                                  INTERNAL
└── EngineFailure           a step failed; the KV content of the worker is void                      INTERNAL

"No blocks now" is a return value (None), never an exception.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
"""Reason of violations that a request with fewer tokens would avoid."""
MALFORMED = "MALFORMED"
"""Reason of violations where the message or body as a whole cannot be read."""
_MOST_FACT_CHARS = 200


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field: its path (`sampling.top_p`, `--block-size`), what was wrong and what was expected.

    `reason` is a stable UPPER_SNAKE word where clients may want to tell this mistake from others.
    """

    field: str
    description: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class QuotaViolation:
    """One exhausted quota: its subject (`router.queue`) and the numbers in words."""

    subject: str
    description: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One part of the pool identity in which two services differ, with the flag that changes it."""

    field: str
    ours: str
    theirs: str
    flag: str

    def __str__(self) -> str:
        return f"{self.field}: here {self.ours}, there {self.theirs} (change it with {self.flag})"


class QuireError(Exception):
    """Base of all errors that Quire raises on purpose.

    `reason` is a stable UPPER_SNAKE word that names the fault; it and `facts` are reason and metadata of ErrorInfo.
    """

    reason = "INTERNAL"

    @property
    def facts(self) -> dict[str, str]:
        """What a program may want to know of the fault: `field`, `limit` or `model`."""
        return {}


class InvalidRequest(QuireError):
    """One or more fields of a request are wrong; all of them are named. The first one may give the reason."""

    reason = "INVALID_FIELD"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations
        self.reason = next((v.reason for v in violations[:1] if v.reason), type(self).reason)

    @property
    def facts(self) -> dict[str, str]:
        return {"field": self.violations[0].field[:_MOST_FACT_CHARS]} if self.violations else {}


class InvalidConfig(InvalidRequest):
    """One or more options are wrong; raised before anything starts."""

    reason = "INVALID_CONFIG"


class PortTaken(InvalidConfig):
    """A service cannot listen on a port; `flag` is the option that names it."""

    reason = "PORT_TAKEN"

    def __init__(self, flag: str, host: str, port: int, why: str | None = None) -> None:
        reason = f" ({why})" if why else ""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        what = f"cannot listen on {where}{reason}; expected a free port of this machine (0 takes one)"
        super().__init__(FieldViolation(flag, what))


class Unauthenticated(QuireError):
    """The caller showed no API key or token that is known here; its message never repeats what was shown."""

    reason = "UNAUTHENTICATED"


class PermissionDenied(QuireError):
    """The caller is known, and its tenant may not do this."""

    reason = "PERMISSION_DENIED"


class NotFound(QuireError):
    """A name or an id is unknown here."""

    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """A model that is not served here; `model` is what the caller named."""

    reason = "MODEL_NOT_FOUND"

    def __init__(self, message: str, model: str = "") -> None:
        super().__init__(message)
        self.model = model

    @property
    def facts(self) -> dict[str, str]:
        return {"model": self.model[:_MOST_FACT_CHARS]} if self.model else {}


class AlreadyExists(QuireError):
    """An id was offered that is in use."""

    reason = "ALREADY_EXISTS"


class Overloaded(QuireError):
    """The service is full; nothing was queued. `retry_after_s` is when a place is likely (seconds)."""

    reason = "OVERLOADED"

    def __init__(self, violation: QuotaViolation, retry_after_s: float) -> None:
        super().__init__(f"{violation.subject}: {violation.description}; try again in {retry_after_s:.1f} s")
        self.violation = violation
        self.retry_after_s = retry_after_s

    @property
    def facts(self) -> dict[str, str]:
        return {"limit": self.violation.subject}


class RateLimited(Overloaded):
    """A tenant is over a limit of its own (`tenant acme.requests_per_minute`): more workers would not help it."""

    reason = "RATE_LIMITED"

    @property
    def facts(self) -> dict[str, str]:
        """The limit alone: a tenant's name is for people, in the violation."""
        return {"limit": self.violation.subject.rpartition(".")[2]}


class Unavailable(QuireError):
    """A service that is needed is down, starting or draining. `retry_after_s` is when to try again (seconds)."""

    reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorker(Unavailable):
    """No worker could be used for as long as a request waits for one; the message says why not each of them."""


class Draining(Unavailable):
    """The service stops or is replaced; another one takes the request."""


class DeadlineExceeded(QuireError):
    """The deadline passed, or no worker can meet it (the message has the predicted time)."""

    reason = "DEADLINE_EXCEEDED"


class QueueExpired(DeadlineExceeded):
    """The deadline passed, or cannot be met, before the request had a worker and blocks there."""


class Cancelled(QuireError):
    """The client cancelled, or went away."""

    reason = "CANCELLED"


class Unsupported(QuireError):
    """A known feature that Quire does not offer; the message says why and what works instead."""

    reason = "UNSUPPORTED"


class IdentityMismatch(QuireError):
    """Two services may not work together; every difference is named with both values and the flag to change."""

    reason = "IDENTITY_MISMATCH"

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        super().__init__("; ".join(map(str, mismatches)))
        self.mismatches = mismatches


class StaleEpoch(QuireError):
    """A manager with a lower epoch than one already seen."""

    reason = "STALE_EPOCH"


class ProtocolViolation(QuireError):
    """The other side of a lease session broke the protocol; the session is ended and rebuilt from an inventory."""

    reason = "PROTOCOL_VIOLATION"


class EngineFailure(QuireError):
    """A step failed on the device; running requests fail over, the KV content of this incarnation is void."""

    reason = "ENGINE_FAILURE"
