"""Tokens and text over HTTP, the version, and the description of the API that is served."""

from __future__ import annotations

import re
from typing import Any

import pytest

from router.observe.status import quire_version
from tests.support.router.http_harness import FACTS, HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_text_is_tokenized_and_back(api: Api) -> None:
    answer = await api.http.post("/tokenize", json={"model": "demo", "prompt": "Lyon is", "return_token_strs": True})
    ids = await api.encode("Lyon is")
    names = [api.text.decode([each], skip_special_tokens=False) for each in ids]
    assert answer.json() == {
        "tokens": ids, "count": len(ids), "max_model_len": FACTS.max_model_len, "token_strs": names
    }  # fmt: skip
    back = await api.http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": api.text.decode(ids, skip_special_tokens=False)}


async def test_a_chat_is_tokenized_as_it_is_served(api: Api) -> None:
    answer = await api.http.post("/tokenize", json={"messages": HI})
    await api.client.chat.completions.create(model="demo", messages=HI)
    assert tuple(answer.json()["tokens"]) == api.frontend.requests[0].prompt
    assert answer.json()["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/detokenize", {"tokens": [5, FACTS.vocab_size]}, "tokens[1]"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens[1]"),
    ],
)
async def test_a_wrong_body_is_refused(api: Api, path: str, body: dict[str, Any], param: str) -> None:
    answer = await api.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_another_models_tokens_are_not_told(api: Api) -> None:
    answer = await api.http.post("/tokenize", json={"model": "gpt-9", "prompt": "a"})
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_the_version_is_told(api: Api) -> None:
    assert (await api.http.get("/version")).json() == {"version": quire_version()}


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_ping_is_answered_as_health_is(api: Api, method: str) -> None:
    assert (await api.http.request(method, "/ping")).status_code == 200
    api.is_ready = False
    assert (await api.http.request(method, "/ping")).status_code == 503


async def test_the_schema_describes_every_route_with_its_answers_and_errors(api: Api) -> None:
    schema = (await api.http.get("/openapi.json")).json()
    paths = schema["paths"]
    assert set(paths) == {
        *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"),
        *("/health", "/version", "/metrics"),
    }
    chat = paths["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {"200", "400", "404", "429", "503", "default"}
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    good = chat["responses"]["200"]["content"]
    assert good["application/json"]["schema"]["$ref"].endswith("/ChatCompletion")
    assert good["text/event-stream"]["schema"]["$ref"].endswith("/ChatChunk")
    assert chat["responses"]["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert all(operation["description"] for path in paths.values() for operation in path.values())


async def test_everything_that_the_schema_refers_to_is_in_it(api: Api) -> None:
    answer = await api.http.get("/openapi.json")
    named = set(re.findall(r'"\$ref":"([^"]*)"', answer.text))
    assert len(named) > 10
    schemas = answer.json()["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in named} <= set(schemas)
