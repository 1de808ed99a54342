"""Requests of the wire: every wrong field is reported at once, zero is not unset, defaults come from the checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from common.contracts.adapters import AdapterRef
from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, InvalidRequest, ModelNotFound, PermissionDenied
from common.contracts.types import SamplingParams
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1.types_pb2 import SamplingParams as Sampling
from router.contracts.events import ValidatedRequest
from router.contracts.ports import CallContext
from router.requests.request_ids import automatic_id
from router.requests.validate import WatchedValidator, valid_traceparent
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.validation import (
    ACME,
    CALL,
    CONTEXT,
    SEED,
    OnlyDigits,
    accepted,
    refused,
    request,
    validator,
)

TOO_LONG = (
    "prompt: This model's maximum context length is 32 tokens. However, the prompt has 33 tokens, and the output needs"
    " one; shorten the prompt by 2 tokens or more"
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def reasons(message: pb.GenerateRequest) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        await validator().validate(message, CALL)
    return [violation.reason for violation in caught.value.violations]


async def test_a_bare_prompt_gets_every_default() -> None:
    assert await accepted(request()) == ValidatedRequest(
        prompt=(3, 3),
        sampling=SamplingParams(max_tokens=CONTEXT - 2, seed=SEED),
        arrived=5.0,
        deadline=9.0,
        caller=ACME,
        cache_domain=b"acme",
    )


async def test_a_wrong_request_is_told_by_its_id() -> None:
    told: list[tuple[str, str, str]] = []
    by = WatchedValidator(
        validator(), lambda request_id, caller, error: told.append((request_id, caller.tenant.name, str(error)))
    )
    long = pb.Prompt(token_ids=pb.TokenIds(ids=[3] * (CONTEXT + 1)))
    for request_id in ("mine", "", "quire-x y"):
        with pytest.raises(InvalidRequest):
            await by.validate(pb.GenerateRequest(prompt=long, request_id=request_id), CALL)
    with pytest.raises(InvalidRequest):
        await by.validate(pb.GenerateRequest(prompt=long), replace(CALL, request_id="of-the-API"))
    assert told == [("mine", "acme", TOO_LONG), ("of-the-API", "acme", TOO_LONG)]


async def test_every_field_arrives() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_tokens=9, min_tokens=2, stop=["a", "b"],
        stop_token_ids=[4, 5], repetition_penalty=1.5, presence_penalty=-2, frequency_penalty=2,
        logit_bias={9: -1, 3: 2}, seed=-8, ignore_eos=True, logprobs=3, n=2, include_stop=True,
        closing_token_id=6, logprob_token_ids=[8, 2, 8],
    )  # fmt: skip
    given = request(
        sampling=sampling, request_id="r-1", priority=-3, traceparent=TRACE,
        cache=pb.CacheOptions(no_cache=True, salt="s"),
    )  # fmt: skip
    assert await accepted(given) == ValidatedRequest(
        prompt=(3, 3),
        sampling=SamplingParams(
            temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, max_tokens=9, min_tokens=2, stop=("a", "b"),
            stop_token_ids=(4, 5), repetition_penalty=1.5, presence_penalty=-2.0, frequency_penalty=2.0,
            logit_bias=((3, 2.0), (9, -1.0)), seed=-8, ignore_eos=True, logprobs=3, n=2, include_stop=True,
            closing_token_id=6, logprob_token_ids=(8, 2),
        ),
        arrived=5.0, request_id="r-1", deadline=9.0, priority=-3, no_cache=True, caller=ACME, cache_domain=b"acme",
        salt="s", traceparent=TRACE,
    )  # fmt: skip


async def test_zero_is_a_value_and_not_unset() -> None:
    by = validator({"temperature": 0.6, "top_k": 20, "min_p": 0.1})
    given = Sampling(temperature=0, top_k=0, min_p=0, seed=0, logprobs=0, presence_penalty=0)
    sampling = (await accepted(request(sampling=given), by)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.0, 0, 0.0)
    assert (sampling.seed, sampling.logprobs) == (0, 0)


async def test_unset_fields_take_the_checkpoints_defaults() -> None:
    by = validator({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05})
    sampling = (await accepted(request(sampling=Sampling(top_k=5)), by)).sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0.6, 5, 1.05)


async def test_the_context_is_what_the_workers_that_are_there_can_hold() -> None:
    by = validator(context=12)
    assert (await accepted(request("a " * 5), by)).sampling.max_tokens == 7
    assert await refused(request("a " * 12), by) == [
        (
            "prompt: This model's maximum context length is 12 tokens. However, the prompt has 12 tokens, "
            "and the output needs one; shorten the prompt by 1 tokens or more"
        )
    ]


async def test_the_checkpoints_max_new_tokens_is_a_default_that_the_context_caps() -> None:
    by = validator(max_new_tokens=10)
    assert (await accepted(request(), by)).sampling.max_tokens == 10
    assert (await accepted(request("a " * 30), by)).sampling.max_tokens == 2
    assert (await accepted(request(sampling=Sampling(max_tokens=20)), by)).sampling.max_tokens == 20


@pytest.mark.parametrize(
    ("sampling", "violation"),
    [
        (Sampling(temperature=-0.5), "sampling.temperature: is -0.5; expected 0 or more (0 is greedy)"),
        (Sampling(temperature=math.nan), "sampling.temperature: is nan; expected 0 or more (0 is greedy)"),
        (Sampling(temperature=math.inf), "sampling.temperature: is inf; expected 0 or more (0 is greedy)"),
        (Sampling(top_p=0), "sampling.top_p: is 0; expected more than 0, at most 1 (1 keeps all tokens)"),
        (Sampling(top_p=1.1), "sampling.top_p: is 1.1; expected more than 0, at most 1 (1 keeps all tokens)"),
        (Sampling(top_k=-1), "sampling.top_k: is -1; expected 0 or more (0 keeps all tokens)"),
        (Sampling(min_p=1.5), "sampling.min_p: is 1.5; expected 0 to 1"),
        (Sampling(max_tokens=0), "sampling.max_tokens: is 0; expected 1 or more"),
        (Sampling(min_tokens=-1), "sampling.min_tokens: is -1; expected 0 or more"),
        (Sampling(repetition_penalty=0), "sampling.repetition_penalty: is 0; expected more than 0 (1 is none)"),
        (Sampling(presence_penalty=2.5), "sampling.presence_penalty: is 2.5; expected -2 to 2"),
        (Sampling(frequency_penalty=-3), "sampling.frequency_penalty: is -3; expected -2 to 2"),
        (Sampling(logprobs=21), "sampling.logprobs: is 21; expected 0 to 20"),
        (Sampling(n=0), "sampling.n: is 0; expected 1 to 64"),
        (Sampling(n=65), "sampling.n: is 65; expected 1 to 64"),
        (Sampling(stop=["a"] * 17), "sampling.stop: has 17 strings; expected at most 16"),
        (Sampling(stop=["a" * 1025]), "sampling.stop[0]: has 1025 characters; expected at most 1024"),
        (Sampling(stop_token_ids=[-1] * 1025), "sampling.stop_token_ids: has 1025 ids; expected at most 1024"),
        (
            Sampling(logit_bias=dict.fromkeys(range(1025), 500.0)),
            "sampling.logit_bias: has 1025 entries; expected at most 1024",
        ),
        (Sampling(stop=["a", ""]), "sampling.stop[1]: is empty; expected at least one character"),
        (Sampling(closing_token_id=100), "sampling.closing_token_id: is 100; expected a token id, 0 to 99"),
        (
            Sampling(logprobs=0, logprob_token_ids=[1] * 129),
            "sampling.logprob_token_ids: has 129 ids; expected at most 128",
        ),
        (Sampling(logprob_token_ids=[5]), "sampling.logprob_token_ids: needs logprobs, which is not set; set it"),
        (
            Sampling(logprobs=0, logprob_token_ids=[5, 100]),
            "sampling.logprob_token_ids[1]: is 100; expected a token id, 0 to 99",
        ),
        (Sampling(stop_token_ids=[5, 100]), "sampling.stop_token_ids[1]: is 100; expected a token id, 0 to 99"),
        (Sampling(logit_bias={5: 101}), "sampling.logit_bias[5]: is 101; expected -100 to 100"),
        (
            Sampling(logit_bias={-1: 1}),
            "sampling.logit_bias[-1]: is for a token out of the vocabulary; expected a token id, 0 to 99",
        ),
        (
            Sampling(max_tokens=5, min_tokens=6),
            "sampling.min_tokens: is 6; expected at most max_tokens, which is 5",
        ),
        (
            Sampling(max_tokens=31),
            (
                "sampling.max_tokens: This model's maximum context length is 32 tokens. However, the prompt has 2 "
                "tokens, and max_tokens asks for 31 more; lower max_tokens to 30 or shorten the prompt"
            ),
        ),
    ],
)
async def test_a_wrong_sampling_field_is_named_with_value_and_range(sampling: Sampling, violation: str) -> None:
    assert await refused(request(sampling=sampling)) == [violation]


@pytest.mark.parametrize(
    ("message", "violation"),
    [
        (pb.GenerateRequest(), "input: is missing; expected a prompt"),
        (request("refused"), "prompt.text: is refused"),
        (request(priority=101), "priority: is 101; expected -100 to 100"),
        (request(request_id="a b"), "request_id: is not 1 to 128 printable ASCII characters without spaces"),
        (request(request_id="x" * 129), "request_id: is not 1 to 128 printable ASCII characters without spaces"),
        (
            request(request_id="quire-1"),
            "request_id: begins with quire-, as the router's own ids do; choose another, or leave it out",
        ),
        (request(cache=pb.CacheOptions(salt="s" * 257)), "cache.salt: has 257 characters; expected at most 256"),
        (request(regex="0" * 65537), "regex: has 65537 characters; expected at most 65536"),
        (
            pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[-1] * 33))),
            TOO_LONG,
        ),
        (
            request("a " * 33),
            TOO_LONG,
        ),
        (
            pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5, -2]))),
            "prompt.token_ids.ids[1]: is -2; expected a token id, 0 to 99",
        ),
    ],
)
async def test_a_wrong_request_is_refused_with_what_to_do(message: pb.GenerateRequest, violation: str) -> None:
    assert await refused(message, validator(constraints=OnlyDigits())) == [violation]


def test_ids_to_decode_are_at_most_those_of_the_context() -> None:
    validator().check_token_ids([99] * CONTEXT)
    with pytest.raises(InvalidRequest, match="token_ids: has 33 ids; expected at most 32"):
        validator().check_token_ids([100] * (CONTEXT + 1))


def test_automatic_ids_cannot_be_guessed() -> None:
    ids = {automatic_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("quire-[0-9a-f]{32}", each) for each in ids)


async def test_what_the_context_cannot_hold_has_a_reason_of_its_own() -> None:
    assert await reasons(request("a " * 33)) == [CONTEXT_LENGTH_EXCEEDED]
    assert await reasons(request(sampling=Sampling(max_tokens=31))) == [CONTEXT_LENGTH_EXCEEDED]
    assert await reasons(request("refused", priority=101)) == ["", ""]


async def test_every_violation_is_reported_at_once() -> None:
    message = request("refused", priority=200, sampling=Sampling(top_p=2, n=99, stop=[""]))
    fields = [line.partition(":")[0] for line in await refused(message)]
    assert fields == ["priority", "sampling.top_p", "sampling.n", "sampling.stop[0]", "prompt.text"]


async def test_of_many_wrong_ids_the_first_five_are_named() -> None:
    lines = await refused(pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[100] * 8))))
    assert len(lines) == 6
    assert lines[-1] == "prompt.token_ids.ids: has 3 more ids out of the vocabulary"


async def test_the_longest_prompt_leaves_one_output_token() -> None:
    assert (await accepted(request("a " * 31))).sampling.max_tokens == 1


async def test_stop_strings_need_a_tokenizer() -> None:
    lines = await refused(request(sampling=Sampling(stop=["a"])), validator(has_tokenizer=False))
    assert lines == ["sampling.stop: needs a tokenizer, and this checkpoint has none; use stop_token_ids"]


async def test_the_messages_trace_context_goes_before_that_of_the_call() -> None:
    call = CallContext(arrived=0.0, traceparent=TRACE.replace("b7", "c8"))
    assert (await validator().validate(request(traceparent=TRACE), call)).traceparent == TRACE
    assert (await validator().validate(request(traceparent="nonsense"), call)).traceparent == call.traceparent


async def test_the_trace_state_of_the_call_goes_with_its_own_trace_context_alone() -> None:
    call = CallContext(arrived=0.0, traceparent=TRACE.replace("b7", "c8"), tracestate="vendor=1")
    assert (await validator().validate(request(traceparent=""), call)).tracestate == "vendor=1"
    assert (await validator().validate(request(traceparent=TRACE), call)).tracestate == ""


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        TRACE.upper(),
        TRACE + "-more",
        TRACE.replace("00-", "cc-", 1) + "-" + "x" * 256,
        TRACE.replace("00-", "ff-", 1),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
    ],
)
def test_a_malformed_trace_context_is_ignored(header: str) -> None:
    assert valid_traceparent(header) == ""


@pytest.mark.parametrize("header", [TRACE, TRACE.replace("00-", "cc-", 1) + "-what-the-future-brings"])
def test_a_well_formed_trace_context_is_kept(header: str) -> None:
    assert valid_traceparent(f" {header} ") == header


async def test_a_priority_is_lowered_to_the_maximum_of_the_tenant() -> None:
    capped = CallContext(arrived=0.0, caller=Caller(Tenant("acme", max_priority=2)))
    given = [await validator().validate(request(priority=priority), capped) for priority in (-5, 1, 100)]
    assert [each.priority for each in given] == [-5, 1, 2]
    assert (await validator().validate(request(priority=100), CallContext(arrived=0.0))).priority == 0


async def test_a_shared_domain_replaces_the_domain_of_the_tenant_where_it_is_open() -> None:
    shared = await validator().validate(request(cache=pb.CacheOptions(shared_domain="open")), CALL)
    assert shared.cache_domain == b"shared"
    with pytest.raises(PermissionDenied, match="'closed' is not open to this caller"):
        await validator().validate(request(cache=pb.CacheOptions(shared_domain="closed")), CALL)


class Adapters:
    """One adapter beside the base, which is called `base`."""

    def find_adapter(self, name: str) -> AdapterRef | None:
        return AdapterRef("sql", "1" * 64) if name == "sql" else None

    def adapter_names(self) -> list[str]:
        return ["sql"]

    def check_model(self, name: str) -> None:
        if name not in ("base", "sql"):
            raise ModelNotFound(f"model {name!r} is not served here", name)


async def test_a_model_name_selects_an_adapter_that_the_tenant_may_use() -> None:
    by = validator()
    by.adapters = Adapters()
    call = replace(CALL, model="sql")
    of_call = await by.validate(request(), call)
    assert of_call.adapter == AdapterRef("sql", "1" * 64)
    assert (await by.validate(request(model="sql"), CALL)).adapter == of_call.adapter
    assert (await by.validate(request(model="base"), CALL)).adapter is None
    assert (await by.validate(request(), replace(CALL, model="alias"))).adapter is None
    with pytest.raises(ModelNotFound):
        await by.validate(request(model="unknown"), CALL)
    for allowed, refused_words in ((frozenset({"base", "sql"}), ""), (frozenset({"base"}), "may not use model 'sql'")):
        tenant = replace(CALL.caller.tenant, models=allowed)
        named = replace(call, caller=replace(CALL.caller, tenant=tenant))
        if not refused_words:
            assert (await by.validate(request(), named)).adapter == of_call.adapter
            continue
        with pytest.raises(PermissionDenied, match=refused_words):
            await by.validate(request(), named)
