"""Messages between workers: exact bytes, and every number with a bound."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.hashing import key_of
from common.contracts.transfers import ImageName, TransferEnd
from common.contracts.types import BlockHash
from gpuworker.peers import wire
from gpuworker.peers.wire import (
    Hello,
    Item,
    NixlHead,
    NixlOffer,
    PeerIdentity,
    Refusal,
    Refused,
    Request,
    RingOffer,
    RingReply,
    Taken,
    Welcome,
    WireError,
)

FORMAT, OWN, OTHER, HOST = b"f" * 16, b"d" * 16, b"s" * 16, b"h" * 16
HELLO = Hello(PeerIdentity("d-1", OWN, FORMAT, 4096), "s-22", OTHER, HOST)
HELLO_BYTES = (
    b"quirePX\n" + bytes.fromhex("0100 0100 00100000") + FORMAT + HOST + OWN + OTHER
    + bytes.fromhex("0300 0400") + b"d-1s-22"
)  # fmt: skip
WELCOME_BYTES = b"quirePX\n" + bytes.fromhex("0100 0300 00100000") + FORMAT + OTHER
REQUEST_BYTES = (
    bytes.fromhex("01 00 0200 07000000") + b"t" * 16 + bytes.fromhex("0000000001000000") + b"a" * 16 + b"b" * 16
)
ITEM_BYTES = bytes.fromhex("01 00 0500 07000000 00100000 ffffffff") + b"x" * 16


def unpacked_client(content: bytes) -> Request | Taken | RingReply:
    head, body = content[: wire.HEAD_BYTES], content[wire.HEAD_BYTES :]
    assert wire.client_body_bytes(head) == len(body)
    return wire.unpack_client_message(head, body)


def test_a_hello_has_these_bytes() -> None:
    assert wire.pack_hello(HELLO) == HELLO_BYTES
    head, tail = HELLO_BYTES[: wire.HELLO_BYTES], HELLO_BYTES[wire.HELLO_BYTES :]
    assert wire.hello_tail_bytes(head) == len(tail) == 7
    assert wire.unpack_hello(head, tail) == HELLO


def test_without_a_host_key_no_ring_is_taken() -> None:
    packed = wire.pack_hello(Hello(HELLO.who, HELLO.source_id, OTHER))
    assert packed[10:12] == b"\0\0"
    assert wire.unpack_hello(packed[: wire.HELLO_BYTES], packed[wire.HELLO_BYTES :]).host_key == wire.NO_HOST
    unflagged = HELLO_BYTES[:10] + b"\0\0" + HELLO_BYTES[12:]
    assert wire.unpack_hello(unflagged[: wire.HELLO_BYTES], unflagged[wire.HELLO_BYTES :]).host_key == wire.NO_HOST


def test_a_welcome_has_these_bytes() -> None:
    welcome = Welcome(Refusal.INCARNATION, OTHER, FORMAT, 4096)
    assert wire.pack_welcome(welcome) == WELCOME_BYTES
    assert wire.unpack_welcome(WELCOME_BYTES) == welcome
    assert len(WELCOME_BYTES) == wire.WELCOME_BYTES


def test_a_refusal_counts_before_the_version_of_its_sender() -> None:
    other_version = WELCOME_BYTES[:8] + b"\x02\x00\x01\x00" + WELCOME_BYTES[12:]
    assert wire.unpack_welcome(other_version).refusal is Refusal.VERSION
    with pytest.raises(WireError, match="version 2 of the protocol; expected 1"):
        wire.unpack_welcome(other_version[:10] + b"\0\0" + other_version[12:])


def test_messages_of_the_destination_have_these_bytes() -> None:
    request = Request(7, b"t" * 16, 1 << 32, (BlockHash(b"a" * 16), BlockHash(b"b" * 16)))
    assert wire.pack_request(request) == REQUEST_BYTES
    assert unpacked_client(REQUEST_BYTES) == request
    assert wire.pack_taken(5) == bytes.fromhex("02 00 0000 05000000")
    assert unpacked_client(wire.pack_taken(5)) == Taken(5)
    opened, closed = RingReply(opened=True, nonce=b"n" * 32), RingReply(opened=False, nonce=bytes(32))
    assert wire.pack_ring_reply(opened) == bytes.fromhex("03 01 0000 00000000") + b"n" * 32
    assert unpacked_client(wire.pack_ring_reply(opened)) == opened
    assert unpacked_client(wire.pack_ring_reply(closed)) == closed


def test_messages_of_the_source_have_these_bytes() -> None:
    item = Item(7, 5, TransferEnd.DONE, 4096, b"x" * 16)
    assert wire.pack_item(item) == ITEM_BYTES
    assert wire.unpack_answer(ITEM_BYTES) == item
    missing = Item(7, 5, TransferEnd.STALE, slot=3)
    assert wire.pack_item(missing) == bytes.fromhex("01 01 0500 07000000 00000000 03000000") + bytes(16)
    assert wire.unpack_answer(wire.pack_item(missing)) == missing
    assert wire.pack_refused(Refused(7, Refusal.TOKEN)) == bytes.fromhex("02 07 0000 07000000") + bytes(24)
    assert wire.unpack_answer(wire.pack_refused(Refused(7, Refusal.TOKEN))) == Refused(7, Refusal.TOKEN)
    offer = RingOffer(9, 8192, b"r" * 16)
    assert wire.pack_ring_offer(offer) == bytes.fromhex("03 00 0900 00000000 00200000 00000000") + b"r" * 16
    assert wire.unpack_answer(wire.pack_ring_offer(offer)) == offer
    assert len(ITEM_BYTES) == wire.ANSWER_BYTES


def test_who_takes_nixl_says_so_in_a_flag() -> None:
    packed = wire.pack_hello(replace(HELLO, takes_nixl=True))
    assert packed == HELLO_BYTES[:10] + b"\3\0" + HELLO_BYTES[12:]
    assert wire.unpack_hello(packed[: wire.HELLO_BYTES], packed[wire.HELLO_BYTES :]).takes_nixl


def test_an_offer_of_nixl_has_these_bytes() -> None:
    offer = NixlOffer(9, 8192, b"r" * 16, 1 << 40, b"meta")
    content = (
        bytes.fromhex("04 00 0900 04000000 00200000 00000000") + b"r" * 16 + bytes.fromhex("0000000000010000") + b"meta"
    )
    assert wire.pack_nixl_offer(offer) == content
    head = wire.unpack_answer(content[: wire.ANSWER_BYTES])
    assert head == NixlHead(9, 8192, b"r" * 16, len(content) - wire.ANSWER_BYTES)
    assert wire.unpack_nixl_offer(head, content[wire.ANSWER_BYTES :]) == offer


@pytest.mark.parametrize(
    ("offer", "why"),
    [
        (NixlOffer(1, 1, b"r" * 16, 0, b""), "metadata of 0 bytes; expected 1 to 65536"),
        (NixlOffer(1, 1, b"r" * 16, 0, bytes(65537)), "metadata of 65537 bytes"),
        (NixlOffer(2, 4096, b"r" * 16, (1 << 64) - 8192, b"m"), "2 slots of 4096 bytes behind the end of all memory"),
    ],
)
def test_an_offer_of_nixl_is_refused_with_the_reason(offer: NixlOffer, why: str) -> None:
    content = wire.pack_nixl_offer(offer)
    with pytest.raises(WireError, match=why):
        wire.unpack_nixl_offer(
            cast("NixlHead", wire.unpack_answer(content[: wire.ANSWER_BYTES])), content[wire.ANSWER_BYTES :]
        )


@pytest.mark.parametrize(
    ("at", "content", "why"),
    [
        (0, b"GET / HT", "another protocol"),
        (8, b"\x02\x00", "version 2 of the protocol; expected 1"),
        (12, b"\0\0\0\0", "images of 0 bytes"),
        (12, b"\1\0\0\4", "images of 67108865 bytes; expected 1 to 67108864"),
        (80, b"\0\0", "ids of 0 and 4 bytes; expected 1 to 128"),
        (82, b"\x81\0", "ids of 3 and 129 bytes"),
        (84, b"\n", "an id is not printable ASCII"),
        (88, b"\xff", "an id is not printable ASCII"),
    ],
)
def test_a_hello_is_refused_with_the_reason(at: int, content: bytes, why: str) -> None:
    changed = HELLO_BYTES[:at] + content + HELLO_BYTES[at + len(content) :]
    head, tail = changed[: wire.HELLO_BYTES], changed[wire.HELLO_BYTES :]
    with pytest.raises(WireError, match=why):
        (wire.hello_tail_bytes(head), wire.unpack_hello(head, tail))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ("01 00 0000 00000000", "a request for 0 blocks; expected 1 to 512"),
        ("01 00 0102 00000000", "a request for 513 blocks"),
        ("00 00 0000 00000000", "a message of kind 0"),
        ("04 00 0000 00000000", "a message of kind 4"),
    ],
)
def test_a_message_of_the_destination_is_refused_by_its_head(head: str, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.client_body_bytes(bytes.fromhex(head))


@pytest.mark.parametrize(
    ("at", "content", "why"),
    [
        (0, b"\0", "an answer of kind 0"),
        (0, b"\5", "an answer of kind 5"),
        (1, b"\5", "an item with the end 5"),
        (8, b"\1\0\0\4", "an image of 67108865 bytes; expected at most 67108864"),
        (0, b"\2\x09", "a refusal with the number 9"),
    ],
)
def test_an_answer_is_refused_with_the_reason(at: int, content: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        wire.unpack_answer(ITEM_BYTES[:at] + content + ITEM_BYTES[at + len(content) :])


def test_a_request_of_the_most_blocks_fits_the_bound() -> None:
    request = Request(1, bytes(16), 0, (BlockHash(bytes(16)),) * 512)
    assert len(wire.pack_request(request)) == 8 + 24 + 512 * 16
    assert unpacked_client(wire.pack_request(request)) == request


@given(st.binary(min_size=wire.HELLO_BYTES, max_size=wire.HELLO_BYTES), st.binary(max_size=300))
def test_any_hello_is_one_or_is_refused(head: bytes, tail: bytes) -> None:
    for each in (head, HELLO_BYTES[:12] + head[12:]):
        try:
            size = wire.hello_tail_bytes(each)
            assert 2 <= size <= 256
            hello = wire.unpack_hello(each, tail[:size].ljust(size, b"a"))
        except WireError:
            continue
        assert wire.unpack_hello(each, wire.pack_hello(hello)[wire.HELLO_BYTES :]) == hello


@given(st.binary(min_size=wire.HEAD_BYTES, max_size=wire.HEAD_BYTES), st.data())
def test_any_message_of_a_destination_is_one_or_is_refused(head: bytes, data: st.DataObject) -> None:
    try:
        size = wire.client_body_bytes(head)
    except WireError:
        return
    assert size <= 24 + 512 * 16
    wire.unpack_client_message(head, data.draw(st.binary(min_size=size, max_size=size)))


@given(st.binary(min_size=wire.ANSWER_BYTES, max_size=wire.ANSWER_BYTES))
def test_any_answer_is_one_or_is_refused(content: bytes) -> None:
    for each in (content, bytes([1 + content[0] % 3, content[1] % 9]) + content[2:]):
        try:
            found = wire.unpack_answer(each)
        except WireError:
            continue
        assert not isinstance(found, Item) or found.length <= 64 << 20


def test_an_identity_that_no_hello_can_say_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="have 16 bytes"):
        PeerIdentity("w", b"short", FORMAT, 1)
    with pytest.raises(ValueError, match="images of 0 bytes"):
        PeerIdentity("w", OWN, FORMAT, 0)


def test_every_refusal_has_words() -> None:
    assert len({refusal.words for refusal in Refusal}) == len(Refusal)


def test_a_request_of_groups_names_each_and_has_an_image_a_page() -> None:
    keys = (key_of(BlockHash(b"a" * 16), 1), BlockHash(b"b" * 16))
    sent = wire.pack_request(Request(3, bytes(16), 9, keys))
    head, body = sent[: wire.HEAD_BYTES], sent[wire.HEAD_BYTES :]
    assert (head[1], body[-2:], len(body)) == (1, bytes([1, 0]), wire.client_body_bytes(head))
    request = wire.unpack_client_message(head, body)
    assert isinstance(request, Request)
    assert request.keys == keys
    assert request.images((2, 3)) == [
        *(ImageName(keys[0], page) for page in range(3)),
        ImageName(keys[1]),
        (keys[1], 1),
    ]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((1,), "a content of group 1; there are 1"),
        ((1, 9000), "a request for 9001 images; expected at most 8192"),
    ],
)
def test_a_request_of_more_than_there_can_be_is_refused(sizes: tuple[int, ...], why: str) -> None:
    request = Request(3, bytes(16), 9, (key_of(BlockHash(b"a" * 16), 1), BlockHash(b"b" * 16)))
    with pytest.raises(WireError, match=why):
        request.images(sizes)


def test_a_request_is_grouped_or_it_is_not() -> None:
    head = bytes([1, 2, 1, 0, 0, 0, 0, 0])
    with pytest.raises(WireError, match="grouped; expected 0 or 1"):
        wire.client_body_bytes(head)
