"""Figures of requests: the name of the model, tenants up to a bound, and the names that vLLM has for the same."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from common.contracts.errors import Unavailable
from common.contracts.types import FinishReason, Usage
from common.process.metrics import exposed
from router.api.page.parts import buckets_of, total_of
from router.contracts.events import Finished, Timings
from router.contracts.ports import ModelCard
from router.observe.metrics import RouterMetrics
from router.observe.status import RouterStatus
from router.observe.vllm_names import Held, HeldAdapters, VllmNames
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import CLOCK, frontend_over, in_background, request, tokens_of
from tests.support.router.known_router import KnownRouter

PROMTOOL = shutil.which("promtool")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
HELD = Held(running=3, waiting=2, free_blocks=60, num_blocks=80, block_size=16)
OPENMETRICS = "application/openmetrics-text"


def finished(reason: FinishReason, output: int) -> Finished:
    return Finished(0, reason, Usage(prompt_tokens=40, output_tokens=output), Timings(0.0, 0.1, 0.01, 2.0))


def counted(metrics: RouterMetrics, *tenants: str) -> None:
    """Let a request of each tenant come and end, with 40 prompt tokens, 16 of them cached, and 5 of output."""
    for tenant in tenants:
        of = metrics.of(tenant)
        of.requests.inc()
        of.blocks_granted(0.02, "")
        of.prompt_tokens.inc(40)
        of.request_prompt.observe(40)
        of.cached_tokens.inc(16)
        of.first_token(0.1, TRACE_ID)
        of.inter_token_latency.observe(0.01)
        of.generation_tokens.inc(5)
        of.done(finished(FinishReason.LENGTH, 5), TRACE_ID)


def labels_of(registry: CollectorRegistry, name: str) -> list[tuple[dict[str, str], float]]:
    samples = (each for metric in registry.collect() for each in metric.samples)
    return [(each.labels, each.value) for each in samples if each.name == name]


def test_figures_of_requests_name_the_model_and_no_tenant_unless_asked() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "small")
    counted(metrics, "red", "blue", "")
    assert labels_of(registry, "quire:requests_total") == [({"model_name": "small"}, 3.0)]
    (success,) = [each for each in labels_of(registry, "quire:request_success_total") if each[1]]
    assert success == ({"model_name": "small", "finished_reason": "length"}, 3.0)
    assert labels_of(registry, "quire:workers_connected") == []
    known = KnownRouter(IDENTITY, workers=2, connected=True)
    metrics.watch_workers(known, known)
    assert labels_of(registry, "quire:workers_connected") == [({}, 2.0)]


def test_so_many_tenants_are_named_and_the_others_are_one() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, "small", tenants=2)
    counted(metrics, "red", "", "blue", "green", "red", "white", "")
    metrics.of("green").refused(Unavailable("no worker"))
    found = {labels["tenant"]: value for labels, value in labels_of(registry, "quire:requests_total")}
    assert found == {"": 2.0, "red": 2.0, "blue": 1.0, "other": 2.0}
    failed = labels_of(registry, "quire:request_failure_total")
    assert [labels for labels, value in failed if value] == [
        {"model_name": "small", "reason": "UNAVAILABLE", "tenant": "other"}
    ]
    assert {labels["tenant"] for labels, _ in failed} == set(found), "a rate misses what begins with an event"
    # The page sums them up.
    assert total_of(metrics.generation_tokens) == 35.0
    assert buckets_of(metrics.time_to_first_token)[-1] == (float("inf"), 7.0)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_both_formats_can_be_read_and_have_the_exemplars_of_the_format_that_has_any(accept: str) -> None:
    registry = CollectorRegistry()
    counted(RouterMetrics(registry, "small", tenants=1), "red")
    _, body = exposed(registry, accept)
    parse = parse_openmetrics if accept else parse_text
    samples = [each for family in parse(body.decode()) for each in family.samples]
    found = [each.exemplar for each in samples if each.name == "quire:e2e_request_latency_seconds_bucket"]
    assert [each.labels for each in found if each] == ([{"trace_id": TRACE_ID}] if accept else [])
    assert {each.labels["model_name"] for each in samples if each.name == "quire:requests_total"} == {"small"}


def vllm(metrics: RouterMetrics, held: Held = HELD) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(VllmNames(metrics, "small", lambda: held))
    return registry


@pytest.mark.parametrize("tenants", [0, 1])
def test_vllm_s_names_have_the_same_figures_of_all_tenants(tenants: int) -> None:
    metrics = RouterMetrics(CollectorRegistry(), "small", tenants)
    counted(metrics, "red", "blue")
    metrics.of("red").done(finished(FinishReason.CANCELLED, 1), "")
    metrics.of("red").done(finished(FinishReason.DEADLINE, 1), "")
    registry = vllm(metrics)
    value = registry.get_sample_value
    label = {"model_name": "small"}
    wanted = {
        "num_requests_running": 3.0,
        "num_requests_waiting": 2.0,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 80.0,
        "prompt_tokens_cached_total": 32.0,
        "generation_tokens_total": 10.0,
        "prefix_cache_queries_total": 80.0,
        "prefix_cache_hits_total": 32.0,
        "time_to_first_token_seconds_count": 2.0,
        "inter_token_latency_seconds_sum": 0.02,
        "request_queue_time_seconds_sum": 0.04,
        "e2e_request_latency_seconds_sum": 8.0,
        "request_prompt_tokens_sum": 80.0,
        "request_generation_tokens_sum": 12.0,
    }
    assert {name: value(f"vllm:{name}", label) for name in wanted} == pytest.approx(wanted)
    ends = {labels["finished_reason"]: found for labels, found in labels_of(registry, "vllm:request_success_total")}
    assert ends == {"stop": 0.0, "length": 2.0, "abort": 2.0, "error": 0.0}
    buckets = [found for labels, found in labels_of(registry, "vllm:time_to_first_token_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 2.0
    assert value("vllm:time_to_first_token_seconds_bucket", {**label, "le": "0.1"}) == 2.0
    sizes = {"block_size": "16", "num_gpu_blocks": "80"}
    assert value("vllm:cache_config_info", {**label, **sizes}) == 1.0
    for metric in registry.collect():
        assert metric.documentation
        assert metric.name.startswith("vllm:")
        assert {each.labels["model_name"] for each in metric.samples} == {"small"}
        assert not any("tenant" in each.labels for each in metric.samples)


@pytest.mark.parametrize(("held", "rows"), [(8, 1), (0, 0)])
def test_vllm_s_row_of_adapters_has_their_names_and_the_time_where_a_worker_holds_some(held: int, rows: int) -> None:
    names, registry = {f"a{number:03}" for number in range(300)}, CollectorRegistry()
    found = HeldAdapters({"sql", "chat"}, names, held, 1700000000.5)
    registry.register(VllmNames(RouterMetrics(CollectorRegistry(), "small"), "small", lambda: HELD, lambda: found))
    labels = {"model_name": "small", "max_lora": str(held), "running_lora_adapters": "chat,sql"}
    labels["waiting_lora_adapters"] = ",".join(f"a{number:03}" for number in range(256))
    assert labels_of(registry, "vllm:lora_requests_info") == [(labels, 1700000000.5)][:rows]


def test_pages_are_not_counted_as_blocks_of_tokens() -> None:
    """Full layers take one page of a block, those with a window two: 80 pages are at least 26 blocks of tokens."""
    pages = replace(HELD, block_pages=3)
    metrics = RouterMetrics(CollectorRegistry(), "small")
    registry = CollectorRegistry()
    registry.register(VllmNames(metrics, "small", lambda: pages))
    sizes = {"model_name": "small", "block_size": "16", "num_gpu_blocks": "26"}
    assert registry.get_sample_value("vllm:cache_config_info", sizes) == 1.0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "small"}) == 0.25


async def test_vllm_s_names_have_what_a_running_router_and_its_worker_do() -> None:
    worker = FakeWorker(num_blocks=64)
    async with frontend_over(worker) as harness, in_background(harness, request(max_tokens=2)) as served:
        known, card = KnownRouter(IDENTITY), ModelCard("small", harness.pool.identity, 256, 1000, (), True)
        status = RouterStatus(card, harness.pool, harness.admission, known, harness.frontend, known, CLOCK)
        names = VllmNames(
            harness.frontend._recorder.metrics,
            "small",
            lambda: Held(*harness.frontend.sequences(), *status.blocks(), block_size=4),
        )
        harness.registry.register(names)  # beside those of Quire, as `--metrics-alias vllm` does

        def value(name: str) -> float | None:
            return harness.registry.get_sample_value(f"vllm:{name}", {"model_name": "small"})

        await worker.until(lambda: len(worker.submits) == 1)
        assert (value("num_requests_running"), value("num_requests_waiting")) == (0.0, 1.0)
        worker.heartbeat(unheld_blocks=48)
        worker.step({1: [100]}, admitted={1: 8})
        await harness.until(lambda: len(tokens_of(harness.seen)) == 1)
        async with in_background(harness, request()):
            await worker.until(lambda: len(worker.submits) == 2)
            assert (value("num_requests_running"), value("num_requests_waiting")) == (1.0, 1.0)
            assert value("kv_cache_usage_perc") == 0.25
            assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (10.0, 8.0)
        worker.step({1: [101]}, finished={1: FinishReason.LENGTH})
        await served
        assert (value("num_requests_running"), value("num_requests_waiting")) == (0.0, 0.0)
        assert harness.registry.get_sample_value("quire:prompt_tokens_total") == 10.0
        of_vllm = [each for each in harness.registry.collect() if each.name.startswith("vllm:")]
        labels = {key for metric in of_vllm for each in metric.samples for key in each.labels}
        assert labels == {"model_name", "finished_reason", "le", "block_size", "num_gpu_blocks"}


def test_without_workers_no_block_is_used() -> None:
    assert Held(0, 0, 0, 0, 16).usage == 0.0


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_finds_nothing_in_them_but_the_colons() -> None:
    metrics = RouterMetrics(CollectorRegistry(), "small")
    counted(metrics, "red")
    _, body = exposed(vllm(metrics), "")
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=body, capture_output=True, check=False)
    found = done.stderr.decode().splitlines() + done.stdout.decode().splitlines()
    assert [line for line in found if "metric names should not contain ':'" not in line] == []
