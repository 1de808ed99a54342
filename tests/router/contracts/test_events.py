"""What follows from a validated request: its lengths, and its place in the queue of tenants."""

from __future__ import annotations

from common.contracts.types import SamplingParams
from router.contracts.events import ValidatedRequest
from router.placement.fair_queue import Flow
from router.tenants.tenancy import Caller, Tenant


def test_sequences_share_the_prompt_and_have_outputs_of_their_own() -> None:
    sampling = SamplingParams(max_tokens=5, n=3)
    request = ValidatedRequest((1, 2, 3), sampling, arrived=0.0, caller=Caller(Tenant("red", weight=2.0)))
    assert (request.max_len, request.tokens) == (8, 18)
    assert (request.tenant, request.flow) == ("red", Flow("red", 2.0))
