"""What two workers say to each other when one fetches blocks: fixed little-endian structs, each length with a bound.

The destination D opens a connection to the source S. All numbers are little-endian.

    D  hello     magic 8 | version u16 | flags u16 | image bytes u32 | image format 16 | host key 16
                 | D's incarnation 16 | S's incarnation 16 | length of D's id u16 | of S's id u16 | both ids
    S  welcome   magic 8 | version u16 | refusal u16 | image bytes u32 | image format 16 | S's incarnation 16

    D  request   1 u8 | grouped u8 | contents u16 | request u32 | token 16 | expires u64 | hashes, 16 each
                 | where `grouped` is 1, the group of layers of each, 1 each
    D  taken     2 u8 | 0 u8 | 0 u16              | slot u32
    D  ring      3 u8 | opened u8 | 0 u16         | 0 u32 | nonce 32      answers nixl too, with a nonce of zeros

    S  item      1 u8 | end u8 | item u16 | request u32 | length u32 | slot u32 | xxh3-128 of the image 16 | image
    S  refused   2 u8 | refusal u8 | 0 u16 | request u32 | 0 u32 | 0 u32 | 0 16
    S  ring      3 u8 | 0 u8 | slots u16 | 0 u32 | bytes of a slot u32 | 0 u32 | name 16
    S  nixl      4 u8 | 0 u8 | slots u16 | bytes of metadata u32 | bytes of a slot u32 | 0 u32 | name of the agent 16
                 | address of slot 0 u64 | metadata

An image is that of a block, or of a page where the pool has groups of layers. Then a content has as many as a block of
its group has pages, which follows from the image format. Each image of a request is an item, numbered in their order.

`end` is a TransferEnd. An image follows its head where `slot` is NO_SLOT; else it lies in that slot of S's ring in
shared memory (`carriers.py`), or of S's staging memory (`nixl.py`): of what S offered last, and D has opened.
`flags` of a hello: 1 where D takes rings, 2 where it takes nixl. Incarnations are the public ones. Nothing here does
I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from common.contracts.hashing import group_in, hash_in, key_of
from common.contracts.limits import MAX_ID_CHARS, MAX_PEER_IMAGE_BYTES, MAX_PEER_IMAGES, MAX_PEER_ITEMS
from common.contracts.transfer_tokens import TOKEN_BYTES
from common.contracts.transfers import ImageName, TransferEnd
from common.contracts.types import BlockHash
from common.untrusted.ids import is_id

VERSION: Final = 1
KEY_BYTES: Final = 16
DIGEST_BYTES: Final = 16
NONCE_BYTES: Final = 32
NO_SLOT: Final = 0xFFFF_FFFF
NO_HOST: Final = bytes(KEY_BYTES)
_MAGIC: Final = b"quirePX\n"
MAX_METADATA_BYTES: Final = 64 << 10
_TAKES_RINGS, _TAKES_NIXL = 1, 2
_HELLO: Final = struct.Struct("<8sHHI16s16s16s16sHH")
_WELCOME: Final = struct.Struct("<8sHHI16s16s")
_HEAD: Final = struct.Struct("<BBHI")
_REQUEST: Final = struct.Struct(f"<{TOKEN_BYTES}sQ")
_ANSWER: Final = struct.Struct("<BBHIII16s")
_PLACE: Final = struct.Struct("<Q")
HELLO_BYTES: Final = _HELLO.size
WELCOME_BYTES: Final = _WELCOME.size
HEAD_BYTES: Final = _HEAD.size
ANSWER_BYTES: Final = _ANSWER.size


class WireError(Exception):
    """What a peer sent is not of this protocol; the text says why, and has nothing of what was sent."""


class OtherVersion(WireError):
    """A peer of this protocol speaks another version of it."""


class Refusal(IntEnum):
    """Why S refuses a connection or a request."""

    NONE = 0
    VERSION = 1
    FORMAT = 2
    INCARNATION = 3
    SOURCE = 4
    CERTIFICATE = 5
    FULL = 6
    TOKEN = 7
    MALFORMED = 8

    @property
    def words(self) -> str:
        """The reason, for a log line."""
        return _WORDS[self]


_WORDS: Final = {
    Refusal.NONE: "nothing is refused",
    Refusal.VERSION: "the source speaks another version of the protocol",
    Refusal.FORMAT: "its blocks have another format: another model, type or layout",
    Refusal.INCARNATION: "the source has begun anew since the manager named it",
    Refusal.SOURCE: "another worker listens at the address",
    Refusal.CERTIFICATE: "the certificate is not that of this worker",
    Refusal.FULL: "the source has as many connections as it takes",
    Refusal.TOKEN: "the token does not hold",
    Refusal.MALFORMED: "the source could not read the request",
}


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a worker is for its peers. `incarnation` is the public one, `image_format` names the layout of an image.

    Both have 16 bytes. Every image of the format has `image_bytes`, and a content has one for each of the
    `block_pages` of its group. Of another worker these are not known; its format says them.
    """

    worker_id: str
    incarnation: bytes
    image_format: bytes
    image_bytes: int
    block_pages: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        """Raise ValueError for what a hello cannot say."""
        if len(self.incarnation) != KEY_BYTES or len(self.image_format) != KEY_BYTES:
            raise ValueError(f"an incarnation and an image format have {KEY_BYTES} bytes")
        if not 0 < self.image_bytes <= MAX_PEER_IMAGE_BYTES:
            raise ValueError(f"images of {self.image_bytes} bytes; expected 1 to {MAX_PEER_IMAGE_BYTES}")


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of D: who it is, whom it looks for, and by what it takes images. NO_HOST: not by shared memory."""

    who: PeerIdentity
    source_id: str
    source_incarnation: bytes
    host_key: bytes = NO_HOST
    takes_nixl: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to a hello. After a refusal S closes the connection."""

    refusal: Refusal
    incarnation: bytes
    image_format: bytes
    image_bytes: int


