"""Conversations of the Responses API: kept where responses are kept, within the same bounds, as long, by tenant."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound, Unavailable, Unsupported
from common.contracts.limits import MAX_CHAT_MESSAGES, MAX_REFERENCED_RESPONSES, MAX_RESPONSE_BYTES
from router.answers.requested_tools import quoted
from router.api.openai.chat_prompt import media_in
from router.api.openai.responses.items import Item, as_texts, items_of, messages_of
from router.api.openai.responses.listing import ItemPage, list_of, listed, page_of
from router.api.openai.responses.records import (
    Conversation,
    Record,
    check_conversation_id,
    check_size,
    new_id,
    no_conversation,
    response_with,
    with_ids,
)
from router.api.openai.responses.schema import ConversationBody, ConversationItem, DeletedConversation, ItemList
from router.api.openai.responses.store import ResponseStore
from router.api.openai.responses.types import ConversationChange, ConversationRequest, NewItems
from router.api.openai.schema import ErrorBody, answers
from router.api.openai.service import Service

log = logging.getLogger(__name__)

# What a client can do about a conversation that is full.
SHORTER: Final = "delete items of the conversation, or begin another one"
# Each write that fails means that another one succeeded, so this many writers at once all come through.
_TRIES: Final = 100


class Conversations:
    """The conversations in a store. Of writers at once, each later one writes anew on what the earlier one wrote."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def create(self, tenant: str, made: Conversation) -> None:
        """Keep a new conversation. Raises Unavailable, and Unsupported where nothing is kept."""
        if not await self._store.replace(tenant, made.name, made.entry(), None):
            raise Unsupported("conversations are not kept here: --response-store is none; send all items as input")

    async def find(self, tenant: str, name: str) -> Conversation:
        """Return a conversation of the tenant. Raises NotFound and Unavailable."""
        return (await self._read(tenant, name))[0]

    async def change(self, tenant: str, name: str, changed: Callable[[Conversation], Conversation]) -> Conversation:
        """Write what `changed` makes of a conversation, and return it. Raises NotFound and Unavailable."""
        for _ in range(_TRIES):
            found, entry = await self._read(tenant, name)
            later = changed(found)
            if await self._store.replace(tenant, name, later.entry(), entry):
                return later
        raise Unavailable(f"conversation {name!r} was changed by others {_TRIES} times meanwhile; try again")

    async def lengthen(self, tenant: str, name: str, items: Sequence[Item]) -> None:
        """Add the items of a response. One that is deleted, full or out of reach goes on without them."""
        try:
            await self.change(tenant, name, lambda found: _within_bounds(found.with_items(items)))
        except (NotFound, InvalidRequest, Unavailable) as error:
            log.warning("a response is not added to its conversation", extra={"reason": str(error)})

    async def delete(self, tenant: str, name: str) -> None:
        """Forget a conversation. Raises NotFound and Unavailable."""
        check_conversation_id(name)
        if not await self._store.delete(tenant, name):
            raise no_conversation(name)

    async def _read(self, tenant: str, name: str) -> tuple[Conversation, bytes]:
        check_conversation_id(name)
        entry = await self._store.get(tenant, name)
        found = Conversation.of(entry) if entry is not None else None
        if found is None or entry is None:
            raise no_conversation(name)
        return found, entry


def _within_bounds(later: Conversation) -> Conversation:
    """Return a conversation that fits into the store. Raises InvalidRequest."""
    if (size := len(later.entry())) > MAX_RESPONSE_BYTES:
        what = f"has {size} bytes with the answer; at most {MAX_RESPONSE_BYTES} can be stored"
        raise InvalidRequest(FieldViolation("conversation", what))
    return later


def conversation_routes(service: Service, store: ResponseStore) -> APIRouter:
    """Return the routes of conversations and of their items."""
    router, api = APIRouter(), _Routes(service, store)
    missing: dict[int | str, Any] = {404: {"model": ErrorBody, "description": "no such conversation is stored"}}
    whole, items = answers(ConversationBody) | missing, answers(ItemList) | missing
    one = "/v1/conversations/{conversation_id}"
    for path, handler, method, found in (
        ("/v1/conversations", api.create, "POST", answers(ConversationBody)),
        (one, api.retrieve, "GET", whole),
        (one, api.update, "POST", whole),
        (one, api.delete, "DELETE", answers(DeletedConversation) | missing),
        (f"{one}/items", api.add_items, "POST", items),
        (f"{one}/items", api.list_items, "GET", items),
        (f"{one}/items/{{item_id}}", api.item, "GET", answers(ConversationItem) | missing),
        (f"{one}/items/{{item_id}}", api.delete_item, "DELETE", whole),
    ):
        router.add_api_route(path, handler, methods=[method], response_model=None, responses=found)
    return router


