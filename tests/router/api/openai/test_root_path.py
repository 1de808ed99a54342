"""Behind a proxy that serves Quire below a path of its own, whether the proxy cuts that path off or not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from common.contracts.errors import Unauthenticated
from router.tenants.tenancy import Caller, Tenant
from tests.support.router.http_harness import HI, Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

INFO: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
CHAT: dict[str, Any] = {"messages": HI}


class OneKey:
    """It must be asked below the prefix too."""

    def caller(self, authorization: str, host: str) -> Caller:
        if authorization != "Bearer right":
            raise Unauthenticated("the key is not known here")
        return Caller(Tenant("test"))

    def is_live(self, caller: Caller) -> bool:
        return True


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def behind() -> AsyncIterator[Api]:
    info = json.dumps(INFO).encode()
    async with served_api(OneKey(), root_path="/llm/one", tokenizer_info=info) as running:
        running.http.headers["authorization"] = "Bearer right"
        yield running


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
async def test_each_path_is_served_with_and_without_the_prefix(behind: Api, prefix: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/messages", CHAT | {"max_tokens": 9})):
        assert (await behind.http.post(prefix + path, json=body)).status_code == 200
    assert (await behind.http.get(f"{prefix}/health")).json() == {"status": "ok"}
    assert (await behind.http.get(f"{prefix}/tokenizer_info")).json() == INFO


@pytest.mark.parametrize("prefix", ["", "/llm/one"])
async def test_a_key_is_asked_for_and_refusals_have_their_form_below_the_prefix(behind: Api, prefix: str) -> None:
    for wrong in ("Bearer wrong", ""):
        headers = {"authorization": wrong}
        answer = await behind.http.post(f"{prefix}/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 401
    refused = await behind.http.post(f"{prefix}/v1/messages", json=CHAT)
    assert (refused.status_code, refused.json()["type"]) == (400, "error")


@pytest.mark.parametrize("path", ["/llm/one", "/llm/onev1/models", "/llm/v1/models", "/llm/one/llm/one/v1/models"])
async def test_no_other_prefix_is_cut_off(behind: Api, path: str) -> None:
    assert (await behind.http.get(path)).status_code == 404


async def test_the_description_of_the_api_names_the_prefix(behind: Api) -> None:
    assert (await behind.http.get("/openapi.json")).json()["servers"] == [{"url": "/llm/one"}]


async def test_by_default_there_is_no_page_of_the_tokenizer(api: Api) -> None:
    assert (await api.http.get("/tokenizer_info")).status_code == 404