@dataclass(frozen=True, slots=True)
class Request:
    """D asks for contents, by their keys (`key_of`). Each image of them is answered once, in any order."""

    number: int
    token: bytes
    expires: int
    keys: tuple[BlockHash, ...]

    def images(self, block_pages: Sequence[int]) -> list[ImageName]:
        """Return the images of all contents, in their order; a content has as many as a block of its group has pages.

        Raises WireError for a group that there is not, and for too many images.
        """
        groups = [group_in(key) for key in self.keys]
        if max(groups) >= len(block_pages):
            raise WireError(f"a content of group {max(groups)}; there are {len(block_pages)}")
        count = sum(block_pages[group] for group in groups)
        if count > MAX_PEER_IMAGES:
            raise WireError(f"a request for {count} images; expected at most {MAX_PEER_IMAGES}")
        return [
            ImageName(key, page)
            for key, group in zip(self.keys, groups, strict=True)
            for page in range(block_pages[group])
        ]


@dataclass(frozen=True, slots=True)
class Taken:
    """D has copied an image out of a slot of the ring."""

    slot: int


@dataclass(frozen=True, slots=True)
class RingReply:
    """Whether D could open what S offers; then with the nonce that stands in a ring."""

    opened: bool
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Item:
    """S's answer for one image. `length` bytes follow, or lie in `slot`; none unless `end` is DONE."""

    request: int
    item: int
    end: TransferEnd
    length: int = 0
    digest: bytes = bytes(DIGEST_BYTES)
    slot: int = NO_SLOT


@dataclass(frozen=True, slots=True)
class Refused:
    """S answers nothing of a request."""

    request: int
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class RingOffer:
    """S offers a ring in shared memory: `slots` of `slot_bytes` each, in a file whose name is made of `name`."""

    slots: int
    slot_bytes: int
    name: bytes


@dataclass(frozen=True, slots=True)
class NixlHead:
    """The first part of a NixlOffer; `tail_bytes` follow."""

    slots: int
    slot_bytes: int
    name: bytes
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """S offers `slots` of `slot_bytes` each in its staging memory, from `address` on; `metadata` are its agent's."""

    slots: int
    slot_bytes: int
    name: bytes
    address: int
    metadata: bytes


class ClientKind(IntEnum):
    """What D sends."""

    REQUEST = 1
    TAKEN = 2
    RING = 3


