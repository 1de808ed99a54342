"""The waste benchmark: its workload, and the fixed names of its figures."""

from __future__ import annotations

import json

import pytest

from bench import waste


def test_the_workload_is_the_same_for_a_seed_and_within_its_bounds() -> None:
    requests = waste.mixed_requests(200, seed=3)
    assert requests == waste.mixed_requests(200, seed=3) != waste.mixed_requests(200, seed=4)
    assert all(32 <= prompt <= 1024 and 16 <= output <= 256 for prompt, output in requests)


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.waste", "--json", "--requests", "64"])
    waste.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = said["figures"]
    assert said["bench"] == "waste"
    assert (figures["example_contiguous_slots"], figures["example_paged_slots"]) == (5288, 424)
    assert {3692, 620} <= set(figures.values())
    by_size = [figures[f"waste_block{size}"] for size in (4, 8, 16, 32, 64, 128, 256)]
    assert by_size == sorted(by_size), "larger blocks waste more"
    assert by_size[0] > 0
    assert 0 < figures["runway_pressed_400"] < figures["runway_block16"], "sequences that wait shorten the runway"
    assert by_size[2] < figures["naive_waste_fraction"] < 1
    for group in ("full", "window128"):
        assert 0 <= figures[f"unread_bytes_{group}"] < 0.02 * figures[f"held_bytes_{group}"]
    assert figures["held_bytes_window128"] < figures["held_bytes_full"]
    assert figures["unread_bytes_one_group"] > figures["held_bytes_window128"] > 0 < figures["leased_bytes_groups"]
