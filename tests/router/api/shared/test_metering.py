"""What work for texts is charged to the rates of tenants, with exact numbers; tokens are words here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from common.contracts.clock import ManualClock
from common.contracts.errors import InvalidRequest, Overloaded, QuotaViolation
from quire.inference.v1 import inference_pb2 as pb
from router.api.shared.embedding import Embedder
from router.api.shared.metering import UNLIMITED, Meter, MeteredValidator
from router.contracts.ports import CallContext
from router.tenants.tenancy import Caller, Charge, Tenant, TenantLimits, TenantQuotas
from tests.support.router.validation import CONTEXT, Words, request, validator

TEXT = "four four four four!"  # 20 bytes, taken for 5 tokens; it has 4
ALLOWED = 100


class NoRoom(Words):
    """A codec whose threads have no room for a tenant's text."""

    async def encode(self, prompt: pb.Prompt, add_special_tokens: bool = True) -> list[int]:
        raise Overloaded(QuotaViolation("waiting_texts", "none fits"), 1.0)


@dataclass
class Metered:
    """A meter, and what is left of a tenant's rates, which do not refill."""

    codec: Words = field(default_factory=Words)
    tenant: Tenant = field(
        default_factory=lambda: Tenant("red", limits=TenantLimits(requests_per_minute=10, tokens_per_minute=ALLOWED))
    )
    refused: list[tuple[str, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quotas = TenantQuotas()
        self.meter = Meter(self.quotas, ManualClock(), lambda: CONTEXT, None, self._note)
        self.validator = MeteredValidator(validator(codec=self.codec), self.meter)

    def _note(self, call: CallContext, request_id: str, tokens: int, error: Overloaded) -> None:
        self.refused.append((request_id, tokens, str(error.violation.subject)))

    def call(self) -> CallContext:
        return CallContext(arrived=0.0, caller=Caller(self.tenant, "key"), request_id="quire-1")

    @property
    def left(self) -> tuple[int, int]:
        """Return the requests and tokens that are left."""
        return self._most(lambda n: self.quotas.charge_tokens(self.tenant, 0, 0.0, requests=n), 10, True), self._most(
            lambda n: self.quotas.charge_tokens(self.tenant, n, 0.0, requests=0), ALLOWED, False
        )

    def _most(self, charge: Callable[[int], None], most: int, requests: bool) -> int:
        for number in range(most, 0, -1):
            try:
                charge(number)
            except Overloaded:
                continue
            self.quotas.settle(self.tenant, *((0, -number) if requests else (-number, 0)))
            return number
        return 0


async def test_a_valid_request_pays_for_its_prompt_once_its_tokens_are_known() -> None:
    metered = Metered()
    found = await metered.validator.validate(request(TEXT), metered.call())
    assert (len(found.prompt), found.paid, metered.left) == (4, 4, (9, 96))
    metered.quotas.enter(metered.tenant, found.tokens, 1, 0.0, found.paid)
    assert (found.tokens, metered.left) == (CONTEXT, (9, ALLOWED - CONTEXT))


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        pytest.param(request("w " * 60), 30, id="too long"),
        pytest.param(request("w " * 60_000), CONTEXT, id="longer than any context"),
        pytest.param(request("refused"), 1, id="cannot be encoded"),
        pytest.param(request(TEXT, priority=1000), 5, id="a wrong field"),
        pytest.param(pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5000] * 9))), 9, id="unknown ids"),
        pytest.param(pb.GenerateRequest(), 1, id="nothing"),
    ],
)
async def test_a_wrong_request_pays_for_its_prompt(asked: pb.GenerateRequest, tokens: int) -> None:
    metered = Metered()
    with pytest.raises(InvalidRequest):
        await metered.validator.validate(asked, metered.call())
    assert metered.left == (9, ALLOWED - tokens)


async def test_a_request_for_which_a_rate_has_no_room_is_not_read() -> None:
    metered = Metered()
    metered.quotas.charge_tokens(metered.tenant, 80, 0.0)
    with pytest.raises(Overloaded, match=r"red\.tokens_per_minute: 32 tokens wanted"):  # all of the context
        await metered.validator.validate(request("refused", request_id="own"), metered.call())
    assert (metered.refused, metered.left) == ([("own", CONTEXT, "tenant red.tokens_per_minute")], (9, 20))
    short = request(TEXT)
    short.sampling.max_tokens = 10
    await metered.validator.validate(short, metered.call())
    assert metered.left == (8, 16)


async def test_a_request_for_which_the_threads_have_no_room_gets_its_tokens_back() -> None:
    metered = Metered(NoRoom())
    with pytest.raises(Overloaded, match="none fits"):
        await metered.validator.validate(request(TEXT), metered.call())
    with pytest.raises(Overloaded, match="none fits"):
        await metered.meter.encoded(metered.codec, pb.Prompt(text=TEXT), True, metered.tenant)
    assert metered.left == (8, ALLOWED)


