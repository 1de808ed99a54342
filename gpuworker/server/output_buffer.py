"""Outputs on their way to one router: collected while the stream's writer is busy, packed when it is free.

A slow router therefore gets fewer, larger messages. Memory grows with its backlog of tokens, not of steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from common.hashing import little_endian_int32
from common.lease import Admit
from common.types import TokenLogprobs
from common.wire.enum_codec import finish_to_proto, miss_to_proto
from common.wire.output_codec import logprobs_to_proto, usage_to_proto
from gpuworker.core.outcomes import SequenceFinished
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types


class OutputBuffer:
    """Collects the events of the sequences of one stream, by handle."""

    def __init__(self) -> None:
        self._seq = 0
        self._clear()

    def _clear(self) -> None:
        self._step = 0
        self._handles, self._counts, self._tokens = array("i"), array("i"), array("i")
        self._logprob_handles, self._preempted = array("i"), array("i")
        self._logprobs: list[types.TokenLogprobs] = []
        self._admitted: list[pb.SequenceAdmitted] = []
        self._finished: list[pb.SequenceFinished] = []

    def __bool__(self) -> bool:
        return bool(self._handles or self._admitted or self._finished or self._preempted)

    def tokens(self, step: int, handle: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """Append new tokens of a sequence, and their log-probabilities if it asked for them."""
        self._step = step
        self._handles.append(handle)
        self._counts.append(len(tokens))
        self._tokens.extend(tokens)
        for one in logprobs:
            self._logprob_handles.append(handle)
            self._logprobs.append(logprobs_to_proto(one))

    def admitted(self, handle: int, admit: Admit, reserve_seconds: float) -> None:
        self._admitted.append(
            pb.SequenceAdmitted(
                handle=handle,
                cached_tokens=admit.cached_tokens,
                miss_reason=miss_to_proto(admit.miss_reason),
                diverged_at=admit.diverged_at,
                decision_id=admit.decision_id,
                reserve_seconds=reserve_seconds,
            )
        )

    def preempted(self, handle: int) -> None:
        self._preempted.append(handle)

    def finished(self, handle: int, end: SequenceFinished) -> None:
        self._finished.append(
            pb.SequenceFinished(
                handle=handle,
                reason=finish_to_proto(end.reason),
                usage=usage_to_proto(end.usage),
                stop_token_id=end.stop_token,
                message=end.message,
            )
        )

    def take(self) -> pb.StepOutputs:
        """Return everything gathered as one message, and clear it."""
        self._seq += 1
        message = pb.StepOutputs(
            seq=self._seq,
            step=self._step,
            admitted=self._admitted,
            handles=little_endian_int32(self._handles),
            counts=little_endian_int32(self._counts),
            token_ids=little_endian_int32(self._tokens),
            logprobs=self._logprobs,
            logprob_handles=little_endian_int32(self._logprob_handles),
            finished=self._finished,
            preempted=little_endian_int32(self._preempted),
        )
        self._clear()
        return message
