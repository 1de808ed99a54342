"""The Responses API: the official client against a real server, with a scripted frontend behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from common.contracts import limits
from common.contracts.errors import EngineFailure, FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from common.contracts.limits import MAX_RESPONSE_BYTES
from common.contracts.types import FinishReason, TokenLogprobs
from router.contracts.events import ValidatedRequest
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, FACTS, Api
from tests.support.router.responses import body_of, events_of, says

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Patches.", "format": {"type": "text"}}
SEARCH: Any = {"type": "web_search", "external_web_access": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 71}}\n</tool_call>'


class Numbered(BaseModel):
    """What an answer is to be."""

    a: int


def prompt_of(api: Api) -> str:
    """Return the prompt of the last request as text."""
    return api.text.decode(api.frontend.requests[-1].prompt, skip_special_tokens=False)


async def test_a_text_is_answered(api: Api) -> None:
    api.frontend.script = says("Hello", " world", cached=3)
    answer = await api.client.responses.create(
        model="demo", input="Hi", instructions="Be brief.", temperature=0.5, top_p=0.75, max_output_tokens=40,
        metadata={"who": "me"}, extra_body={"seed": 5, "top_k": 3},
    )  # fmt: skip
    assert (answer.output_text, answer.status, answer.model) == ("Hello world", "completed", "demo")
    assert prompt_of(api) == "<|bos|><|system|> Be brief.<|end|><|user|> Hi<|end|><|assistant|>"
    sampling = api.frontend.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.75, 40)
    assert (sampling.seed, sampling.top_k) == (5, 3)
    usage = answer.usage
    assert usage is not None
    assert (usage.output_tokens, usage.input_tokens_details.cached_tokens) == (2, 3)
    assert usage.total_tokens == usage.input_tokens + 2
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"who": "me"}, 40)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"store": False, "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"text": {"format": {"type": "json_object"}, "verbosity": "low"}, "truncation": "auto"},
    ],
)
async def test_a_body_has_every_field_in_its_type(api: Api, fields: dict[str, Any]) -> None:
    whole = await api.http.post(PATH, json={"input": "Hi"} | fields)
    body = body_of(whole)
    assert whole.headers["x-trace-id"]
    stream = await api.http.post(PATH, json={"input": "Hi", "stream": True} | fields)
    events = events_of(stream.text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    for key in {*body} - {"id", "output", "created_at", "completed_at"}:
        assert body[key] == last[key]


async def test_a_thought_is_an_item_of_its_own(api: Api) -> None:
    api.frontend.script = says("<think>", "Well", " then", "</think>", "\n\n", "Yes")
    answer = await api.client.responses.create(model="demo", input="Hi")
    thought, message = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text.strip() == "Well then"
    assert message.type == "message"
    assert answer.output_text.strip() == "Yes"
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


async def test_a_thought_has_a_budget(api: Api) -> None:
    await api.client.responses.create(model="demo", input="Hi", extra_body={"thinking_token_budget": 7})
    thought = api.frontend.requests[0].sampling.thought
    assert (thought and (thought.max_tokens, thought.closer)) == (7, "</think>")


async def test_a_function_is_called_and_its_output_read(api: Api) -> None:
    api.frontend.script = says(CALL)
    first = await api.client.responses.create(model="demo", input="Add!", tools=[ADD], tool_choice="auto")
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 71})
    api.frontend.script = says("It is 71.")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "the sum is 71"}
    second = await api.client.responses.create(model="demo", previous_response_id=first.id, input=[output])
    assert second.output_text == "It is 71."
    assert second.previous_response_id == first.id
    prompt = prompt_of(api)
    assert prompt.index("Add!") < prompt.index("the sum is 71")


async def test_tools_of_a_namespace_and_custom_ones_are_called_by_their_own_names(api: Api) -> None:
    tools: Any = [SEARCH, {"type": "namespace", "name": "crew", "description": "", "tools": [ADD, PATCH]}, PATCH]
    said = [("crew.add", {"a": 71}), ("crew.patch", {"input": "++ a"}), ("patch", {"input": 'say "hi"\n'})]
    calls = "".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in said)
    api.frontend.script = says(*[calls[start : start + 5] for start in range(0, len(calls), 5)])
    async with api.client.responses.stream(model="demo", input="Go!", tools=tools) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    found = [each.model_dump(exclude_none=True) for each in final.output]
    assert [(each["type"], each.get("namespace"), each["name"]) for each in found] == [
        ("function_call", "crew", "add"),
        ("custom_tool_call", "crew", "patch"),
        ("custom_tool_call", None, "patch"),
    ]
    assert [each.get("input") or each.get("arguments") for each in found] == ['{"a": 71}', "++ a", 'say "hi"\n']
    inputs = [each for each in events if each.type == "response.custom_tool_call_input.done"]
    assert [each.input for each in inputs] == ["++ a", 'say "hi"\n']
    api.frontend.script = says("Done.")
    outputs: Any = [{"type": "custom_tool_call_output", "call_id": found[2]["call_id"], "output": "patched"}]
    second = await api.client.responses.create(model="demo", previous_response_id=final.id, input=outputs, tools=tools)
    assert second.output_text == "Done."
    prompt = prompt_of(api)
    assert (
        prompt.index("crew.add") < prompt.index("crew.patch") < prompt.index('say \\"hi\\"') < prompt.index("patched")
    )


async def test_tools_that_only_a_vendor_runs_are_left_out_and_the_answer_says_so(api: Api) -> None:
    api.frontend.script = says("Hi")
    raw = await api.http.post(PATH, json={"input": "Hi", "tools": [SEARCH, ADD, {"type": "local_shell"}]})
    assert raw.status_code == 200, raw.text
    note = "tools are left out that this server does not run: web_search, local_shell"
    assert note in raw.headers["x-quire-note"]
    assert raw.json()["tools"][0] == SEARCH
    assert "web_search" not in prompt_of(api)


async def test_arguments_are_streamed(api: Api) -> None:
    api.frontend.script = says(*[CALL[start : start + 5] for start in range(0, len(CALL), 5)])
    async with api.client.responses.stream(model="demo", input="Add!", tools=[ADD]) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    (call,) = final.output
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert call.type == "function_call"
    assert "".join(deltas) == call.arguments
    assert json.loads(call.arguments) == {"a": 71}


async def test_a_named_function_is_enforced(api: Api) -> None:
    api.frontend.script = says(CALL)
    await api.client.responses.create(
        model="demo", input="Add!", tools=[ADD], tool_choice={"type": "function", "name": "add"}
    )
    constraint = api.frontend.requests[0].sampling.constraint
    assert constraint is not None
    assert "add" in constraint.text


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_schema_is_enforced_and_parsed(api: Api, streamed: bool) -> None:
    api.frontend.script = says('{"a"', ":71}")
    if streamed:
        async with api.client.responses.stream(model="demo", input="Hi", text_format=Numbered) as stream:
            parsed = (await stream.get_final_response()).output_parsed
    else:
        parsed = (await api.client.responses.parse(model="demo", input="Hi", text_format=Numbered)).output_parsed
    assert parsed == Numbered(a=71)
    assert api.frontend.requests[0].sampling.constraint is not None


async def test_an_answer_that_ran_out_is_incomplete(api: Api) -> None:
    api.frontend.script = says("Hel", reason=FinishReason.LENGTH)
    answer = await api.client.responses.create(model="demo", input="Hi", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Hel"


async def test_more_tokens_than_the_context_holds_are_lowered(api: Api) -> None:
    api.frontend.script = says("Hel", reason=FinishReason.LENGTH)
    answer = await api.client.responses.create(
        model="demo", input="Hi", max_output_tokens=1_000_000, reasoning={"effort": "xhigh"}
    )
    assert (answer.status, answer.max_output_tokens) == ("incomplete", 1_000_000)
    (request,) = api.frontend.requests
    assert request.max_len == FACTS.max_model_len


async def test_a_conversation_goes_on_without_its_instructions(api: Api) -> None:
    previous = None
    for text in ("one", "two", "three"):
        answer = await api.client.responses.create(
            model="demo", input=text, instructions="Once." if previous is None else None, previous_response_id=previous
        )
        previous = answer.id
    turn = "<|assistant|> Hello world<|end|>"
    said = f"<|user|> one<|end|>{turn}<|user|> two<|end|>{turn}<|user|> three<|end|><|assistant|>"
    assert prompt_of(api) == f"<|bos|>{said}"


async def test_a_streamed_response_can_be_continued_at_its_last_event(api: Api) -> None:
    stream = await api.client.responses.create(model="demo", input="Hi", stream=True)
    async for event in stream:
        if event.type == "response.completed":
            again = await api.client.responses.create(
                model="demo", input="More", previous_response_id=event.response.id
            )
            assert again.status == "completed"


async def test_a_response_is_kept_until_it_is_deleted(api: Api) -> None:
    made = await api.client.responses.create(model="demo", input="Hi")
    read = await api.client.responses.retrieve(made.id)
    assert read.model_dump() == made.model_dump()
    await api.client.responses.delete(made.id)
    for refused in (api.client.responses.retrieve, api.client.responses.delete, api.client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await refused(made.id)
    with pytest.raises(openai.BadRequestError) as wrong:
        await api.client.responses.create(model="demo", input="Hi", previous_response_id=made.id)
    assert (wrong.value.code, wrong.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_is_not_kept_against_the_clients_wish(api: Api, streamed: bool) -> None:
    answer = await api.http.post(PATH, json={"input": "Hi", "store": False, "stream": streamed})
    body = events_of(answer.text)[-1]["response"] if streamed else answer.json()
    assert body["store"] is False
    assert (await api.http.get(f"{PATH}/{body['id']}")).status_code == 404


async def test_another_tenant_finds_nothing(api: Api) -> None:
    made = await api.client.responses.create(model="demo", input="Hi")
    other = api.client.with_options(api_key="other")
    for refused in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await refused(made.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.input_items.list(made.id)
    with pytest.raises(openai.BadRequestError, match="is not here"):
        await other.responses.create(model="demo", input="Hi", previous_response_id=made.id)
    assert (await api.client.responses.retrieve(made.id)).id == made.id


@pytest.mark.parametrize(
    "name", ["x", "resp_", "resp_" + "g" * 32, "resp_" + "a" * 32 + ".cancel", "%2e%2e", "a" * 999]
)
async def test_what_is_no_id_is_not_looked_up(api: Api, name: str) -> None:
    assert (await api.http.get(f"{PATH}/{name}")).status_code == 404


async def test_ids_cannot_be_guessed(api: Api) -> None:
    names = {(await api.client.responses.create(model="demo", input="Hi")).id for _ in range(3)}
    assert len(names) == 3
    assert all(len(bytes.fromhex(name.removeprefix("resp_"))) == 16 for name in names)


async def test_input_items_are_listed_in_pages(api: Api) -> None:
    first = await api.client.responses.create(model="demo", input="one")
    second = await api.client.responses.create(model="demo", input="two", previous_response_id=first.id)
    listed = [item async for item in api.client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [item.type for item in listed] == ["message"] * 3
    texts = [item.to_dict()["content"][0]["text"] for item in listed]  # type: ignore[index]
    assert texts == ["one", "Hello world", "two"]
    page = (await api.http.get(f"{PATH}/{second.id}/input_items", params={"limit": 1})).json()
    assert (page["has_more"], page["data"][0]["content"][0]["text"]) == (True, "two")
    assert (await api.http.get(f"{PATH}/{second.id}/input_items", params={"after": "x"})).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [{"type": "psychic"}]}, None, "tools[0].type: 'psychic' is not offered; function, custom and names"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "is missing"),
        (
            {"tools": [SEARCH, {"type": "namespace", "name": "n", "tools": [ADD, {"type": "function"}]}]},
            "tools[1].tools[1].name",
            "is missing",
        ),
        ({"tools": [{"type": "custom", "name": "x", "format": {"type": "poem"}}]}, "tools[0].format.type", "'poem'"),
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "expected 1 to 64"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name", "'sub'"),
        ({"tools": [ADD], "tool_choice": {"type": "file_search"}}, None, "tool_choice.type: 'file_search'"),
        ({"conversation": {}}, "conversation", "id"),
        ({"prompt": {"id": "x"}}, None, "prompt: not offered"),
        ({"top_logprobs": 21}, "top_logprobs", "expected 0 to 20"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "is missing"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_object or json_schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected"),
        ({"temperature": -1}, "temperature", "expected"),
        ({"reasoning": {"effort": "a b"}}, "reasoning.effort", "expected a word such as low"),
        ({"truncation": "none"}, "truncation", "auto"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "0 or more"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
        ({"input": []}, "input", "is empty"),
        ({"input": [5]}, "input", "expected"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "expected user"),
        ({"background": True, "store": False}, "background", "store is false"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "is not here"),
        ({"instructions": "\ud800"}, None, "surrogate"),
        ({"tools": [ADD | {"description": "\ud800"}]}, None, "surrogate"),
    ],
)
async def test_a_wrong_field_is_named(api: Api, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = await api.http.post(PATH, content=json.dumps({"input": "Hi"} | fields), headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not api.frontend.requests


JSON = {"content-type": "application/json"}


async def test_not_a_number_is_no_json(api: Api) -> None:
    tool = ADD | {"parameters": {"type": "object", "properties": {"a": {"const": float("nan")}}}}
    answer = await api.http.post(PATH, content=json.dumps({"input": "Hi", "tools": [tool]}), headers=JSON)
    assert (answer.status_code, "NaN" in answer.text) == (400, True)


async def test_too_large_a_conversation_is_refused_before_the_work(api: Api) -> None:
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "x" * MAX_RESPONSE_BYTES}
    body = {"input": [{"role": "user", "content": "Hi"}, thought]}
    answer = await api.http.post(PATH, json=body)
    assert (answer.status_code, "store false" in answer.text) == (400, True)
    assert not api.frontend.requests
    assert (await api.http.post(PATH, json=body | {"store": False})).status_code == 200


async def test_a_refusal_comes_before_the_stream(api: Api) -> None:
    api.frontend.script = lambda request: [Overloaded(QuotaViolation("router", "full"), 2.0)]
    answer = await api.http.post(PATH, json={"input": "Hi", "stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


async def test_a_stream_that_breaks_ends_with_a_failed_response(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), EngineFailure("lost 4 workers")]
    answer = await api.http.post(PATH, json={"input": "Hi", "stream": True})
    last = events_of(answer.text)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "lost 4 workers"}
    read = body_of(await api.http.get(f"{PATH}/{last['response']['id']}"))
    assert (read["status"], read["output"][0]["content"][0]["text"]) == ("failed", "Hel")


async def test_an_answer_that_breaks_is_an_error(api: Api) -> None:
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), InvalidRequest(FieldViolation("x", "y"))]
    assert (await api.http.post(PATH, json={"input": "Hi"})).status_code == 400


async def test_the_oldest_items_are_left_out_where_the_client_wants_that(api: Api) -> None:
    turns = [{"role": "user", "content": f"word{number} " * 40} for number in range(60)]
    items = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "last"}]
    refused = await api.http.post(PATH, json={"input": items})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = await api.http.post(PATH, json={"input": items, "truncation": "auto"})
    assert body_of(answer)["truncation"] == "auto"
    prompt = prompt_of(api)
    assert "Be brief." in prompt
    assert "last" in prompt
    assert len(api.frontend.requests[0].prompt) < FACTS.max_model_len


async def test_an_agents_second_turn_is_answered(api: Api) -> None:
    """A body as coding agents send it: nothing is stored, and the history comes along."""
    shell = {"type": "array", "items": {"type": "string"}}
    parameters = {"type": "object", "properties": {"command": shell}, "required": ["command"]}
    api.frontend.script = says("All", " done")
    body = {
        "model": "demo",
        "instructions": "You edit files.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask first."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List them."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        ],
        "tools": [{"type": "function", "name": "shell", "description": "x", "strict": False, "parameters": parameters}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "session",
        "text": {"verbosity": "medium"},
    }
    events = events_of((await api.http.post(PATH, json=body)).text)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "All done"
    prompt = prompt_of(api)
    said = ["You edit files.", "Ask first.", "List them.", "a.txt"]
    assert [prompt.index(each) for each in said] == sorted(prompt.index(each) for each in said)
    assert api.frontend.requests[0].sampling.constraint is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"input": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
async def test_a_silent_stream_says_that_it_lives(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(limits, "EVENT_SILENCE_SECONDS", 0.01)
    release = asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), release, tokens("lo"), finished(2)]
    seen = ""
    async with asyncio.timeout(DEADLINE_S), api.http.stream("POST", path, json=body | {"stream": True}) as answer:
        async for text in answer.aiter_text():
            seen += text
            if "\n\n: still here\n\n" in seen:
                release.set()
    assert release.is_set()
    assert "lo" in seen[seen.index(": still here") :]


async def test_the_tokens_of_an_input_are_counted(api: Api) -> None:
    counted = await api.client.responses.input_tokens.count(model="demo", input="Hi")
    assert not api.frontend.requests
    await api.client.responses.create(model="demo", input="Hi")
    assert counted.input_tokens == len(api.frontend.requests[0].prompt)


async def test_events_of_a_foreground_response_cannot_be_read_again(api: Api) -> None:
    made = await api.client.responses.create(model="demo", input="Hi")
    answer = await api.http.get(f"{PATH}/{made.id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    with pytest.raises(openai.BadRequestError, match="not a background response"):
        await api.client.responses.cancel(made.id)


ASKS_FOR_LOGPROBS: dict[str, Any] = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}


def likely(token_id: int, logprob: float) -> tuple[TokenLogprobs, ...]:
    return (TokenLogprobs(token_id, logprob, ((token_id, logprob), (41, -2.5))),)


def thinks_and_says(request: ValidatedRequest) -> list[Step]:
    """A thought, its mark, then words of three tokens, of which one has no text by itself."""
    return [
        admitted(request),
        *(tokens("<think>Hm", 50, logprobs=likely(50, -0.1)), tokens("</think>", 51, logprobs=likely(51, -0.2))),
        *(tokens("Y", 42, logprobs=likely(42, -0.5)), tokens("", 43, logprobs=likely(43, -1.0))),
        *(tokens("es", 44, logprobs=likely(44, -1.5)), finished(5)),
    ]


async def test_a_message_has_the_log_probabilities_of_its_tokens(api: Api) -> None:
    api.frontend.script = thinks_and_says
    whole = (await api.http.post(PATH, json=ASKS_FOR_LOGPROBS)).json()
    (request,) = api.frontend.requests
    assert (request.sampling.logprobs, whole["top_logprobs"]) == (2, 2)
    (part,) = whole["output"][1]["content"]
    assert [each["logprob"] for each in part["logprobs"]] == [-0.5, -1.0, -1.5]
    assert [top["logprob"] for top in part["logprobs"][0]["top_logprobs"]] == [-0.5, -2.5]
    kept = (await api.http.get(f"{PATH}/{whole['id']}")).json()
    assert kept["output"][1]["content"] == [part]
    async with api.client.responses.stream(model="demo", **ASKS_FOR_LOGPROBS) as stream:
        events = [event async for event in stream]
    found = [each.logprob for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert found == [-0.5, -1.0, -1.5]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [each.logprob for each in done.logprobs] == found


async def test_a_count_of_likely_tokens_asks_for_log_probabilities_by_itself(api: Api) -> None:
    await api.http.post(PATH, json={"input": "Hi", "top_logprobs": 3})
    await api.http.post(PATH, json={"input": "Hi"})
    assert [request.sampling.logprobs for request in api.frontend.requests] == [3, None]


async def test_log_probabilities_that_take_more_than_the_room_end_a_stream(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.api.openai.responses.routes.MAX_ANSWER_BYTES", 300)
    api.frontend.script = thinks_and_says
    events = events_of((await api.http.post(PATH, json=ASKS_FOR_LOGPROBS | {"stream": True})).text)
    assert events[-1]["type"] == "response.failed"
    assert "log-probabilities" in events[-1]["response"]["error"]["message"]


async def referring(api: Api, *items: str, **headers: str) -> Any:
    references = [{"type": "item_reference", "id": each} for each in items]
    given = {"input": [*references, {"role": "user", "content": "Well?"}]}
    return await api.http.post(PATH, json=given, headers=headers)


async def test_an_item_of_a_stored_response_may_stand_for_itself(api: Api) -> None:
    api.frontend.script = says(CALL)
    called = (await api.http.post(PATH, json={"input": "Add!", "tools": [ADD]})).json()
    (call,) = called["output"]
    api.frontend.script = says("Hello")
    said = (await api.http.post(PATH, json={"input": "Hi"})).json()
    answer = await referring(api, said["output"][0]["id"], call["id"])
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(api)
    assert -1 < prompt.index("Hello") < prompt.index("add") < prompt.index("Well?")
    kept = (await api.http.get(f"{PATH}/{answer.json()['id']}/input_items?order=asc")).json()["data"]
    assert [each["id"] for each in kept[:2]] == [said["output"][0]["id"], call["id"]]


async def test_a_reference_to_what_is_not_there_is_refused_by_its_place(api: Api) -> None:
    said = (await api.http.post(PATH, json={"input": "Hi"})).json()["output"][0]["id"]
    unstored = (await api.http.post(PATH, json={"input": "Hi", "store": False})).json()["output"][0]["id"]
    for wrong in ("msg_1", "", said[:-1] + ("0" if said[-1] != "0" else "1"), unstored):
        error = (await referring(api, said, wrong)).json()["error"]
        assert error["param"] == "input[1].id"
        assert "no stored response has an item of that id" in error["message"]
    assert (await referring(api, said, authorization="Bearer other")).json()["error"]["param"] == "input[0].id"


async def test_one_request_refers_to_items_of_so_many_responses(api: Api) -> None:
    said = [(await api.http.post(PATH, json={"input": "Hi"})).json()["output"][0]["id"] for _ in range(17)]
    assert (await referring(api, *said[:16], said[0])).status_code == 200
    assert (await referring(api, *said)).json()["error"]["param"] == "input[16].id"
