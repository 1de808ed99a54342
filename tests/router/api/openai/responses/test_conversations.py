"""Conversations by the official client, against a real server: who has them, what comes to their end, and how much."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
    Message,
)

from common.contracts.clock import ManualClock
from common.contracts.errors import EngineFailure, Unavailable
from common.contracts.limits import MAX_CHAT_MESSAGES, MAX_RESPONSE_BYTES
from common.contracts.types import FinishReason
from router.api.openai.responses import conversations as module
from router.api.openai.responses.conversations import Conversations
from router.api.openai.responses.records import Conversation as Record
from router.api.openai.responses.store import MemoryStore, NoStore, StoreLimits
from router.contracts.events import ValidatedRequest
from tests.support.official_models import hold
from tests.support.router.fake_frontend import Step, admitted, finished, tokens
from tests.support.router.http_harness import DEADLINE_S, Api, served_api
from tests.support.router.responses import body_of, events_of, says
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
UNKNOWN = f"conv_{'0' * 32}"
HI: Any = {"type": "message", "role": "user", "content": "Hi"}
IMAGE: Any = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}


async def new(api: Api, *items: Any, **fields: Any) -> str:
    return (await api.client.conversations.create(items=items, **fields)).id


async def texts_of(api: Api, name: str) -> list[str]:
    """Return the texts of the messages, in order."""
    found = [item async for item in api.client.conversations.items.list(name, order="asc", limit=100)]
    return [part.text for item in found if isinstance(item, Message) for part in item.content if hasattr(part, "text")]


def prompt_of(api: Api) -> str:
    return api.text.decode(api.frontend.requests[-1].prompt, skip_special_tokens=False)


async def test_bodies_have_the_form_of_the_official_client(api: Api) -> None:
    made = hold(Conversation, (await api.http.post(PATH, json={"items": [HI], "metadata": {"a": "b"}})).content)
    one = f"{PATH}/{made.id}"
    assert hold(Conversation, (await api.http.get(one)).content) == made
    changed = hold(Conversation, (await api.http.post(one, json={"metadata": {"c": "d"}})).content)
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"c": "d"})
    turns: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Well"}]},
        {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "1"},
    ]
    added = hold(ConversationItemList, (await api.http.post(f"{one}/items", json={"items": turns})).content)
    assert [item.type for item in added.data] == [turn.get("type", "message") for turn in turns]
    listed = hold(ConversationItemList, (await api.http.get(f"{one}/items", params={"limit": 4})).content)
    assert (listed.data, listed.has_more) == (added.data[::-1], True)
    hold(ConversationItem, (await api.http.get(f"{one}/items/{added.data[0].id}")).content)
    after = await api.http.delete(f"{one}/items/{added.data[0].id}")
    assert hold(Conversation, after.content) == changed
    assert len((await api.http.get(f"{one}/items")).json()["data"]) == 4
    gone = hold(ConversationDeletedResource, (await api.http.delete(one)).content)
    assert (gone.id, gone.deleted) == (made.id, True)


async def test_a_response_begins_after_the_conversation_and_comes_to_its_end(api: Api) -> None:
    name = await new(api, {"role": "user", "content": "one"}, {"role": "assistant", "content": "Yes."})
    first = await api.client.responses.create(model="demo", input="two", conversation=name)
    assert first.conversation is not None
    assert first.conversation.id == name
    body_of(await api.http.post(RESPONSES, json={"input": "three", "conversation": {"id": name}, "store": False}))
    turn = "<|assistant|> Hello world<|end|>"
    said = f"<|user|> one<|end|><|assistant|> Yes.<|end|><|user|> two<|end|>{turn}<|user|> three<|end|><|assistant|>"
    assert prompt_of(api) == f"<|bos|>{said}"
    assert await texts_of(api, name) == ["one", "Yes.", "two", "Hello world", "three", "Hello world"]
    listed = [item async for item in api.client.responses.input_items.list(first.id, order="asc")]
    assert len(listed) == 3
    count = {"input": "four", "conversation": name}
    assert (await api.http.post(f"{RESPONSES}/input_tokens", json=count)).json()["input_tokens"] > 20
    assert len(await texts_of(api, name)) == 6


async def test_instructions_are_not_kept(api: Api) -> None:
    name = await new(api)
    await api.client.responses.create(model="demo", input="one", conversation=name, instructions="Once.")
    await api.client.responses.create(model="demo", input="two", conversation=name)
    assert "Once." not in prompt_of(api)


async def test_a_stream_and_a_background_response_come_to_its_end_before_their_last_event(api: Api) -> None:
    name = await new(api)
    async for event in await api.client.responses.create(model="demo", input="one", conversation=name, stream=True):
        if event.type == "response.completed":
            assert await texts_of(api, name) == ["one", "Hello world"]
    made = {"input": "two", "conversation": name, "background": True, "stream": True}
    events = events_of((await api.http.post(RESPONSES, json=made)).text)
    assert (events[0]["response"]["status"], events[-1]["type"]) == ("queued", "response.completed")
    assert await texts_of(api, name) == ["one", "Hello world", "two", "Hello world"]


async def test_what_ran_out_is_kept_and_what_fails_is_not(api: Api) -> None:
    name = await new(api)
    api.frontend.script = says("Hel", reason=FinishReason.LENGTH)
    await api.client.responses.create(model="demo", input="one", conversation=name)
    api.frontend.script = lambda request: [admitted(request), tokens("Hel"), EngineFailure("broken")]
    events = events_of((await api.http.post(RESPONSES, json={"input": "x", "conversation": name, "stream": True})).text)
    assert events[-1]["type"] == "response.failed"
    assert await texts_of(api, name) == ["one", "Hel"]


async def test_responses_at_once_all_come_to_its_end_each_whole(api: Api) -> None:
    name, asked = await new(api), [f"n{number}" for number in range(8)]
    release = asyncio.Event()

    def script(request: ValidatedRequest) -> list[Step]:
        return [admitted(request), release, tokens("Hello"), finished(1)]

    api.frontend.script = script
    every = [
        asyncio.ensure_future(api.client.responses.create(model="demo", input=text, conversation=name))
        for text in asked
    ]
    await until(lambda: len(api.frontend.requests) == len(asked))
    release.set()
    await asyncio.gather(*every)
    texts = await texts_of(api, name)
    assert sorted(texts[::2]) == asked
    assert texts[1::2] == ["Hello"] * 8


async def test_a_conversation_that_is_deleted_meanwhile_stays_deleted(api: Api) -> None:
    name, release = await new(api), asyncio.Event()
    api.frontend.script = lambda request: [admitted(request), tokens("Hello"), release, finished(1)]
    asked = asyncio.ensure_future(api.client.responses.create(model="demo", input="Hi", conversation=name))
    await asyncio.wait_for(api.frontend.reached.wait(), DEADLINE_S)
    await api.client.conversations.delete(name)
    release.set()
    assert (await asked).output_text == "Hello"
    with pytest.raises(openai.NotFoundError):
        await api.client.conversations.retrieve(name)


async def test_another_tenant_finds_nothing(api: Api) -> None:
    name = await new(api, HI)
    item = (await api.client.conversations.items.list(name)).data[0].id
    other = api.client.with_options(api_key="other").conversations
    assert item is not None
    for refused in (
        other.retrieve(name),
        other.update(name, metadata={}),
        other.items.list(name),
        other.items.create(name, items=[HI]),
        other.items.retrieve(item, conversation_id=name),
        other.items.delete(item, conversation_id=name),
        other.delete(name),
        api.client.with_options(api_key="other").responses.create(model="demo", input="Hi", conversation=name),
    ):
        with pytest.raises(openai.NotFoundError):
            await refused
    assert await texts_of(api, name) == ["Hi"]


@pytest.mark.parametrize("name", ["x", UNKNOWN, "conv_", f"resp_{'a' * 32}", "a" * 999])
async def test_what_is_no_conversation_is_not_found(api: Api, name: str) -> None:
    made = await api.client.responses.create(model="demo", input="Hi")
    for each in (name, made.id):
        assert (await api.http.get(f"{PATH}/{each}")).status_code == 404
        assert (await api.http.post(RESPONSES, json={"input": "Hi", "conversation": each})).status_code == 404


async def test_ids_of_items_are_those_of_the_client_once(api: Api) -> None:
    name = await new(api, HI | {"id": "msg_1"}, HI | {"id": "msg_1"})
    asked = [HI | {"id": "msg_1"}, HI | {"id": "msg_2"}]
    await api.client.responses.create(model="demo", input=asked, conversation=name)
    items = api.client.conversations.items.list(name, order="asc")
    ids = [item.id async for item in items]
    assert (ids[0], ids[3], len(set(ids))) == ("msg_1", "msg_2", 5)


async def test_an_item_of_a_stored_response_may_be_added_by_its_id(api: Api) -> None:
    said = (await api.client.responses.create(model="demo", input="Hi")).output[0]
    name = await new(api, {"type": "item_reference", "id": said.id})
    assert await texts_of(api, name) == ["Hello world"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"items": [{"role": "tool", "content": ""}]}, "items[0].role", "expected user"),
        ({"items": [HI, {"type": "item_reference", "id": "msg_1"}]}, "items[1].id", "no stored response"),
        ({"items": [HI, {"type": "computer_call"}]}, None, "items[1].type: 'computer_call' is not offered"),
        ({"items": [HI | {"content": 5}]}, "items[0].content", "is missing"),
        ({"items": [HI] * (MAX_CHAT_MESSAGES + 1)}, "items", "expected at most 4096"),
        ({"items": [HI | {"content": "x" * MAX_RESPONSE_BYTES}]}, "items", "delete items of the conversation"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a", "512"),
    ],
)
async def test_a_wrong_field_is_named(api: Api, fields: dict[str, Any], param: str | None, words: str) -> None:
    answer = await api.http.post(PATH, json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_items_must_be_there_and_only_so_many_fit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHAT_MESSAGES", 4)
    name = await new(api, HI, HI, HI)
    one = f"{PATH}/{name}/items"
    assert (await api.http.post(one, json={"items": []})).json()["error"]["param"] == "items"
    assert (await api.http.post(one, json={"items": [HI]})).status_code == 200
    refused = await api.http.post(one, json={"items": [HI]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")
    assert "delete items of the conversation" in refused.json()["error"]["message"]


async def test_a_response_continues_one_of_both(api: Api) -> None:
    both = {"input": "Hi", "conversation": UNKNOWN, "previous_response_id": f"resp_{'0' * 32}"}
    error = (await api.http.post(RESPONSES, json=both)).json()["error"]
    assert (error["param"], "leave out one of them" in error["message"]) == ("conversation", True)


async def test_an_image_is_kept_as_the_text_that_stands_in_for_it(api: Api) -> None:
    (text,) = await texts_of(api, await new(api, IMAGE))
    assert "image" in text
    assert "base64" not in text


async def test_where_nothing_is_kept_there_are_no_conversations() -> None:
    async with served_api(store=NoStore()) as api:
        refused = await api.http.post(PATH, json={})
    assert (refused.status_code, "--response-store is none" in refused.text) == (400, True)


class Contended(MemoryStore):
    """Somebody else writes before the first `rounds` writes."""

    rounds = writes = 0

    async def replace(self, tenant: str, name: str, entry: bytes, old: bytes | None) -> bool:
        if old is not None and self.rounds:
            self.rounds, self.writes = self.rounds - 1, self.writes + 1
            found = Record.of(old)
            assert found is not None
            await self.put(tenant, name, found.with_items([{"id": f"other_{self.writes}"}]).entry())
        return await super().replace(tenant, name, entry, old)


async def test_a_writer_begins_anew_while_others_write_and_gives_up_at_last() -> None:
    store = Contended(StoreLimits(), ManualClock(1.0))
    every, name = Conversations(store), f"conv_{'1' * 32}"
    await every.create("acme", Record(name, 1, {}))
    store.rounds = 3
    added = await every.change("acme", name, lambda found: found.with_items([{"id": "mine"}]))
    assert [each["id"] for each in added.items] == ["other_1", "other_2", "other_3", "mine"]
    store.rounds = module._TRIES
    with pytest.raises(Unavailable, match="was changed by others 100 times"):
        await every.change("acme", name, lambda found: found.with_items([{"id": "late"}]))


async def test_what_is_added_twice_is_there_once() -> None:
    every, name = Conversations(MemoryStore(StoreLimits(), ManualClock(1.0))), f"conv_{'1' * 32}"
    await every.create("acme", Record(name, 1, {}))
    for _ in range(2):
        await every.lengthen("acme", name, [{"id": "a"}, {"id": "b"}])
    assert [each["id"] for each in (await every.find("acme", name)).items] == ["a", "b"]


async def test_an_answer_that_does_not_fit_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    every, name = Conversations(MemoryStore(StoreLimits(), ManualClock(1.0))), f"conv_{'1' * 32}"
    await every.create("acme", Record(name, 1, {}))
    await every.lengthen("acme", name, [{"id": "a", "content": "x" * MAX_RESPONSE_BYTES}])
    assert (await every.find("acme", name)).items == ()
    assert [record.message for record in caplog.records] == ["a response is not added to its conversation"]
