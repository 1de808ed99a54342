"""Which adapters are in memory: bounded, the least recently used one leaves first, and none that is in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.errors import NotFound, Overloaded, QuireError, Unavailable
from common.contracts.limits import MAX_ADAPTERS
from gpuworker.scheduling.adapter_table import Adapter, AdapterTable


def adapter(name: str, content: str = "1") -> Adapter:
    return Adapter(name, content, rank=4, num_bytes=100, source=f"/{name}")


def filled(table: AdapterTable, name: str, content: str = "1") -> Adapter:
    found = table.add(adapter(name, content))
    table.fill(found, object())
    table.check_invariants()
    return found


def held(table: AdapterTable) -> list[str]:
    return [each.name for each in table.known if each.weights is not None]


def test_the_least_recently_used_one_leaves() -> None:
    table = AdapterTable(2)
    first, _ = filled(table, "a"), filled(table, "b")
    table.use(first)
    table.release(first)
    left = table.fill(table.add(adapter("c")), object())
    assert left is not None
    assert left.name == "b"
    assert held(table) == ["a", "c"]


def test_one_in_use_never_leaves() -> None:
    table = AdapterTable(2)
    first, second = filled(table, "a"), filled(table, "b")
    table.use(first)
    filled(table, "c")
    assert held(table) == ["a", "c"]
    table.use(table.get("c"))
    cold = table.get("b")
    with pytest.raises(Overloaded, match="all 2 adapters in memory are in use, and --max-loras is 2"):
        table.check_room(cold)
    with pytest.raises(Overloaded):
        table.fill(cold, object())
    assert second.weights is None
    table.release(first)
    table.check_room(cold)
    table.fill(cold, object())
    assert held(table) == ["b", "c"]


def test_another_content_under_a_name_takes_its_place_at_once_and_the_old_one_counts_until_it_is_unused() -> None:
    table = AdapterTable(2)
    old = filled(table, "a")
    table.use(old)
    new = filled(table, "a", "2")
    assert table.num_held == 2
    assert table.find_held("a", "2") is new
    with pytest.raises(Unavailable, match="another content"):
        table.find_held("a", "1")
    assert old.weights is not None
    table.release(old)
    assert (old.weights, table.num_held) == (None, 1)


def test_the_same_content_again_changes_nothing() -> None:
    table = AdapterTable(2)
    first = filled(table, "a")
    assert table.add(adapter("a")) is first
    assert first.weights is not None


def test_what_is_removed_is_unknown_and_its_memory_free_once_it_is_unused() -> None:
    table = AdapterTable(1)
    used = filled(table, "a")
    table.use(used)
    table.remove("a")
    with pytest.raises(NotFound):
        table.find_held("a", "1")
    assert table.num_held == 1
    table.release(used)
    assert (used.weights, table.num_held) == (None, 0)
    unused = filled(table, "b")
    table.remove("b")
    assert unused.weights is None


def test_one_that_left_memory_is_to_be_loaded_again() -> None:
    table = AdapterTable(1)
    filled(table, "a")
    filled(table, "b")
    with pytest.raises(Unavailable, match="not in memory at this worker any more"):
        table.find_held("a", "1")


def test_names_are_bounded() -> None:
    table = AdapterTable(1)
    for number in range(MAX_ADAPTERS):
        table.add(adapter(f"a{number}"))
    with pytest.raises(Overloaded, match=f"{MAX_ADAPTERS} adapters are known"):
        table.add(adapter("one-more"))
    table.add(adapter("a0", "2"))
    assert len(table.known) == MAX_ADAPTERS


@given(st.lists(st.tuples(st.sampled_from("lurx"), st.sampled_from("abc"), st.sampled_from("12")), max_size=40))
def test_no_order_of_loads_uses_and_removals_breaks_the_books(steps: list[tuple[str, str, str]]) -> None:
    table, users = AdapterTable(2), list[Adapter]()
    for what, name, content in steps:
        try:
            if what == "l":
                table.fill(table.add(adapter(name, content)), object())
            elif what == "u":
                users.append(table.find_held(name, content))
                table.use(users[-1])
            elif what == "r" and users:
                table.release(users.pop(0))
            elif what == "x":
                table.remove(name)
        except QuireError:
            pass
        table.check_invariants()
        assert all(each.weights is not None for each in users)
    for each in users:
        table.release(each)
    assert table.num_held == len(held(table)) <= 2
