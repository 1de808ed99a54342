"""Tenants: which model and cache domain is theirs, who an address is, and their limits, with exact numbers."""

from __future__ import annotations

import pytest

from common.errors import Overloaded, PermissionDenied
from router.core.tenancy import Caller, Tenant, TenantLimits, TenantQuotas, peer_caller


def over(quotas: TenantQuotas, tenant: Tenant, tokens: int, sequences: int, now: float) -> tuple[str, float]:
    """Return the limit that a request would overrun, and the seconds until the next try."""
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, tokens, sequences, now)
    return caught.value.violation.subject, caught.value.retry_after_s


def test_a_tenant_uses_the_models_that_it_may() -> None:
    tenant = Tenant("red", models=frozenset({"small"}))
    tenant.check_model("small")
    with pytest.raises(PermissionDenied, match="tenant red may not use model 'large'"):
        tenant.check_model("large")
    Tenant("blue").check_model("large")


def test_a_shared_domain_is_open_by_name_alone() -> None:
    tenant = Tenant("red", cache_domain=b"own", shared_domains=(("prompts", b"shared"),))
    assert (tenant.domain(""), tenant.domain("prompts")) == (b"own", b"shared")
    with pytest.raises(PermissionDenied, match="shared domain 'others' is not open"):
        tenant.domain("others")


def test_requests_are_owned_where_keys_tell_callers_apart() -> None:
    assert Caller(Tenant("red"), "key-1").owner == "red"
    assert Caller(Tenant("peer 10.0.0.1")).owner == ""


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.1", "peer 10.0.0.1"),
        ("::ffff:10.0.0.1", "peer 10.0.0.1"),
        ("2001:db8::1:2", "peer 2001:db8::/64"),
        ("fe80::1%eth0", "peer fe80::/64"),
        ("unix", "peer unix"),
    ],
)
def test_an_address_is_a_tenant(host: str, name: str) -> None:
    assert peer_caller(host).tenant.name == name


def test_places_are_counted_until_requests_leave() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(streams=2, sequences=4))
    quotas.enter(tenant, 10, 3, 0.0)
    assert over(quotas, tenant, 10, 2, 0.0) == ("tenant red.sequences", 1.0)
    quotas.enter(tenant, 10, 1, 0.0)
    assert over(quotas, tenant, 10, 1, 0.0) == ("tenant red.streams", 1.0)
    quotas.leave(tenant, 0, 3)
    quotas.enter(tenant, 10, 3, 0.0)


def test_a_rate_is_a_minutes_allowance_that_refills() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(requests_per_minute=2))
    quotas.enter(tenant, 1, 1, 0.0)
    quotas.enter(tenant, 1, 1, 0.0)
    assert over(quotas, tenant, 1, 1, 0.0) == ("tenant red.requests_per_minute", 30.0)
    assert over(quotas, tenant, 1, 1, 20.0)[1] == pytest.approx(10.0)
    quotas.enter(tenant, 1, 1, 30.0)


def test_a_rate_gathers_no_more_than_a_minutes_allowance_while_its_tenant_is_away() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(requests_per_minute=2))
    quotas.enter(tenant, 1, 1, 0.0)
    for _ in range(2):
        quotas.enter(tenant, 1, 1, 3600.0)
    assert over(quotas, tenant, 1, 1, 3600.0) == ("tenant red.requests_per_minute", 30.0)


def test_tokens_that_were_not_used_come_back() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(tokens_per_minute=60))
    quotas.enter(tenant, 60, 1, 0.0)
    assert over(quotas, tenant, 30, 1, 0.0) == ("tenant red.tokens_per_minute", 30.0)
    quotas.leave(tenant, 40, 1)
    quotas.enter(tenant, 40, 1, 0.0)
    quotas.leave(tenant, 0, 1)
    assert over(quotas, tenant, 1000, 1, 0.0) == ("tenant red.tokens_per_minute", 60.0), "a full bucket lets it in"
    quotas.enter(tenant, 1000, 1, 60.0)


def test_a_tenant_without_limits_is_not_counted() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red")
    quotas.enter(tenant, 1 << 30, 1 << 20, 0.0)
    quotas.leave(tenant, 0, 1 << 20)
    quotas.leave(Tenant("blue", limits=TenantLimits(streams=1)), 0, 1)


def test_a_check_raises_as_an_entry_would_and_counts_nothing() -> None:
    quotas = TenantQuotas()
    tenant = Tenant("red", limits=TenantLimits(requests_per_minute=2, tokens_per_minute=100, streams=2))
    for _ in range(5):
        quotas.check(tenant, 60, 1, 0.0)
    quotas.enter(tenant, 60, 1, 0.0)
    with pytest.raises(Overloaded) as caught:
        quotas.check(tenant, 60, 1, 0.0)
    assert caught.value.violation.subject == "tenant red.tokens_per_minute"
    # The tokens that the checks asked for were never taken: 40 are left, and one more request.
    quotas.check(tenant, 40, 1, 0.0)
    quotas.enter(tenant, 40, 1, 0.0)
    assert over(quotas, tenant, 1, 1, 0.0)[0] == "tenant red.streams"


def test_tenants_that_come_no_more_are_forgotten() -> None:
    """An operator's file may name ever new tenants, each of which keeps a rate for a minute."""
    quotas, most = TenantQuotas(), 0
    for number in range(5_000):
        tenant = Tenant(f"t{number}", limits=TenantLimits(requests_per_minute=2, tokens_per_minute=100))
        quotas.enter(tenant, 10, 1, float(number))
        quotas.leave(tenant, 0, 1)
        most = max(most, len(quotas))
    assert most <= 512


def test_tenants_that_still_owe_or_hold_something_are_remembered() -> None:
    quotas = TenantQuotas()
    owes, holds = (
        Tenant("owes", limits=TenantLimits(tokens_per_minute=60)),
        Tenant("holds", limits=TenantLimits(streams=1)),
    )
    quotas.enter(owes, 600, 1, 0.0)  # ten minutes' allowance
    quotas.leave(owes, 0, 1)
    quotas.enter(holds, 1, 1, 0.0)
    for number in range(2_000):
        tenant = Tenant(f"t{number}", limits=TenantLimits(requests_per_minute=2))
        quotas.enter(tenant, 1, 1, number / 20)
        quotas.leave(tenant, 0, 1)
    assert len(quotas) < 2_000
    assert over(quotas, owes, 60, 1, 100.0) == ("tenant owes.tokens_per_minute", 500.0)
    assert over(quotas, holds, 1, 1, 100.0) == ("tenant holds.streams", 1.0)
