"""Tokens and text over HTTP, the version, and the description of the API that is served."""

from __future__ import annotations

import re
from typing import Any

import pytest

from common.version import quire_version
from tests.support.router.http_harness import FACTS, HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_text_is_tokenized_and_back(api: Api) -> None:
    answer = await api.http.post("/tokenize", json={"model": "demo", "prompt": "Lyon is", "return_token_strs": True})
    ids = await api.encode("Lyon is")
    names = [api.text.token_name(each) for each in ids]
    assert "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}is" in names  # as the vocabulary has it, and as vLLM shows it
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


async def test_another_models_tokens_are_not_disclosed(api: Api) -> None:
    answer = await api.http.post("/tokenize", json={"model": "gpt-9", "prompt": "a"})
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_the_version_is_reported(api: Api) -> None:
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
        *("/health", "/version", "/v1/responses", "/v1/responses/{response_id}"),
        *("/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),
        *("/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items"),
        *("/v1/conversations", "/v1/conversations/{conversation_id}", "/v1/conversations/{conversation_id}/items"),
        *(
            "/v1/conversations/{conversation_id}/items/{item_id}",
            "/v1/chat/completions/batch",
            "/v1/rerank",
            "/v1/score",
        ),
        *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
        *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
    }
    chat = paths["/v1/chat/completions"]["post"]
    statuses = "200 400 401 403 404 408 409 413 415 429 431 499 500 503 504"
    assert set(chat["responses"]) == {*statuses.split()}
    # Every status is named: `default` would describe whatever comes.
    found = {status for path in paths.values() for operation in path.values() for status in operation["responses"]}
    assert found == {*statuses.split(), "529"}
    assert chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    good = chat["responses"]["200"]["content"]
    assert good["application/json"]["schema"]["$ref"].endswith("/ChatCompletion")
    event = good["text/event-stream"]["schema"]
    end, data = event["properties"]["data"]["anyOf"]
    assert (end, event["required"]) == ({"const": "[DONE]"}, ["data"])
    assert [each["$ref"].rpartition("/")[2] for each in data["contentSchema"]["anyOf"]] == ["ChatChunk", "ErrorBody"]
    assert chat["responses"]["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert all(operation["description"] for path in paths.values() for operation in path.values())


async def test_the_schema_says_which_values_are_served(api: Api) -> None:
    """Found by `make fuzz`: no chat that fitted the document was served, for one field or another was out of range."""
    schemas = (await api.http.get("/openapi.json")).json()["components"]["schemas"]
    for name, fields in {"ChatRequest": "max_completion_tokens top_logprobs", "MessagesRequest": "max_tokens"}.items():
        found = schemas[name]["properties"]
        assert {key: found["top_p"][key] for key in ("exclusiveMinimum", "maximum")} == {
            "exclusiveMinimum": 0, "maximum": 1
        }  # fmt: skip
        assert all("minimum" in found[field] for field in fields.split())
        assert found["messages"]["minItems"] == 1
    for body in ({"messages": HI, "top_p": 0}, {"messages": HI, "n": 65}, {"messages": HI, "priority": 101}):
        assert (await api.http.post("/v1/chat/completions", json=body)).status_code == 400


async def test_everything_that_the_schema_refers_to_is_in_it(api: Api) -> None:
    answer = await api.http.get("/openapi.json")
    named = set(re.findall(r'"\$ref":"([^"]*)"', answer.text))
    assert len(named) > 10
    schemas = answer.json()["components"]["schemas"]
    assert {each.removeprefix("#/components/schemas/") for each in named} <= set(schemas)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_the_schema_says_that_a_wrong_body_is_answered_with_400(api: Api, path: str) -> None:
    """Found by `make fuzz`: the document said 422, which never comes."""
    assert (await api.http.post(path, json={})).status_code == 400
    answers = (await api.http.get("/openapi.json")).json()["paths"][path]["post"]["responses"]
    assert answers["400"]["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorBody")
    assert "422" not in answers
