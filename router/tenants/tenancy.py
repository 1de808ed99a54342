"""Tenants: who calls, with which weight, rights and limits, and what each of them uses now.

Rates are token buckets that hold one minute's allowance. They are charged before the router works for a request: for
the request, and for the tokens that its prompt is expected to have. When it enters it is charged for all tokens that it
may hold; the part that it did not use comes back when it leaves. One that is wrong pays for its prompt. One that a
limit refuses gets its tokens back, so that it can come in later.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.contracts.adapters import AdapterShare
from common.contracts.errors import PermissionDenied, QuotaViolation, RateLimited
from common.contracts.lease import MAX_RETENTION_PRIORITY

_MINUTE_S = 60.0
# A place that another request of the tenant holds is free at an unknown time; clients try again after so many seconds.
_PLACE_RETRY_S = 1.0
_MIN_RETRY_S = 0.1
# Tenants of whom something is kept when it is looked for the first time whether that is still needed.
_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use; None leaves it unbounded. `streams` and `sequences` count what is inside the router."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None
    sequences: int | None = None

    @property
    def are_set(self) -> bool:
        return self != TenantLimits()


class AdapterOwners:
    """Whose own an adapter is, by its name."""

    def __init__(self, shares: Iterable[AdapterShare] = ()) -> None:
        """No two tenants have a name in common: `find_clash` says so."""
        self._by_name = {name: share for share in shares for name in share.names}

    def share_of(self, name: str) -> AdapterShare | None:
        """Return what the owner of an adapter may have; None where it is nobody's own."""
        beginnings = (f"{name[:size]}*" for size in range(len(name), 0, -1))
        return next((self._by_name[each] for each in (name, *beginnings) if each in self._by_name), None)

    @staticmethod
    def find_clash(names: Mapping[str, Iterable[str]]) -> tuple[str, str, str] | None:
        """Return a tenant, one of its names, and another tenant that has a name for the same adapters."""
        owners = dict[str, str]()
        for tenant, each in names.items():
            for name in each:
                if owners.setdefault(name, tenant) != tenant:
                    return tenant, name, owners[name]
        for name, tenant in owners.items():
            begins = name.removesuffix("*")
            for size in range(1, len(begins) + 1):
                if (other := owners.get(f"{begins[:size]}*", tenant)) != tenant:
                    return tenant, name, other
        return None


NO_OWNERS = AdapterOwners()


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. `weight` is its share of batch slots and blocks while others want them.

    `cache_domain` separates its cached blocks from those of others. `shared_domains` are (name, domain) of the domains
    that the operator opened to it. `models` None allows every model, but for adapters that are another tenant's own:
    `owners` says whose they are. `adapters` are the names of its own, and a * at the end of one stands for any further
    characters.
    """

    name: str = ""
    weight: float = 1.0
    max_priority: int = 0
    max_retention_priority: int = MAX_RETENTION_PRIORITY
    models: frozenset[str] | None = None
    admin: bool = False
    limits: TenantLimits = TenantLimits()
    cache_domain: bytes = b""
    shared_domains: tuple[tuple[str, bytes], ...] = ()
    adapters: tuple[str, ...] = ()
    owners: AdapterOwners = field(default=NO_OWNERS, compare=False, repr=False)

    def check_model(self, model: str) -> None:
        """Raise PermissionDenied when the tenant may not use a model."""
        if self.models is not None and model not in self.models:
            raise PermissionDenied(f"tenant {self.name} may not use model {model!r}; ask the operator for it")

    def may_use_adapter(self, name: str) -> bool:
        """Return whether requests may name an adapter: the tenant's own, one of `models`, or one that is nobody's."""
        owner = self.owners.share_of(name)
        if owner is not None and owner.tenant == self.name:
            return True
        return name in self.models if self.models is not None else owner is None

    def check_adapter(self, name: str) -> None:
        """Raise PermissionDenied when the tenant may not use an adapter."""
        if not self.may_use_adapter(name):
            raise PermissionDenied(f"tenant {self.name} may not use model {name!r}; ask the operator for it")

    def check_change(self, name: str) -> str:
        """Return the folder of --lora-dir below which the tenant loads an adapter from; "": anywhere below --lora-dir.

        Raises PermissionDenied for an adapter that it may neither load nor unload.
        """
        if self.admin:
            return ""
        owner = self.owners.share_of(name)
        if owner is not None and owner.tenant == self.name:
            return self.name
        if not self.adapters:
            what = "by tenants with `admin = true`, and by those with `adapters` of their own"
            raise PermissionDenied(f"adapters are loaded {what}; ask the operator")
        own = ", ".join(self.adapters)
        raise PermissionDenied(f"tenant {self.name} loads and unloads its own adapters alone: {own}")

    def domain(self, shared: str) -> bytes:
        """Return the tenant's own cache domain, or the named shared one. Raises PermissionDenied for any other."""
        if not shared:
            return self.cache_domain
        found = dict(self.shared_domains).get(shared)
        if found is None:
            raise PermissionDenied(f"shared domain {shared!r} is not open to this caller; leave it out or ask for it")
        return found


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant, and the credential by which it was recognised; "" for one that is known by its address.

    The credential is an identifier, never the key itself.
    """

    tenant: Tenant = field(default_factory=Tenant)
    credential: str = ""

    @property
    def owner(self) -> str:
        """The tenant whose requests this caller may see; "" where no key tells callers apart."""
        return self.tenant.name if self.credential else ""


ANYONE = Caller()


def peer_caller(host: str) -> Caller:
    """Return the caller of a router without keys: each address is a tenant, and all share one cache domain.

    Addresses of one IPv6 network of 64 bits are one tenant: one machine has as many of these as it likes.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return Caller(Tenant(f"peer {host}"))
    if address.version == 6:
        mapped = address.ipv4_mapped
        host = str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))
    return Caller(Tenant(f"peer {host}"))


