"""The fairness benchmark: what it serves, and the fixed names of its figures."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from statistics import median

import pytest

from bench import fairness
from bench.fairness import HUGE, Arrival, Timed, in_time, serve, session_waits, timed
from bench.lib import long_prompts


def test_a_huge_request_is_passed_by_one_that_ends_in_time() -> None:
    # The first leaves too few blocks for the huge one until step 64 and some.
    arrivals = [Arrival(0, 4000, 64), Arrival(2, HUGE, 4), Arrival(3, 64, 16), Arrival(3, 64, 4000)]
    before, after = (serve(arrivals, 400, fair=fair).steps for fair in (False, True))
    assert after[1] == before[1] > 60, "nobody delays it"
    assert before[2] > 60
    assert after[2] < 5
    assert after[3] >= 60


def test_a_huge_prompt_is_earlier_in_parts_and_nobody_pays() -> None:
    found = long_prompts.compare(long_prompts.MACHINES["gpu_capped"], 0, exact=True)
    assert found["ttft_s_chunked"] < 0.9 * found["ttft_s_whole"]
    assert found["behind_p50_s_chunked"] <= found["behind_p50_s_whole"]
    assert found["tokens_per_s_chunked"] >= found["tokens_per_s_whole"]
    assert found["preemptions_chunked"] <= found["preemptions_whole"]


def test_in_groups_a_huge_prompt_is_earlier_in_parts_and_others_pass_it() -> None:
    machine = replace(long_prompts.GROUPED["gemma_capped"], blocks=8192, per_second=6.0, seconds=6.0, huge_at=2.0)
    assert machine.huge == (8192 * 4 // 5 - 26 * 66) // 5 * 16
    found = long_prompts.compare(machine, 0, exact=True)
    assert found["ttft_s_parts"] < 0.95 * found["ttft_s_off"]
    assert found["behind_p50_s_on"] < 0.9 * found["behind_p50_s_off"]
    assert found["tokens_per_s_on"] > found["tokens_per_s_off"]


def test_the_earliest_deadline_goes_first_and_a_hopeless_one_takes_no_place() -> None:
    # The first 16 hold all places for a second; then 16 have time and 16 have none to lose.
    full = [Timed(0.0, 1.0, 9.0)] * 16
    patient, urgent = [Timed(0.1, 1.0, 9.0)] * 16, [Timed(0.2, 1.0, 1.9)] * 16
    assert in_time([*full, *patient, *urgent], earliest=False, refuse=True) == 32 / 48
    assert in_time([*full, *patient, *urgent], earliest=True, refuse=True) == 1.0
    hopeless, next_ones = [Timed(0.1, 1.0, 1.5)] * 16, [Timed(0.2, 1.0, 2.0)] * 16
    assert in_time([*full, *hopeless, *next_ones], earliest=False, refuse=False) == 16 / 48
    assert in_time([*full, *hopeless, *next_ones], earliest=False, refuse=True) == 32 / 48


def test_more_are_in_time_by_deadlines() -> None:
    requests = timed(1.1, 120.0, seed=1)
    assert in_time(requests, earliest=True, refuse=True) > in_time(requests, earliest=False, refuse=True)


def test_a_session_of_a_thousand_requests_keeps_no_other_waiting() -> None:
    before, after = (session_waits(1, 300.0, named=named) for named in (False, True))
    assert median(before) > 30.0, "it waits for the thousand"
    assert median(after) < 1.0


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.fairness", "--json", "--seeds", "1", "--seconds", "12"])
    short = {name: replace(each, seconds=4.0, huge_at=1.0) for name, each in long_prompts.MACHINES.items()}
    monkeypatch.setattr(long_prompts, "figures_of", partial(long_prompts.figures_of, machines=short))
    fairness.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ("huge_wait_s", "behind_wait_p50_s", "behind_wait_p90_s", "huge_preemptions", "low_priority_wait_s")
    assert said["bench"] == "fairness"
    found = {f"{name}_{when}" for name in names for when in ("before", "after")}
    found |= {f"in_time_load_{load}_{when}" for load in ("0.9", "1.1") for when in ("before", "refused", "after")}
    found |= {f"session_wait_{each}_s_{when}" for each in ("p50", "p90") for when in ("before", "after")}
    figures = ("ttft_s", "behind_p50_s", "behind_p90_s", "tokens_per_s", "preemptions")
    kinds = itertools.product(long_prompts.MACHINES, ("exact", "generous"), figures, ("whole", "chunked"))
    found |= {f"long_{'_'.join(kind)}" for kind in kinds}
    assert set(said["figures"]) == found
