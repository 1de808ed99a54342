"""The field `cache_retention` of a body: which blocks the KV manager keeps once the request has ended."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.contracts.limits import MAX_RETENTION_RANGES
from quire.inference.v1 import inference_pb2 as pb
from router.api.shared.numbers import Float32, Int32


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
