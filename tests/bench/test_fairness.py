"""The fairness benchmark: what it serves, and the fixed names of its figures."""

from __future__ import annotations

import json

import pytest

from bench import fairness
from bench.fairness import HUGE, Arrival, serve


def test_a_huge_request_is_passed_by_one_that_ends_in_time() -> None:
    # The first leaves too few blocks for the huge one until step 64 and some.
    arrivals = [Arrival(0, 4000, 64), Arrival(2, HUGE, 4), Arrival(3, 64, 16), Arrival(3, 64, 4000)]
    before, after = (serve(arrivals, 400, fair=fair).steps for fair in (False, True))
    assert after[1] == before[1] > 60, "nobody delays it"
    assert before[2] > 60
    assert after[2] < 5
    assert after[3] >= 60


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.fairness", "--json", "--seeds", "1", "--seconds", "12"])
    fairness.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ("huge_wait_s", "behind_wait_p50_s", "behind_wait_p90_s", "huge_preemptions", "low_priority_wait_s")
    assert said["bench"] == "fairness"
    assert set(said["figures"]) == {f"{name}_{when}" for name in names for when in ("before", "after")}
