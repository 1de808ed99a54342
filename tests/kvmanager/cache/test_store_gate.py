"""What host memory gives back, exactly: when stores end, for how long, and when they begin again."""

from __future__ import annotations

from common.contracts.transfers import TransferCosts
from kvmanager.cache.store_gate import StoreGate

COSTS = TransferCosts(compute=0.010, read=0.0, copy=0.002)
WINDOW = 2000


def gate_of() -> StoreGate:
    return StoreGate(4 * WINDOW)


def store(gate: StoreGate, windows: int, loads: int = 0, costs: TransferCosts | None = COSTS) -> None:
    """Store so many windows of pages one by one; in each of them so many blocks are loaded, of one page each."""
    for _ in range(windows):
        gate.note_loaded(loads)
        gate.note_spared(loads)
        for _ in range(WINDOW):
            gate.note_stored(1, costs)


def decline(gate: StoreGate, windows: int) -> None:
    gate.note_declined(windows * WINDOW)


def test_two_windows_in_a_row_that_save_less_than_they_take_end_the_stores() -> None:
    # 2,000 stores and 499 loads take 4.998 s, and 499 blocks would take 4.99 s.
    gate = gate_of()
    store(gate, 1, loads=499)
    assert gate.open
    store(gate, 1, loads=499)
    assert not gate.open


def test_a_window_between_them_that_pays_begins_anew() -> None:
    gate = gate_of()
    for _ in range(5):
        store(gate, 1, loads=499)
        store(gate, 1, loads=500)
    assert gate.open


def test_stores_begin_again_after_four_windows_of_evictions_and_then_after_twice_as_many_up_to_32() -> None:
    gate = gate_of()
    for windows in (4, 8, 16, 32, 32):
        store(gate, 2)
        assert not gate.open
        decline(gate, windows - 1)
        assert not gate.open
        decline(gate, 1)
        assert gate.open


def test_what_is_stored_while_stores_rest_makes_the_rest_no_longer_and_no_shorter() -> None:
    gate = gate_of()
    store(gate, 2)
    decline(gate, 4)
    store(gate, 2)
    decline(gate, 7)
    store(gate, 3)
    store(gate, 3, loads=500)
    assert not gate.open
    decline(gate, 1)
    assert gate.open


def test_a_window_that_pays_makes_the_next_rest_a_short_one() -> None:
    gate = gate_of()
    store(gate, 2)
    decline(gate, 4)
    store(gate, 1, loads=500)
    store(gate, 2)
    decline(gate, 4)
    assert gate.open


def test_while_costs_are_unknown_everything_is_stored() -> None:
    gate = gate_of()
    for costs in (None, TransferCosts(0.0, 0.0, copy=0.002), TransferCosts(0.010, 0.0)):
        store(gate, 3, costs=costs)
    assert gate.open
    store(gate, 2)
    assert not gate.open


def test_pages_of_a_load_count_as_copies_and_its_places_as_what_it_spares() -> None:
    gate = gate_of()
    for _ in range(2):
        gate.note_loaded(4 * 600)
        gate.note_spared(600)  # 6 s to compute, and (2,000 + 2,400) x 2 ms to copy
        for _ in range(WINDOW // 4):
            gate.note_stored(4, COSTS)
    assert not gate.open


def test_what_is_left_out_while_the_gate_is_open_makes_no_penance_longer() -> None:
    gate = gate_of()
    decline(gate, 100)  # loads did not pay meanwhile, and this gate was asked nothing
    store(gate, 2)
    assert not gate.open
    decline(gate, 4)
    assert gate.open


def test_a_small_tier_is_watched_for_a_thousand_stores() -> None:
    gate = StoreGate(8)
    for _ in range(2 * 1024 - 1):
        gate.note_stored(1, COSTS)
    assert gate.open
    gate.note_stored(1, COSTS)
    assert not gate.open
