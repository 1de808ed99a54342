"""Errors about the fields of a chat, in the words of a body that became one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.contracts.errors import InvalidRequest
from common.contracts.limits import MAX_RETENTION_RANGES, MAX_SESSION_ID_CHARS
from quire.inference.v1 import inference_pb2 as pb

# Numbers of client requests in JSON, bounded to the ranges of the protobuf fields that receive them.
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
# The range of protobuf's float; router/requests/validate.py checks the narrower range of each field.
Float32 = Annotated[float, Field(ge=-3.4e38, le=3.4e38)]
SessionId = Annotated[str, Field(max_length=MAX_SESSION_ID_CHARS)]


# The field `cache_retention` of a body: which blocks the KV manager keeps once the request has ended.
class RetentionRange(BaseModel):
    """A part of the prompt: the tokens from `start` on and before `end`, or the first `messages` of a chat."""

    model_config = ConfigDict(extra="forbid")

    start: Int32 = 0
    end: Int32 | None = Field(None, description="unset: to the end of the prompt")
    messages: Int32 | None = Field(None, description="of a chat: its tools and so many of its messages")
    priority: Int32 = Field(..., description="0 to 100; 35 is that of blocks without retention")
    duration: Float32 | None = Field(None, description="seconds; unset: as long as the KV manager lets any stay")


class CacheRetention(BaseModel):
    """Which cached blocks are evicted after, or before, all others, and for how long once the request has ended."""

    model_config = ConfigDict(extra="forbid")

    priority: Int32 | None = Field(None, description="of prompt and output; 0 to 100, 35 is the usual one")
    duration: Float32 | None = Field(None, description="seconds; unset: as long as the KV manager lets any stay")
    ranges: Annotated[list[RetentionRange], Field(fail_fast=True, max_length=MAX_RETENTION_RANGES)] | None = None
    decode_priority: Int32 | None = Field(None, description="of the blocks with the output")
    decode_duration: Float32 | None = None

    def message(self) -> pb.CacheRetention:
        """Return the message of the field; its numbers are checked with the request."""
        return pb.CacheRetention(
            priority=self.priority,
            duration=self.duration,
            ranges=[pb.RetentionRange(**each.model_dump()) for each in self.ranges or ()],
            decode_priority=self.decode_priority,
            decode_duration=self.decode_duration,
        )


class FieldNames:
    """Names of a chat's fields in another API: patterns, and what replaces a match, one after another."""

    def __init__(self, *table: tuple[str, str]) -> None:
        self._table = [(re.compile(pattern), name) for pattern, name in table]

    def __call__(self, field: str) -> str:
        for pattern, name in self._table:
            field = pattern.sub(name, field)
        return field


@contextmanager
def in_words_by(named: Callable[[str], str]) -> Iterator[None]:
    """Let errors about fields of a chat name those of the body."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(*[replace(each, field=named(each.field)) for each in error.violations]) from None
