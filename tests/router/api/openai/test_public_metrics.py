"""/metrics of the HTTP port: there if the operator asks for it, for callers without a key, made anew each second."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from common.contracts.clock import ManualClock
from router.api.openai.public_metrics import PublicMetrics
from tests.support.router.callers import Closed
from tests.support.router.http_harness import Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Counted:
    """A registry with one figure, and a clock that stands still."""

    def __init__(self) -> None:
        self.clock, registry = ManualClock(3.0), CollectorRegistry()
        self.figure = Counter("vllm:prompt_tokens", "prompt tokens", registry=registry)
        self.page = PublicMetrics(registry, self.clock)


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shown(counted: Counted) -> AsyncIterator[Api]:
    async with served_api(Closed(), metrics=counted.page) as running:
        yield running


async def value_of(api: Api) -> float:
    answer = await api.http.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    samples = [each for family in text_string_to_metric_families(answer.text) for each in family.samples]
    return next(each.value for each in samples if each.name == "vllm:prompt_tokens_total")


async def test_it_needs_no_key_and_is_made_once_a_second(shown: Api, counted: Counted) -> None:
    assert await value_of(shown) == 0.0
    counted.figure.inc(7)
    assert await value_of(shown) == 0.0
    counted.clock.advance(1.0)
    assert await value_of(shown) == 7.0


async def test_scrapers_get_the_format_that_they_ask_for(shown: Api) -> None:
    answer = await shown.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    assert (await shown.http.head("/metrics")).status_code == 200
    assert (await shown.http.post("/metrics")).status_code == 405
    assert shown.spans.ended() == ()


async def test_everything_else_still_needs_a_key(shown: Api) -> None:
    assert (await shown.http.get("/v1/models")).status_code == 401


async def test_without_the_option_there_is_none_with_and_without_keys(api: Api) -> None:
    assert (await api.http.get("/metrics")).status_code == 404
    async with served_api(Closed()) as closed:
        assert (await closed.http.get("/metrics")).status_code == 404
