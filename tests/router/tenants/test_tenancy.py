"""Tenants: which model and cache domain is theirs, who an address is, and their limits, with exact numbers."""

from __future__ import annotations

import pytest

from common.contracts.adapters import AdapterShare
from common.contracts.errors import Overloaded, PermissionDenied
from router.tenants.tenancy import AdapterOwners, Caller, Charge, Tenant, TenantLimits, TenantQuotas, peer_caller


def over(quotas: TenantQuotas, tenant: Tenant, tokens: int, sequences: int, now: float) -> tuple[str, float]:
    """Return the limit that a request would overrun, and the seconds until the next try."""
    with pytest.raises(Overloaded) as caught:
        quotas.enter(tenant, tokens, sequences, now)
    return caught.value.violation.subject, caught.value.retry_after_s


RED, BLUE = AdapterShare("red", ("red-*", "sql"), 100), AdapterShare("blue", ("blue-*", "r"))
OWNERS = AdapterOwners([RED, BLUE])


@pytest.mark.parametrize(
    ("name", "owner"),
    [("red-1", RED), ("red-", RED), ("red", None), ("sql", RED), ("sql2", None), ("blue-x", BLUE), ("r", BLUE)],
)
def test_the_owner_of_an_adapter_follows_from_its_name(name: str, owner: AdapterShare | None) -> None:
    assert OWNERS.share_of(name) is owner


@pytest.mark.parametrize(
    ("tenant", "models", "may"),
    [
        ("red", None, "red-1 free"),
        ("red", {"demo"}, "red-1"),
        ("green", None, "free"),
        ("green", {"demo", "red-1"}, "red-1"),
        ("blue", {"free"}, "blue-1 free"),
    ],
)
def test_an_adapter_of_its_own_is_the_tenants_and_of_those_whose_models_name_it(
    tenant: str, models: set[str] | None, may: str
) -> None:
    found = Tenant(tenant, models=None if models is None else frozenset(models), owners=OWNERS)
    assert [name for name in ("red-1", "blue-1", "free") if found.may_use_adapter(name)] == may.split()
    with pytest.raises(PermissionDenied, match=f"^tenant {tenant} may not use model 'red-2'; ask the operator for it$"):
        Tenant(tenant, models=frozenset()).check_adapter("red-2")


def test_only_owners_and_operators_change_an_adapter() -> None:
    red = Tenant("red", adapters=RED.names, owners=OWNERS)
    assert red.check_change("red-1") == "red"
    assert Tenant("green", admin=True, owners=OWNERS).check_change("red-1") == ""
    for name in ("free", "blue-1"):
        with pytest.raises(
            PermissionDenied, match=r"^tenant red loads and unloads its own adapters alone: red-\*, sql$"
        ):
            red.check_change(name)


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
    quotas.release_request(tenant, 0, 3)
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
    quotas.release_request(tenant, 40, 1)
    quotas.enter(tenant, 40, 1, 0.0)
    quotas.release_request(tenant, 0, 1)
    assert over(quotas, tenant, 1000, 1, 0.0) == ("tenant red.tokens_per_minute", 60.0), "a full bucket lets it in"
    quotas.enter(tenant, 1000, 1, 60.0)


def test_a_tenant_without_limits_is_not_counted() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red")
    quotas.enter(tenant, 1 << 30, 1 << 20, 0.0)
    quotas.release_request(tenant, 0, 1 << 20)
    quotas.release_request(Tenant("blue", limits=TenantLimits(streams=1)), 0, 1)


def test_a_check_raises_as_an_entry_would_and_counts_nothing() -> None:
    quotas = TenantQuotas()
    tenant = Tenant("red", limits=TenantLimits(requests_per_minute=2, tokens_per_minute=100, streams=2))
    for _ in range(5):
        quotas.check_quota(tenant, 60, 1, 0.0)
    quotas.enter(tenant, 60, 1, 0.0)
    with pytest.raises(Overloaded) as caught:
        quotas.check_quota(tenant, 60, 1, 0.0)
    assert caught.value.violation.subject == "tenant red.tokens_per_minute"
    # The tokens that the checks asked for were never taken: 40 are left, and one more request.
    quotas.check_quota(tenant, 40, 1, 0.0)
    quotas.enter(tenant, 40, 1, 0.0)
    assert over(quotas, tenant, 1, 1, 0.0)[0] == "tenant red.streams"


def test_tenants_that_come_no_more_are_forgotten() -> None:
    """An operator's file may name ever new tenants, each of which keeps a rate for a minute."""
    quotas, most = TenantQuotas(), 0
    for number in range(5_000):
        tenant = Tenant(f"t{number}", limits=TenantLimits(requests_per_minute=2, tokens_per_minute=100))
        quotas.enter(tenant, 10, 1, float(number))
        quotas.release_request(tenant, 0, 1)
        most = max(most, len(quotas))
    assert most <= 512


