"""Charges the router's work for texts to the rates of its tenants: before the work, by what it is expected to be.

All APIs call this. What a prompt costs is known when its tokens are made; until then it is taken for the usual number
of bytes a token. So the router works only where a rate has room, and a request that it refuses later has been paid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from common.contracts.clock import Clock, SystemClock
from common.contracts.errors import Overloaded
from common.contracts.limits import MAX_SEQUENCES
from quire.inference.v1 import inference_pb2 as pb
from router.answers.text.tokenizer import BYTES_A_TOKEN, size_of
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext, RequestValidator, TextCodec
from router.tenants.tenancy import Tenant, TenantQuotas

Refused = Callable[[CallContext, str, int, Overloaded], None]


def _ignore(call: CallContext, request_id: str, tokens: int, error: Overloaded) -> None:
    """Record nothing."""


class Meter:
    """Charges tenants. Prompt and output of a request have `context()` tokens at most, its output `max_new` by default.

    `refused` is told of each request of which a rate has no room for the prompt: with its id, "" for none, and tokens.
    """

    def __init__(
        self,
        quotas: TenantQuotas,
        clock: Clock,
        context: Callable[[], int],
        max_new: int | None = None,
        refused: Refused = _ignore,
    ) -> None:
        self._quotas, self._clock, self._refused = quotas, clock, refused
        self._context, self._max_new = context, max_new

    def begin(
        self, prompts: Sequence[pb.Prompt], asked: pb.GenerateRequest, call: CallContext, embeds: bool = False
    ) -> None:
        """Charge a call for its prompts, once. `asked` has what its requests share. Raises Overloaded."""
        if call.charge.begun:
            return
        tenant = call.caller.tenant
        if not tenant.limits.are_set:
            call.charge.begin(())
            return
        each = [self._prompt_tokens(prompt) for prompt in prompts]
        answers = call.charge.answers and not embeds
        later = sum(self._output_tokens(asked, tokens) for tokens in each) if answers else 0
        try:
            self._quotas.charge_tokens(tenant, sum(each), self._clock.monotonic(), len(each), later)
        except Overloaded as error:
            self._refused(call, asked.request_id or call.request_id, sum(each) + later, error)
            raise
        call.charge.begin(each)

    def give_back(self, call: CallContext) -> None:
        """Give back what a call was charged for requests that nobody has begun to work on."""
        requests, tokens = call.charge.rest()
        self._quotas.settle(call.caller.tenant, -tokens, -requests)

    def settle(self, tenant: Tenant, more: int) -> None:
        """Charge a tenant for so many tokens more than was expected."""
        self._quotas.settle(tenant, more)

    async def encoded(self, codec: TextCodec, prompt: pb.Prompt, special: bool, tenant: Tenant) -> list[int]:
        """Return the tokens of a prompt, for a client that wants no more than these. Raises Overloaded."""
        expected = self._prompt_tokens(prompt) if tenant.limits.are_set else 0
        self._quotas.charge_tokens(tenant, expected, self._clock.monotonic())
        try:
            ids = await codec.encode(prompt, special)
        except Overloaded:
            self.settle(tenant, -expected)
            raise
        self.settle(tenant, len(ids) - expected)
        return ids

    def asks(self, tenant: Tenant) -> None:
        """Charge a tenant for a request without a prompt. Raises Overloaded."""
        self._quotas.charge_tokens(tenant, 0, self._clock.monotonic())

    def wrong(self, tenant: Tenant) -> None:
        """Charge a tenant for a request that cannot be read. Raises Overloaded."""
        self._quotas.charge_tokens(tenant, 0, self._clock.monotonic())

    def decodes(self, token_ids: Sequence[int], tenant: Tenant) -> None:
        """Charge a tenant for the text of tokens. Raises Overloaded."""
        self._quotas.charge_tokens(tenant, min(len(token_ids), self._context()), self._clock.monotonic())

    def _prompt_tokens(self, prompt: pb.Prompt) -> int:
        """Return how many tokens a prompt probably has; of one that does not fit the context no more are made."""
        match prompt.WhichOneof("content"):
            case "token_ids":
                tokens = len(prompt.token_ids.ids)
            case "text":
                tokens = size_of(prompt.text) // BYTES_A_TOKEN
            case _:
                tokens = prompt.ByteSize() // BYTES_A_TOKEN
        return max(1, min(tokens, self._context()))

    def _output_tokens(self, asked: pb.GenerateRequest, prompt: int) -> int:
        """Return how many tokens the output of a request may have; one that asks for wrong numbers is refused later."""
        left, sampling = max(0, self._context() - prompt), asked.sampling
        most = sampling.max_tokens if sampling.HasField("max_tokens") else min(left, self._max_new or left)
        return max(0, min(most, left)) * max(1, min(sampling.n, MAX_SEQUENCES))


class _NoQuotas(TenantQuotas):
    """Quotas of a server that holds nobody to limits."""

    def charge_tokens(self, tenant: Tenant, tokens: int, now: float, requests: int = 1, later: int = 0) -> None:
        """Charge nothing."""


UNLIMITED: Final = Meter(_NoQuotas(), SystemClock(), lambda: 1)
"""Charges nobody."""


class MeteredValidator:
    """The RequestValidator over another one that charges for requests, valid or not."""

    def __init__(self, validator: RequestValidator, meter: Meter) -> None:
        self._validator, self._meter = validator, meter

    async def validate(self, request: pb.GenerateRequest, call: CallContext, embeds: bool = False) -> ValidatedRequest:
        tenant = call.caller.tenant
        if not tenant.limits.are_set:
            return await self._validator.validate(request, call, embeds)
        self._meter.begin([request.prompt], request, call, embeds)
        expected = call.charge.take()
        try:
            found = await self._validator.validate(request, call, embeds)
        except Overloaded:
            self._meter.settle(tenant, -expected)
            raise
        self._meter.settle(tenant, len(found.prompt) - expected)
        return replace(found, paid=len(found.prompt))

    def check_token_ids(self, token_ids: Sequence[int]) -> None:
        self._validator.check_token_ids(token_ids)