class ServerKind(IntEnum):
    """What S sends."""

    ITEM = 1
    REFUSED = 2
    RING = 3
    NIXL = 4


# ---------------------------------------------------------------- hello and welcome


def pack_hello(hello: Hello) -> bytes:
    own, other = hello.who.worker_id.encode(), hello.source_id.encode()
    head = _HELLO.pack(
        _MAGIC,
        VERSION,
        (_TAKES_RINGS if hello.host_key != NO_HOST else 0) | (_TAKES_NIXL if hello.takes_nixl else 0),
        hello.who.image_bytes,
        hello.who.image_format,
        hello.host_key,
        hello.who.incarnation,
        hello.source_incarnation,
        len(own),
        len(other),
    )
    return head + own + other


def hello_tail_bytes(head: bytes) -> int:
    """Return the bytes of the ids behind the fixed part of a hello. Raises WireError."""
    magic, version, *_, own, other = _HELLO.unpack(head)
    _check_magic(magic, version)
    if not (0 < own <= MAX_ID_CHARS and 0 < other <= MAX_ID_CHARS):
        raise WireError(f"ids of {own} and {other} bytes; expected 1 to {MAX_ID_CHARS}")
    return int(own) + int(other)


def unpack_hello(head: bytes, tail: bytes) -> Hello:
    """Return the hello of its fixed part and its ids. Raises WireError."""
    _, _, flags, image_bytes, image_format, host_key, incarnation, source_incarnation, own, _ = _HELLO.unpack(head)
    if not 0 < image_bytes <= MAX_PEER_IMAGE_BYTES:
        raise WireError(f"images of {image_bytes} bytes; expected 1 to {MAX_PEER_IMAGE_BYTES}")
    who = PeerIdentity(_id(tail[:own]), incarnation, image_format, image_bytes)
    host_key = host_key if flags & _TAKES_RINGS else NO_HOST
    return Hello(who, _id(tail[own:]), source_incarnation, host_key, bool(flags & _TAKES_NIXL))


def pack_welcome(welcome: Welcome) -> bytes:
    return _WELCOME.pack(
        _MAGIC, VERSION, welcome.refusal, welcome.image_bytes, welcome.image_format, welcome.incarnation
    )


def unpack_welcome(content: bytes) -> Welcome:
    """Raises WireError."""
    magic, version, refusal, image_bytes, image_format, incarnation = _WELCOME.unpack(content)
    if magic != _MAGIC:
        raise WireError("the answer to the hello is of another protocol")
    # A source of another version refuses with a welcome of its own: its refusal counts before its version does.
    if refusal == Refusal.NONE:
        _check_magic(magic, version)
    return Welcome(_refusal(refusal), incarnation, image_format, image_bytes)


# ---------------------------------------------------------------- D -> S


def pack_request(request: Request) -> bytes:
    groups = bytes(map(group_in, request.keys))
    head = _HEAD.pack(ClientKind.REQUEST, int(any(groups)), len(request.keys), request.number)
    hashes = b"".join(map(hash_in, request.keys))
    return head + _REQUEST.pack(request.token, request.expires) + hashes + (groups if any(groups) else b"")


def pack_taken(slot: int) -> bytes:
    return _HEAD.pack(ClientKind.TAKEN, 0, 0, slot)


def pack_ring_reply(reply: RingReply) -> bytes:
    return _HEAD.pack(ClientKind.RING, int(reply.opened), 0, 0) + reply.nonce.ljust(NONCE_BYTES, b"\0")


def client_body_bytes(head: bytes) -> int:
    """Return the bytes behind the head of one of D's messages, at most 8,728. Raises WireError."""
    kind, grouped, count, _ = _HEAD.unpack(head)
    if kind == ClientKind.REQUEST:
        if not 0 < count <= MAX_PEER_ITEMS:
            raise WireError(f"a request for {count} blocks; expected 1 to {MAX_PEER_ITEMS}")
        if grouped > 1:
            raise WireError(f"a request that is {grouped} times grouped; expected 0 or 1")
        return _REQUEST.size + (KEY_BYTES + int(grouped)) * int(count)
    if kind == ClientKind.TAKEN:
        return 0
    if kind == ClientKind.RING:
        return NONCE_BYTES
    raise WireError(f"a message of kind {kind}")


