"""Which spans a full store gives up: exact keys on tiny rings."""

from __future__ import annotations

from router.observe.trace_store import Key, SpanRing


def key(number: int) -> Key:
    return "trace", str(number)


def added(ring: SpanRing, number: int, sender: str, size: int = 10) -> list[int]:
    """Add a span; return the numbers of those that made room."""
    return [int(span_id) for _, span_id in ring.add(key(number), sender, size)]


def test_the_oldest_goes_first_whoever_sent_it() -> None:
    ring = SpanRing(4, 1_000)
    assert [added(ring, number, sender) for number, sender in enumerate("abab")] == [[], [], [], []]
    assert [added(ring, number, "b") for number in (4,)] == [[0]]
    assert added(ring, 5, "a") == [1]
    assert len(ring) == 4


def test_a_sender_beyond_its_share_pushes_out_its_own() -> None:
    ring = SpanRing(8, 1_000)
    added(ring, 0, "victim")
    added(ring, 1, "victim")
    gone = [each for number in range(2, 20) for each in added(ring, number, "flood")]
    assert gone == list(range(2, 14))  # six places are its share; both spans of the victim stay
    assert added(ring, 20, "victim") == [0]


def test_the_share_holds_for_bytes_too() -> None:
    ring = SpanRing(1_000, 100)
    added(ring, 0, "victim")
    gone = [each for number in range(1, 12) for each in added(ring, number, "flood", 30)]
    assert gone == list(range(1, 9))  # three fit beside the span of the victim, which stays
    assert ring.bytes == 100


def test_a_sender_alone_has_the_whole_ring() -> None:
    ring = SpanRing(4, 1_000)
    assert [added(ring, number, "a") for number in range(6)] == [[], [], [], [], [0], [1]]


def test_several_small_ones_make_room_for_a_large_one() -> None:
    ring = SpanRing(10, 100)
    for number in range(10):
        added(ring, number, "a")
    assert added(ring, 10, "b", 35) == [0, 1, 2, 3]
    assert ring.bytes == 95


def test_a_span_that_was_sent_again_counts_with_its_new_size() -> None:
    ring = SpanRing(10, 100)
    added(ring, 0, "a")
    ring.resize(key(0), 90)
    assert ring.bytes == 90
    assert added(ring, 1, "a", 20) == [0]
    assert ring.bytes == 20
