"""The size of answers that are sent as a whole: refused where it is known before the work, bounded while it grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import Message

from common.contracts.errors import FieldViolation, InvalidRequest, Overloaded, QuotaViolation
from common.contracts.limits import MAX_ALL_ANSWER_BYTES, MAX_REPLY_BYTES, SMALL_ANSWER_BYTES
from router.contracts.events import ValidatedRequest

ReplyT = TypeVar("ReplyT", bound=Message)
_FIELD, _PROMPT_FIELD = "sampling.max_tokens", "sampling.prompt_logprobs"
_ADVICE = "stream the answer, or ask for fewer tokens, sequences or log-probabilities"
_RETRY_S = 1.0


def least_tokens(request: ValidatedRequest) -> int:
    """Return how many output tokens the answer has at least: all of them where nothing can end it earlier."""
    sampling = request.sampling
    ends_early = not sampling.ignore_eos or sampling.stop or sampling.stop_token_ids or sampling.constraint
    return sampling.n * (sampling.min_tokens if ends_early else sampling.max_tokens)


def check_least_size(
    requests: Iterable[ValidatedRequest], token: int, entry: int, most: int, prompt_entry: int = 0
) -> None:
    """Raise InvalidRequest when the answer will be larger than `most` bytes in any case.

    A token takes at least `token` bytes, and with log-probabilities `entry` bytes for each of them; those of prompts
    `prompt_entry` bytes where that is another number.
    """
    least, of_prompts = 0, 0
    for request in requests:
        logprobs, scored = request.sampling.logprobs, request.sampling.prompt_logprobs
        least += least_tokens(request) * (token + (0 if logprobs is None else entry * (1 + request.sampling.top_count)))
        if scored is not None:
            of_prompts += (len(request.prompt) - 1) * max(1, scored) * (prompt_entry or entry)
    if least + of_prompts > most:
        raise _too_large(least + of_prompts, most, _PROMPT_FIELD if of_prompts > least else _FIELD)


class AnswerRoom:
    """The bytes of all whole answers of one API. Each answer takes room as it grows, and leaves."""

    def __init__(self, most: int = MAX_ALL_ANSWER_BYTES) -> None:
        self.taken, self._most = 0, most

    def place(self, most: int) -> AnswerPlace:
        return AnswerPlace(self, most)

    def is_full(self) -> bool:
        return self.taken > self._most

    def overloaded(self) -> Overloaded:
        what = f"answers of {self.taken} bytes wait to be sent; at most {self._most} may; {_ADVICE}"
        return Overloaded(QuotaViolation("router.answers", what), _RETRY_S)


class AnswerPlace:
    """The bytes of one answer."""

    def __init__(self, room: AnswerRoom, most: int) -> None:
        self._room, self._most, self.size = room, most, 0

    def grow(self, size: int) -> None:
        """Count more bytes. Raises InvalidRequest for too large an answer, Overloaded when all are too large."""
        self.size += size
        self._room.taken += size
        if self.size > self._most:
            raise _too_large(self.size, self._most)
        if self.size > SMALL_ANSWER_BYTES and self._room.is_full():
            raise self._room.overloaded()

    def leave(self) -> None:
        """Give the room back. Idempotent."""
        self._room.taken -= self.size
        self.size = 0

    def __del__(self) -> None:
        self.leave()  # a response that the server never began to send


def checked_reply(reply: ReplyT) -> ReplyT:
    """Return a message. Raises InvalidRequest when it is too large for the channel, which would say INTERNAL."""
    if (size := reply.ByteSize()) > MAX_REPLY_BYTES:
        raise _too_large(size, MAX_REPLY_BYTES)
    return reply


def _too_large(size: int, most: int, field: str = _FIELD) -> InvalidRequest:
    return InvalidRequest(FieldViolation(field, f"makes an answer of {size} bytes or more; at most {most}; {_ADVICE}"))