class Charge:
    """The tokens that the requests of one call were charged before the work for them, one number each.

    `answers`: outputs follow, for which the rate must have room too.
    """

    __slots__ = ("_each", "answers", "begun")

    def __init__(self) -> None:
        self._each: list[int] = []  # the next one is the last
        self.begun, self.answers = False, True

    @classmethod
    def of(cls, *each: int) -> Charge:
        """Return the charge of requests that were charged before."""
        made = cls()
        made.begin(each)
        return made

    def begin(self, each: Iterable[int]) -> None:
        """Remember what was charged; a call is charged once."""
        self._each, self.begun = [*each][::-1], True

    def take(self) -> int:
        """Return the tokens of the next request, for which work begins; 0 for one that is looked at again."""
        return self._each.pop() if self._each else 0

    def rest(self) -> tuple[int, int]:
        """Return the requests for which no work began, and their tokens; they are none then."""
        rest = len(self._each), sum(self._each)
        self._each.clear()
        return rest


class _Bucket:
    """A token bucket of one minute's allowance; its level may fall below zero by one large request."""

    __slots__ = ("_allowance", "_at", "_level")

    def __init__(self, allowance: int, now: float) -> None:
        self._level, self._at, self._allowance = float(allowance), now, allowance

    def seconds_until(self, amount: float, allowance: int, now: float) -> float:
        """Return how long until `amount` may be taken; 0 if at once. More than the allowance needs a full bucket."""
        gained = (now - self._at) * allowance / _MINUTE_S
        self._level, self._at, self._allowance = min(allowance, self._level + gained), now, allowance
        return max(0.0, (min(amount, allowance) - self._level) * _MINUTE_S / allowance)

    def take(self, amount: float) -> None:
        self._level -= amount

    def is_full(self, now: float) -> bool:
        """Return whether a new bucket would say the same."""
        return self._level + (now - self._at) * self._allowance / _MINUTE_S >= self._allowance


@dataclass(slots=True)
class _Use:
    """What one tenant uses; its buckets exist while it has rates."""

    streams: int = 0
    sequences: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None

    def is_over(self, now: float) -> bool:
        buckets = (each for each in (self.requests, self.tokens) if each is not None)
        return not self.streams and all(each.is_full(now) for each in buckets)


