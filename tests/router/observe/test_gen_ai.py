"""The attributes of request spans by OpenTelemetry's conventions: exact values, and names that the conventions have."""

from __future__ import annotations

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from common.contracts import gen_ai_names
from common.contracts.types import Constraint, ConstraintKind, FinishReason, Usage
from router.contracts.events import Finished, Timings, ValidatedRequest
from router.contracts.ports import CallContext
from router.observe.gen_ai import request_attributes, response_attributes
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import MODEL, frontend_over, request
from tests.support.router.validation import request as message
from tests.support.router.validation import validator
from tests.support.spans import called

# What version 0.1.0 of the conventions has for the spans of inferences, of which Quire knows something.
STANDARD = frozenset(
    f"gen_ai.{name}"
    for name in (
        *("operation.name", "provider.name", "output.type", "response.finish_reasons", "response.id", "response.model"),
        *("request.choice.count", "request.frequency_penalty", "request.max_tokens", "request.model"),
        *("request.presence_penalty", "request.seed", "request.stream", "request.temperature", "request.top_k"),
        *("request.top_p", "request.stop_sequences", "conversation.id", "request.previous_response.id"),
        *("request.reasoning.level", "usage.cache_read.input_tokens", "usage.cache_write.input_tokens"),
        *("usage.input_tokens", "usage.output_tokens", "usage.reasoning.output_tokens"),
    )
)
GIVEN = {"temperature": 0.5, "top_p": 0.75, "frequency_penalty": 0.25, "presence_penalty": -0.5, "seed": 7}


async def spanned(asked: ValidatedRequest) -> dict[str, object]:
    """Serve a request, and return the attributes of its span that the conventions name, without their prefix."""
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        await harness.events(asked)
        (span,) = (each for each in harness.spans.ended() if called(each) == "inference")
        found = {name: value for name, value in (span.attributes or {}).items() if name.startswith("gen_ai.")}
    assert set(found) <= STANDARD
    return {name.removeprefix("gen_ai."): value for name, value in found.items()}


async def test_a_span_has_what_was_asked_for_and_what_came() -> None:
    assert await spanned(request(request_id="r1", prompt=10, n=2, top_k=40, chat=True, model="alias", **GIVEN)) == {
        "operation.name": "chat",
        "provider.name": "quire",
        "request.model": "alias",
        "request.choice.count": 2,
        "request.max_tokens": 3,
        "request.temperature": 0.5,
        "request.top_p": 0.75,
        "request.top_k": 40,
        "request.frequency_penalty": 0.25,
        "request.presence_penalty": -0.5,
        "request.seed": 7,
        "request.stream": True,
        "response.id": "r1",
        "response.model": MODEL,
        "response.finish_reasons": ["length", "length"],
        "usage.input_tokens": 10,
        "usage.output_tokens": 6,
    }


async def test_a_request_that_names_no_model_asks_for_the_served_one() -> None:
    found = await spanned(request())
    assert (found["request.model"], found["operation.name"]) == (MODEL, "text_completion")
    assert not {"request.choice.count", "request.top_k"} & set(found)


async def test_no_text_of_the_client_is_in_the_span() -> None:
    assert "secret" not in str(await spanned(request(stop=("secret",))))


def test_every_name_is_spelt_as_in_opentelemetry_s_own_package() -> None:
    """The package has the attributes of the version before; none of ours was renamed since."""
    theirs = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    ours = {value for name, value in vars(gen_ai_names).items() if name.isupper() and str(value).startswith("gen_ai.")}
    attributes = ours - {gen_ai_names.PREFIX}
    assert len(attributes) == 19
    assert attributes <= theirs & STANDARD


def test_only_a_streamed_request_says_that_it_is_one() -> None:
    assert request_attributes(request(), MODEL)[gen_ai_names.REQUEST_STREAM] is True
    assert gen_ai_names.REQUEST_STREAM not in request_attributes(request(whole=True), MODEL)


def test_the_type_of_the_output_follows_the_constraint() -> None:
    assert gen_ai_names.OUTPUT_TYPE not in request_attributes(request(), MODEL)
    for kind, expected in ((ConstraintKind.JSON_SCHEMA, "json"), (ConstraintKind.REGEX, "text")):
        found = request_attributes(request(constraint=Constraint(kind, "{}")), MODEL)
        assert found["gen_ai.output.type"] == expected


def test_an_embedding_has_no_parameters_of_sampling() -> None:
    assert request_attributes(request(embeds=True), MODEL) == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": MODEL,
    }


def test_a_request_of_which_nothing_ended_has_no_response() -> None:
    assert response_attributes({}, MODEL, "r1", sequences=2) == {}


def test_each_sequence_has_a_reason_at_its_place_and_an_abnormal_end_is_an_error() -> None:
    usage = Usage(prompt_tokens=40, cached_tokens=16, output_tokens=5)
    reasons = {1: FinishReason.STOP, 2: FinishReason.CANCELLED, 3: FinishReason.DEADLINE, 4: FinishReason.LENGTH}
    ends = {index: Finished(index, reason, usage, Timings(0.0, 0.1, 0.01, 2.0)) for index, reason in reasons.items()}
    assert response_attributes(ends, MODEL, "r1", sequences=5) == {
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["error", "stop", "error", "error", "length"],
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 20,
    }


async def test_a_model_is_named_as_its_caller_named_it() -> None:
    call = CallContext(arrived=0.0, model="alias")
    assert (await validator().validate(message(), call)).model == "alias"
