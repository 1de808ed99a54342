"""The marks `cache_control` of a body: each retains the prompt up to the item that has it.

An item is a tool, a block of a message, or the whole body, whose mark stands for the last message. The turn of a marked
block counts as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.limits import MAX_RETENTION_MESSAGE_RANGES
from router.answers.tools import quoted
from router.api.anthropic.types import Block, CacheControl, CountRequest
from router.api.shared.retention import CacheRetention, RetentionRange

PRIORITY: Final = 60
"""Above all blocks without retention, and below what an operator's own clients may ask for."""
_SHORT: Final = "5m"
_SECONDS: Final = {_SHORT: 300.0, "1h": 3600.0}
# A mark and its place in the body.
Mark = tuple[CacheControl, str]


def retention_of(body: CountRequest, marked: Sequence[tuple[Mark, int]], messages: int) -> CacheRetention | None:
    """Return what the marks of a body retain. `marked` are those of its blocks, each with the number of messages of the
    chat up to it; `messages` are all of them. Raises InvalidRequest.
    """
    found = [(mark, 0) for mark in _of_tools(body)] + list(marked)
    if body.cache_control is not None:
        found.append(((body.cache_control, "cache_control"), messages))
    if len(found) > MAX_RETENTION_MESSAGE_RANGES:
        where = found[MAX_RETENTION_MESSAGE_RANGES][0][1]
        _refuse(where, f"is one mark too many; expected at most {MAX_RETENTION_MESSAGE_RANGES} in a body")
    ranges = [
        RetentionRange(messages=min(count, messages), priority=PRIORITY, duration=_seconds(mark))
        for mark, count in found
    ]
    return CacheRetention(ranges=ranges) if ranges else None


def marks_of(block: Block, path: str) -> Iterator[Mark]:
    """Yield the marks of a block and, for the result of a tool, of the blocks in it."""
    for number, part in enumerate(block.content if isinstance(block.content, list) else ()):
        if part.cache_control is not None:
            yield part.cache_control, f"{path}.content[{number}].cache_control"
    if block.cache_control is not None:
        yield block.cache_control, f"{path}.cache_control"


def _of_tools(body: CountRequest) -> Iterator[Mark]:
    for place, tool in enumerate(body.tools or ()):
        if tool.cache_control is not None:
            yield tool.cache_control, f"tools[{place}].cache_control"


def _seconds(mark: Mark) -> float:
    control, path = mark
    if control.type != "ephemeral":
        _refuse(f"{path}.type", f"is {quoted(control.type)}; expected ephemeral")
    ttl = control.ttl or _SHORT
    if ttl not in _SECONDS:
        _refuse(f"{path}.ttl", f"is {quoted(ttl)}; expected {' or '.join(_SECONDS)}")
    return _SECONDS[ttl]


def _refuse(path: str, what: str) -> NoReturn:
    raise InvalidRequest(FieldViolation(path, what))
