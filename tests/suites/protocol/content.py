"""The exact content of block slots: the K/V of the last token of a known sequence of tokens.

A prefix is a node of one tree of tokens, shared by all worlds; a slot holds a node or 0, nothing. Two sequences may
share a slot if and only if their tokens up to there are the same. Then the node is the same.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

from common.contracts.hashing import all_partial_hashes, block_hash_of, little_endian_int32, next_digest
from common.contracts.types import BlockHash, BlockId, FrameId

NOTHING = 0
ROOT_LINK = bytes(32)

_parents: list[int] = [NOTHING]
_tokens: list[int] = [-1]
_depths: list[int] = [0]
_draws: list[int] = [0]
_children: dict[tuple[int, int], int] = {}
_nodes_of_keys: dict[BlockHash, int] = {}


def child(node: int, token: int) -> int:
    found = _children.get((node, token))
    if found is None:
        found = _children[node, token] = len(_parents)
        _parents.append(node)
        _tokens.append(token)
        _depths.append(_depths[node] + 1)
        _draws.append(crc32(token.to_bytes(4, "little"), _draws[node]))
    return found


def path(tokens: tuple[int, ...]) -> list[int]:
    nodes, node = [], NOTHING
    for token in tokens:
        node = child(node, token)
        nodes.append(node)
    return nodes


def draw(node: int) -> int:
    """Return a number that only the tokens of a prefix decide. The node depends on what the process met before."""
    return _draws[node]


def depth(node: int) -> int:
    """Return how many tokens a prefix has."""
    return _depths[node]


def ancestor(node: int, steps: int) -> int:
    """Return the prefix without its last `steps` tokens."""
    for _ in range(steps):
        node = _parents[node]
    return node


@cache
def link(node: int, block_size: int) -> bytes:
    """Return the 32-byte digest of a prefix of whole blocks."""
    if node == NOTHING:
        return ROOT_LINK
    tokens, at = [], node
    for _ in range(block_size):
        tokens.append(_tokens[at])
        at = _parents[at]
    found = next_digest(link(at, block_size), tokens[::-1])
    _nodes_of_keys[block_hash_of(found)] = node
    return found


@cache
def key(node: int, block_size: int) -> BlockHash:
    """Return the hash of the block that ends a prefix of whole blocks."""
    return block_hash_of(link(node, block_size))


@cache
def partial_keys(tokens: tuple[int, ...], block_size: int) -> tuple[BlockHash, ...]:
    """Return the partial hashes of the blocks of a sequence of tokens."""
    nodes = path(tokens)
    keys = [key(nodes[end - 1], block_size) for end in range(block_size, len(tokens) + 1, block_size)]
    return all_partial_hashes(ROOT_LINK, keys, little_endian_int32(tokens), block_size)


def as_part(node: int, part: int) -> int:
    """Return what a slot holds of a node in a page, by the number of that page in its place of a block table.

    The pages of all groups count: the K/V of a token lies in as many pages, and each has its own part of it.
    """
    return part << 32 | node


@cache
def _key_of(slots: tuple[int, ...], part: int) -> BlockHash | None:
    """Return the key of the block whose slots these are, as a part of its place."""
    nodes = [slot - as_part(NOTHING, part) for slot in slots]
    node = nodes[-1]
    if not NOTHING < node < len(_parents) or _depths[node] % len(nodes):
        return None
    for index in range(len(nodes) - 1, -1, -1):
        if nodes[index] != node:
            return None
        node = _parents[node]
    return key(nodes[-1], len(nodes))


def parent_key(of: BlockHash, block_size: int) -> BlockHash | None:
    """Return the key of the block before the one that `of` stands for; None for a first block."""
    before = ancestor(_nodes_of_keys[of], block_size)
    return None if before == NOTHING else key(before, block_size)


@cache
def image_of(block_hash: BlockHash, block_size: int, part: int = 0, states: bool = False) -> tuple[int, ...]:
    """Return what the slots of a page hold, a part of the place of the block that a hash stands for."""
    node = _nodes_of_keys[block_hash]
    steps = [0] * block_size if states else range(block_size - 1, -1, -1)
    return tuple([as_part(ancestor(node, each), part) for each in steps])


class Device:
    """The KV cache of one worker: per block, the node that each slot holds.

    Frames of host memory stand behind the blocks (`frame`). Where the pool has groups, `slots` are those of pages, and
    hold a node as its part of a place (`as_part`). All slots of a checkpoint's pages hold the node of the last token
    before it.
    """

    def __init__(self, num_blocks: int, block_size: int, frames: int = 0) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.slots = [[NOTHING] * block_size for _ in range(num_blocks + frames)]

    def frame(self, frame: FrameId) -> int:
        """Return where the slots of a frame stand."""
        return self.num_blocks + frame

    def copy_block(self, src: int, dst: int) -> None:
        self.slots[dst] = self.slots[src].copy()

    def block_key(self, block: int, part: int = 0) -> BlockHash | None:
        """Return the key of what a block holds; None unless all its slots hold the tokens of one prefix.

        Where the pool has groups, return it for a page, as a part of its place.
        """
        return _key_of(tuple(self.slots[block]), part)

    def state_in(self, page: BlockId, part: int) -> int | None:
        """Return the node behind whose token a page holds its part of the states; None: it holds no states."""
        slots = self.slots[page]
        node = slots[0] - as_part(NOTHING, part)
        return node if NOTHING < node < len(_parents) and slots.count(slots[0]) == len(slots) else None

    def clone(self) -> Device:
        twin = Device(0, self.block_size)
        twin.num_blocks = self.num_blocks
        twin.slots = [slots.copy() for slots in self.slots]
        return twin
