"""Which adapters are in memory: bounded, the least recently used one leaves first, and none that is in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.adapters import AdapterShare
from common.contracts.errors import NotFound, Overloaded, PermissionDenied, QuireError, RateLimited, Unavailable
from common.contracts.limits import MAX_ADAPTERS, MAX_OWN_ADAPTERS
from gpuworker.scheduling.adapter_table import CLAIM_S, TURN_S, Adapter, AdapterTable


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
    assert [each.name for each in left] == ["b"]
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


# ------------------------------------------------------------ turns


class Line:
    """A table whose adapters tenants ask for at given times. An adapter's name begins with its tenant's."""

    def __init__(self, max_held: int) -> None:
        self.table, self.now = AdapterTable(max_held), 0.0

    def ask(self, name: str, max_bytes: int = 0, num_bytes: int = 100) -> str:
        """Load an adapter if that may be now; return what it is told."""
        found = self.table.add(Adapter(name, "1", 4, num_bytes, f"/{name}"))
        share = AdapterShare(name[0], (f"{name[0]}*",), max_bytes)
        try:
            left = self.table.fill(found, object(), share, self.now)
        except (Overloaded, PermissionDenied) as refused:
            return str(refused)
        finally:
            self.table.check_invariants()
        return "".join(("there", *(f", {each.name} left" for each in left)))

    def use(self, *names: str) -> None:
        for name in names:
            self.table.use(self.table.find_held(name, "1"))

    def end(self, *names: str) -> None:
        for name in names:
            self.table.release(self.table.get(name))

    def closed(self) -> dict[str, str]:
        return {each.name: each.closed_for for each in self.table.known if each.closed_for}


def in_use(*names: str) -> Line:
    line = Line(len(names))
    for name in names:
        assert line.ask(name) == "there"
        line.use(name)
        line.now += 1.0
    line.now = 10.0
    return line


def test_an_adapter_that_stays_in_use_closes_for_a_load_that_has_waited() -> None:
    line = in_use("a")
    assert "all 1 adapters in memory are in use, and --max-loras is 1" in line.ask("b")
    line.now += TURN_S - 0.01
    line.ask("b")
    assert line.closed() == {}
    line.now += 0.01
    line.ask("b")
    assert line.closed() == {"a": "b"}
    assert "all 1 adapters in memory are in use, and --max-loras is 1; 1 other loads come first" in line.ask("a")
    line.end("a")
    assert line.ask("b") == "there, a left"
    line.use("b")
    line.ask("a")
    assert line.closed() == {}  # it has just come, and keeps its turn
    line.now += TURN_S
    line.ask("a")
    assert line.closed() == {"b": "a"}


def test_what_closed_is_open_again_where_nobody_waits_for_it_any_more() -> None:
    line = in_use("a")
    line.ask("b")
    line.now += TURN_S
    line.ask("b")
    assert line.closed() == {"a": "b"}
    line.now += CLAIM_S + 0.01
    assert line.ask("a") == "there"
    assert (line.closed(), line.table.waiting) == ({}, [])


def test_a_load_that_found_room_elsewhere_lets_the_closed_one_go_on() -> None:
    line = in_use("a", "b")
    line.ask("c")
    line.now += TURN_S
    line.ask("c")
    assert line.closed() == {"a": "c"}
    line.end("b")
    assert line.ask("c") == "there, b left"
    assert line.closed() == {}


def test_tenants_take_turns_however_many_loads_each_has_waiting() -> None:
    line = in_use("x")
    for name in ("a1", "a2", "a3", "b1"):
        line.ask(name)
        line.now += 0.1
    assert line.table.waiting == ["a1", "a2", "a3", "b1"]
    line.end("x")
    assert "0 of 1 adapters in memory are in use, and --max-loras is 1; 3 other loads come first" in line.ask("b1")
    assert line.ask("a1") == "there, x left"
    assert line.table.waiting == ["b1", "a2", "a3"]
    assert "1 other loads come first" in line.ask("a2")
    assert line.ask("b1") == "there, a1 left"
    assert line.ask("a2") == "there, b1 left"


def test_loads_that_keep_coming_starve_nobody() -> None:
    """Each tick brings a stream of x, which stays for longer than the next one takes to come, and new tenants."""
    line, ends = in_use("x"), [("x", 10.5)]
    for tick in range(200):
        line.now = 10.0 + 0.25 * tick
        for name, end in list(ends):
            if end <= line.now:
                line.end(name)
                ends.remove((name, end))
        if line.table.get("x").is_open:
            line.use("x")
            ends.append(("x", line.now + 0.5))
        if line.ask("slow") == "there, x left":
            break
        line.ask("x")
        line.ask(f"{chr(0x4E00 + tick)}new")
    assert 10.0 + TURN_S <= line.now <= 10.0 + TURN_S + 1.0


def test_the_tenant_that_holds_the_most_gives_way_and_never_to_one_that_would_hold_more() -> None:
    line = in_use("a1", "a2", "a3", "b1")
    for name in ("c1", "c2", "c3", "c4"):
        line.ask(name)
    line.now += TURN_S
    for name in ("c1", "c2", "c3", "c4"):
        line.ask(name)
    # After the first two, a has 1, b 1 and c 2: a third one would be for the tenant that has the most.
    assert line.closed() == {"a1": "c1", "a2": "c2"}


def test_of_the_tenant_that_holds_the_most_the_one_held_longest_closes_first() -> None:
    line = in_use("b1", "a1", "a2")
    line.ask("c1")
    line.now += TURN_S
    line.ask("c1")
    assert line.closed() == {"a1": "c1"}


# ------------------------------------------------------------ quotas


def test_a_tenants_own_leave_for_its_own_where_they_take_all_that_it_may_have() -> None:
    line = Line(8)
    for name in ("x1", "a1", "a2"):
        assert line.ask(name, max_bytes=200) == "there"
    assert line.ask("a3", max_bytes=200) == "there, a1 left"
    assert line.ask("a4", max_bytes=200, num_bytes=150) == "there, a2 left, a3 left"
    assert held(line.table) == ["x1", "a4"]


def test_a_tenant_over_its_bytes_waits_and_holds_off_nobody() -> None:
    line = Line(3)
    for name in ("a1", "a2"):
        line.ask(name, max_bytes=250)
        line.use(name)
    words = "tenant a.adapter_bytes: its adapters in use take 200 bytes of a worker's memory, and adapter 'a3' 100; at"
    assert f"{words} most 250" in line.ask("a3", max_bytes=250)
    assert line.ask("b1") == "there"
    line.now = TURN_S
    with pytest.raises(RateLimited):
        line.table.check_room(line.table.get("a3"), AdapterShare("a", ("a*",), 250), line.now)
    assert line.closed() == {"a1": "a3"}
    line.end("a1")
    assert line.ask("a3", max_bytes=250) == "there, a1 left"


def test_contents_that_were_replaced_or_removed_count_for_their_tenant_until_they_are_unused() -> None:
    line, share = Line(4), AdapterShare("a", ("a*",), 200)

    def used(content: str) -> Adapter:
        found = line.table.add(adapter("a1", content))
        line.table.fill(found, object(), share, line.now)
        line.table.use(found)
        return found

    first, _ = used("1"), used("2")
    line.table.remove("a1")
    new = line.table.add(adapter("a1", "3"))
    words = "its adapters in use take 200 bytes of a worker's memory, and adapter 'a1' 100; at most 200"
    with pytest.raises(RateLimited, match=words):
        line.table.fill(new, object(), share, line.now)
    assert line.ask("b1") == "there", "it waits for its own tenant, and holds off nobody"
    line.table.release(first)
    assert line.table.fill(new, object(), share, line.now) == []
    line.table.check_invariants()


def test_a_tenant_whose_contents_are_about_to_leave_holds_them_still() -> None:
    line = Line(4)
    for name in ("a1", "a2", "a3", "b1"):
        line.ask(name)
        line.use(name)
    for name in ("a1", "a2", "a3"):
        line.table.remove(name)
    line.ask("a4")
    line.now = TURN_S
    assert "all 4 adapters in memory are in use" in line.ask("a4")
    assert line.closed() == {}, "b has one, and a would have four"


def test_one_tenant_has_a_part_of_the_names() -> None:
    table, share = AdapterTable(1), AdapterShare("a", ("a*",))
    for number in range(MAX_OWN_ADAPTERS):
        table.add(adapter(f"a{number}"), share)
    with pytest.raises(RateLimited, match=r"256 of its own adapters are known.*unload some"):
        table.add(adapter("a-more"), share)
    table.add(adapter("a7", "2"), share)  # another content of a name that there is
    table.add(adapter("b"), share)
    table.add(adapter("b1"), AdapterShare("b", ("b*",)))


def test_an_adapter_larger_than_its_tenant_may_have_is_refused_at_once() -> None:
    line = Line(1)
    words = "adapter 'a' takes 201 bytes of a worker's memory, and all of tenant a may take 200 (adapter_bytes)"
    assert words in line.ask("a", max_bytes=200, num_bytes=201)
    assert line.table.waiting == []


@given(st.lists(st.tuples(st.sampled_from("lurx"), st.sampled_from("abcd"), st.sampled_from("12")), max_size=60))
def test_no_order_of_loads_uses_and_removals_breaks_the_books(steps: list[tuple[str, str, str]]) -> None:
    table, users = AdapterTable(2), list[Adapter]()
    for at, (what, name, content) in enumerate(steps):
        try:
            if what == "l":
                share = AdapterShare(name, (f"{name}*", "d"), 150)
                table.fill(table.add(adapter(name, content)), object(), share, float(at))
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
