"""What bodies ask for: constraints by every name they have, fields that contradict, and those that are not offered."""

from __future__ import annotations

import json
import math
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from common.contracts.lease import RetainedTokens
from common.contracts.types import Constraint, ConstraintKind, TokenLogprobs
from router.api.openai.foreign_fields import REFUSED
from tests.support.router.fake_frontend import admitted, finished, tokens
from tests.support.router.http_harness import HI, Api

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON, REGEX, GRAMMAR = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX, ConstraintKind.GRAMMAR
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# Closed, as objects are that name their properties.
SCHEMA_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}'


class Place(BaseModel):
    """What the client requests of an answer."""

    town: str
    year: int | None


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            (JSON, SCHEMA_TEXT),
        ),
        ({"response_format": {"type": "json_object"}}, (JSON, '{"type": "object"}')),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, (JSON, SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA}}, (JSON, SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, (JSON, SCHEMA_TEXT)),
        ({"structured_outputs": {"json_object": True}}, (JSON, '{"type": "object"}')),
        ({"structured_outputs": {"regex": "a+"}}, (REGEX, "a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, (GRAMMAR, 'start: "a"')),
        ({"structured_outputs": {"choice": ["a", 'b"ü']}}, (GRAMMAR, 'start: CHOICE\nCHOICE: "a" | "b\\"\\u00fc"')),
        ({"guided_json": SCHEMA}, (JSON, SCHEMA_TEXT)),
        ({"guided_regex": "a+"}, (REGEX, "a+")),
        ({"guided_grammar": 'start: "a"'}, (GRAMMAR, 'start: "a"')),
        ({"regex": "a+"}, (REGEX, "a+")),
        ({"ebnf": 'root ::= "a" [0-9]'}, (GRAMMAR, 'root ::= "a" [0-9]')),
        ({"json_schema": SCHEMA}, (JSON, SCHEMA_TEXT)),
        ({"guided_choice": ["a"]}, (GRAMMAR, 'start: CHOICE\nCHOICE: "a"')),
        ({"guided_json": SCHEMA, "structured_outputs": {"json": json.dumps(SCHEMA)}}, (JSON, SCHEMA_TEXT)),
    ],
)  # fmt: skip
async def test_a_constraint_arrives_by_each_of_its_names(
    api: Api, fields: dict[str, Any], constraint: tuple[ConstraintKind, str]
) -> None:
    await api.client.chat.completions.create(model="demo", messages=HI, extra_body=fields)
    await api.client.completions.create(model="demo", prompt="a", extra_body=fields)
    assert [each.sampling.constraint for each in api.frontend.requests] == [Constraint(*constraint)] * 2


@pytest.mark.parametrize("fields", [{"response_format": {"type": "text"}}, {"guided_json": None}, {}])
async def test_nothing_is_constrained_unasked(api: Api, fields: dict[str, Any]) -> None:
    await api.client.chat.completions.create(model="demo", messages=HI, extra_body=fields)
    assert api.frontend.requests[0].sampling.constraint is None


async def test_the_client_parses_what_its_own_model_constrained(api: Api) -> None:
    said = '{"town": "Lyon", "year": null}'
    api.frontend.script = lambda request: [admitted(request), tokens(said), finished(1)]
    answer = await api.client.chat.completions.parse(model="demo", messages=HI, response_format=Place)
    assert answer.choices[0].message.parsed == Place(town="Lyon", year=None)
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    assert '"town"' in constraint.text


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema", 'uses keywords that cannot be enforced: "not"; leave them out',
        ),
        ({"guided_regex": "("}, "guided_regex", 'is wrong: unclosed group; in the expression "("'),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs.grammar", "is not valid"),
        ({"guided_choice": []}, "guided_choice", "is empty; expected at least one text"),
        ({"structured_outputs": {}}, "structured_outputs", "has none of json, regex, grammar, choice and json_object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema", 'is missing; expected {"name": ..., "schema": {...}}',
        ),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type", "is 'yaml'; expected text, json_object or json_schema",
        ),
        (
            {"guided_regex": "a+", "response_format": {"type": "json_object"}},
            "response_format", "contradicts guided_regex; give one of response_format, guided_regex",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options", "belongs to a stream, and stream is not set; set it to true",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs, which is not set; set it to true"),
        ({"logprobs": True, "top_logprobs": 30}, "top_logprobs", "is 30; expected 0 to 20"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "is 0; expected 1 or more"),
        ({"max_tokens": 0}, "max_tokens", "is 0; expected 1 or more"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named_as_the_body_has_it(
    api: Api, fields: dict[str, Any], param: str, what: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await api.client.chat.completions.create(model="demo", messages=HI, extra_body=fields)
    assert caught.value.param == param
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"].startswith(f"{param}: {what}")


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"best_of": 3}, "best_of: is 3; only as many as n are sampled"),
        ({"suffix": "!"}, "suffix: not offered; leave it out"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag: not offered"),
    ],
)
async def test_what_completions_do_not_offer_is_refused(api: Api, fields: dict[str, Any], what: str) -> None:
    with pytest.raises(openai.BadRequestError, match=what) as caught:
        await api.client.completions.create(model="demo", prompt="a", extra_body=fields)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_a_field_of_another_server_that_would_change_the_answer_is_refused_by_name(api: Api, name: str) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": HI, name: "x"})
    assert (answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["code"]) == (
        400, name, "unsupported",
    )  # fmt: skip
    harmless = {name: value for name, values in REFUSED.items() for value in values}
    assert (await api.http.post("/v1/chat/completions", json={"messages": HI} | harmless)).status_code == 200