class _Routes:
    """The handlers of the routes."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service, self._store, self._all = service, store, Conversations(store)

    async def create(self, body: ConversationRequest, request: Request) -> Response:
        """Begin a conversation, with items or without."""
        made = Conversation(new_id("conv_"), int(time.time()), body.metadata or {})
        if body.items:
            made = _with_given(made, await self._given(body.items, request))
        await self._all.create(_tenant(request), made)
        return JSONResponse(made.body())

    async def retrieve(self, conversation_id: str, request: Request) -> Response:
        """Return a conversation without its items."""
        return JSONResponse((await self._all.find(_tenant(request), conversation_id)).body())

    async def update(self, conversation_id: str, body: ConversationChange, request: Request) -> Response:
        """Give a conversation other metadata."""
        metadata = body.metadata or {}
        changed = await self._changed(conversation_id, request, lambda found: replace(found, metadata=metadata))
        return JSONResponse(changed.body())

    async def delete(self, conversation_id: str, request: Request) -> Response:
        """Forget a conversation; responses that continued it stay."""
        await self._all.delete(_tenant(request), conversation_id)
        return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    async def add_items(self, conversation_id: str, body: NewItems, request: Request) -> Response:
        """Add items to the end, and return them."""
        given = await self._given(body.items, request)
        changed = await self._changed(conversation_id, request, lambda found: _with_given(found, given))
        return JSONResponse(list_of(changed.items[-len(given) :]))

    async def list_items(self, conversation_id: str, request: Request, page: Annotated[ItemPage, Query()]) -> Response:
        """List the items, the newest first unless `order` is asc."""
        found = await self._all.find(_tenant(request), conversation_id)
        return JSONResponse(page_of(found.items, page))

    async def item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        """Return one item."""
        found = await self._all.find(_tenant(request), conversation_id)
        return JSONResponse(listed(found.items[_place(found, item_id)]))

    async def delete_item(self, conversation_id: str, item_id: str, request: Request) -> Response:
        """Take one item out, and return the conversation."""

        def without(found: Conversation) -> Conversation:
            place = _place(found, item_id)
            return replace(found, items=(*found.items[:place], *found.items[place + 1 :]))

        return JSONResponse((await self._changed(conversation_id, request, without)).body())

    async def _given(self, items: Sequence[Item], request: Request) -> list[Item]:
        """Return items as they are kept. Raises InvalidRequest and Unsupported with the place of a wrong one."""
        given = await with_referenced(self._store, _tenant(request), items_of(items, "items"), "items")
        self._service.check_media(media_in(messages_of(None, (), given, "items")))
        return as_texts(given)

    async def _changed(
        self, name: str, request: Request, changed: Callable[[Conversation], Conversation]
    ) -> Conversation:
        return await self._all.change(_tenant(request), name, changed)


async def with_referenced(store: ResponseStore, tenant: str, items: Sequence[Item], field: str = "input") -> list[Item]:
    """Return the items, with those of stored responses in place of references to them. Raises InvalidRequest."""
    found, read = list[Item](), dict[str, dict[str, Item]]()
    for place, item in enumerate(items):
        if item.get("type") != "item_reference":
            found.append(item)
            continue
        name = str(item.get("id"))
        response = response_with(name) or ""
        if response and response not in read:
            if len(read) == MAX_REFERENCED_RESPONSES:
                what = f"is of one response too many; expected items of at most {MAX_REFERENCED_RESPONSES}"
                raise InvalidRequest(FieldViolation(f"{field}[{place}].id", what))
            entry = await store.get(tenant, response)
            record = Record.of(entry) if entry is not None else None
            read[response] = {} if record is None else {each["id"]: each for each in record.body["output"]}
        if (referenced := read.get(response, {}).get(name)) is None:
            what = f"is {quoted(name)}, and no stored response has an item of that id; send the item"
            raise InvalidRequest(FieldViolation(f"{field}[{place}].id", what))
        found.append(referenced)
    return found


def _with_given(found: Conversation, given: Sequence[Item]) -> Conversation:
    """Return a conversation with what a client adds. Raises InvalidRequest where that is too much."""
    later = found.with_items(with_ids(given, found.items))
    check_size(later.items, "items", SHORTER)
    if len(later.items) > MAX_CHAT_MESSAGES:
        what = f"are {len(later.items)} with those before; expected at most {MAX_CHAT_MESSAGES}; {SHORTER}"
        raise InvalidRequest(FieldViolation("items", what))
    return later


def _place(found: Conversation, name: str) -> int:
    place = next((place for place, each in enumerate(found.items) if each["id"] == name), None)
    if place is None:
        raise NotFound(f"conversation {found.name!r} has no item {name[:64]!r}")
    return place


def _tenant(request: Request) -> str:
    return str(request.state.caller.tenant.name)
