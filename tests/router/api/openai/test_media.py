"""Images, files, audio and video in a conversation: a text stands in for each, in every API with conversations."""

from __future__ import annotations

from typing import Any

import pytest

from common.contracts.limits import MAX_HTTP_BODY_BYTES, MAX_HTTP_CHAT_BYTES
from router.contracts.media import medium_of, note_of, stand_in
from tests.support.router.http_harness import Api, served_api

pytestmark = pytest.mark.asyncio(loop_scope="module")

IMAGE = "[Left out: image. Only text reaches the model.]"
PIXELS = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": PIXELS}}],
        },
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": PIXELS}}]},
    ]
}
MESSAGES: dict[str, Any] = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "source": SOURCE}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": SOURCE}]}],
        },
    ],
}
RESPONSES: dict[str, Any] = {
    "input": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": PIXELS}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": PIXELS}]},
    ]
}
APIS = [("/v1/chat/completions", CHAT), ("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)]


def prompt_of(api: Api) -> str:
    return api.text.decode(api.frontend.requests[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize(("path", "body"), APIS)
async def test_a_text_stands_in_and_the_answer_says_so(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert f"See{IMAGE}" in prompt_of(api)
    assert prompt_of(api).count(IMAGE) == 2
    assert "iVBOR" not in prompt_of(api)
    note = "only text reaches the model; left out: image (2)"
    assert answer.headers["x-quire-note"] == note
    assert api.frontend.requests[-1].notes == (note,)


@pytest.mark.parametrize(("path", "body"), [*APIS, ("/v1/messages/count_tokens", MESSAGES)])
async def test_an_operator_refuses_what_is_no_text(path: str, body: dict[str, Any]) -> None:
    async with served_api(refuses_media=True) as strict:
        answer = await strict.http.post(path, json=body)
        assert answer.status_code == 400
        assert "the conversation has image, which this server refuses; send only text" in answer.text
        assert strict.frontend.requests == []
        text = {"messages": [{"role": "user", "content": "a"}], "input": "a", "max_tokens": 9}
        assert (await strict.http.post(path, json=text)).status_code == 200


async def test_a_stored_response_keeps_what_the_model_has_read(api: Api) -> None:
    """Its pictures would be sent with each turn that continues it, and would fill the store."""
    first = (await api.http.post("/v1/responses", json=RESPONSES)).json()
    items = (await api.http.get(f"/v1/responses/{first['id']}/input_items?order=asc")).json()["data"]
    stand_in_part = {"type": "input_text", "text": IMAGE}
    assert items[0]["content"] == [{"type": "input_text", "text": "See"}, stand_in_part]
    assert items[2]["output"] == [stand_in_part]
    second = await api.http.post("/v1/responses", json={"previous_response_id": first["id"], "input": "Well?"})
    assert prompt_of(api).count(IMAGE) == 2
    assert "x-quire-note" not in second.headers


LARGE = "A" * (MAX_HTTP_CHAT_BYTES - 4096)


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": LARGE}}),
        ("/v1/messages", "messages", {"type": "image", "source": {"data": LARGE}}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": LARGE}),
    ],
    ids=["chat", "messages", "responses"],
)
async def test_pictures_may_be_larger_than_texts(api: Api, path: str, field: str, part: dict[str, Any]) -> None:
    body = {"max_tokens": 9, field: [{"role": "user", "content": [part]}]}
    assert (await api.http.post(path, json=body)).status_code == 200
    text = {"max_tokens": 9, field: [{"role": "user", "content": "A" * (MAX_HTTP_BODY_BYTES + 1)}]}
    answer = await api.http.post(path, json=text)
    assert answer.status_code == 413
    assert f"without its images; expected at most {MAX_HTTP_BODY_BYTES}" in answer.text


async def test_documents_of_text_and_results_of_a_search_are_read(api: Api) -> None:
    blocks = [
        {
            "type": "document",
            "title": "Moon",
            "source": {"type": "text", "media_type": "text/plain", "data": "It is far."},
        },
        {"type": "search_result", "title": "Sun", "source": "x", "content": [{"type": "text", "text": "It is hot."}]},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
    ]
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": blocks}]}
    answer = await api.http.post("/v1/messages", json=body)
    assert answer.headers["x-quire-note"] == "only text reaches the model; left out: file (1)"
    shown = [prompt_of(api).find(each) for each in ("Moon\nIt is far.", "Sun\nIt is hot.", stand_in("file"))]
    assert -1 < shown[0] < shown[1] < shown[2]


async def test_tools_of_a_vendor_are_left_out_of_a_message_and_the_others_keep_their_places(api: Api) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    add = {"name": "add", "input_schema": {"type": "object"}, "defer_loading": True}
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": [search, add]}
    answer = await api.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    left_out = "tools are left out that this server does not run: web_search_20250305"
    assert left_out in answer.headers["x-quire-note"]
    assert left_out in api.frontend.requests[-1].notes
    wrong = body | {"tools": [search, add | {"name": "no name"}]}
    assert "tools[1].name" in (await api.http.post("/v1/messages", json=wrong)).text
    alone = await api.http.post("/v1/messages", json=body | {"tools": [search]})
    assert alone.status_code == 200
    assert alone.headers["x-quire-note"] == left_out


@pytest.mark.parametrize(
    ("part_type", "medium"),
    [
        ("image_url", "image"),
        ("input_audio", "audio"),
        ("video_url", "video"),
        ("file", "file"),
        ("text", None),
        ({}, None),
    ],
)
async def test_media(part_type: Any, medium: str | None) -> None:
    assert medium_of(part_type) == medium


async def test_a_note_counts_each_medium() -> None:
    assert note_of(["image", "file", "image"]) == "only text reaches the model; left out: image (2), file (1)"
