"""Reads which parts of a prompt a request retains in the cache: checks the numbers, and finds the ends of messages."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from common.contracts.errors import FieldViolation, QuireError
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY, MAX_RETENTION_PRIORITY, RetainedTokens
from common.contracts.limits import MAX_RETENTION_MESSAGE_RANGES, MAX_RETENTION_RANGES
from quire.inference.v1 import inference_pb2 as pb
from router.requests.violations import Range

Encode = Callable[[pb.Prompt], Awaitable[Sequence[int]]]

_PRIORITIES: Final = Range(
    0, MAX_RETENTION_PRIORITY, hint=f"{DEFAULT_RETENTION_PRIORITY} is that of blocks without retention"
)
_SECONDS: Final = Range(0, math.inf, open_low=True, hint="seconds")
# Without a duration, blocks stay for as long as the KV manager lets any; a month is more than that.
_LONGEST: Final = 30 * 86_400.0
_FIELD: Final = "cache_retention"


def wrong_retention(request: pb.GenerateRequest) -> list[FieldViolation]:
    """Return what is wrong with the retention of a request."""
    given = request.cache_retention
    found = [*_wrong_terms(given, "priority", "duration", _FIELD)]
    found += _wrong_terms(given, "decode_priority", "decode_duration", _FIELD)
    if len(given.ranges) > MAX_RETENTION_RANGES:
        what = f"has {len(given.ranges)} ranges; expected at most {MAX_RETENTION_RANGES}"
        return [*found, FieldViolation(f"{_FIELD}.ranges", what)]
    of_messages = sum(each.HasField("messages") for each in given.ranges)
    if of_messages > MAX_RETENTION_MESSAGE_RANGES:
        what = f"has {of_messages} ranges with messages; expected at most {MAX_RETENTION_MESSAGE_RANGES}"
        return [*found, FieldViolation(f"{_FIELD}.ranges", what)]
    chat = request.prompt.chat if request.prompt.HasField("chat") else None
    for place, each in enumerate(given.ranges):
        found += _wrong_range(each, f"{_FIELD}.ranges[{place}]", chat)
    return found


def _wrong_range(given: pb.RetentionRange, path: str, chat: pb.Chat | None) -> Iterator[FieldViolation]:
    if given.priority not in _PRIORITIES:
        yield FieldViolation(f"{path}.priority", f"is {given.priority}; expected {_PRIORITIES}")
    if given.HasField("duration") and given.duration not in _SECONDS:
        yield FieldViolation(f"{path}.duration", f"is {given.duration:g}; expected {_SECONDS}")
    if given.HasField("messages"):
        yield from _wrong_messages(given, path, chat)
        return
    if given.start < 0:
        yield FieldViolation(f"{path}.start", f"is {given.start}; expected 0 or more")
    elif given.HasField("end") and given.end <= given.start:
        what = f"is {given.end}; expected more than start, which is {given.start}, or nothing for all that follows"
        yield FieldViolation(f"{path}.end", what)


def _wrong_messages(given: pb.RetentionRange, path: str, chat: pb.Chat | None) -> Iterator[FieldViolation]:
    if given.start or given.HasField("end"):
        yield FieldViolation(f"{path}.messages", "is given beside start or end; leave one of them out")
    elif chat is None:
        yield FieldViolation(f"{path}.messages", "belongs to a chat, and the prompt is none; give start and end")
    elif not 0 <= given.messages <= len(chat.messages):
        what = f"is {given.messages}; expected 0 to {len(chat.messages)}, the messages of the chat"
        yield FieldViolation(f"{path}.messages", what)


def _wrong_terms(given: pb.CacheRetention, priority: str, duration: str, path: str) -> Iterator[FieldViolation]:
    if given.HasField(priority) and (value := getattr(given, priority)) not in _PRIORITIES:  # type: ignore[arg-type]
        yield FieldViolation(f"{path}.{priority}", f"is {value}; expected {_PRIORITIES}")
    if not given.HasField(duration):  # type: ignore[arg-type]
        return
    if (seconds := getattr(given, duration)) not in _SECONDS:
        yield FieldViolation(f"{path}.{duration}", f"is {seconds:g}; expected {_SECONDS}")
    if not given.HasField(priority):  # type: ignore[arg-type]
        yield FieldViolation(f"{path}.{duration}", f"needs {priority}, which is not set; set it or leave both out")


async def retained_tokens(
    request: pb.GenerateRequest, prompt: Sequence[int], highest: int, encode: Encode
) -> tuple[RetainedTokens, ...]:
    """Return what a request retains, of a prompt with these tokens. `highest` is the tenant's highest priority.

    `wrong_retention` has found nothing wrong.
    """
    given, terms, whole = request.cache_retention, list[RetainedTokens](), len(prompt)
    if given.HasField("priority"):
        terms.append(RetainedTokens(0, None, given.priority, _seconds(given, "duration")))
    if given.HasField("decode_priority"):
        terms.append(RetainedTokens(whole, None, given.decode_priority, _seconds(given, "decode_duration")))
    # The longest beginning of a chat first: it may make the others superfluous.
    of_messages = [each for each in given.ranges if each.HasField("messages")]
    for each in sorted(of_messages, key=lambda each: -each.messages):
        seconds = _seconds(each, "duration")
        if not any(_covers(known, each.priority, seconds) for known in terms):
            end = await _end_of_messages(request.prompt.chat, each.messages, prompt, encode)
            terms.append(RetainedTokens(0, end, each.priority, seconds))
    for each in given.ranges:
        if not each.HasField("messages"):
            end = min(each.end, whole) if each.HasField("end") else whole
            terms.append(RetainedTokens(each.start, end, each.priority, _seconds(each, "duration")))
    lowered = (_lowered(each, highest) for each in terms if each.end is None or each.start < each.end)
    return tuple([each for each in lowered if each.priority != DEFAULT_RETENTION_PRIORITY])


def _covers(known: RetainedTokens, priority: int, seconds: float) -> bool:
    """Return whether the whole request, or a longer beginning of it, stays with that priority for that time."""
    begins = known.start == 0 and known.end != 0
    return begins and known.priority >= priority > DEFAULT_RETENTION_PRIORITY and known.seconds >= seconds


def _lowered(each: RetainedTokens, highest: int) -> RetainedTokens:
    """Lower a priority to the tenant's highest, but never below that of blocks without retention: what a request wants
    to keep would leave before all others.
    """
    priority = min(each.priority, max(highest, DEFAULT_RETENTION_PRIORITY))
    return RetainedTokens(each.start, each.end, priority, each.seconds)


def _seconds(given: pb.CacheRetention | pb.RetentionRange, name: str) -> float:
    return min(getattr(given, name), _LONGEST) if given.HasField(name) else _LONGEST  # type: ignore[arg-type]


async def _end_of_messages(chat: pb.Chat, count: int, prompt: Sequence[int], encode: Encode) -> int:
    """Return how many tokens of a prompt belong to the tools and the first messages of its chat.

    They are those that the same beginning has with another end. A template that cannot render that retains nothing:
    the request is right, and retention changes no answer.
    """
    if count == len(chat.messages):
        return len(prompt)
    beginning = pb.Chat()
    beginning.CopyFrom(chat)
    del beginning.messages[count:]
    if not count:
        first = chat.messages[0]
        beginning.messages.append(pb.ChatMessage(role=first.role, content="1" if first.content[:1] == "0" else "0"))
    beginning.continue_final_message, beginning.add_generation_prompt = False, False
    try:
        tokens = await encode(pb.Prompt(chat=beginning))
    except QuireError:
        return 0
    alike = (at for at, pair in enumerate(zip(tokens, prompt, strict=False)) if pair[0] != pair[1])
    return next(alike, min(len(tokens), len(prompt)))
