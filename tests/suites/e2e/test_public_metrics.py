"""Metrics where fleets look: vLLM's names at the HTTP port, tenants at the admin plane, and equal figures at both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.demo_model import CHECKPOINT
from cli.suite.programs import metrics_addresses
from cli.suite.stack import StackOptions
from tests.support.suite import PATIENCE
from tests.support.tenants import TenantSuite, tenant_suite
from tests.support.waiting import until

MODEL = CHECKPOINT.name
REQUESTS = "quire:requests_total"
Labels = frozenset[tuple[str, str]]


async def scraped(url: str) -> dict[tuple[str, Labels], float]:
    """Return every sample, by its name and its labels beside that of the model."""
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = await client.get(url)
    assert answer.status_code == 200
    samples = [each for family in text_string_to_metric_families(answer.text) for each in family.samples]
    ours = [each for each in samples if each.name.startswith("vllm:")]
    assert {each.labels["model_name"] for each in ours} <= {MODEL}
    return {
        (each.name, frozenset(item for item in each.labels.items() if item[0] != "model_name")): each.value
        for each in samples
    }


async def asked(tenants: TenantSuite, tenant: str, max_tokens: int) -> None:
    headers = {"authorization": f"Bearer {tenants.keys[tenant]}"}
    body = {"prompt": "one two three", "max_tokens": max_tokens, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=tenants.suite.stack.http_url, headers=headers, timeout=PATIENCE) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200


async def test_gateways_read_vllm_s_names_and_operators_tenants(tmp_path: Path) -> None:
    flags = ("--public-metrics", "--metrics-tenants", "1", "--metrics-alias", "vllm")
    workers = ("--kv-blocks", "256", "--simulate", "base=20ms")
    options = StackOptions(model=CHECKPOINT, router_flags=flags, worker_flags=workers)
    async with tenant_suite(tmp_path, {"red": "", "blue": ""}, options) as tenants:
        public = f"{tenants.suite.stack.http_url}/metrics"
        (admin,) = metrics_addresses(tenants.suite.stack.options)
        idle = await scraped(public)
        assert {name for name, _ in idle if not name.startswith("vllm:")} == set()
        none: Labels = frozenset()
        assert (idle["vllm:num_requests_running", none], idle["vllm:kv_cache_usage_perc", none]) == (0.0, 0.0)
        assert idle["vllm:cache_config_info", frozenset({("block_size", "16"), ("num_gpu_blocks", "256")})] == 1.0
        await asked(tenants, "red", 3)
        await asked(tenants, "blue", 4)
        running = asyncio.create_task(asked(tenants, "blue", 3000))  # a minute at least, on any machine
        busy = await until(lambda: scraped(public), lambda found: found["vllm:num_requests_running", none] == 1.0)
        # Workers say what they hold each second.
        await until(lambda: scraped(public), lambda found: 0.0 < found["vllm:kv_cache_usage_perc", none] < 1.0)
        assert busy["vllm:request_success_total", frozenset({("finished_reason", "length")})] == 2.0
        assert busy["vllm:e2e_request_latency_seconds_count", none] == 2.0
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: scraped(public), lambda found: found["vllm:num_requests_running", none] == 0.0)
        ended = await scraped(public)
        assert ended["vllm:num_requests_waiting", none] == 0.0
        whole = await scraped(f"http://{admin}/metrics")
        assert {each: value for each, value in whole.items() if each[0].startswith("vllm:")} == ended
        by_tenant = {dict(labels)["tenant"]: value for (name, labels), value in whole.items() if name == REQUESTS}
        assert by_tenant == {"": 0.0, "red": 1.0, "other": 2.0}
        prompts = sum(value for (name, _), value in whole.items() if name == "quire:prompt_tokens_total")
        assert prompts == ended["vllm:prompt_tokens_total", none] > 0.0
