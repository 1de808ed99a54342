"""Requests of the Messages API, streamed or not, whose text is compared with the one that must come.

Only a client of gRPC resumes by itself. So an answer may break with its router, and it is no error that an answer ends
early. What has come must be right all the same.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Final

import httpx

from gpuworker.simulated.tokens import SimulatedTokens
from router.answers.text.tokenizer import Tokenizer

_PATIENCE_S: Final = 240.0
_MOST_TOKENS: Final = 80
_WORDS: Final = 60
_OK: Final = 200
_WHOLE: Final = "max_tokens"


class Messages:
    """Sends requests; `compared` counts answers whose text was compared, `differing` the tokens that were not right."""

    def __init__(self, client: httpx.AsyncClient, tokens: SimulatedTokens, model: Path, rng: random.Random) -> None:
        tokenizer = Tokenizer.load(model)
        assert tokenizer is not None
        self._client, self._tokens, self._tokenizer, self._rng = client, tokens, tokenizer, rng
        self.compared = self.differing = 0

    async def whole(self) -> str:
        """Ask for an answer as one body; return how it ended."""
        return await self._asked(stream=False)

    async def streamed(self) -> str:
        """Ask for an answer as events; return how it ended."""
        return await self._asked(stream=True)

    async def _asked(self, stream: bool) -> str:
        seed, count = self._rng.randrange(1 << 30), self._rng.randrange(1, _MOST_TOKENS)
        body = {
            "messages": [{"role": "user", "content": f"Tell me of number {self._rng.randrange(100)}."}],
            "max_tokens": count,
            "seed": seed,
            "stream": stream,
        }
        answer = Answer(stream)
        try:
            async with asyncio.timeout(_PATIENCE_S), self._client.stream("POST", "/v1/messages", json=body) as response:
                if response.status_code != _OK:
                    return f"HTTP_{response.status_code}"
                async for line in response.aiter_lines():
                    answer.take(line)
        except (httpx.HTTPError, TimeoutError) as error:
            answer.broken = type(error).__name__
        if not answer.begun:
            return answer.broken or "empty"
        self.compared += 1
        if differing := self._differing(answer, seed, count):
            self.differing += differing
            print(f"  {differing} of {count} tokens of a message differ: {answer.text[:_WORDS]!r}", flush=True)
        return answer.broken or ("OK" if answer.reason else "ended early")

    def _differing(self, answer: Answer, seed: int, count: int) -> int:
        """Return how many tokens are not those that must come; missing ones count where the answer ended."""
        ids = self._tokens.expected(seed, answer.prompt_tokens, count)
        texts = [self._tokenizer.decode(ids[:end]) for end in range(1, count + 1)]
        if not answer.reason:  # its end is missing
            return int(not texts[-1].startswith(answer.text))
        right = sum(map(answer.text.startswith, texts))
        wrong_end = answer.text != texts[-1] or answer.reason != _WHOLE or answer.output_tokens != count
        return max(count - right, int(wrong_end))


class Answer:
    """What has come of one answer. `begun` is whether the number of its prompt's tokens has."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self.text = self.reason = self.broken = ""
        self.begun, self.prompt_tokens, self.output_tokens = False, 0, 0

    def take(self, line: str) -> None:
        """Take a line of the body; a whole answer is one line."""
        if not self._streamed:
            self._whole(json.loads(line))
        elif line.startswith("data: "):
            self._event(json.loads(line.removeprefix("data: ")))

    def _whole(self, message: dict[str, Any]) -> None:
        self.begun = True
        self.text = "".join(block["text"] for block in message["content"])
        self._end(message["stop_reason"], message["usage"])

    def _event(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "message_start":
                self.begun = True
                self._count(event["message"]["usage"])
            case "content_block_delta":
                self.text += event["delta"]["text"]
            case "message_delta":
                self._end(event["delta"]["stop_reason"], event["usage"])
            case "error":
                self.broken = event["error"]["type"]

    def _end(self, reason: str, usage: dict[str, int]) -> None:
        self.reason = reason
        self._count(usage)

    def _count(self, usage: dict[str, int]) -> None:
        self.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        self.output_tokens = usage["output_tokens"]
