"""The queue of constraints: senders take turns."""

from __future__ import annotations

from router.answers.constraints.checker import PeerQueue


def queue(*items: str) -> PeerQueue[str]:
    """Return a queue of items whose first character is their peer."""
    made: PeerQueue[str] = PeerQueue()
    for item in items:
        made.put(item[0], item)
    return made


def drained(waiting: PeerQueue[str]) -> list[str]:
    return list(iter(waiting.take, None))


def test_peers_take_turns_and_each_keeps_its_order() -> None:
    assert drained(queue("a1", "a2", "a3", "b1", "c1", "b2")) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_late_peer_waits_for_one_item_of_each_other() -> None:
    waiting = queue("a1", "a2", "a3")
    assert waiting.take() == "a1"
    waiting.put("b", "b1")
    assert drained(waiting) == ["a2", "b1", "a3"]


def test_a_busy_peer_is_passed_over_and_keeps_its_items() -> None:
    waiting = queue("a1", "b1")
    assert (waiting.take(busy={"a"}), waiting.take(busy={"a"}), waiting.of("a")) == ("b1", None, 1)


def test_what_is_withdrawn_is_gone() -> None:
    waiting = queue("a1", "a2", "b1")
    waiting.remove("a", "a1")
    waiting.remove("b", "b1")
    waiting.remove("b", "b1")
    assert (len(waiting), waiting.of("b"), drained(waiting)) == (1, 0, ["a2"])