def test_tenants_that_still_owe_or_hold_something_are_remembered() -> None:
    quotas = TenantQuotas()
    owes, holds = (
        Tenant("owes", limits=TenantLimits(tokens_per_minute=60)),
        Tenant("holds", limits=TenantLimits(streams=1)),
    )
    quotas.enter(owes, 600, 1, 0.0)  # ten minutes' allowance
    quotas.release_request(owes, 0, 1)
    quotas.enter(holds, 1, 1, 0.0)
    for number in range(2_000):
        tenant = Tenant(f"t{number}", limits=TenantLimits(requests_per_minute=2))
        quotas.enter(tenant, 1, 1, number / 20)
        quotas.release_request(tenant, 0, 1)
    assert len(quotas) < 2_000
    assert over(quotas, owes, 60, 1, 100.0) == ("tenant owes.tokens_per_minute", 500.0)
    assert over(quotas, holds, 1, 1, 100.0) == ("tenant holds.streams", 1.0)


def test_work_is_charged_before_a_request_enters_and_the_whole_request_when_it_does() -> None:
    limits = TenantLimits(requests_per_minute=4, tokens_per_minute=100)
    quotas, tenant = TenantQuotas(), Tenant("red", limits=limits)
    quotas.charge_tokens(tenant, 30, 0.0)  # one request, 70 tokens are left
    quotas.settle(tenant, 5)  # its prompt has 35
    quotas.enter(tenant, 60, 1, 0.0, paid=35)  # 25 tokens of output
    quotas.check_quota(tenant, 40, 1, 0.0)
    limit, wait = over(quotas, tenant, 41, 1, 0.0)
    assert (limit, round(wait, 6)) == ("tenant red.tokens_per_minute", 0.6)
    for _ in range(3):
        quotas.charge_tokens(tenant, 1, 0.0)
    assert over(quotas, tenant, 1, 1, 0.0) == ("tenant red.requests_per_minute", 15.0)


def test_work_needs_room_for_the_output_that_is_charged_later() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(tokens_per_minute=100))
    quotas.charge_tokens(tenant, 30, 0.0, later=70)
    with pytest.raises(Overloaded, match=r"tenant red\.tokens_per_minute: 71 tokens wanted; at most 100 a minute"):
        quotas.charge_tokens(tenant, 40, 0.0, later=31)
    quotas.check_quota(tenant, 70, 1, 0.0)  # nothing was charged


def test_the_requests_of_a_list_are_charged_together() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(requests_per_minute=60))
    quotas.charge_tokens(tenant, 1, 0.0, requests=20)
    words = "tenant red.requests_per_minute: 41 requests wanted; at most 60 requests a minute"
    with pytest.raises(Overloaded, match=words) as caught:
        quotas.charge_tokens(tenant, 1, 0.0, requests=41)
    assert caught.value.retry_after_s == 1.0
    quotas.charge_tokens(tenant, 1, 0.0, requests=40)
    quotas.settle(tenant, 0, requests=-10)
    quotas.charge_tokens(tenant, 1, 0.0, requests=10)
    assert over(quotas, tenant, 1, 1, 0.0) == ("tenant red.requests_per_minute", 1.0)


def test_a_request_that_a_limit_refuses_gets_its_tokens_back() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(tokens_per_minute=100, streams=1))
    quotas.charge_tokens(tenant, 40, 0.0)
    with pytest.raises(Overloaded, match=r"tenant red\.tokens_per_minute: 101 tokens wanted"):
        quotas.charge_tokens(tenant, 61, 0.0, later=40)
    quotas.enter(tenant, 50, 1, 0.0, paid=40)
    quotas.charge_tokens(tenant, 30, 0.0)
    with pytest.raises(Overloaded, match=r"tenant red\.streams"):
        quotas.enter(tenant, 50, 1, 0.0, paid=30)
    quotas.check_quota(Tenant("red", limits=TenantLimits(tokens_per_minute=100)), 50, 1, 0.0)


def test_more_than_the_allowance_needs_a_full_rate_whether_it_is_charged_at_once_or_in_parts() -> None:
    quotas, tenant = TenantQuotas(), Tenant("red", limits=TenantLimits(tokens_per_minute=60))
    quotas.charge_tokens(tenant, 1000, 0.0, later=1)
    quotas.enter(tenant, 1001, 1, 0.0, paid=1000)
    assert over(quotas, tenant, 60, 1, 1001.0 - 60.0)[1] == pytest.approx(60.0)
    for _ in range(3):  # inputs of a list, all of which were charged before
        quotas.enter(tenant, 10, 1, 0.0, paid=10)


def test_a_charge_knows_the_requests_for_which_no_work_began() -> None:
    charge = Charge()
    assert (charge.begun, charge.take()) == (False, 0)
    charge.begin([5, 6, 7])
    assert (charge.begun, charge.take(), charge.rest(), charge.take(), charge.rest()) == (True, 5, (2, 13), 0, (0, 0))
    again = Charge.of(9)
    assert (again.begun, again.take(), again.take()) == (True, 9, 0)
