"""The rules on made-up records of one request: each cause, ties, early ends, and what a lost record changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.errors import CONTEXT_LENGTH_EXCEEDED, FieldViolation, InvalidRequest
from common.contracts.lease import AHEAD_REASON, FETCH_REASON, PARTIAL_REASON, RETENTION_REASON
from common.contracts.turns import BY_AGE
from common.contracts.types import Candidate, Decision, DecisionKind, ShortfallReason
from router.contracts.refusals import FAULTS, Refusal, refusal_record, wrong_request_record
from router.observe.diagnosis.causes import Cause
from router.observe.diagnosis.outcome import Outcome, Phase, figures_of, outcome_of, texts_of
from router.observe.diagnosis.request_history import request_history
from router.observe.diagnosis.rules import diagnose
from router.observe.diagnosis.verdict import Diagnosis, advised
from router.placement.routing import OTHERS_CHANGED

R = "r1"
CALM = Outcome(
    ended="length", worker="w0", miss="full_hit", has_first_token=True, started=True, prompt_tokens=100,
    cached_tokens=96, output_tokens=11, block_size=16, admissions=1, placements=1,
)  # fmt: skip

OR_UNREAD = "the network was slow, or one of the two did not read them"


def seconds(**phases: float) -> tuple[tuple[str, float], ...]:
    return tuple(phases.items())


def ended(outcome: Outcome) -> Decision:
    return Decision("end", DecisionKind.OUTCOME, 9_000, outcome.ended, R, (), texts_of(outcome),
                    figures=figures_of(outcome))  # fmt: skip


def routed(*options: Candidate, chosen: str = "w0", kind: DecisionKind = DecisionKind.ROUTING) -> Decision:
    return Decision(f"route-{kind}", kind, 1_000, chosen, R, options or (Candidate("w0", 0.1),))


def option(worker: str, cost: float, hits: int = 0) -> Candidate:
    terms = (("queue_delay", cost - 0.1), ("prefill", 0.1))
    return Candidate(worker, cost, terms, figures=(("hit_blocks", float(hits)),))


def granted(waited: float, beneficiary: str = "", number: int = 0) -> Decision:
    figures = (("waited_seconds", waited), ("hit_blocks", 6.0), ("fresh_blocks", 1.0))
    return Decision(f"grant-{number}", DecisionKind.GRANT, 3_000 + number, "6 shared and 1 fresh blocks", R, (),
                    ("full_hit",), beneficiary=beneficiary, figures=figures)  # fmt: skip


def short(reason: str = ShortfallReason.BLOCKS, head: str = "") -> Decision:
    holders = (
        Candidate("tenant blue", terms=(("blocks", 60.0), ("sequences", 3.0))),
        Candidate("r7", terms=(("blocks", 40.0),)),
    )
    figures = (("needed", 8.0), ("head_needed", 90.0), ("available", 20.0), ("num_blocks", 100.0))
    return Decision("short", DecisionKind.SHORTFALL, 2_000, "waits", R, holders, (reason,), beneficiary=head,
                    figures=figures)  # fmt: skip


def preempted(beneficiary: str = "r9") -> Decision:
    return Decision("preempt", DecisionKind.PREEMPTION, 5_000, R, R, (), ("a higher priority waits",), (), R,
                    beneficiary, (("blocks_freed", 7.0), ("tokens_lost", 30.0)))  # fmt: skip


def queued() -> Decision:
    full = Candidate("w0", rejected="over limit: 4 sequences of at most 4")
    return Decision("queued", DecisionKind.QUEUED, 500, "wait", R, (full,), figures=(("ahead", 2.0),))


def asked(outcome: Outcome | None, *records: Decision, unread: tuple[str, ...] = ()) -> Diagnosis:
    return diagnose(request_history(R, [*records, *([ended(outcome)] if outcome else [])], unread))


# ------------------------------------------------------------ time


def test_a_wait_for_blocks_names_who_held_them() -> None:
    slow = replace(CALM, before=seconds(queue=0.01, blocks=1.8, prefill=0.1), after=seconds(decode=0.3))
    found = asked(slow, routed(), short(), granted(1.8))
    assert found.verdict.cause is Cause.BLOCKS
    assert found.verdict.share == pytest.approx(1.8 / 1.91)
    assert found.verdict.sentence == (
        "94 % of the 1.9 s to the first token: it waited at w0 for 8 blocks, and 3 sequences of tenant blue with "
        "60 blocks held them (the most: r7)."
    )
    assert found.verdict.advice.anchor == "quireblocksshort"
    assert (found.prefix, found.missing) == (None, ())
    assert found.first_token_s == pytest.approx(1.91)
    assert found.total_s == pytest.approx(2.21)


def test_where_a_pool_counts_pages_the_words_say_pages() -> None:
    slow = replace(CALM, counts_pages=True, before=seconds(queue=0.01, blocks=1.8, prefill=0.1))
    found = asked(slow, routed(), short(), granted(1.8))
    assert "it waited at w0 for 8 pages, and 3 sequences of tenant blue with 60 pages held them" in (
        found.verdict.sentence
    )
    assert any("it needs 8 pages, 20 of 100 are free or cached" in each.sentence for each in found.steps)
    evicting = granted(1.8)
    found = asked(slow, routed(), short(), replace(evicting, figures=(*evicting.figures, ("evicted", 2.0))))
    assert any("after 1.8 s, 2 cached blocks evicted for it" in each.sentence for each in found.steps)
    found = asked(slow, routed(), short(ShortfallReason.BEHIND, head="huge"), granted(1.8))
    assert "goes first and needs 90 pages; 20 of 100 pages were free or cached" in found.verdict.sentence


def test_a_wait_behind_the_head_of_the_queue_names_the_head() -> None:
    slow = replace(CALM, before=seconds(blocks=1.8, prefill=0.1))
    found = asked(slow, routed(), short(ShortfallReason.BEHIND, head="huge"), granted(1.8))
    assert found.verdict.sentence == (
        "95 % of the 1.9 s to the first token: it waited at w0 behind huge, which goes first and needs 90 blocks; "
        "20 of 100 blocks were free or cached."
    )


def test_a_wait_for_an_adapter_names_it_and_the_worker_that_loads_it() -> None:
    slow = replace(CALM, before=seconds(adapter=0.9, prefill=0.1), adapter="sql", adapter_worker="worker-1")
    found = asked(slow, routed(), granted(0.0))
    assert found.verdict.cause is Cause.ADAPTER
    assert found.verdict.sentence == (
        "90 % of the 1.0 s to the first token: it waited for adapter sql to load on worker-1."
    )
    found = asked(replace(slow, adapter_wait="all 2 adapters in memory are in use"), routed(), granted(0.0))
    assert found.verdict.sentence == (
        "90 % of the 1.0 s to the first token: it waited for adapter sql to load on worker-1, which had no room: "
        "all 2 adapters in memory are in use."
    )


def test_a_wait_for_a_checkpoint_names_whose_it_is() -> None:
    slow = replace(CALM, before=seconds(blocks=1.8, prefill=0.1))
    found = asked(slow, routed(), short(ShortfallReason.CHECKPOINT, head="twin"), granted(1.8))
    assert found.verdict.sentence == (
        "95 % of the 1.9 s to the first token: it waited at w0 while twin computed what both begin with, to go on from "
        "its checkpoint."
    )
    assert any("waits behind twin (for a checkpoint of another sequence)" in each.sentence for each in found.steps)


def test_a_wait_for_blocks_without_the_managers_record_is_not_known() -> None:
    slow = replace(CALM, before=seconds(blocks=1.8, prefill=0.1))
    found = asked(slow, routed(), unread=("the KV manager: no answer",))
    assert found.verdict.cause is Cause.NOT_KNOWN
    assert found.verdict.sentence == (
        "Not known for 95 % of the 1.9 s to the first token: it waited at w0 to be admitted, and the KV manager's "
        "records of that could not be read (the KV manager: no answer)."
    )
    assert found.missing == (
        "records of the KV manager: no answer",
        "the cause of 1.8 s waiting for blocks",
        "a grant of blocks: the KV manager's record of it is gone",
    )


def test_a_manager_that_grants_at_once_is_reached_by_slow_messages() -> None:
    slow = replace(CALM, before=seconds(blocks=1.8, prefill=0.1))
    assert asked(slow, routed(), granted(0.001)).verdict.cause is Cause.MESSAGES


def test_a_wait_for_blocks_below_half_of_a_phase_has_its_own_part() -> None:
    slow = replace(CALM, before=seconds(blocks=2.0, prefill=0.1))
    found = asked(slow, routed(), short(), granted(0.9))
    assert [(each.phase, each.seconds, each.cause) for each in found.phases] == [
        (Phase.BLOCKS, 0.9, Cause.BLOCKS),
        (Phase.MESSAGES, pytest.approx(1.1), Cause.MESSAGES),
        (Phase.PREFILL, 0.1, Cause.PREFILL),
    ]
    assert found.verdict.sentence == (
        "52 % of the 2.1 s to the first token: the KV manager answered w0 late: it stood still, or the messages "
        "between them were slow; it granted the blocks after a wait of 900 ms."
    )
    assert found.verdict.evidence[1].startswith("43 % (900 ms): it waited at w0 for 8 blocks")


def test_a_manager_that_was_away_is_named_before_its_grant_and_in_a_running_stream() -> None:
    waited = replace(CALM, before=seconds(blocks=0.2, manager_away=5.0, prefill=0.1))
    found = asked(waited, routed(), granted(0.0)).verdict
    assert found.sentence == (
        "94 % of the 5.3 s to the first token: it lacked blocks at w0, whose KV manager did not answer for 5.0 s."
    )
    assert (found.cause, found.advice.anchor) == (Cause.MANAGER_AWAY, "quiremanagerdown")
    runs = replace(CALM, before=seconds(prefill=0.1), after=seconds(decode=2.0, manager_away=5.0))
    assert asked(runs, routed(), granted(0.0)).verdict.sentence == (
        "70 % of its 7.1 s: it lacked blocks at w0, whose KV manager did not answer for 5.0 s."
    )


def test_a_begun_prompt_that_lacks_blocks_says_so() -> None:
    slow = replace(CALM, before=seconds(blocks=0.2, prefill=1.0, stalled=3.0))
    part = replace(granted(0.2), figures=(("waited_seconds", 0.2), ("lacking_blocks", 60.0)))
    found = asked(slow, routed(), short(), part).verdict
    assert found.sentence == (
        "71 % of the 4.2 s to the first token: it began with a part of its prompt's blocks, and waited at w0 for the "
        "other 60; 3 sequences of tenant blue with 60 blocks held them (the most: r7)."
    )
    assert (found.cause, found.advice.anchor) == (Cause.STALLED, "quireblocksshort")
    in_pages = asked(replace(slow, counts_pages=True), routed(), short(), part).verdict
    assert "a part of its prompt's blocks, and waited at w0 for 60 pages more; 3 sequences" in in_pages.sentence
    runs = replace(CALM, before=seconds(prefill=0.1), after=seconds(decode=0.5, stalled=3.0))
    assert asked(runs, routed(), granted(0.0)).verdict.sentence == (
        "83 % of its 3.6 s: it ran at w0, which had no block for its next tokens: the KV manager had none free, or "
        "answered late."
    )


def test_a_constraint_that_compiles_long_is_named() -> None:
    slow = replace(CALM, before=seconds(queue=0.01, constraint=2.0, prefill=0.1))
    found = asked(slow, routed(), granted(0.0)).verdict
    assert found.sentence == (
        "95 % of the 2.1 s to the first token: its constraint (a schema, a regular expression or a grammar) was "
        "compiled before its first token."
    )
    assert (found.cause, found.advice.anchor) == (Cause.CONSTRAINT, "long-constraint")


def test_a_low_priority_that_others_pass_says_how_many_went_first() -> None:
    at_router = replace(CALM, queued=True, passed_by=12, before=seconds(queue=3.0, prefill=0.1))
    found = asked(at_router, queued(), routed(), granted(0.0)).verdict
    assert found.sentence == (
        "97 % of the 3.1 s to the first token: 12 requests of a higher priority went first while it waited for a "
        "worker: no worker could take it, with 2 requests before it (w0: over limit: 4 sequences of at most 4)."
    )
    assert (found.cause, found.advice.anchor) == (Cause.OUTRANKED, "higher-priority")
    assert asked(at_router, routed(), granted(0.0)).verdict.cause is Cause.NOT_KNOWN
    at_manager = replace(CALM, before=seconds(blocks=1.8, prefill=0.1))
    passed = replace(granted(1.8), figures=(("waited_seconds", 1.8), ("passed_by", 3.0)))
    assert asked(at_manager, routed(), short(), passed).verdict.sentence == (
        "95 % of the 1.9 s to the first token: 3 sequences of a higher priority went first at w0: it waited at w0 for "
        "8 blocks, and 3 sequences of tenant blue with 60 blocks held them (the most: r7)."
    )
    assert asked(at_manager, routed(), passed).verdict.cause is Cause.NOT_KNOWN


def test_a_request_that_only_decoded_slowly_is_held_against_what_is_usual() -> None:
    slow = replace(CALM, usual_gap=0.008, longest_gap=0.5, before=seconds(blocks=0.03, prefill=0.1),
                   after=seconds(decode=0.4))  # fmt: skip
    found = asked(slow, routed(), granted(0.0)).verdict
    assert found.sentence == (
        "75 % of its 530 ms: w0 sampled 10 further tokens slowly, 40 ms from one to the next, where 8.0 ms is usual "
        "there (longest inter-token latency: 500 ms)."
    )
    assert (found.cause, found.advice.anchor) == (Cause.SLOW_DECODE, "quireslowtokens")
    usual = asked(replace(slow, usual_gap=0.03, before=seconds(prefill=0.01)), routed(), granted(0.0)).verdict
    assert usual.sentence == "Nothing held it up: 98 % of its 410 ms: w0 sampled 10 further tokens, 40 ms each."
    four = replace(slow, sequences=4, output_tokens=44)
    assert four.decode_gap == pytest.approx(0.04), "its sequences sample at once"


def test_a_great_wait_beside_the_work_is_named_too() -> None:
    half = replace(CALM, preemptions=1, before=seconds(prefill=0.1), after=seconds(decode=2.0, preempted=1.0))
    found = asked(half, routed(), granted(0.0), preempted()).verdict
    assert found.sentence == (
        "65 % of its 3.1 s: w0 sampled 10 further tokens, 200 ms each; 32 % (1.0 s): it was preempted: its 7 blocks "
        "went to r9 (a higher priority waits)."
    )
    assert (found.cause, found.advice.anchor) == (Cause.DECODE, "quirepreempting")
    quick = replace(half, before=(), after=seconds(decode=0.1, preempted=0.05))
    assert asked(quick, routed(), granted(0.0), preempted()).verdict.sentence == (
        "67 % of its 150 ms: w0 sampled 10 further tokens, 10 ms each."
    )


def test_a_wait_for_a_worker_says_why_each_was_left_out() -> None:
    slow = replace(CALM, queued=True, before=seconds(queue=3.0, prefill=0.1))
    found = asked(slow, queued(), routed(), granted(0.0))
    assert found.verdict.sentence == (
        "97 % of the 3.1 s to the first token: no worker could take it, with 2 requests before it (w0: over limit: "
        "4 sequences of at most 4)."
    )
    assert asked(slow, routed(), granted(0.0)).verdict.cause is Cause.NOT_KNOWN
    assert asked(replace(slow, queued=False), routed(), granted(0.0)).verdict.cause is Cause.ROUTER


def test_prompts_of_others_before_it_are_named() -> None:
    slow = replace(CALM, before=seconds(prefill_wait=2.0, prefill=0.1), ahead_tokens=3000, ahead_of="huge")
    found = asked(slow, routed(), granted(0.0))
    assert found.verdict.sentence == (
        "95 % of the 2.1 s to the first token: it had its blocks, and w0 computed 3,000 tokens of other requests "
        "first, most of them for huge."
    )


def test_a_preemption_names_the_beneficiary_and_the_reason() -> None:
    slow = replace(CALM, preemptions=1, before=seconds(prefill=0.1), after=seconds(decode=0.2, preempted=1.7))
    found = asked(slow, routed(), granted(0.0), preempted())
    assert found.verdict.sentence == (
        "85 % of its 2.0 s: it was preempted: its 7 blocks went to r9 (a higher priority waits)."
    )
    assert "not known" in asked(slow, routed(), granted(0.0)).verdict.sentence


def test_of_several_preemptions_the_one_that_cost_most_is_named() -> None:
    slow = replace(CALM, preemptions=3, admissions=4, before=seconds(prefill=0.1), after=seconds(preempted=3.5))
    second = 1_000_000_000
    times = ((1, 1.5, "r7"), (2, 4.5, "r8"), (5, 5.5, "r9"))
    lost = [
        replace(preempted(name), decision_id=name, time_ns=int(at * second), figures=(("blocks_freed", float(at)),))
        for at, _, name in times
    ]
    again = [replace(granted(0.1, number=number), time_ns=int(at * second)) for number, (_, at, _) in enumerate(times)]
    end = replace(ended(slow), time_ns=6 * second)
    found = diagnose(request_history(R, [routed(), granted(0.0, number=9), *lost, *again, end]))
    assert found.verdict.sentence == (
        "97 % of its 3.6 s: it was preempted 3 times; what cost most, 2.5 s, was that its 2 blocks went to r8 "
        "(a higher priority waits)."
    )


@pytest.mark.parametrize(
    ("phase", "cause", "words"),
    [
        ("reading", Cause.READING, "the router read the request and made it into 100 tokens"),
        (
            "router_still",
            Cause.ROUTER_STILL,
            "the router stood still: its process was stopped, had no processor, or was held up by one long task",
        ),
        (
            "on_the_way",
            Cause.ON_THE_WAY,
            f"messages between the router and w0 took so long: {OR_UNREAD}",
        ),
        (
            "worker_still",
            Cause.WORKER_STILL,
            "w0 stood still: its process was stopped or had no processor, or its steps took many times their usual",
        ),
        ("sending", Cause.SENDING, "w0 had finished, and the router still wrote the output"),
    ],
)
def test_who_was_late_around_the_work_is_named(phase: str, cause: Cause, words: str) -> None:
    slow = replace(CALM, before=((phase, 1.2), ("prefill", 0.3)), after=seconds(decode=0.1))
    found = asked(slow, routed(), granted(0.0)).verdict
    assert (found.cause, found.sentence) == (cause, f"80 % of the 1.5 s to the first token: {words}.")
    late = replace(CALM, before=seconds(prefill=0.3), after=((phase, 1.2), ("decode", 0.1)))
    assert asked(late, routed(), granted(0.0)).verdict.sentence == f"75 % of its 1.6 s: {words}."


def test_what_may_have_lain_unread_at_the_router_is_told_after_the_verdict() -> None:
    late = replace(CALM, unread_before=1.4, before=seconds(prefill=0.3))
    assert asked(late, routed(), granted(0.0)).verdict.sentence == (
        "Nothing held it up: 100 % of its 300 ms: w0 computed 4 tokens of its prompt, 75 ms each. The router had stood "
        "still for up to 1.4 s when the request came: before these 300 ms it may have lain unread for as long."
    )
    long = replace(late, before=seconds(prefill=30.0))
    assert "unread" not in asked(long, routed(), granted(0.0)).verdict.sentence


def test_a_lost_worker_and_a_slow_client_are_named() -> None:
    moved = replace(CALM, moves=1, placements=2, after=seconds(moved=3.0, decode=0.2))
    migration = replace(routed(chosen="w1", kind=DecisionKind.MIGRATION), time_ns=6_000, reasons=("connection lost",))
    found = asked(moved, routed(), migration, granted(0.0)).verdict
    assert (found.cause, "it lost w0 (connection lost) and went on at w1" in found.sentence) == (
        Cause.WORKER_LOST,
        True,
    )
    drain = replace(migration, reasons=("drain: its worker hands its sequences over",))
    assert "it left w0 (drain: its worker hands" in asked(moved, routed(), drain, granted(0.0)).verdict.sentence
    slow = replace(CALM, client_longest=4.0, after=seconds(client=8.0, decode=0.2))
    assert asked(slow, routed(), granted(0.0)).verdict.cause is Cause.SLOW_CLIENT
    busy = asked(replace(slow, client_longest=0.05), routed(), granted(0.0)).verdict
    assert (busy.cause, "client or for the router's own event loop" in busy.sentence) == (Cause.NOT_KNOWN, True)


def test_a_request_that_nothing_held_up_says_so() -> None:
    quick = replace(CALM, before=seconds(queue=0.001, blocks=0.002, prefill=0.02), after=seconds(decode=0.2))
    found = asked(quick, routed(), granted(0.0)).verdict
    assert found.sentence == "Nothing held it up: 90 % of its 223 ms: w0 sampled 10 further tokens, 20 ms each."


def test_two_causes_of_one_size_are_not_decided() -> None:
    tie = replace(CALM, queued=True, before=seconds(queue=1.0, prefill_wait=1.01), ahead_tokens=7)
    found = asked(tie, queued(), routed(), granted(0.0)).verdict
    assert found.cause is Cause.NOT_KNOWN
    assert found.sentence.startswith("Not known which of two causes counts more in the 2.0 s to the first token: 50 %")


def test_time_without_a_cause_that_could_be_the_greatest_is_not_decided() -> None:
    hidden = replace(CALM, queued=True, before=seconds(queue=1.0, prefill_wait=1.2, prefill=0.3), ahead_tokens=7)
    assert asked(hidden, queued(), routed(), granted(0.0)).verdict.cause is Cause.HEAD_OF_LINE
    assert asked(hidden, routed(), granted(0.0)).verdict.cause is Cause.NOT_KNOWN


# ------------------------------------------------------------ early ends


def test_a_refusal_at_the_door_has_the_limit_and_the_numbers() -> None:
    refusal = Decision("no", DecisionKind.REJECTION, 1, "router.queue", R, (), ("8 requests wait; at most 8",))
    found = asked(None, refusal).verdict
    assert found.sentence == "Refused at once by the limit router.queue: 8 requests wait; at most 8."
    assert (found.cause, found.advice.anchor) == (Cause.REFUSED, "quirerefusing")


def test_a_tenant_over_its_own_limit_is_told_so_and_not_to_add_workers() -> None:
    words = "at most 1 requests a minute"
    refusal = Decision("no", DecisionKind.REJECTION, 1, "tenant a.requests_per_minute", R, (), (words,))
    found = asked(None, refusal).verdict
    assert found.sentence == f"Refused at once with RATE_LIMITED by the limit tenant a.requests_per_minute: {words}."
    assert (found.cause, found.advice.anchor) == (Cause.RATE_LIMITED, "rate-limited")


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("UNAUTHENTICATED", Cause.WRONG_REQUEST),
        ("MODEL_NOT_FOUND", Cause.WRONG_REQUEST),
        ("CONTEXT_LENGTH_EXCEEDED", Cause.TOO_LARGE),
        ("RATE_LIMITED", Cause.RATE_LIMITED),
        ("OVERLOADED", Cause.REFUSED),
        ("UNAVAILABLE", Cause.NO_WORKER),
        ("DEADLINE_EXCEEDED", Cause.DEADLINE),
        ("CANCELLED", Cause.CLIENT_GONE),
        ("INTERNAL", Cause.FAILED),
    ],
)
def test_what_a_face_refuses_is_told_with_its_reason(reason: str, cause: Cause) -> None:
    record = refusal_record(Refusal("openai", "/v1/x", "400", reason, R), "no", 1)
    found = asked(None, record).verdict
    assert found.sentence == f"Refused at once with {reason}: {FAULTS[reason]}; 400 to openai /v1/x."
    assert found.cause is cause


def test_a_prompt_that_is_too_long_is_told_with_the_numbers() -> None:
    words = "This model's maximum context length is 32 tokens. However, the prompt has 33 tokens"
    error = InvalidRequest(FieldViolation("prompt", words, CONTEXT_LENGTH_EXCEEDED), FieldViolation("input", "is odd"))
    found = asked(None, wrong_request_record("no", 1, R, "", error)).verdict
    assert found.sentence == f"Refused at once, because it does not fit the context of the model: prompt: {words}."
    assert (found.cause, found.advice.anchor) == (Cause.TOO_LARGE, "too-large")


def test_a_wrong_request_names_its_fields_and_quotes_no_text_of_the_client() -> None:
    fields = FieldViolation("sampling.top_p", "is 2; expected at most 1"), FieldViolation("json_schema", "says 'mine'")
    found = asked(None, wrong_request_record("no", 1, R, "", InvalidRequest(*fields))).verdict
    assert found.sentence == (
        "Refused at once, because fields of it are wrong: sampling.top_p: is 2; expected at most 1; json_schema "
        "(the answer to the client says what is wrong)."
    )
    assert (found.cause, found.advice.anchor) == (Cause.WRONG_REQUEST, "wrong-request")


def test_a_deadline_that_passed_says_what_took_the_time() -> None:
    late = replace(CALM, ended="DEADLINE_EXCEEDED", failure="deadline exceeded before ...", has_first_token=False,
                   admissions=0, miss="", before=seconds(blocks=1.9, queue=0.1))  # fmt: skip
    found = asked(late, routed(), short()).verdict
    assert (found.cause, found.advice.anchor) == (Cause.DEADLINE, "quireblocksshort")
    assert found.sentence.startswith("Its deadline passed after 2.0 s. 95 % of them: it waited at w0 for 8 blocks")


def test_a_stream_that_ends_while_its_worker_is_silent_blames_no_step() -> None:
    gone = replace(CALM, ended="CANCELLED", failure="the client went away", before=seconds(prefill=0.1),
                   after=seconds(decode=0.4, silent=8.0))  # fmt: skip
    found = asked(gone, routed(), granted(0.0)).verdict
    assert found.sentence == (
        "Its client went away after 8.5 s. Not known for 94 % of them: w0 put out nothing for so long, until the end, "
        "and had not said why yet."
    )


def test_a_wait_without_any_record_of_a_manager_says_that_it_may_have_been_away() -> None:
    late = replace(CALM, ended="DEADLINE_EXCEEDED", failure="deadline exceeded before ...", has_first_token=False,
                   admissions=0, miss="", before=seconds(blocks=1.9, queue=0.1))  # fmt: skip
    assert asked(late, routed()).verdict.sentence == (
        "Its deadline passed after 2.0 s. Not known for 95 % of them: it waited at w0 to be admitted, and no KV "
        "manager has a record of that: it may have been away."
    )


def test_a_hopeless_deadline_says_the_prediction() -> None:
    words = "0.100 s are left, and the first token is predicted in 2.300 s"
    late = Outcome(ended="DEADLINE_EXCEEDED", failure=words, before=seconds(queue=0.001))
    found = asked(late, routed()).verdict
    assert found.cause is Cause.HOPELESS_DEADLINE
    assert found.sentence == f"Refused, because its deadline was hopeless, after 1.0 ms: {words}."


def test_a_deadline_that_became_hopeless_in_the_queue_says_that_it_waited() -> None:
    words = "0.100 s are left, and the first token is predicted in 2.300 s even at a worker that is free, and none is"
    late = Outcome(ended="DEADLINE_EXCEEDED", failure=words, before=seconds(queue=4.0))
    found = asked(late, routed()).verdict
    assert found.cause is Cause.HOPELESS_DEADLINE
    assert found.sentence == f"It waited for a worker until its deadline was hopeless, after 4.0 s: {words}."


@pytest.mark.parametrize(
    ("reason", "failure", "cause"),
    [
        ("CANCELLED", "the client went away", Cause.CLIENT_GONE),
        ("OVERLOADED", "router.output: the client reads too slowly: 9 bytes", Cause.SLOW_CLIENT),
        ("OVERLOADED", "router.queue: full", Cause.REFUSED),
        ("RATE_LIMITED", "tenant blue.streams", Cause.RATE_LIMITED),
        ("INVALID_FIELD", "prompt and output fit no worker", Cause.TOO_LARGE),
        ("INVALID_FIELD", "json_schema: cannot be followed: too deep", Cause.WRONG_REQUEST),
        ("UNAVAILABLE", "no worker for 10 s", Cause.NO_WORKER),
        ("ENGINE_FAILURE", "2 workers broke with this request", Cause.FAILED),
        ("INVALID_ARGUMENT", "prompt and output fit no worker", Cause.TOO_LARGE),
        ("INVALID_ARGUMENT", "json_schema: cannot be followed: too deep", Cause.WRONG_REQUEST),
    ],
)
def test_each_reason_of_an_error_has_a_cause(reason: str, failure: str, cause: Cause) -> None:
    assert asked(replace(CALM, ended=reason, failure=failure, before=seconds(prefill=1.0))).verdict.cause is cause


def test_a_request_that_has_not_ended_is_not_known_yet_and_its_last_record_is_told() -> None:
    found = asked(None, routed(), short())
    assert found.verdict.cause is Cause.NOT_KNOWN
    assert found.verdict.sentence.startswith("Not known: the request has not ended yet, or the record of its end is")
    assert "it needs 8 blocks, 20 of 100 are free or cached" in found.verdict.sentence
    assert [step.offset for step in found.steps] == [0.0, 1e-6]


def test_of_several_requests_with_one_id_the_last_one_is_meant() -> None:
    first = replace(ended(replace(CALM, failure="gone", ended="CANCELLED")), decision_id="first", time_ns=100)
    found = asked(replace(CALM, before=seconds(prefill=1.0)), first, routed(), granted(0.0))
    assert found.verdict.cause is Cause.PREFILL
    assert found.missing == ("which of 2 requests with this id is meant: this is the last one",)


def test_the_step_of_a_grant_gives_all_its_reasons() -> None:
    found = asked(CALM, routed(), replace(granted(0.0), reasons=("full_hit", "passes one that lacks blocks")))
    assert found.steps[1].sentence.endswith("(its prefix: full_hit; passes one that lacks blocks)")


# ------------------------------------------------------------ the prefix


UNSEEN = replace(CALM, miss="never_seen", cached_tokens=0, before=seconds(prefill=1.0))
HIT = (option("w0", 0.2), option("w1", 2.4, hits=6))


@pytest.mark.parametrize(
    ("outcome", "options", "cause", "words"),
    [
        (replace(UNSEEN, miss="below_block"), (), Cause.BELOW_BLOCK, "shorter than a block, which has 16 tokens"),
        (replace(UNSEEN, miss="disabled"), (), Cause.CACHE_OFF, "was not used"),
        (replace(UNSEEN, miss="windowed"), (), Cause.WINDOW_MISSING, "another request was computing that, or it"),
        (replace(UNSEEN, other_domain_tokens=64, other_domain="blue"), (), Cause.OTHER_DOMAIN, "cache domain (blue)"),
        (replace(UNSEEN, miss="evicted"), (), Cause.EVICTED, "to make room for r5"),
        (UNSEEN, (option("w0", 0.2, hits=5),), Cause.STALE_INDEX, "w0 was expected to hold 80 tokens"),
        (UNSEEN, HIT, Cause.HOT_WORKER, "w1 holds 96 tokens of it and was busy: predicted 2.4 s, 2.3 s of it queue"),
        (replace(UNSEEN, index_answered=False), (option("w0", 1), option("w1", 2)), Cause.NOT_KNOWN, "of its look-up"),
        (replace(UNSEEN, index_answered=False), (), Cause.NEVER_SEEN, "no worker had its first 16 tokens"),
        (UNSEEN, (), Cause.NEVER_SEEN, "no worker had its first 16 tokens"),
        (replace(UNSEEN, miss="diverged_at", cached_tokens=48, diverged_at=3), (), Cause.DIVERGED, "from token 48 on"),
    ],
)
def test_each_cause_of_a_miss(outcome: Outcome, options: tuple[Candidate, ...], cause: Cause, words: str) -> None:
    found = asked(outcome, routed(*options), granted(0.0, beneficiary="r5")).prefix
    assert found is not None
    assert found.cause is cause
    assert words in found.sentence
    assert found.sentence.startswith(f"{outcome.cached_tokens} of 100 prompt tokens were cached: ")


WENT_ON = "and the router went on without it"
TOO_EARLY = "before all of the prompt was looked up"
THREE = "3 look-ups in a row failed in the 1.2 s before, the last one: no answer within 20 ms"
UNTOLD = "so the router could not know who holds it; w0 does not"


@pytest.mark.parametrize(
    ("index", "cause", "words"),
    [
        ("empty", Cause.NEVER_SEEN, "no worker had its first 16 tokens; w0 has not seen them since its start"),
        (
            "late: 20 ms",
            Cause.INDEX_SLOW,
            f"the prefix index in Redis did not answer within 20 ms, {WENT_ON}, {UNTOLD}",
        ),
        ("cut: 20 ms", Cause.INDEX_SLOW, f"the look-up in Redis ended at its limit of 20 ms, {TOO_EARLY}, {UNTOLD}"),
        ("failed: odd", Cause.INDEX_UNREACHABLE, f"the prefix index in Redis failed (odd), {UNTOLD}"),
        (f"skipped: {THREE}", Cause.INDEX_SKIPPED, f"the router did not ask Redis ({THREE}), {UNTOLD}"),
        ("lost", Cause.INDEX_LOST, f"the prefix index in Redis had lost its workers, {UNTOLD}"),
        ("off", Cause.NO_INDEX, f"the router has no prefix index, {UNTOLD}"),
    ],
)
def test_an_index_that_was_silent_is_blamed_for_what_it_did_alone(index: str, cause: Cause, words: str) -> None:
    outcome = replace(UNSEEN, index=index, index_answered=False)
    found = asked(outcome, routed(option("w0", 1), option("w1", 2)), granted(0.0)).prefix
    assert found is not None
    assert (found.cause, found.sentence) == (cause, f"0 of 100 prompt tokens were cached: {words}.")
    known = asked(replace(outcome, miss="evicted"), routed(option("w0", 1), option("w1", 2)), granted(0.0)).prefix
    assert known is not None
    assert known.cause is Cause.EVICTED, "the worker had it: what the index said does not count"


def test_a_look_up_at_its_limit_costs_its_limit() -> None:
    slow = replace(CALM, index="late: 20 ms", before=seconds(queue=0.002, lookup=0.02, prefill=0.005))
    assert asked(slow, routed(), granted(0.0)).verdict.sentence == (
        "74 % of the 27 ms to the first token: the prefix index in Redis did not answer within 20 ms, and the router "
        "went on without it."
    )


def test_a_miss_of_what_was_retained_says_what_had_become_of_that() -> None:
    grant = granted(0.0, beneficiary="r5")
    grant = replace(grant, reasons=(*grant.reasons, f"{RETENTION_REASON}its retention was over"))
    found = asked(replace(UNSEEN, miss="evicted"), routed(), grant).prefix
    assert found is not None
    assert "evicted that to make room for r5 (its retention was over)." in found.sentence


def test_tokens_beyond_whole_blocks_are_told_one_by_one() -> None:
    outcome = replace(UNSEEN, miss="diverged_at", cached_tokens=16, diverged_at=1, shared_tokens=31)
    found = asked(outcome, routed(), granted(0.0)).prefix
    assert found is not None
    assert found.cause is Cause.DIVERGED
    assert found.sentence == (
        "16 of 100 prompt tokens were cached: w0 has seen no prompt that is the same from token 31 on, and of the 31 "
        "tokens that it shares with an earlier prompt 16 count, because only whole blocks of 16 do."
    )


@pytest.mark.parametrize(("miss", "prompt"), [("full_hit", 31), ("capped", 32)])
def test_a_prompt_that_was_sent_before_and_ends_in_a_block_says_what_counts(miss: str, prompt: int) -> None:
    outcome = replace(UNSEEN, miss=miss, prompt_tokens=prompt, cached_tokens=16, shared_tokens=prompt)
    found = asked(outcome, routed(), granted(0.0)).prefix
    assert found is not None
    assert (found.cause, found.advice.anchor) == (Cause.WHOLE_BLOCKS, "whole-blocks-alone")
    assert found.sentence == (
        f"16 of {prompt} prompt tokens were cached: of the {prompt} tokens that it shares with an earlier prompt 16 "
        "count, because only whole blocks of 16 do."
    )
    assert asked(replace(outcome, shared_tokens=16), routed(), granted(0.0)).prefix is None
    assert asked(replace(CALM, shared_tokens=100), routed(), granted(0.0)).prefix is None, "four tokens do not matter"


def test_a_prompt_that_diverges_within_a_block_says_how_much_of_it_was_copied() -> None:
    grant = granted(0.0)
    grant = replace(grant, reasons=(*grant.reasons, f"{PARTIAL_REASON}12 slots are copied from block 7"))
    outcome = replace(UNSEEN, miss="diverged_at", cached_tokens=60, diverged_at=3)
    found = asked(outcome, routed(), grant).prefix
    assert found is not None
    assert found.sentence.startswith("60 of 100 prompt tokens were cached: ")
    assert found.sentence.endswith("from token 48 on (partial block: 12 slots are copied from block 7).")


LOADED = replace(
    CALM,
    before=seconds(loading=0.003, prefill=0.01),
    after=seconds(decode=0.1),
    prompt_tokens=760,
    cached_tokens=752,
    loaded_blocks=47,
    load_seconds=0.003,
    spared_seconds=0.41,
)
LOADS = "w0 loaded 47 blocks from host memory in 3.0 ms instead of computing 752 tokens"
DIVERGED = "w0 has seen no prompt that is the same from token 752 on"


def test_what_was_loaded_from_host_memory_is_told_with_what_computing_it_would_take() -> None:
    found = asked(LOADED, routed(), granted(0.0))
    assert found.prefix is not None
    assert found.prefix.sentence == f"752 of 760 prompt tokens were cached; {LOADS} (about 410 ms at its rate)."
    assert (found.prefix.cause, found.prefix.advice.anchor) == (Cause.LOADED, "loaded-from-host-memory")
    assert [(each.phase, each.cause) for each in found.phases[:2]] == [
        (Phase.LOADING, Cause.LOADED),
        (Phase.PREFILL, Cause.PREFILL),
    ]
    assert advised(found) == [found.verdict], "that it was loaded wants no advice"
    unlearnt = asked(replace(LOADED, spared_seconds=0.0), routed(), granted(0.0)).prefix
    assert unlearnt is not None
    assert unlearnt.sentence == f"752 of 760 prompt tokens were cached; {LOADS}."
    quick = asked(replace(LOADED, load_seconds=0.00004), routed(), granted(0.0)).prefix
    assert quick is not None
    assert "w0 loaded 47 blocks from host memory in under 0.1 ms instead of" in quick.sentence


def test_loaded_blocks_that_came_ahead_of_need_are_named() -> None:
    said = "36 of the 47 loaded blocks came before a request asked for them (prefetch)"
    grant = replace(granted(0.0), reasons=("full_hit", f"{AHEAD_REASON}{said}"))
    found = asked(LOADED, routed(), grant).prefix
    assert found is not None
    assert found.sentence.endswith(f"; {LOADS} (about 410 ms at its rate); {said}.")
    unloaded = asked(replace(LOADED, loaded_blocks=0, cached_tokens=700, miss="diverged_at"), routed(), grant).prefix
    assert unloaded is not None
    assert said not in unloaded.sentence


def test_why_no_more_was_cached_is_told_with_what_was_loaded() -> None:
    missed = replace(LOADED, prompt_tokens=1000, miss="diverged_at", diverged_at=47)
    found = asked(missed, routed(), granted(0.0)).prefix
    assert found is not None
    assert (found.cause, found.sentence) == (
        Cause.DIVERGED,
        f"752 of 1,000 prompt tokens were cached: {DIVERGED}. {LOADS} (about 410 ms at its rate).",
    )


def test_loads_that_took_most_of_the_time_are_the_verdict() -> None:
    slow = replace(LOADED, before=seconds(loading=0.9, prefill=0.1), load_seconds=0.9)
    found = asked(slow, routed(), granted(0.0)).verdict
    assert (found.cause, found.share, found.advice.anchor) == (Cause.LOADED, 0.9 / 1.1, "loaded-from-host-memory")
    assert found.sentence == (
        "Nothing held it up: 82 % of its 1.1 s: w0 loaded 47 blocks from host memory in 900 ms instead of computing "
        "752 tokens (about 410 ms at its rate)."
    )


FETCHED = replace(
    LOADED,
    before=seconds(fetch=0.031, loading=0.003, prefill=0.01),
    after=(),
    fetched_blocks=47,
    fetch_asked=47,
    fetch_seconds=0.031,
    fetch_source="disk",
)
FAILED = replace(
    FETCHED, cached_tokens=560, fetched_blocks=35, loaded_blocks=35, spared_seconds=0.35, miss="diverged_at",
    diverged_at=35,
)  # fmt: skip


def fetched(waited: float, fetching: float, words: str = "47 of 47 blocks came from disk in 31 ms") -> Decision:
    """Return a grant after a wait, of which a fetch took some seconds."""
    grant = granted(waited)
    figures = (*grant.figures, ("fetched_blocks", 47.0), ("fetch_seconds", fetching))
    return replace(grant, reasons=(*grant.reasons, f"{FETCH_REASON}{words}"), figures=figures)


def test_a_choice_says_what_its_worker_was_to_fetch() -> None:
    terms = (("queue_delay", 0.0), ("fetch", 0.031), ("prefill", 0.069))
    fetches = Candidate("w0", 0.1, terms, figures=(("hit_blocks", 2.0), ("fetched_blocks", 47.0)))
    found = diagnose(request_history(R, [routed(fetches, option("w1", 0.9, 49)), ended(Outcome())]))
    assert found.steps[0].sentence == (
        "goes to w0, the least predicted: w0 100 ms, 2 hit blocks, 47 blocks to fetch in 31 ms; "
        "w1 900 ms, 49 hit blocks"
    )


def test_a_choice_says_that_the_placements_of_other_routers_changed_it() -> None:
    told = f"{OTHERS_CHANGED} w1: they add 0.250 s there, and it was cheaper by 0.100 s"
    decision = replace(routed(option("w0", 0.2), option("w1", 0.35, 9)), reasons=(BY_AGE, told))
    found = diagnose(request_history(R, [decision, ended(Outcome())]))
    assert found.steps[0].sentence == (f"goes to w0, the least predicted: w0 200 ms; w1 350 ms, 9 hit blocks; {told}")


def test_a_wait_for_the_disk_is_told_with_what_computing_would_take() -> None:
    found = asked(FETCHED, routed(), short(ShortfallReason.FETCH, "disk"), fetched(0.031, 0.031))
    waited = "it waited 31 ms at w0 while 47 blocks came from disk, in place of 410 ms of prefill"
    assert (found.verdict.cause, found.verdict.sentence) == (
        Cause.FETCHING,
        f"70 % of the 44 ms to the first token: {waited}.",
    )
    assert found.verdict.advice.anchor == "fetched"
    assert [(each.phase, each.cause) for each in found.phases] == [
        (Phase.FETCH, Cause.FETCHING),
        (Phase.LOADING, Cause.LOADED),
        (Phase.PREFILL, Cause.PREFILL),
    ]
    assert found.prefix is not None
    assert (found.prefix.cause, found.prefix.sentence) == (
        Cause.FETCHING,
        f"752 of 760 prompt tokens were cached; 47 blocks came from disk in 31 ms; {LOADS} (about 410 ms at its rate).",
    )
    assert found.steps[1].sentence == "waits while 8 blocks come from disk"


def test_blocks_of_another_worker_are_told_by_its_name() -> None:
    peer = replace(FETCHED, fetch_source="worker-1", spared_seconds=0.0)
    found = asked(peer, routed(), short(ShortfallReason.FETCH, "worker-1"), fetched(0.031, 0.031))
    assert found.verdict.sentence.endswith("it waited 31 ms at w0 while 47 blocks came from worker-1.")
    assert found.steps[1].sentence == "waits while 8 blocks come from worker-1"


def test_a_fetch_that_failed_says_what_was_computed_and_why() -> None:
    words = "35 of 47 blocks came from disk in 31 ms; 1 failed their checksum, 11 could not be read"
    found = asked(FAILED, routed(), short(ShortfallReason.FETCH, "disk"), fetched(0.031, 0.031, words))
    lost = "12 of 47 blocks did not come from disk (1 failed their checksum, 11 could not be read) and were computed"
    assert (found.verdict.cause, found.verdict.advice.anchor) == (Cause.FETCH_FAILED, "fetch-failed")
    assert found.verdict.sentence.endswith(f"it waited 31 ms at w0 for blocks from disk; {lost}.")
    assert found.prefix is not None
    assert found.prefix.cause is Cause.FETCH_FAILED
    assert found.prefix.sentence.startswith(f"560 of 760 prompt tokens were cached: {lost}. 35 blocks came from disk")
    unsaid = asked(FAILED, routed()).prefix
    assert unsaid is not None
    assert "12 of 47 blocks did not come from disk and were computed" in unsaid.sentence, "the manager's record is gone"


def test_what_was_not_fetched_is_no_eviction() -> None:
    found = asked(replace(UNSEEN, miss="unfetched", diverged_at=6), routed(), granted(0.0)).prefix
    assert found is not None
    assert (found.cause, found.advice.anchor) == (Cause.NOT_FETCHED, "not-fetched")
    assert found.sentence == (
        "0 of 100 prompt tokens were cached: w0 had its first 96 tokens, some of them on disk alone, and did not fetch "
        "these: it was not expected to pay, or host memory had no room for them."
    )


def test_a_wait_for_a_fetch_is_not_one_for_blocks() -> None:
    """Of two seconds at the manager the fetch took one, and then blocks were short."""
    slow = replace(FETCHED, before=seconds(blocks=1.1, fetch=1.0, prefill=0.1), fetch_seconds=1.0)
    lacked = replace(short(), decision_id="lacked", time_ns=2_500)
    found = asked(slow, routed(), short(ShortfallReason.FETCH, "disk"), lacked, fetched(2.0, 1.0))
    causes = [(each.phase, each.cause, round(each.seconds, 3)) for each in found.phases]
    assert causes[:3] == [
        (Phase.BLOCKS, Cause.BLOCKS, 1.0),
        (Phase.MESSAGES, Cause.MESSAGES, 0.1),
        (Phase.FETCH, Cause.FETCHING, 1.0),
    ]
    slow = replace(slow, before=seconds(blocks=2.0, prefill=0.1))
    assert (
        "it waited at w0 for 8 blocks, and 3 sequences" in asked(slow, routed(), lacked, granted(2.0)).verdict.sentence
    )


def test_a_request_that_ended_while_its_blocks_came_says_for_what_it_waited() -> None:
    gone = replace(CALM, has_first_token=False, started=False, admissions=0, before=seconds(blocks=3.0), miss="",
                   ended="CANCELLED", failure="the client went away")  # fmt: skip
    found = asked(gone, routed(), short(ShortfallReason.FETCH, "disk")).verdict
    assert "it waited at w0 for 8 blocks to come from disk" in found.sentence


def test_a_preemption_says_what_host_memory_keeps_of_it() -> None:
    slow = replace(CALM, preemptions=1, before=seconds(prefill=0.1), after=seconds(decode=0.2, preempted=1.7))
    record = preempted()
    kept = replace(record, figures=(*record.figures, ("loadable_tokens", 96.0)))
    assert asked(slow, routed(), granted(0.0), kept).verdict.sentence == (
        "85 % of its 2.0 s: it was preempted: its 7 blocks went to r9 (a higher priority waits), and host memory takes "
        "what 96 tokens need, to be loaded again."
    )


def test_a_worker_that_was_full_and_held_the_prefix_is_named() -> None:
    full = Candidate("w1", rejected="over limit: 4 sequences of at most 4", figures=(("hit_blocks", 6.0),))
    found = asked(UNSEEN, routed(option("w0", 0.2), full), granted(0.0)).prefix
    assert found is not None
    assert "w1 holds 96 tokens of it and was left out (over limit: 4 sequences of at most 4)" in found.sentence


def test_a_worker_that_would_have_missed_the_deadline_is_not_called_busy() -> None:
    late = "too late: 0.100 s are left, and the first token is predicted in 0.178 s"
    slow = Candidate("w1", rejected=late, figures=(("hit_blocks", 6.0),))
    found = asked(UNSEEN, routed(option("w0", 0.2), slow), granted(0.0)).prefix
    assert found is not None
    assert found.cause is Cause.LATE_WORKER
    assert f"w1 holds 96 tokens of it and was left out ({late}), so it went to w0" in found.sentence
    assert found.advice.text.startswith("Allow a longer deadline")


def test_a_miss_whose_routing_is_gone_is_not_known() -> None:
    found = asked(UNSEEN, granted(0.0)).prefix
    assert found is not None
    assert found.cause is Cause.NOT_KNOWN


# ------------------------------------------------------------ properties

phase_seconds = st.dictionaries(st.sampled_from(list(Phase)), st.floats(0.001, 10.0), max_size=6).map(
    lambda found: tuple((phase.value, found[phase]) for phase in Phase if phase in found)
)
outcomes = st.builds(
    Outcome,
    ended=st.sampled_from(["length", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "OVERLOADED"]),
    failure=st.sampled_from(["", "", "the client went away"]),
    worker=st.just("w0"),
    miss=st.sampled_from(["", "full_hit", "below_block", "never_seen", "evicted", "diverged_at"]),
    other_domain=st.just("blue"),
    before=phase_seconds,
    after=phase_seconds,
    has_first_token=st.booleans(),
    started=st.booleans(),
    queued=st.booleans(),
    index_answered=st.booleans(),
    index=st.sampled_from(["", "empty", "late: 20 ms", "skipped: 3 failed", "lost"]),
    prompt_tokens=st.integers(1, 500),
    cached_tokens=st.integers(0, 100),
    output_tokens=st.integers(0, 100),
    block_size=st.just(16),
    placements=st.integers(0, 2),
    preemptions=st.integers(0, 1),
    sequences=st.integers(0, 2),
    passed_by=st.integers(0, 2),
    shared_tokens=st.sampled_from([0, 31]),
    usual_gap=st.sampled_from([0.0, 0.01]),
    other_domain_tokens=st.sampled_from([0, 64]),
    client_longest=st.sampled_from([0.0, 0.1, 5.0]),
)  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> list[Decision]:
    """Draw records of one request that are whole: as many of each kind as the outcome counts."""
    outcome = draw(outcomes)
    grants = [granted(draw(st.floats(0.0, 10.0)), number=n) for n in range(draw(st.integers(0, 2)))]
    placements = [routed(*draw(st.permutations(HIT))), replace(routed(kind=DecisionKind.MIGRATION), time_ns=6_000)]
    records = [*grants, *placements[: outcome.placements]]
    records += [short(draw(st.sampled_from(list(ShortfallReason))))] * draw(st.integers(0, 1))
    records += [preempted()] * outcome.preemptions + [queued()] * outcome.queued
    return [*records, ended(replace(outcome, admissions=len(grants)))]


def causes(records: list[Decision]) -> tuple[Cause, Cause | None]:
    found = diagnose(request_history(R, records))
    return found.verdict.cause, found.prefix.cause if found.prefix else None


@given(histories())
def test_shares_are_parts_of_one_whole(records: list[Decision]) -> None:
    found = diagnose(request_history(R, records))
    assert sum(each.share for each in found.phases) <= 1.0 + 1e-9
    assert 0.0 <= found.verdict.share <= 1.0 + 1e-9
    assert sum(each.seconds for each in found.phases) == pytest.approx(found.total_s)


@given(histories(), st.randoms(use_true_random=False))
def test_the_order_of_records_does_not_matter(records: list[Decision], random: object) -> None:
    shuffled = list(records)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert diagnose(request_history(R, shuffled)) == diagnose(request_history(R, records))


@given(histories(), st.data())
def test_a_lost_record_hides_a_cause_and_never_names_another(records: list[Decision], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, len(records) - 1), min_size=1))
    whole = causes(records)
    left = causes([each for at, each in enumerate(records) if at not in lost])
    for cause, before in zip(left, whole, strict=True):
        assert cause in (Cause.NOT_KNOWN, before, None)


@given(outcomes)
def test_an_outcome_survives_its_record(outcome: Outcome) -> None:
    assert outcome_of(ended(outcome)) == replace(outcome, time_ns=9_000)
