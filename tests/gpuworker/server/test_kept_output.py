"""What a worker keeps of outputs for another router: all tokens, and as many log-probabilities as fit."""

from __future__ import annotations

import pytest

from common.contracts.lease import Admit
from common.contracts.types import BlockId, FinishReason, MissReason, SequenceId, TokenLogprobs, Usage
from common.wire.packing import unpack_u32
from gpuworker.scheduling.outcomes import SequenceFinished
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.scheduling.stopping import StopRule
from gpuworker.server import live_sequence, router_stream
from gpuworker.server.live_sequence import KeptLogprobs, KeptOutput, LiveSequence
from gpuworker.server.output_buffer import OutputBuffer
from gpuworker.server.router_stream import EndedSequences
from quire.gpuworker.v1 import gpuworker_pb2 as pb

ADMIT = Admit(SequenceId(1), (BlockId(3),), 0, 4, MissReason.NEVER_SEEN, 0, "d1")


def entry(token: int, likely: int = 1) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple((token + each, -0.5) for each in range(likely)))


def replayed(kept: KeptOutput) -> pb.StepOutputs:
    buffer, whole = OutputBuffer(), pb.StepOutputs()
    kept.replay(9, buffer)
    while buffer:
        whole.MergeFrom(buffer.take_outputs())
    return whole


def test_a_replay_has_every_event_once_and_the_numbers_that_count() -> None:
    kept = KeptOutput()
    kept.admitted(ADMIT, 0.5, now=1.0)
    kept.admitted(ADMIT, 9.0, now=8.0)  # again, after a preemption
    kept.cached_tokens = 2
    kept.scored.extend([entry(1)])
    kept.sampled([5, 6], [entry(5), entry(6)], now=2.0)
    kept.sampled([7], [entry(7)], now=3.0)
    kept.end = SequenceFinished(SequenceId(1), FinishReason.STOP, Usage(output_tokens=3), 7)
    outputs = replayed(kept)
    assert unpack_u32(outputs.token_ids) == [5, 6, 7]
    assert [each.token_id for each in outputs.logprobs] == [5, 6, 7]
    assert [each.token_id for each in outputs.prompt_logprobs] == [1]
    assert [(each.cached_tokens, each.recounted) for each in outputs.admitted] == [(4, False), (2, True)]
    assert outputs.admitted[0].reserve_seconds == 0.5
    assert (outputs.finished[0].handle, outputs.finished[0].stop_token_id) == (9, 7)
    assert (kept.admitted_at, kept.first_token_at, kept.last_token_at) == (1.0, 2.0, 3.0)


def test_a_long_output_is_replayed_in_parts() -> None:
    kept = KeptOutput()
    kept.sampled(list(range(1000)), (), now=1.0)
    outputs = replayed(kept)
    assert unpack_u32(outputs.token_ids) == list(range(1000))
    assert max(unpack_u32(outputs.counts)) <= 256


def test_log_probabilities_are_bounded_and_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sequence, "MAX_KEPT_LOGPROBS_BYTES", 1000)
    kept = KeptOutput()
    for token in range(10):
        kept.sampled([token], [entry(token)], now=1.0)
    assert kept.logprobs.bytes <= 1000
    assert kept.logprobs.dropped == 7
    outputs = replayed(kept)
    assert len(outputs.logprobs) == 10, "each token has its own entry"
    assert [each.token_id for each in outputs.logprobs][7:] == [7, 8, 9]


def test_an_entry_larger_than_the_bound_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_sequence, "MAX_KEPT_LOGPROBS_BYTES", 100)
    kept = KeptLogprobs()
    kept.extend([entry(1)])
    assert (kept.bytes, kept.dropped) == (0, 1)


def ended(handle: int, resumable: bool = True) -> LiveSequence:
    stop = StopRule(max_tokens=4, min_tokens=0, eos_ids=frozenset(), stop_token_ids=frozenset(), ignore_eos=False)
    new = NewSequence(SequenceId(handle), "r1", (1, 2), (), b"", 6, stop)
    message = pb.Submit(handle=handle, continuation=pb.Continuation() if resumable else None)
    live = LiveSequence(handle, new, 0.0, message, size=100)
    if live.kept is not None:
        live.kept.end = SequenceFinished(SequenceId(handle), FinishReason.STOP, Usage())
    return live


@pytest.mark.parametrize(("name", "most"), [("MAX_ENDED_SEQUENCES", 2), ("MAX_ENDED_BYTES", 250)])
def test_the_oldest_of_the_ended_leave_first(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, name, most)
    kept = EndedSequences()
    for handle in range(1, 5):
        kept.put(ended(handle))
    assert [live.handle for live in kept] == [3, 4]
    kept.pop(3)
    kept.pop(99)
    kept.put(ended(5, resumable=False))
    assert [live.handle for live in kept] == [4]