async def test_a_call_is_charged_once_however_often_its_requests_are_looked_at() -> None:
    metered = Metered()
    call = metered.call()
    metered.meter.begin([pb.Prompt(text=TEXT)], pb.GenerateRequest(), call)
    with pytest.raises(InvalidRequest):
        await metered.validator.validate(request(TEXT, priority=1000), call)
    await metered.validator.validate(request("one two"), call)
    assert metered.left == (9, ALLOWED - 5 - 2)


async def test_tokens_for_a_client_that_wants_no_more_are_charged_as_they_are() -> None:
    metered = Metered()
    assert len(await metered.meter.encoded(metered.codec, pb.Prompt(text=TEXT), True, metered.tenant)) == 4
    with pytest.raises(InvalidRequest):
        await metered.meter.encoded(metered.codec, pb.Prompt(text="refused"), True, metered.tenant)
    metered.meter.decodes([5] * 20, metered.tenant)
    metered.meter.decodes([5] * 2000, metered.tenant)
    assert metered.left == (6, ALLOWED - 4 - 1 - 20 - CONTEXT)
    metered.meter.decodes([5] * 2000, metered.tenant)
    with pytest.raises(Overloaded, match=r"red\.tokens_per_minute: 32 tokens wanted"):
        metered.meter.decodes([5] * 2000, metered.tenant)


async def test_a_count_needs_no_room_for_an_output() -> None:
    metered = Metered()
    metered.quotas.charge_tokens(metered.tenant, 80, 0.0)
    call = metered.call()
    call.charge.answers = False
    await metered.validator.validate(request(TEXT), call)
    assert metered.left == (8, 16)


# ------------------------------------------------------------ lists


def embedder(metered: Metered) -> Embedder:
    return Embedder(None, metered.validator, 8, metered.meter)  # type: ignore[arg-type] # nothing is run


def inputs(*texts: str) -> pb.EmbedRequest:
    return pb.EmbedRequest(inputs=[pb.Prompt(text=text) for text in texts])


async def test_each_input_of_a_list_is_charged_before_the_first_is_read() -> None:
    metered = Metered()
    found = await embedder(metered).validated(inputs(*[TEXT] * 6), metered.call(), 1, 1 << 20)
    assert ([each.paid for each in found.inputs], metered.left) == ([4] * 6, (4, ALLOWED - 24))
    metered.codec = NoRoom()
    with pytest.raises(Overloaded, match="5 requests wanted; at most 10 requests a minute"):
        await embedder(metered).validated(inputs(*["refused"] * 5), metered.call(), 1, 1 << 20)
    assert metered.left == (4, ALLOWED - 24)
    for each in found.inputs:
        metered.quotas.enter(metered.tenant, each.tokens, 1, 0.0, each.paid)
    assert metered.left == (4, ALLOWED - 24)


async def test_a_list_with_a_wrong_input_pays_for_those_that_were_read() -> None:
    metered = Metered()
    with pytest.raises(InvalidRequest, match=r"inputs\[1\]"):
        await embedder(metered).validated(inputs(TEXT, "refused", *[TEXT] * 6), metered.call(), 1, 1 << 20)
    assert metered.left == (8, ALLOWED - 4 - 1)


async def test_a_list_beyond_the_allowance_needs_full_rates_and_is_then_run() -> None:
    metered = Metered()
    found = await embedder(metered).validated(inputs(*[TEXT] * 40), metered.call(), 1, 1 << 20)
    assert metered.left == (0, 0)
    for each in found.inputs:
        metered.quotas.enter(metered.tenant, each.tokens, 1, 0.0, each.paid)
    with pytest.raises(Overloaded, match=r"red\.requests_per_minute"):
        await embedder(metered).validated(inputs(TEXT), metered.call(), 1, 1 << 20)


async def test_tenants_without_limits_are_not_charged() -> None:
    metered = Metered(tenant=Tenant("blue"))
    call = metered.call()
    found = await metered.validator.validate(request(TEXT), call)
    assert (found.paid, call.charge.rest(), len(metered.quotas)) == (None, (0, 0), 0)
    assert Charge().begun is False


async def test_a_server_without_quotas_charges_nobody() -> None:
    metered = Metered()
    for _ in range(20):
        await UNLIMITED.encoded(metered.codec, pb.Prompt(text=TEXT), True, metered.tenant)
        UNLIMITED.begin([pb.Prompt(text=TEXT)], pb.GenerateRequest(), metered.call())
    assert metered.left == (10, ALLOWED)
