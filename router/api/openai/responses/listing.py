"""Lists the items of a stored conversation in pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from common.contracts.errors import FieldViolation, InvalidRequest
from router.api.openai.responses.items import Item

Json = dict[str, Any]


class ItemPage(BaseModel):
    """Which items are listed. OpenAI's `include` has no effect."""

    model_config = ConfigDict(extra="ignore")

    after: str | None = Field(None, description="the id of the item before the first one")
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


def page_of(items: Sequence[Item], page: ItemPage) -> Json:
    """Return a page of items. Raises InvalidRequest where none has the id of `after`."""
    ordered = [*items] if page.order == "asc" else [*items][::-1]
    start = 0 if page.after is None else 1 + _place(ordered, page.after)
    return list_of(ordered[start : start + page.limit], start + page.limit < len(ordered))


def list_of(items: Sequence[Item], has_more: bool = False) -> Json:
    """Return items as a page."""
    shown = [listed(each) for each in items]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else "",
        "last_id": shown[-1]["id"] if shown else "",
        "has_more": has_more,
    }


def _place(items: Sequence[Item], name: str) -> int:
    found = next((place for place, each in enumerate(items) if each["id"] == name), None)
    if found is None:
        raise InvalidRequest(FieldViolation("after", f"is {name[:64]!r}, and no item has that id"))
    return found


def listed(item: Item) -> Json:
    """Return an item in its long form: it has a status, and the content of a message is a list of parts."""
    content = item.get("content")
    if not isinstance(content, str):
        return {"status": "completed", **item}
    if item.get("role") == "assistant":
        part: Json = {"type": "output_text", "text": content, "annotations": []}
    else:
        part = {"type": "input_text", "text": content}
    return {"status": "completed", **item, "content": [part]}