async def test_parts_of_unknown_kinds_are_refused(api: Api) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "hologram", "hologram": {}}]}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content: 'hologram' is not offered") as caught:
        await api.client.chat.completions.create(model="demo", messages=messages)
    assert caught.value.code == "unsupported"


async def test_a_developers_message_is_a_system_message(api: Api) -> None:
    for role in ("developer", "system"):
        messages: Any = [{"role": role, "content": "Be brief."}, *HI]
        await api.client.chat.completions.create(model="demo", messages=messages)
    assert api.frontend.requests[0].prompt == api.frontend.requests[1].prompt


async def test_minus_one_keeps_all_tokens_as_for_vllm(api: Api) -> None:
    await api.client.completions.create(model="demo", prompt="a", extra_body={"top_k": -1})
    assert api.frontend.requests[0].sampling.top_k == 0


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_retention_arrives_from_each_kind_of_body(api: Api, path: str) -> None:
    given = {"priority": 80, "duration": 60, "ranges": [{"end": 1, "priority": 10}], "decode_priority": 50}
    prompts = {"completions": {"prompt": "Hi"}, "responses": {"input": "Hi"}}
    prompt = prompts.get(path, {"messages": HI})
    answer = await api.http.post(f"/v1/{path}", json={"model": "demo", **prompt, "cache_retention": given})
    assert answer.status_code == 200, answer.text
    request = api.frontend.requests[-1]
    whole, longest = len(request.prompt), 30 * 86_400.0
    assert request.retention == (
        RetainedTokens(0, None, 80, 60.0), RetainedTokens(whole, None, 50, longest), RetainedTokens(0, 1, 10, longest),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"priority": 101}, "cache_retention.priority"),
        ({"priority": 80, "ttl": "5m"}, "cache_retention.ttl"),
        ({"ranges": [{"start": 5, "end": 5, "priority": 80}]}, "cache_retention.ranges[0].end"),
        ({"ranges": [{"messages": 2, "priority": 80}]}, "cache_retention.ranges[0].messages"),
    ],
)
async def test_wrong_retention_is_named_as_the_body_has_it(api: Api, given: dict[str, Any], field: str) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": HI, "cache_retention": given})
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]


async def test_null_is_unset(api: Api) -> None:
    names = (
        "stream stream_options temperature top_p n stop seed presence_penalty logit_bias response_format top_k "
        "priority cache_salt return_token_ids echo best_of logprobs suffix user guided_choice"
    )
    await api.http.post("/v1/completions", json={"prompt": "a"} | dict.fromkeys(names.split()))
    assert len(api.frontend.requests) == 1


PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "answer"}]


@pytest.mark.parametrize("content", ["the answer", PARTS], ids=["text", "parts"])
async def test_a_prediction_arrives_as_one_text(api: Api, content: Any) -> None:
    prediction: Any = {"type": "content", "content": content}
    await api.client.chat.completions.create(model="demo", messages=HI, prediction=prediction)
    assert api.frontend.requests[-1].prediction == tuple(await api.encode("the answer"))


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
async def test_an_echo_begins_with_the_message_that_the_answer_continues(api: Api, fields: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well,"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True, "n": 2}
    api.frontend.script = lambda request: [
        *(admitted(request), tokens(" yes.", index=0), tokens(" no.", index=1)),
        *(finished(1, index=0), finished(1, index=1)),
    ]
    whole = await api.http.post("/v1/chat/completions", json=asked | fields)
    assert [each["message"]["content"] for each in whole.json()["choices"]] == ["Well, yes.", "Well, no."]
    streamed = await api.http.post("/v1/chat/completions", json=asked | fields | {"stream": True})
    found = {0: "", 1: ""}
    for line in streamed.text.split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                found[choice["index"]] += choice["delta"].get("content") or ""
    assert found == {0: "Well, yes.", 1: "Well, no."}


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "a", "logprobs": 1}), ("chat/completions", {"messages": HI, "logprobs": True})],
)
async def test_tokens_that_are_named_get_log_probabilities(api: Api, path: str, body: dict[str, Any]) -> None:
    api.frontend.script = lambda request: [
        admitted(request),
        tokens("a", 40, logprobs=(TokenLogprobs(40, -0.5, ((40, -0.5), (7, -2.5), (9, -math.inf))),)),
        finished(1),
    ]
    asked = body | {"logprob_token_ids": [7, 9], "return_tokens_as_token_ids": True}
    answer = (await api.http.post(f"/v1/{path}", json=asked)).json()["choices"][0]["logprobs"]
    assert api.frontend.requests[-1].sampling.logprob_token_ids == (7, 9)
    if "content" in answer:
        (found,) = [{each["token"]: each["logprob"] for each in place["top_logprobs"]} for place in answer["content"]]
    else:
        (found,) = answer["top_logprobs"]
    assert found == {"token_id:40": -0.5, "token_id:7": -2.5, "token_id:9": -9999.0}
    alone = {key: value for key, value in asked.items() if key != "logprobs"}
    refused = (await api.http.post(f"/v1/{path}", json=alone)).json()["error"]
    assert (refused["param"], refused["message"]) == (
        "logprob_token_ids",
        "logprob_token_ids: needs logprobs, which is not set; set it",
    )


async def test_an_answer_that_continues_nothing_has_no_echo(api: Api) -> None:
    answer = await api.http.post("/v1/chat/completions", json={"messages": HI, "echo": True})
    assert answer.json()["choices"][0]["message"]["content"] == "Hello world"
