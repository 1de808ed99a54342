"""Which tokens of a prompt a request retains: terms and ranges, the ends of messages, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from common.contracts.errors import FieldViolation, InvalidRequest
from common.contracts.lease import LAST_BLOCK, RetainedBlocks, RetainedTokens
from common.contracts.limits import MAX_RETENTION_RANGES
from quire.inference.v1 import inference_pb2 as pb
from router.contracts.events import ValidatedRequest
from router.tenants.tenancy import Caller
from tests.support.router.validation import ACME, CALL, Words, accepted, refused, request, validator

ALL = 30 * 86_400.0
USER = pb.ChatMessage(role="user", content="aaa")


class Template(Words):
    """A chat in letters: the tools, then each message between brackets, then a colon where an answer begins.

    A chat whose last message is of the assistant cannot be rendered without the next one.
    """

    def __init__(self) -> None:
        self.rendered: list[str] = []

    async def encode(self, prompt: pb.Prompt, add_special_tokens: bool = True) -> list[int]:
        if not prompt.HasField("chat"):
            return await super().encode(prompt, add_special_tokens)
        chat = prompt.chat
        if chat.messages[-1].role == "assistant":
            raise InvalidRequest(FieldViolation("prompt.chat", "ends with the assistant"))
        answers = not chat.HasField("add_generation_prompt") or chat.add_generation_prompt
        text = "".join(f"[{each.content}]" for each in chat.messages)
        self.rendered.append(f"{chat.tools_json}{text}{':' if answers else ''}")
        return [ord(letter) % 100 for letter in self.rendered[-1]]


def chat(*messages: pb.ChatMessage, **retention: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt=pb.Prompt(chat=pb.Chat(messages=messages)), cache_retention=pb.CacheRetention(**retention)
    )


def to_message(count: int, priority: int = 80, duration: float | None = 60.0) -> pb.RetentionRange:
    return pb.RetentionRange(messages=count, priority=priority, duration=duration)


async def retained(**retention: Any) -> Sequence[RetainedTokens]:
    found = await accepted(request("a b c d", cache_retention=pb.CacheRetention(**retention)))
    return found.retention


async def test_terms_are_of_the_whole_request_of_ranges_and_of_the_output() -> None:
    assert await retained() == ()
    assert await retained(priority=80, duration=60.0) == (RetainedTokens(0, None, 80, 60.0),)
    assert await retained(priority=80) == (RetainedTokens(0, None, 80, ALL),)
    assert await retained(decode_priority=50, decode_duration=1.0) == (RetainedTokens(4, None, 50, 1.0),)
    ranges = [
        pb.RetentionRange(start=1, end=3, priority=80, duration=60.0),
        pb.RetentionRange(start=2, end=100, priority=5),
        pb.RetentionRange(start=4, priority=80),
        pb.RetentionRange(priority=35),
    ]
    assert await retained(ranges=ranges) == (RetainedTokens(1, 3, 80, 60.0), RetainedTokens(2, 4, 5, ALL))


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        (RetainedTokens(0, None, 80, 1.0), RetainedBlocks(0, LAST_BLOCK, 80, 1.0)),
        (RetainedTokens(17, 47, 80, 1.0), RetainedBlocks(1, 2, 80, 1.0)),
        (RetainedTokens(16, 48, 80, 1.0), RetainedBlocks(1, 3, 80, 1.0)),
        (RetainedTokens(0, 15, 80, 1.0), RetainedBlocks(0, 0, 80, 1.0)),
    ],
)
def test_tokens_are_counted_in_full_blocks(tokens: RetainedTokens, blocks: RetainedBlocks) -> None:
    assert tokens.blocks(16) == blocks


async def test_a_priority_is_lowered_to_that_of_the_tenant() -> None:
    tenant = replace(ACME.tenant, max_retention_priority=40)
    call = replace(CALL, caller=Caller(tenant))
    for asked, expected in ((100, (40,)), (10, (10,))):
        message = request(cache_retention=pb.CacheRetention(priority=asked))
        found: ValidatedRequest = await validator().validate(message, call)
        assert tuple(each.priority for each in found.retention) == expected
    call = replace(CALL, caller=Caller(replace(tenant, max_retention_priority=35)))
    assert not (await validator().validate(request(cache_retention=pb.CacheRetention(priority=100)), call)).retention


@pytest.mark.parametrize("highest", [0, 10, 34, 35])
async def test_a_highest_priority_of_35_or_less_retains_nothing_and_puts_nothing_before_the_others(
    highest: int,
) -> None:
    call = replace(CALL, caller=Caller(replace(ACME.tenant, max_retention_priority=highest)))
    for asked, expected in ((100, ()), (36, ()), (35, ()), (34, (34,)), (0, (0,))):
        message = request(cache_retention=pb.CacheRetention(priority=asked))
        found: ValidatedRequest = await validator().validate(message, call)
        assert tuple(each.priority for each in found.retention) == expected


async def test_what_is_not_cached_is_not_retained() -> None:
    message = request(cache=pb.CacheOptions(no_cache=True), cache_retention=pb.CacheRetention(priority=80))
    assert (await accepted(message)).retention == ()


@pytest.mark.parametrize(
    ("retention", "wrong"),
    [
        ({"priority": 101}, "priority: is 101; expected 0 to 100 (35 is that of blocks without retention)"),
        ({"priority": -1}, "priority: is -1; expected 0 to 100 (35 is that of blocks without retention)"),
        ({"priority": 80, "duration": 0.0}, "duration: is 0; expected more than 0 (seconds)"),
        ({"priority": 80, "duration": math.nan}, "duration: is nan; expected more than 0 (seconds)"),
        ({"priority": 80, "duration": math.inf}, "duration: is inf; expected more than 0 (seconds)"),
        ({"duration": 5.0}, "duration: needs priority, which is not set; set it or leave both out"),
        (
            {"decode_duration": 5.0},
            "decode_duration: needs decode_priority, which is not set; set it or leave both out",
        ),
        (
            {"decode_priority": 200},
            "decode_priority: is 200; expected 0 to 100 (35 is that of blocks without retention)",
        ),
        (
            {"ranges": [pb.RetentionRange(start=3, end=3, priority=80)]},
            "ranges[0].end: is 3; expected more than start, which is 3, or nothing for all that follows",
        ),
        ({"ranges": [pb.RetentionRange(start=-1, priority=80)]}, "ranges[0].start: is -1; expected 0 or more"),
        (
            {"ranges": [pb.RetentionRange(priority=80), pb.RetentionRange(priority=101)]},
            "ranges[1].priority: is 101; expected 0 to 100 (35 is that of blocks without retention)",
        ),
        (
            {"ranges": [pb.RetentionRange(priority=80, duration=-1)]},
            "ranges[0].duration: is -1; expected more than 0 (seconds)",
        ),
        (
            {"ranges": [pb.RetentionRange(priority=80)] * (MAX_RETENTION_RANGES + 1)},
            "ranges: has 17 ranges; expected at most 16",
        ),
        ({"ranges": [to_message(1)] * 5}, "ranges: has 5 ranges with messages; expected at most 4"),
        (
            {"ranges": [to_message(1)]},
            "ranges[0].messages: belongs to a chat, and the prompt is none; give start and end",
        ),
        (
            {"ranges": [pb.RetentionRange(messages=1, end=5, priority=80)]},
            "ranges[0].messages: cannot be combined with start or end; leave one of them out",
        ),
    ],
)
async def test_each_mistake_has_one_error(retention: dict[str, Any], wrong: str) -> None:
    assert await refused(request(cache_retention=pb.CacheRetention(**retention))) == [f"cache_retention.{wrong}"]


async def test_a_chat_has_no_more_messages_than_it_has() -> None:
    for count in (-1, 2):
        found = await refused(chat(USER, ranges=[to_message(count)]), validator(codec=Template()))
        what = f"is {count}; expected 0 to 1, the messages of the chat"
        assert found == [f"cache_retention.ranges[0].messages: {what}"]


async def test_a_range_ends_with_a_message_or_with_the_tools() -> None:
    """The prompt is `TT[aaa][bb][c]:`."""
    for count, end in ((0, 3), (1, 7), (2, 11), (3, 15)):
        message = chat(USER, pb.ChatMessage(role="user", content="bb"), pb.ChatMessage(role="user", content="c"))
        message.prompt.chat.tools_json = "TT"
        message.cache_retention.ranges.append(to_message(count))
        found = await accepted(message, validator(codec=Template()))
        assert found.retention == (RetainedTokens(0, end, 80, 60.0),)


async def test_a_beginning_that_a_longer_one_keeps_is_not_rendered() -> None:
    template = Template()
    message = chat(USER, USER, USER, ranges=[to_message(1), to_message(2, 90), to_message(3), to_message(0, 80, 5.0)])
    found = await accepted(message, validator(codec=template))
    assert found.retention == (RetainedTokens(0, 16, 80, 60.0), RetainedTokens(0, 10, 90, 60.0))
    assert template.rendered == ["[aaa][aaa][aaa]:", "[aaa][aaa]"]


async def test_a_beginning_that_cannot_be_rendered_retains_nothing() -> None:
    answer = pb.ChatMessage(role="assistant", content="b")
    found = await accepted(chat(USER, answer, USER, ranges=[to_message(2)]), validator(codec=Template()))
    assert found.retention == ()


async def test_where_layers_keep_states_the_end_of_the_first_message_is_said() -> None:
    """It stays no longer than other tokens; a chat of one message, and one that is not cached, say nothing."""
    answer = pb.ChatMessage(role="assistant", content="b")
    whole, alone, uncached = chat(USER, USER), chat(USER), chat(USER, USER)
    uncached.cache.no_cache = True
    whole.ClearField("cache_retention")
    for message, wanted in (
        (whole, (RetainedTokens(0, 5, 35, ALL),)),
        (chat(USER, USER, ranges=[to_message(2)]), (RetainedTokens(0, 11, 80, 60.0), RetainedTokens(0, 5, 35, ALL))),
        (alone, ()),
        (uncached, ()),
        (chat(answer, USER), ()),
    ):
        of_states = validator(codec=Template())
        of_states.keeps_states = lambda: True
        assert (await accepted(message, of_states)).retention == wanted
    assert (await accepted(whole, validator(codec=Template()))).retention == ()
