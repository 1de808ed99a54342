"""What the store keeps: of a response its body, and the items of all that was before its output; and conversations."""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from common.contracts.errors import FieldViolation, InvalidRequest, NotFound
from common.contracts.limits import BACKGROUND_SECONDS, MAX_RESPONSE_BYTES
from router.api.openai.responses.events import FAILED, RUNNING
from router.api.openai.responses.items import Item

Json = dict[str, Any]
_ID: Final = re.compile(r"resp_[0-9a-f]{32}")
_CONVERSATION_ID: Final = re.compile(r"conv_[0-9a-f]{32}")
_ITEM_ID: Final = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{6}")
# A background response that is not done so many seconds after its deadline is lost: its router stopped.
_GRACE_S: Final = 60.0
# Bytes of an entry that are left for its output.
_FOR_OUTPUT: Final = MAX_RESPONSE_BYTES // 4
_MOST_ID_CHARS: Final = 128
_LOST: Final = "the router that worked on this response stopped; ask again"


@dataclass(frozen=True, slots=True)
class Record:
    """A stored response. `items` are those of all earlier responses and its own input, in order."""

    body: Json
    items: list[Item]

    def entry(self) -> bytes:
        return _dumps({"response": self.body, "items": self.items})

    @property
    def conversation(self) -> list[Item]:
        """The items that a next response continues."""
        return [*self.items, *self.body["output"]]

    @staticmethod
    def of(entry: bytes) -> Record | None:
        """Return the record of an entry; None where the entry is not in our form."""
        try:
            read = json.loads(entry)
            return Record({**read["response"]}, [*read["items"]])
        except (ValueError, KeyError, TypeError):
            return None

    def seen_at(self, now: float) -> Json:
        """Return the body to show. An unfinished response past its longest time has failed."""
        body = self.body
        if body["status"] in RUNNING and now > body["created_at"] + BACKGROUND_SECONDS + _GRACE_S:
            return body | {"status": FAILED, "error": {"code": "server_error", "message": _LOST}}
        return body


@dataclass(frozen=True, slots=True)
class Conversation:
    """A stored conversation: items that responses continue, and to which they add their own."""

    name: str
    created: int
    metadata: dict[str, str]
    items: tuple[Item, ...] = ()

    def body(self) -> Json:
        return {"id": self.name, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    def entry(self) -> bytes:
        return _dumps({"conversation": self.body(), "items": self.items})

    def with_items(self, items: Sequence[Item]) -> Conversation:
        """Return it with the items that it does not have yet at its end."""
        known = {each["id"] for each in self.items}
        return replace(self, items=(*self.items, *(each for each in items if each["id"] not in known)))

    @staticmethod
    def of(entry: bytes) -> Conversation | None:
        """Return the conversation of an entry; None where the entry is not in our form."""
        try:
            read = json.loads(entry)
            body = read["conversation"]
            return Conversation(body["id"], body["created_at"], {**body["metadata"]}, tuple(read["items"]))
        except (ValueError, KeyError, TypeError):
            return None


def new_id(prefix: str) -> str:
    """Return an id with 128 random bits, too many to guess."""
    return prefix + secrets.token_hex(16)


def new_item_ids(name: str) -> Callable[[str], str]:
    """Return what makes the ids of a response's items, after a prefix; each has the response's id in it."""
    numbers = itertools.count()
    return lambda prefix: f"{prefix}{name.removeprefix('resp_')}{next(numbers):06x}"


def response_with(item_id: str) -> str | None:
    """Return the id of the response whose output has an item of this id; None of an id that is not of our form."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


def check_id(name: str) -> None:
    """Raise NotFound for what cannot be a response's id."""
    if not _ID.fullmatch(name):
        raise not_found(name)


def check_conversation_id(name: str) -> None:
    """Raise NotFound for what cannot be a conversation's id."""
    if not _CONVERSATION_ID.fullmatch(name):
        raise no_conversation(name)


def no_conversation(name: str) -> NotFound:
    return NotFound(f"conversation {name[:64]!r} is not here: it was deleted, it is too old, or it is somebody else's")


def not_found(name: str) -> NotFound:
    return NotFound(f"response {name[:64]!r} is not here: it was not stored, it is too old, or it is somebody else's")


def no_previous(name: str) -> InvalidRequest:
    what = f"is {name[:64]!r}, which is not here: it was not stored, it is too old, or it is somebody else's"
    return InvalidRequest(FieldViolation("previous_response_id", what, "PREVIOUS_RESPONSE_NOT_FOUND"))


def check_size(items: Sequence[Item], field: str = "input", instead: str = "send store false") -> None:
    """Raise InvalidRequest for items that will not fit into the store; `instead` says what the client can do."""
    size, most = len(_dumps(list(items))), MAX_RESPONSE_BYTES - _FOR_OUTPUT
    if size > most:
        what = f"has, with all that was before, {size} bytes; at most {most} can be stored; {instead}"
        raise InvalidRequest(FieldViolation(field, what))


def check_text(body: Json) -> None:
    """Raise InvalidRequest, or UnicodeEncodeError, for what cannot be repeated in JSON."""
    _dumps(body)


def with_ids(items: Sequence[Item], earlier: Sequence[Item] = ()) -> list[Item]:
    """Return items that all have a type, and an id of their own, as they are listed after the earlier ones."""
    taken, named = {each["id"] for each in earlier}, list[Item]()
    for each in items:
        item = {"type": "message", **each} | ({} if _has_id(each, taken) else {"id": _id_for(each)})
        taken.add(item["id"])
        named.append(item)
    return named


def _has_id(item: Item, taken: Container[str]) -> bool:
    return isinstance(item.get("id"), str) and 0 < len(item["id"]) <= _MOST_ID_CHARS and item["id"] not in taken


def _id_for(item: Item) -> str:
    return new_id("msg_" if item.get("type", "message") == "message" else "item_")


def _dumps(value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        if isinstance(error, UnicodeEncodeError):
            raise
        raise InvalidRequest(FieldViolation("body", "has NaN or Infinity, which is not JSON; leave it out")) from None
