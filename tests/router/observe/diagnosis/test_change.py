"""Why a measure changed: exact parts of small spans, and that all parts of each division add up to the change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe.diagnosis.causes import RUNBOOK
from router.observe.diagnosis.change import Change, Part, hit_rate_change, latency_change
from router.observe.diagnosis.change_words import advice_of, caution_of, head_of, part_name
from router.observe.diagnosis.outcome import Outcome, Phase


def cached(prompt: int, hit: int, miss: str = "full_hit", tenant: str = "red", worker: str = "w0") -> Outcome:
    return Outcome(prompt_tokens=prompt, cached_tokens=hit, miss=miss, tenant=tenant, worker=worker, admissions=1)


def timed(tenant: str = "red", worker: str = "w0", miss: str = "", **seconds: float) -> Outcome:
    return Outcome(before=tuple(seconds.items()), has_first_token=True, tenant=tenant, worker=worker, miss=miss)


def parts(change: Change, by: str) -> dict[str, tuple[float | None, float | None, float]]:
    (division,) = [each for each in change.divisions if each.by == by]
    return {each.name: (each.before, each.after, each.change) for each in division.parts}


def test_a_hit_rate_changes_by_the_missed_tokens_of_each_reason() -> None:
    before = [cached(64, 48), cached(64, 32, "evicted")]  # 80 of 128
    after = [cached(64, 48), cached(32, 0, "evicted"), cached(32, 0, "never_seen")]  # 48 of 128
    found = hit_rate_change(before, after)
    assert (found.before.value, found.after.value, found.change) == (0.625, 0.375, -0.25)
    assert (found.before.requests, found.after.requests) == (2, 3)
    assert parts(found, "miss reason") == {
        "never_seen": (0.0, -0.25, -0.25),
        "evicted": (-0.25, -0.25, 0.0),
        "full_hit": (-0.125, -0.125, 0.0),
    }
    # The largest comes first; one tenant and one worker divide nothing.
    assert [each.by for each in found.divisions] == ["miss reason"]
    assert found.divisions[0].parts[0].name == "never_seen"


def test_blocks_that_a_fetch_did_not_bring_are_a_reason_of_their_own() -> None:
    """Of 48 missed tokens two blocks of sixteen were waited for in vain."""
    failed = replace(cached(64, 16, "diverged_at"), block_size=16, fetch_asked=3, fetched_blocks=1)
    found = hit_rate_change([cached(64, 64)], [failed])
    assert parts(found, "miss reason") == {
        "fetch_failed": (0.0, -0.5, -0.5),
        "diverged_at": (0.0, -0.25, -0.25),
        "full_hit": (0.0, 0.0, 0.0),
    }
    assert head_of(found) == (
        "The hit rate fell from 100 % to 25 %, by 75.0 points: mostly from blocks that did not come from disk, or from "
        "another worker, in a fetch (50.0 points) and prompts that differ from earlier ones (25.0 points)."
    )
    advice = advice_of(found)
    assert advice is not None
    assert advice.anchor == "fetch-failed"
    assert hit_rate_change([cached(64, 64)], [cached(64, 0, "unfetched")]).divisions[0].parts[0].name == "unfetched"


def test_a_tenant_counts_by_its_own_change_and_by_how_much_of_it_there_is() -> None:
    # Red keeps its 50 %, blue its 0 %; there is three times as much of blue.
    before = [cached(96, 48, tenant="red"), cached(32, 0, "never_seen", tenant="blue")]
    after = [cached(32, 16, tenant="red"), cached(96, 0, "never_seen", tenant="blue")]
    found = hit_rate_change(before, after)
    assert (found.before.value, found.after.value, found.change) == (0.375, 0.125, -0.25)
    assert parts(found, "tenant") == {"blue": (0.0, 0.0, -0.125), "red": (0.5, 0.5, -0.125)}
    (division,) = [each for each in found.divisions if each.by == "tenant"]
    assert [(each.share_before, each.share_after) for each in division.parts] == [(0.25, 0.75), (0.75, 0.25)]


def test_a_worker_that_is_new_counts_against_the_mean() -> None:
    found = hit_rate_change([cached(64, 32)], [cached(64, 32), cached(64, 0, "never_seen", worker="w1")])
    assert found.change == -0.25
    # w1 brings half of the tokens, at 0 % where the mean of both spans is 37.5 %; w0 loses that half, at 50 %.
    assert parts(found, "worker") == {"w1": (None, 0.0, -0.1875), "w0": (0.5, 0.5, -0.0625)}


def test_latency_changes_by_phase() -> None:
    before = [timed(queue=0.25, prefill=0.5), timed(prefill=0.25)]
    after = [timed(queue=1.0, prefill=0.5), timed(blocks=0.5, prefill=0.5)]
    found = latency_change(before, after)
    assert (found.before.value, found.after.value, found.change) == (0.5, 1.25, 0.75)
    assert parts(found, "phase") == {
        "queue": (0.125, 0.5, 0.375),
        "blocks": (0.0, 0.25, 0.25),
        "prefill": (0.375, 0.5, 0.125),
    }
    assert (found.after.p50, found.after.p95) == (1.0, 1.5)


def test_requests_without_blocks_or_without_a_first_token_do_not_count() -> None:
    gone = Outcome(prompt_tokens=64, before=(("queue", 9.0),), ended="CANCELLED")
    assert hit_rate_change([cached(64, 32), gone], [cached(64, 32), gone]).before.requests == 1
    assert latency_change([timed(queue=1.0), gone], [timed(queue=1.0), gone]).change == 0.0


def test_an_empty_span_is_compared_with_nothing() -> None:
    found = hit_rate_change([], [cached(64, 32)])
    assert (found.change, found.divisions, found.after.value) == (None, (), 0.5)
    assert head_of(found) == "Nothing to compare: no request that counts ended in the span before."
    assert "in this span" in head_of(hit_rate_change([cached(64, 32)], []))
    assert "in either span" in head_of(latency_change([], []))
    assert caution_of(found) == ""
    assert advice_of(found) is None


def _pairs(seconds: dict[Phase, float]) -> tuple[tuple[str, float], ...]:
    return tuple((phase.value, each) for phase, each in seconds.items())


OUTCOMES = st.lists(
    st.builds(
        Outcome,
        prompt_tokens=st.integers(1, 5000),
        cached_tokens=st.integers(0, 5000),
        miss=st.sampled_from(["", "full_hit", "evicted", "never_seen"]),
        tenant=st.sampled_from(["", "red", "blue"]),
        worker=st.sampled_from(["w0", "w1"]),
        admissions=st.just(1),
        has_first_token=st.just(True),
        before=st.dictionaries(st.sampled_from(list(Phase)), st.floats(0.0, 100.0), max_size=4).map(_pairs),
    ),
    min_size=1,
    max_size=12,
)  # fmt: skip


@given(OUTCOMES, OUTCOMES)
def test_the_parts_of_each_division_add_up_to_the_change(before: list[Outcome], after: list[Outcome]) -> None:
    hits = [
        [replace(each, cached_tokens=min(each.cached_tokens, each.prompt_tokens)) for each in span]
        for span in (before, after)
    ]
    for found in (hit_rate_change(*hits), latency_change(before, after)):
        for division in found.divisions:
            assert sum(part.change for part in division.parts) == pytest.approx(found.change, abs=1e-9)
        assert found.change is not None
        assert head_of(found)


# ------------------------------------------------------------ in words


def test_the_first_line_names_the_causes_of_most_of_a_fall() -> None:
    before, after = [cached(100, 80, "never_seen")] * 20, [cached(100, 40, "evicted")] * 20
    found = hit_rate_change(before, after)
    words = "mostly from prefixes that were evicted (60.0 points)"
    assert head_of(found) == f"The hit rate fell from 80 % to 40 %, by 40.0 points: {words}."
    advice = advice_of(found)
    assert advice is not None
    assert advice.link() == f"{RUNBOOK}#quirehitratefell"
    assert caution_of(found) == ""


def test_a_rise_of_the_latency_has_advice_and_a_fall_none() -> None:
    before, after = [timed(prefill=0.1)] * 3, [timed(prefill=0.1, blocks=0.9)] * 3
    found = latency_change(before, after)
    words = "mostly from waiting for blocks (900 ms)"
    assert head_of(found) == f"The mean time to the first token rose from 100 ms to 1.0 s, by 900 ms: {words}."
    advice = advice_of(found)
    assert advice is not None
    assert "more memory for blocks" in advice.text
    assert advice_of(latency_change(after, before)) is None
    assert caution_of(found).startswith("Only 3 requests ended in one of the spans")


def test_what_hardly_changed_is_not_explained() -> None:
    found = latency_change([timed(prefill=1.0)] * 20, [timed(prefill=1.01)] * 20)
    assert head_of(found) == "The mean time to the first token hardly changed: from 1.0 s to 1.0 s."
    assert advice_of(found) is None


def test_parts_without_a_name_have_words() -> None:
    found = hit_rate_change([cached(64, 32, tenant="")], [cached(64, 32), cached(64, 0, "x", tenant="")])
    (tenants,) = [each for each in found.divisions if each.by == "tenant"]
    assert {part_name(tenants, each) for each in tenants.parts} == {"without a key", "red"}
    assert part_name(found.divisions[0], Part("x", 0.0, 0.0, 0.0)) == "x"
