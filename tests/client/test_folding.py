"""Events gathered into a completion, whole and half."""

from __future__ import annotations

from common.contracts.types import FinishReason, MissReason, TokenLogprobs, Usage
from quire.client import Chunk, Timings
from quire.client.folding import Fold
from quire.inference.v1 import inference_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.fake_router import HELLO, TRACE_ID, admitted, finished, tokens


def test_an_answer_is_its_events_together() -> None:
    fold = Fold()
    assert [fold.take(event) for event in HELLO] == [
        None,
        Chunk(0, "Hel", (1, 2)),
        Chunk(0, "lo", (3,)),
        Chunk(0, "", (), finish_reason=FinishReason.STOP),
    ]
    done = fold.completion()
    assert fold.complete
    assert (done.text, done.token_ids, done.finish_reason) == ("Hello", (1, 2, 3), FinishReason.STOP)
    assert (done.request_id, done.worker_id, done.decision_id, done.trace_id) == ("r1", "worker-0", "d1", TRACE_ID)
    assert (done.prompt_tokens, done.cached_tokens, done.seed, done.queue_seconds) == (5, 4, 9, 0.25)
    assert done.miss_reason is MissReason.NEVER_SEEN
    assert done.usage == Usage(prompt_tokens=5, cached_tokens=4, output_tokens=3)
    assert done.timings == Timings(time_to_first_token=0.5, total_seconds=1.5)


def test_outputs_are_kept_apart_by_their_index() -> None:
    fold = Fold(2)
    for event in (admitted(), tokens("b", 8, index=1), tokens("a", 7), finished(1, index=1)):
        fold.take(event)
    assert not fold.complete
    first, second = fold.completion().outputs
    assert (first.index, first.text, first.token_ids, first.finish_reason) == (0, "a", (7,), None)
    assert (second.index, second.text, second.token_ids, second.finish_reason) == (1, "b", (8,), FinishReason.STOP)


def test_what_stopped_an_output_is_a_string_or_a_token() -> None:
    for by, wanted in (({"stop_string": "end"}, "end"), ({"stop_token_id": 2}, 2), ({}, None)):
        fold = Fold()
        fold.take(finished(1, **by))
        assert fold.completion().outputs[0].stopped_by == wanted


def test_logprobs_come_with_their_tokens() -> None:
    entry = types.TokenLogprobs(token_id=7, logprob=-0.5, top_token_ids=[7, 8], top_logprobs=[-0.5, -1.5])
    fold = Fold()
    chunk = fold.take(pb.GenerateResponse(tokens=pb.Tokens(text="a", token_ids=[7], logprobs=[entry])))
    wanted = (TokenLogprobs(7, -0.5, ((7, -0.5), (8, -1.5))),)
    assert chunk == Chunk(0, "a", (7,), wanted)
    assert fold.completion().outputs[0].logprobs == wanted


def test_reasons_of_a_newer_server_do_not_break_an_answer() -> None:
    fold = Fold()
    fold.take(pb.GenerateResponse(admitted=pb.Admitted(miss_reason=99)))  # type: ignore[arg-type]
    fold.take(finished(1, reason=99))  # type: ignore[arg-type]
    assert fold.completion().finish_reason is FinishReason.ERROR


def test_nothing_has_begun_before_the_first_event() -> None:
    fold = Fold()
    assert not fold.begun
    assert (fold.completion().text, fold.completion().miss_reason) == ("", None)
