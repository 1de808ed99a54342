"""The waste of paging: the worked examples to the slot, a workload that can be counted by hand, and the fixed names."""

from __future__ import annotations

import json

import pytest

from bench import waste


def test_three_sequences_waste_5288_contiguous_slots_and_424_paged_ones() -> None:
    lengths = (800, 2300, 3900)
    assert waste.contiguous_waste(lengths, 4096) == 5288
    assert waste.paged_waste(lengths, 256) == 424


def test_four_sequences_waste_3692_contiguous_slots_and_620_paged_ones() -> None:
    lengths = (600, 900, 1300, 1700)
    assert waste.contiguous_waste(lengths, 2048) == 3692
    assert waste.paged_waste(lengths, 256) == 620


def test_full_blocks_waste_nothing() -> None:
    assert waste.paged_waste((16, 32, 48), 16) == 0


def test_a_small_workload_adds_up_by_hand() -> None:
    """5 prompt tokens and 3 to draw, in blocks of 4: three steps, with 5, 6 and 7 tokens in two blocks."""
    sums = waste.run_mixed(4, [(5, 3)])
    assert (sums.used, sums.in_rows, sums.contiguous) == (5 + 6 + 7, 3 * 8, 3 * waste.MAX_MODEL_LEN)


def test_the_workload_is_the_same_for_a_seed_and_within_its_bounds() -> None:
    requests = waste.mixed_requests(200, seed=3)
    assert requests == waste.mixed_requests(200, seed=3) != waste.mixed_requests(200, seed=4)
    assert all(32 <= prompt <= 1024 and 16 <= output <= 256 for prompt, output in requests)


def test_the_figures_have_their_fixed_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.waste", "--json", "--requests", "4"])
    waste.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = said["figures"]
    assert said["bench"] == "waste"
    assert (figures["example_contiguous_slots"], figures["example_paged_slots"]) == (5288, 424)
    assert {3692, 620} <= set(figures.values())
    by_size = [figures[f"waste_block{size}"] for size in (4, 8, 16, 32, 64, 128, 256)]
    assert by_size == sorted(by_size), "larger blocks waste more"
    assert by_size[0] > 0
    assert by_size[2] < figures["naive_waste_fraction"] < 1