def unpack_client_message(head: bytes, body: bytes) -> Request | Taken | RingReply:
    """Return one of D's messages; `body` has as many bytes as `client_body_bytes` said. Raises WireError."""
    kind, flag, count, number = _HEAD.unpack(head)
    if kind == ClientKind.TAKEN:
        return Taken(number)
    if kind == ClientKind.RING:
        return RingReply(bool(flag), body)
    token, expires = _REQUEST.unpack_from(body)
    end = _REQUEST.size + KEY_BYTES * count
    keys = [BlockHash(body[at : at + KEY_BYTES]) for at in range(_REQUEST.size, end, KEY_BYTES)]
    if flag:
        keys = [key_of(each, group) for each, group in zip(keys, body[end:], strict=True)]
    return Request(number, token, expires, tuple(keys))


# ---------------------------------------------------------------- S -> D


def pack_item(item: Item) -> bytes:
    return _ANSWER.pack(ServerKind.ITEM, item.end, item.item, item.request, item.length, item.slot, item.digest)


def pack_refused(refused: Refused) -> bytes:
    return _ANSWER.pack(ServerKind.REFUSED, refused.refusal, 0, refused.request, 0, 0, b"")


def pack_ring_offer(offer: RingOffer) -> bytes:
    return _ANSWER.pack(ServerKind.RING, 0, offer.slots, 0, offer.slot_bytes, 0, offer.name)


def pack_nixl_offer(offer: NixlOffer) -> bytes:
    head = _ANSWER.pack(ServerKind.NIXL, 0, offer.slots, len(offer.metadata), offer.slot_bytes, 0, offer.name)
    return head + _PLACE.pack(offer.address) + offer.metadata


def unpack_nixl_offer(head: NixlHead, tail: bytes) -> NixlOffer:
    """Return the offer of its first part and what follows. Raises WireError."""
    (address,) = _PLACE.unpack_from(tail)
    if address + head.slots * head.slot_bytes >= 1 << 64:
        raise WireError(f"{head.slots} slots of {head.slot_bytes} bytes behind the end of all memory")
    return NixlOffer(head.slots, head.slot_bytes, head.name, address, tail[_PLACE.size :])


def unpack_answer(content: bytes) -> Item | Refused | RingOffer | NixlHead:
    """Return one of S's messages, without the image or the metadata behind it. Raises WireError."""
    kind, end, item, request, length, slot, digest = _ANSWER.unpack(content)
    if kind == ServerKind.ITEM:
        if end not in _ENDS:
            raise WireError(f"an item with the end {end}")
        if length > MAX_PEER_IMAGE_BYTES:
            raise WireError(f"an image of {length} bytes; expected at most {MAX_PEER_IMAGE_BYTES}")
        return Item(request, item, TransferEnd(end), length, digest, slot)
    if kind == ServerKind.REFUSED:
        return Refused(request, _refusal(end))
    if kind == ServerKind.RING:
        return RingOffer(item, length, digest)
    if kind == ServerKind.NIXL:
        if not 0 < request <= MAX_METADATA_BYTES:
            raise WireError(f"metadata of {request} bytes; expected 1 to {MAX_METADATA_BYTES}")
        return NixlHead(item, length, digest, _PLACE.size + request)
    raise WireError(f"an answer of kind {kind}")


# ---------------------------------------------------------------- parts

_ENDS: Final = frozenset(map(int, TransferEnd))
_REFUSALS: Final = frozenset(map(int, Refusal))


def _check_magic(magic: bytes, version: int) -> None:
    if magic != _MAGIC:
        raise WireError("the first message is of another protocol")
    if version != VERSION:
        raise OtherVersion(f"version {version} of the protocol; expected {VERSION}")


def _id(content: bytes) -> str:
    text = content.decode("ascii", errors="replace")
    if not is_id(text):
        raise WireError("an id is not printable ASCII")
    return text


def _refusal(number: int) -> Refusal:
    if number not in _REFUSALS:
        raise WireError(f"a refusal with the number {number}")
    return Refusal(number)