class TenantQuotas:
    """Holds tenants to their limits. One `leave` follows every `enter` that did not raise."""

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}
        self._next_look = _FIRST_LOOK

    def __len__(self) -> int:
        """Return the number of tenants of whom something is kept."""
        return len(self._uses)

    def charge_tokens(self, tenant: Tenant, tokens: int, now: float, requests: int = 1, later: int = 0) -> None:
        """Charge the rates for work that the router is about to do, whatever becomes of it.

        Raises RateLimited where these tokens and those to be charged `later` are not there; then nothing was charged.
        """
        if tenant.limits.are_set:
            use = self._use(tenant, now)
            self._check_rates(tenant, use, tokens + later, now, requests)
            _take(tenant, use, tokens, requests)

    def settle(self, tenant: Tenant, tokens: int, requests: int = 0) -> None:
        """Charge the rates for so much more, or less, than was expected."""
        if (use := self._uses.get(tenant.name)) is not None:
            _take(tenant, use, tokens, requests)

    def enter(self, tenant: Tenant, tokens: int, sequences: int, now: float, paid: int | None = None) -> None:
        """Count a request. Raises RateLimited with the limit that it would overrun; then nothing was counted.

        `paid` are those of the tokens that it was charged before, with the request; None where it was not. They come
        back, as it is charged for all of its tokens now or for none.
        """
        if not tenant.limits.are_set:
            return
        use, requests = self._use(tenant, now), 1 if paid is None else 0
        _take(tenant, use, -(paid or 0), 0)
        self._check_places(tenant, use, sequences)
        if requests or tokens > (paid or 0):
            self._check_rates(tenant, use, tokens, now, requests)
        use.streams += 1
        use.sequences += sequences
        _take(tenant, use, tokens, requests)

    def check_quota(self, tenant: Tenant, tokens: int, sequences: int, now: float) -> None:
        """Raise as `enter` would; nothing is counted."""
        if tenant.limits.are_set:
            use = self._uses.get(tenant.name) or _Use()
            self._check_places(tenant, use, sequences)
            self._check_rates(tenant, use, tokens, now, 1)

    def release_request(self, tenant: Tenant, unused_tokens: int, sequences: int) -> None:
        """Stop counting a request, and give back the tokens that it did not use."""
        use = self._uses.get(tenant.name)
        if use is None or not tenant.limits.are_set:
            return
        use.streams -= 1
        use.sequences -= sequences
        if use.tokens is not None:
            use.tokens.take(-unused_tokens)
        if not use.streams and use.requests is None and use.tokens is None:
            del self._uses[tenant.name]

    def _use(self, tenant: Tenant, now: float) -> _Use:
        if len(self._uses) >= self._next_look:
            self._forget_idle(now)
        return self._uses.setdefault(tenant.name, _Use())

    def _forget_idle(self, now: float) -> None:
        """Forget tenants whose absence says the same: an operator's file may name ever new ones."""
        self._uses = {name: use for name, use in self._uses.items() if not use.is_over(now)}
        self._next_look = max(_FIRST_LOOK, 2 * len(self._uses))

    def _check_places(self, tenant: Tenant, use: _Use, sequences: int) -> None:
        most = tenant.limits
        if most.streams is not None and use.streams >= most.streams:
            raise _over(tenant, "streams", f"{use.streams} requests are open; at most {most.streams}")
        if most.sequences is not None and use.sequences + sequences > most.sequences:
            words = f"{use.sequences} sequences are open and {sequences} more wanted; at most {most.sequences}"
            raise _over(tenant, "sequences", words)

    def _check_rates(self, tenant: Tenant, use: _Use, tokens: int, now: float, requests: int) -> None:
        most, allowed = tenant.limits.requests_per_minute, tenant.limits.tokens_per_minute
        if most is not None and requests:
            use.requests = use.requests or _Bucket(most, now)
            if wait := use.requests.seconds_until(requests, most, now):
                wanted = f"{requests} requests wanted; " if requests > 1 else ""
                raise _over(tenant, "requests_per_minute", f"{wanted}at most {most} requests a minute", wait)
        if allowed is not None:
            use.tokens = use.tokens or _Bucket(allowed, now)
            if wait := use.tokens.seconds_until(tokens, allowed, now):
                words = f"{tokens} tokens wanted; at most {allowed} a minute, prompt and max_tokens together"
                raise _over(tenant, "tokens_per_minute", words, wait)


def _take(tenant: Tenant, use: _Use, tokens: int, requests: int) -> None:
    if use.tokens is not None and tenant.limits.tokens_per_minute is not None:
        use.tokens.take(tokens)
    if use.requests is not None and tenant.limits.requests_per_minute is not None:
        use.requests.take(requests)


def _over(tenant: Tenant, limit: str, words: str, wait: float = _PLACE_RETRY_S) -> RateLimited:
    return RateLimited(QuotaViolation(f"tenant {tenant.name}.{limit}", words), max(wait, _MIN_RETRY_S))
