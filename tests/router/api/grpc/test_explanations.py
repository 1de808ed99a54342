"""How many dry runs a router makes at once, in all and for one tenant."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from common.contracts.clock import SystemClock
from common.contracts.errors import NotFound, Overloaded, QuireError
from common.contracts.limits import MAX_EXPLANATIONS_A_TENANT, MAX_EXPLANATIONS_AT_ONCE
from quire.decision.v1 import decision_pb2 as pb
from router.api.grpc.explanation import Explanations
from router.contracts.ports import RequestValidator
from router.requests.explainer import Explainer
from router.tenants.tenancy import Caller, Tenant
from tests.support.waiting import until


class HeldValidator:
    """Refuses each request, once it is let go."""

    def __init__(self) -> None:
        self.go, self.inside = asyncio.Event(), 0

    async def validate(self, *given: object) -> object:
        self.inside += 1
        await self.go.wait()
        raise NotFound("validated")


async def outcome(explanations: Explanations, tenant: str) -> QuireError:
    with pytest.raises(QuireError) as caught:
        await explanations.answer(pb.ExplainRequest(), Caller(Tenant(tenant)))
    return caught.value


async def test_one_tenant_leaves_places_to_others_and_gets_its_own_back() -> None:
    validator = HeldValidator()
    explanations = Explanations(
        cast("Explainer", None), cast("RequestValidator", cast("Any", validator)), SystemClock()
    )
    tenants = [f"t{number}" for number in range(MAX_EXPLANATIONS_AT_ONCE // MAX_EXPLANATIONS_A_TENANT)]
    runs = [asyncio.create_task(outcome(explanations, "t0")) for _ in range(MAX_EXPLANATIONS_A_TENANT)]
    await until(lambda: validator.inside >= len(runs), every=0)
    refused = await outcome(explanations, "t0")
    assert isinstance(refused, Overloaded)
    assert str(refused.violation.subject) == "tenant t0.explanations"
    for tenant in tenants[1:]:
        runs += [asyncio.create_task(outcome(explanations, tenant)) for _ in range(MAX_EXPLANATIONS_A_TENANT)]
    await until(lambda: validator.inside >= MAX_EXPLANATIONS_AT_ONCE, every=0)
    refused = await outcome(explanations, "late")
    assert isinstance(refused, Overloaded)
    assert str(refused.violation.subject) == "router.explanations"
    validator.go.set()
    assert [type(each) for each in await asyncio.gather(*runs)] == [NotFound] * MAX_EXPLANATIONS_AT_ONCE
    assert isinstance(await outcome(explanations, "t0"), NotFound)
