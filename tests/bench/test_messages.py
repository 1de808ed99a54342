"""The messages of the soak's load: what their answers show, right or not."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from bench.fault_injection.mixed_load import Messages
from cli.demo_model import CHECKPOINT
from gpuworker.simulated.plane import simulated_tokens
from router.answers.text.tokenizer import Tokenizer

TOKENS = simulated_tokens(CHECKPOINT)
# Tokens of the prompt; three of four are cached.
CACHED, COMPUTED = 3, 1

Json = dict[str, Any]


def texts_of(body: Json) -> list[str]:
    """Return the texts of the right tokens."""
    tokenizer = Tokenizer.load(CHECKPOINT)
    assert tokenizer is not None
    return [tokenizer.decode([each]) for each in TOKENS.expected(body["seed"], CACHED + COMPUTED, body["max_tokens"])]


def usage(output: int) -> Json:
    return {"input_tokens": COMPUTED, "cache_read_input_tokens": CACHED, "output_tokens": output}


class Body(httpx.AsyncByteStream):
    """The lines of an answer; a connection that breaks behind them if `breaks`."""

    def __init__(self, lines: list[str], breaks: bool = False) -> None:
        self._lines, self._breaks = lines, breaks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for line in self._lines:
            yield line.encode() + b"\n"
        if self._breaks:
            raise httpx.ReadError("it broke")


def event(kind: str, **fields: Any) -> str:
    return f"data: {json.dumps({'type': kind, **fields})}"


def delta(text: str) -> str:
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


START = event("message_start", message={"usage": usage(0)})


def answered(texts: list[str], reason: str = "max_tokens") -> httpx.Response:
    """Return a whole answer."""
    content = [{"type": "text", "text": "".join(texts)}]
    return httpx.Response(200, json={"content": content, "stop_reason": reason, "usage": usage(len(texts))})


def lines_of(texts: list[str]) -> list[str]:
    """Return the lines of a streamed answer up to its last text."""
    return ["event: message_start", START, "", *map(delta, texts)]


def ending(texts: list[str]) -> str:
    return event("message_delta", delta={"stop_reason": "max_tokens"}, usage=usage(len(texts)))


async def sent(answer: Callable[[list[str]], httpx.Response], streamed: bool) -> tuple[str, int, int]:
    """Send one request; return how it ended, how many were compared, and how many tokens differ."""

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert body["stream"] is streamed
        return answer(texts_of(body))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://quire") as client:
        messages = Messages(client, TOKENS, CHECKPOINT, random.Random(4))
        ended = await (messages.streamed() if streamed else messages.whole())
    return ended, messages.compared, messages.differing


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (answered, ("OK", 1, 0)),
        (lambda texts: answered([*texts[:-1], "?"]), ("OK", 1, 1)),
        (lambda texts: answered([*texts[:-3], *texts[-2:]]), ("OK", 1, 3)),
        (lambda texts: answered([*texts, "?"]), ("OK", 1, 1)),
        (lambda texts: answered(texts, "end_turn"), ("OK", 1, 1)),
        (lambda texts: httpx.Response(529), ("HTTP_529", 0, 0)),
        (lambda texts: httpx.Response(200, stream=Body([], breaks=True)), ("ReadError", 0, 0)),
    ],
    ids=["right", "last wrong", "one lost", "one more", "other end", "refused", "broken"],
)
async def test_a_whole_message_is_right_to_its_last_token(
    answer: Callable[[list[str]], httpx.Response], found: tuple[str, int, int]
) -> None:
    assert await sent(answer, streamed=False) == found


@pytest.mark.parametrize(
    ("lines", "breaks", "found"),
    [
        (lambda texts: [*lines_of(texts), ending(texts)], False, ("OK", 1, 0)),
        (lambda texts: [*lines_of(texts[:-1]), ending(texts)], False, ("OK", 1, 1)),
        (lambda texts: [*lines_of(texts[:-1]), ending(texts[:-1])], False, ("OK", 1, 1)),
        (lambda texts: lines_of(texts[:-1]), False, ("ended early", 1, 0)),
        (lambda texts: lines_of([*texts[:2], "?"]), False, ("ended early", 1, 1)),
        (lambda texts: lines_of(texts[:-1]), True, ("ReadError", 1, 0)),
        (lambda texts: lines_of([*texts[:2], "?"]), True, ("ReadError", 1, 1)),
        (lambda texts: [*lines_of(texts[:2]), event("error", error={"type": "api_error"})], False, ("api_error", 1, 0)),
    ],
    ids=["right", "text lost", "ended short", "cut", "cut wrong", "broken", "broken wrong", "error"],
)
async def test_a_streamed_message_is_right_as_far_as_it_came(
    lines: Callable[[list[str]], list[str]], breaks: bool, found: tuple[str, int, int]
) -> None:
    answer = lambda texts: httpx.Response(200, stream=Body(lines(texts), breaks))  # noqa: E731
    assert await sent(answer, streamed=True) == found
