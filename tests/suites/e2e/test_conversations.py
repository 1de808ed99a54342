"""Conversations by the official client on a real suite with keys: of one tenant, and past kill -9 of the router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.support.load import kill, until_restarted
from tests.support.tenants import TenantSuite, tenant_suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "checkpoint"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TenantSuite]:
    async with tenant_suite(tmp_path_factory.mktemp("conversations"), {"red": "", "blue": ""}) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tenants: TenantSuite) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of one tenant. It tries again while no router is there."""
    url = f"{tenants.suite.stack.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=tenants.keys["red"], max_retries=10) as made:
        yield made


async def test_a_conversation_outlives_its_router_and_is_of_one_tenant(
    tenants: TenantSuite, client: openai.AsyncOpenAI
) -> None:
    made = await client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "Anna lives in a town."}], metadata={"of": "Anna"}
    )
    first = await client.responses.create(model=MODEL, input="Where?", conversation=made.id, max_output_tokens=8)
    pid = tenants.suite.stack.children["router"].pid
    kill(tenants.suite, "router")
    await until_restarted(tenants.suite, "router", pid)
    second = await client.responses.create(model=MODEL, input="Who?", conversation=made.id, max_output_tokens=8)
    items = [item.to_dict() async for item in client.conversations.items.list(made.id, order="asc")]
    texts = ["".join(part["text"] for part in item["content"]) for item in items]  # type: ignore[attr-defined]
    assert texts == ["Anna lives in a town.", "Where?", first.output_text, "Who?", second.output_text]
    assert (await client.conversations.retrieve(made.id)) == made
    other = client.with_options(api_key=tenants.keys["blue"])
    with pytest.raises(openai.NotFoundError, match="is not here"):
        await other.conversations.items.list(made.id)
    with pytest.raises(openai.NotFoundError, match="is not here"):
        await other.responses.create(model=MODEL, input="Who?", conversation=made.id)
    with pytest.raises(openai.NotFoundError, match="is not here"):
        await other.conversations.delete(made.id)
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError, match="is not here"):
        await client.conversations.retrieve(made.id)
