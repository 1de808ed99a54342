"""Spans and metrics of requests by OpenTelemetry's conventions: exact values, and names that the conventions have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from common.contracts import gen_ai_names
from common.contracts.errors import Overloaded
from common.contracts.types import Constraint, ConstraintKind, FinishReason, Usage
from common.process.metrics import exposed
from router.contracts.events import Finished, Timings, ValidatedRequest
from router.contracts.ports import CallContext
from router.contracts.refusals import FAULTS
from router.observe.diagnosis.outcome import Outcome
from router.observe.gen_ai import ServerMetrics, request_attributes, response_attributes
from router.placement.admission import AdmissionLimits
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import MODEL, frontend_over, request
from tests.support.router.validation import request as message
from tests.support.router.validation import validator
from tests.support.spans import called

# What the conventions have (commit 024a4f94) for the spans of inferences, of which Quire knows something.
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
    assert len(attributes) == 20
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


DURATION = "gen_ai_server_request_duration_seconds"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SERVED = Outcome(
    ended="length", has_first_token=True, before=(("queue", 0.5), ("prefill", 0.25)), after=(("decode", 1.5),),
    output_tokens=8, sequences=2,
)  # fmt: skip


def samples(registry: CollectorRegistry, name: str) -> list[Sample]:
    return [each for metric in registry.collect() for each in metric.samples if each.name == name]


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    """Return the values that are not 0, by operation, the model as it was asked for, and the error of durations."""
    names = ("gen_ai_operation_name", "gen_ai_request_model", "error_type")
    found = {tuple(each.labels[key] for key in names if key in each.labels): each for each in samples(registry, name)}
    return {key: each.value for key, each in found.items() if each.value}


def test_the_names_of_metrics_and_their_buckets_are_those_of_the_conventions() -> None:
    registry = CollectorRegistry()
    ServerMetrics(registry, MODEL)
    theirs = {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_SERVER")}
    ours = gen_ai_names.REQUEST_DURATION, gen_ai_names.TIME_TO_FIRST_TOKEN, gen_ai_names.TIME_PER_OUTPUT_TOKEN
    assert {each.name for each in ours} == theirs
    # gen-ai-metrics.md at commit 004902b8 has these.
    wanted = {
        DURATION: "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
        FIRST_TOKEN: "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0",
        OUTPUT_TOKEN: "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5",
    }
    for name, bounds in wanted.items():
        found = [each for each in samples(registry, f"{name}_bucket") if each.labels["gen_ai_operation_name"] == "chat"]
        assert [each.labels["le"] for each in found] == [*bounds.split(), "+Inf"]


def test_a_request_is_one_value_of_each_metric_by_operation_and_model() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, MODEL, ["alias"])
    metrics.ended(request(chat=True, model="alias", n=2), SERVED, TRACE_ID)
    metrics.ended(request(model="made up"), replace(SERVED, output_tokens=1, sequences=1), "")
    metrics.ended(request(embeds=True), SERVED, "")
    of = {("chat", "alias"): 2.25, ("text_completion", MODEL): 2.25, ("embeddings", MODEL): 2.25}
    assert values(registry, f"{DURATION}_sum") == {(*key, ""): value for key, value in of.items()}
    assert values(registry, f"{FIRST_TOKEN}_sum") == {("chat", "alias"): 0.75, ("text_completion", MODEL): 0.75}
    # 1.5 s for 4 tokens a sequence, of which 3 come after the first; a single token has none after it.
    assert values(registry, f"{OUTPUT_TOKEN}_sum") == {("chat", "alias"): 0.5}
    assert {each.labels["gen_ai_provider_name"] for each in samples(registry, f"{DURATION}_sum")} == {"quire"}
    assert {each.labels["gen_ai_response_model"] for each in samples(registry, f"{DURATION}_sum")} == {MODEL}
    for name, bound in ((DURATION, "2.56"), (FIRST_TOKEN, "0.75"), (OUTPUT_TOKEN, "0.5")):
        (traced,) = [each for each in samples(registry, f"{name}_bucket") if each.exemplar is not None]
        assert traced.exemplar is not None
        assert (traced.exemplar.labels, traced.labels["le"]) == ({"trace_id": TRACE_ID}, bound)
    for accept, times in (("application/openmetrics-text", 3), ("", 0)):
        _, body = exposed(registry, accept)
        assert body.decode().count(f'trace_id="{TRACE_ID}"') == times


def test_a_failed_or_resumed_request_has_a_duration_alone() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, MODEL)
    metrics.ended(request(), replace(SERVED, ended="UNAVAILABLE", failure="no worker"), "")
    metrics.ended(request(), SERVED, "", begins=False)
    assert values(registry, f"{DURATION}_count") == {
        ("text_completion", MODEL, "UNAVAILABLE"): 1.0,
        ("text_completion", MODEL, ""): 1.0,
    }
    assert values(registry, f"{FIRST_TOKEN}_count") == values(registry, f"{OUTPUT_TOKEN}_count") == {}


def test_whatever_requests_name_and_fail_by_the_labels_are_bounded() -> None:
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry, MODEL, ["alias"])
    before = len(samples(registry, f"{DURATION}_count"))
    for number in range(100):
        metrics.failed(request(model=f"model {number}"), 1.0, f"ERROR_{number}", "")
    assert values(registry, f"{DURATION}_count") == {("text_completion", MODEL, "_OTHER"): 100.0}
    assert (before, len(samples(registry, f"{DURATION}_count"))) == (3, 4)
    for reason, chat, model in itertools.product(FAULTS, (True, False), (MODEL, "alias")):
        metrics.failed(request(chat=chat, model=model), 1.0, reason, "")
    assert len(samples(registry, f"{DURATION}_count")) == 4 + 4 * len(FAULTS)


async def test_a_running_router_counts_what_it_served_and_what_it_refused() -> None:
    limits = AdmissionLimits(max_tokens_in_flight=20)
    async with frontend_over(FakeWorker(automatic=True), limits=limits) as harness:
        await harness.events(request(chat=True, model="alias"))
        with pytest.raises(Overloaded):
            await harness.events(request(prompt=30))
        trace_id = f"{harness.spans.ended()[0].context.trace_id:032x}"
        assert values(harness.registry, f"{DURATION}_count") == {
            ("chat", "alias", ""): 1.0,
            ("text_completion", "", "OVERLOADED"): 1.0,
        }
        assert values(harness.registry, f"{FIRST_TOKEN}_count") == {("chat", "alias"): 1.0}
        assert values(harness.registry, f"{OUTPUT_TOKEN}_count") == {("chat", "alias"): 1.0}
        (traced,) = [each for each in samples(harness.registry, f"{OUTPUT_TOKEN}_bucket") if each.exemplar is not None]
        assert traced.exemplar is not None
        assert traced.exemplar.labels == {"trace_id": trace_id}
