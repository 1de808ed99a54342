"""What gathers for a router while its stream is busy: packed in order, nothing lost, nothing sent twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.contracts.lease import Admit
from common.contracts.transfers import Fetched
from common.contracts.types import BlockId, FinishReason, MissReason, SequenceId, TokenLogprobs, Usage
from common.wire.packing import unpack_u32
from gpuworker.engine.ports import Started
from gpuworker.scheduling.outcomes import Loaded, SequenceFinished
from gpuworker.server.output_buffer import OutputBuffer, Waited
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types


def admit(**changes: object) -> Admit:
    """Return an admission of two blocks, the first of them shared."""
    parts: dict[str, object] = {"sequence": SequenceId(9), "block_table": (BlockId(0), BlockId(1)), "n_shared": 1}
    return Admit(**(parts | changes))  # type: ignore[arg-type]


@pytest.fixture
def buffer() -> OutputBuffer:
    return OutputBuffer()


def test_steps_that_gather_become_one_message_in_order(buffer: OutputBuffer) -> None:
    buffer.tokens(7, 1, (10,), ())
    buffer.tokens(7, 2, (20, 21), ())
    buffer.tokens(8, 1, (11,), ())
    taken = buffer.take_outputs()
    assert (taken.seq, taken.step) == (1, 8)
    assert unpack_u32(taken.handles) == [1, 2, 1]
    assert unpack_u32(taken.counts) == [1, 2, 1]
    assert unpack_u32(taken.token_ids) == [10, 20, 21, 11]


def test_what_was_taken_is_forgotten_and_messages_are_numbered_densely(buffer: OutputBuffer) -> None:
    buffer.tokens(1, 1, (10,), ())
    assert buffer
    buffer.take_outputs()
    assert not buffer
    buffer.tokens(2, 1, (11,), ())
    taken = buffer.take_outputs()
    assert (taken.seq, taken.step, unpack_u32(taken.token_ids)) == (2, 2, [11])


def test_numbers_are_little_endian_int32(buffer: OutputBuffer) -> None:
    buffer.tokens(1, 0x01020304, (0x0A0B0C0D,), ())
    taken = buffer.take_outputs()
    assert (taken.handles, taken.token_ids) == (b"\x04\x03\x02\x01", b"\x0d\x0c\x0b\x0a")


def test_logprobs_name_the_handles_that_asked_for_them(buffer: OutputBuffer) -> None:
    first = TokenLogprobs(10, -0.5, ((10, -0.5), (3, -1.0)))
    buffer.tokens(1, 4, (40,), ())
    buffer.tokens(1, 5, (10, 11), (first, TokenLogprobs(11, -0.25, ())))
    taken = buffer.take_outputs()
    assert unpack_u32(taken.logprob_handles) == [5, 5]
    assert [(one.token_id, one.logprob) for one in taken.logprobs] == [(10, -0.5), (11, -0.25)]
    assert list(taken.logprobs[0].top_token_ids) == [10, 3]
    assert list(taken.logprobs[0].top_logprobs) == [-0.5, -1.0]


def test_an_admission_says_what_the_cache_gave_and_why_not_more(buffer: OutputBuffer) -> None:
    given = admit(cached_tokens=16, miss_reason=MissReason.DIVERGED_AT, diverged_at=1, decision_id="m-1")
    buffer.admitted(3, given, Waited(0.5, 0.25, 0.125))
    assert list(buffer.take_outputs().admitted) == [
        pb.SequenceAdmitted(
            handle=3,
            cached_tokens=16,
            miss_reason=types.MISS_REASON_DIVERGED_AT,
            diverged_at=1,
            decision_id="m-1",
            reserve_seconds=0.5,
            lost_seconds=0.25,
            unread_seconds=0.125,
        )
    ]


def test_cached_tokens_that_an_admission_said_wrongly_are_said_again(buffer: OutputBuffer) -> None:
    buffer.recounted(3, 4)
    assert list(buffer.take_outputs().admitted) == [pb.SequenceAdmitted(handle=3, cached_tokens=4, recounted=True)]


def test_an_end_carries_usage_stop_token_and_words(buffer: OutputBuffer) -> None:
    usage = Usage(prompt_tokens=5, cached_tokens=4, output_tokens=3, recomputed_tokens=2, preemptions=1)
    buffer.finished(3, SequenceFinished(SequenceId(9), FinishReason.STOP, usage, 0, "words"))
    (end,) = buffer.take_outputs().finished
    assert (end.handle, end.reason, end.message) == (3, types.FINISH_REASON_STOP, "words")
    assert end.HasField("stop_token_id"), "token 0 is a stop token like any other"
    assert end.stop_token_id == 0
    assert end.usage == types.Usage(
        prompt_tokens=5, cached_tokens=4, output_tokens=3, recomputed_tokens=2, preemptions=1
    )


def test_the_end_of_a_sequence_that_embeds_carries_its_vector_and_counts_it(buffer: OutputBuffer) -> None:
    end = SequenceFinished(SequenceId(9), FinishReason.STOP, Usage(), embedding=b"\0" * 16_384)
    buffer.finished(3, end)
    assert buffer.size > 16_384
    assert buffer.take_outputs().finished[0].embedding == end.embedding


def test_an_end_without_a_stop_token_names_none(buffer: OutputBuffer) -> None:
    buffer.finished(3, SequenceFinished(SequenceId(9), FinishReason.LENGTH, Usage()))
    assert not buffer.take_outputs().finished[0].HasField("stop_token_id")


NEWS: dict[str, Callable[[OutputBuffer], None]] = {
    "tokens": lambda buffer: buffer.tokens(1, 1, (1,), ()),
    "admitted": lambda buffer: buffer.admitted(1, admit(), Waited()),
    "preempted": lambda buffer: buffer.preempted(1),
    "finished": lambda buffer: buffer.finished(1, SequenceFinished(SequenceId(1), FinishReason.LENGTH, Usage())),
}


@pytest.mark.parametrize("kind", NEWS)
def test_each_kind_of_news_alone_is_worth_a_message(buffer: OutputBuffer, kind: str) -> None:
    assert not buffer
    NEWS[kind](buffer)
    assert buffer


def test_preemptions_are_reported_in_order(buffer: OutputBuffer) -> None:
    buffer.preempted(4)
    buffer.preempted(2)
    assert unpack_u32(buffer.take_outputs().preempted) == [4, 2]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_has_its_value_on_the_wire(buffer: OutputBuffer, reason: FinishReason) -> None:
    buffer.finished(1, SequenceFinished(SequenceId(1), reason, Usage()))
    assert types.FinishReason.Name(buffer.take_outputs().finished[0].reason) == f"FINISH_REASON_{reason.name}"


@pytest.mark.parametrize("reason", list(MissReason))
def test_every_miss_reason_has_its_value_on_the_wire(buffer: OutputBuffer, reason: MissReason) -> None:
    buffer.admitted(1, admit(miss_reason=reason), Waited())
    assert types.MissReason.Name(buffer.take_outputs().admitted[0].miss_reason) == f"MISS_REASON_{reason.name}"


def test_an_admission_says_what_was_fetched_before_it(buffer: OutputBuffer) -> None:
    buffer.admitted(1, admit(fetched=Fetched(47, 64, 0.5, "worker-1")), Waited())
    buffer.admitted(2, admit(), Waited())
    first, second = buffer.take_outputs().admitted
    assert first.fetched == pb.Fetched(blocks=47, asked=64, seconds=0.5, source="worker-1")
    assert not second.HasField("fetched")


def test_a_start_says_how_long_it_waited_and_for_whom_the_worker_computed(buffer: OutputBuffer) -> None:
    buffer.started(3, Started(SequenceId(9), 0.25, 2048, "huge", Loaded(47, 0.5), 1.5))
    assert buffer
    assert list(buffer.take_outputs().started) == [
        pb.SequenceStarted(
            handle=3,
            wait_seconds=0.25,
            ahead_tokens=2048,
            ahead_of="huge",
            loaded_blocks=47,
            load_seconds=0.5,
            spared_seconds=1.5,
        )
    ]
    assert not buffer.take_outputs().started


def test_a_delay_says_what_held_the_sequence_up(buffer: OutputBuffer) -> None:
    buffer.delayed(3, compiled=1.5)
    buffer.delayed(4, stalled=2.0, away=0.5)
    assert buffer
    assert list(buffer.take_outputs().delayed) == [
        pb.SequenceDelayed(handle=3, compile_seconds=1.5),
        pb.SequenceDelayed(handle=4, stalled_seconds=2.0, manager_away_seconds=0.5),
    ]
    assert not buffer.take_outputs().delayed


def test_each_turn_of_the_engine_keeps_its_time_in_a_message_of_several(buffer: OutputBuffer) -> None:
    """A turn that put out nothing of this stream is not named."""
    buffer.begin_turn(10.0, 0.5)
    buffer.tokens(1, 1, (10,), ())
    buffer.begin_turn(10.5, 0.5)
    buffer.begin_turn(11.0, 2.0)
    buffer.admitted(2, admit(), Waited())
    buffer.started(2, Started(SequenceId(9), 0.25, 0, ""))
    buffer.tokens(2, 1, (11,), ())
    buffer.delayed(1, stalled=1.0)
    buffer.finished(1, SequenceFinished(SequenceId(1), FinishReason.LENGTH, Usage()))
    taken = buffer.take_outputs()
    assert list(taken.turns) == [
        pb.EngineTurn(at_seconds=10.0, lost_seconds=0.5, first_row=0),
        pb.EngineTurn(at_seconds=11.0, lost_seconds=2.0, first_row=1),
    ]
    said = (taken.admitted, taken.started, taken.delayed, taken.finished)
    assert [each[0].turn for each in said] == [2, 2, 2, 2]


def test_what_is_put_out_once_more_has_no_time(buffer: OutputBuffer) -> None:
    buffer.begin_turn(10.0, 0.5)
    buffer.tokens(1, 1, (10,), ())
    buffer.begin_turn(0.0, 0.0)
    buffer.tokens(1, 2, (20,), ())
    assert [(turn.at_seconds, turn.first_row) for turn in buffer.take_outputs().turns] == [(10.0, 0), (0.0, 1)]
    buffer.tokens(1, 2, (21,), ())
    assert not buffer.take_outputs().turns


def test_a_message_that_is_full_within_a_turn_leaves_its_time_to_the_next_one(buffer: OutputBuffer) -> None:
    buffer.begin_turn(10.0, 0.5)
    tokens = (7,) * 20_000
    for handle in (1, 2, 3):
        buffer.tokens(1, handle, tokens, ())
    messages = [buffer.take_outputs(), buffer.take_outputs()]
    assert [len(each.turns) for each in messages] == [1, 1]
    assert not buffer
