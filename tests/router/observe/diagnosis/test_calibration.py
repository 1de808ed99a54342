"""Predictions joined with what happened, and their errors: exact values on made-up records."""

from __future__ import annotations

from collections.abc import Sequence

from common.contracts.types import Candidate, Decision, DecisionKind
from router.observe.diagnosis.calibration import Measure, Pair, calibrations, predictions
from router.observe.diagnosis.outcome import Outcome, figures_of, texts_of


def route(
    request: str, at: int = 1, worker: str = "w0", queue: float = 0.25, prefill: float = 0.5, hits: float = 2.0
) -> Decision:
    terms = (("queue_delay", queue), ("prefill", prefill), ("decode_pressure", 9.0))
    chosen = Candidate(worker, queue + prefill + 9.0, terms, figures=(("hit_blocks", hits),))
    other = Candidate("other", 99.0, (("queue_delay", 90.0), ("prefill", 9.0)))
    return Decision(f"d{at}", DecisionKind.ROUTING, at, worker, request, (other, chosen), worker=worker)


def end(request: str, at: int = 100, **changed: object) -> Decision:
    before = (("queue", 4.0), ("blocks", 0.125), ("prefill_wait", 0.25), ("prefill", 1.0))
    values = {"before": before, "has_first_token": True, "block_size": 16, "cached_tokens": 48} | changed
    outcome = Outcome(ended="length", **values)  # type: ignore[arg-type]
    words, figures = texts_of(outcome), figures_of(outcome)
    return Decision(f"e{at}", DecisionKind.OUTCOME, at, "length", request, reasons=words, figures=figures)


def requests_of(records: Sequence[Decision]) -> list[str]:
    return [each.request_id for each in predictions(records)]


def test_a_choice_is_joined_with_the_end_of_its_request() -> None:
    (found,) = predictions([end("r1"), route("r1", at=7)])
    assert (found.request_id, found.worker, found.time_ns) == ("r1", "w0", 7)
    assert found.pairs == {
        Measure.WAIT: Pair(0.25, 0.375),
        Measure.HITS: Pair(32.0, 48.0),
        Measure.PREFILL: Pair(0.5, 1.0),
        Measure.FIRST_TOKEN: Pair(0.75, 1.375),  # without the 4 s in the router's queue, before the choice
    }


def test_a_fetch_is_before_the_first_token_and_what_it_brings_counts_as_hits() -> None:
    terms = (("queue_delay", 0.25), ("fetch", 0.125), ("prefill", 0.5), ("decode_pressure", 9.0))
    chosen = Candidate("w0", 9.875, terms, figures=(("hit_blocks", 1.0), ("fetched_blocks", 2.0)))
    fetches = Decision("d1", DecisionKind.ROUTING, 1, "w0", "r1", (chosen,), worker="w0")
    before = (("fetch", 0.0625), ("prefill", 0.5))
    (found,) = predictions([fetches, end("r1", before=before)])
    assert found.pairs[Measure.FETCH] == Pair(0.125, 0.0625)
    assert (found.pairs[Measure.HITS], found.pairs[Measure.PREFILL]) == (Pair(48.0, 48.0), Pair(0.5, 0.5))
    assert found.pairs[Measure.FIRST_TOKEN] == Pair(0.875, 0.5625)
    (unforeseen,) = predictions([route("r1"), end("r1", before=before)])
    assert unforeseen.pairs[Measure.FETCH] == Pair(0.0, 0.0625)
    assert Measure.FETCH in [each.measure for each in calibrations([found])]


def test_the_last_choice_of_a_request_counts() -> None:
    waits = Decision("d3", DecisionKind.ROUTING, 3, "wait", "r1", (Candidate("w0", rejected="over limit"),))
    (found,) = predictions([route("r1", at=5, worker="w1"), waits, route("r1", at=1), end("r1")])
    assert (found.worker, found.time_ns) == ("w1", 5)


def test_requests_that_cannot_be_compared_do_not_count() -> None:
    records = [
        *(route("moved"), end("moved", moves=1)),
        *(route("no token"), end("no token", has_first_token=False)),
        route("not over"),
        end("no choice"),
        *(route("counts"), end("counts")),
    ]
    assert requests_of(records) == ["counts"]


def test_errors_are_medians_with_their_sign_and_sizes() -> None:
    actual = [0.5, 1.0, 1.5, 4.0]  # of a prefill that was predicted as 1 s each time
    records = [
        each
        for number, seconds in enumerate(actual)
        for each in (
            route(f"r{number}", at=number, prefill=1.0),
            end(f"r{number}", at=100 + number, before=(("prefill", seconds),)),
        )
    ]
    found = {each.measure: each for each in calibrations(predictions(records))}
    prefill = found[Measure.PREFILL]
    assert (prefill.requests, prefill.predicted_p50, prefill.actual_p50) == (4, 1.0, 1.0)
    assert (prefill.error_p50, prefill.off_p50, prefill.off_p90) == (-0.5, 0.5, 3.0)
    assert prefill.near == 0.75  # 4 s is not within a factor of two
    assert (found[Measure.WAIT].actual_p50, found[Measure.WAIT].near) == (0.0, 0.0)


def test_times_below_a_millisecond_are_near_each_other_and_hits_must_be_within_a_factor() -> None:
    records = [
        route("r1", queue=0.0, hits=0.0),
        end("r1", cached_tokens=0, before=(("blocks", 0.0009), ("prefill", 0.5))),
        route("r2", at=2, queue=0.0, hits=1.0),
        end("r2", at=101, cached_tokens=48, before=(("blocks", 0.003), ("prefill", 0.5))),
    ]
    found = {each.measure: each.near for each in calibrations(predictions(records))}
    assert found == {Measure.WAIT: 0.5, Measure.HITS: 0.5, Measure.PREFILL: 1.0, Measure.FIRST_TOKEN: 1.0}


def test_nothing_is_calibrated_by_no_requests() -> None:
    assert calibrations(predictions([])) == ()
