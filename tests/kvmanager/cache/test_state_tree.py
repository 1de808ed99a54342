"""Which checkpoints are superseded, and which leave first; a walk compares with a look at whole chains."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from common.contracts.types import BlockHash, BlockId
from kvmanager.cache.state_tree import StateTree
from kvmanager.contracts.block import CACHED, Blocks


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


ONE, TWO, THREE, FOUR = map(name, range(1, 5))


def tree(*chain: BlockHash) -> StateTree:
    """Return a tree with one chain of checkpoints that no sequence holds; each block has the number of its hash."""
    found = StateTree(1, Blocks(0))
    for above, state in zip((None, *chain), chain, strict=False):
        found.add(state, above)
        found.note_cached(state, block_of(state))
    return found


def block_of(state: BlockHash) -> BlockId:
    return BlockId(int.from_bytes(state, "big"))


def first(found: StateTree, kept: Iterable[int] = ()) -> int | None:
    leaving = found.first_to_leave(lambda block: block in kept)
    return None if leaving is None else leaving[0]


def test_a_checkpoint_from_which_one_goes_on_leaves_first() -> None:
    assert (first(tree(ONE)), first(tree(ONE, TWO)), first(tree(ONE, TWO, THREE))) == (None, 1, 1)


def test_a_checkpoint_from_which_two_go_on_stays() -> None:
    found = tree(ONE, TWO)
    found.add(THREE, ONE)
    assert first(found) is None
    found.remove(THREE)
    assert first(found) == 1


def test_a_checkpoint_that_was_asked_for_stays() -> None:
    found = StateTree(1, Blocks(0))
    found.add(ONE, None, asked=True)
    found.add(TWO, ONE)
    found.note_cached(ONE, BlockId(1))
    assert first(found) is None


def test_one_that_a_sequence_holds_or_the_cache_keeps_does_not_leave() -> None:
    found = tree(ONE, TWO, THREE)
    assert (first(found, {1}), first(found, {1, 2})) == (2, None)
    found.note_taken(ONE)
    assert first(found) == 2


def test_those_behind_one_that_left_go_on_from_the_one_before_it() -> None:
    found = tree(ONE, TWO, THREE)
    found.add(FOUR, TWO)
    assert first(found) == 1
    found.remove(ONE)
    found.remove(TWO)
    assert (first(found), len(found.known)) == (None, 2)


def test_a_tail_supersedes_nothing_before_it_is_used() -> None:
    found = tree(ONE)
    found.add(TWO, ONE, tail=True)
    found.note_cached(TWO, BlockId(2))
    assert (first(found), first(found, {2})) == (2, None)
    found.note_taken(TWO)
    assert first(found) == 1


def test_a_tail_is_used_too_where_a_checkpoint_goes_on_from_it() -> None:
    found = tree(ONE)
    found.add(TWO, ONE, tail=True)
    found.add(THREE, TWO)
    assert first(found) == 1


def test_tails_leave_first_unless_more_of_the_last_ones_were_used() -> None:
    found = tree(ONE)
    for state in (TWO, THREE):
        found.add(state, ONE, tail=True)
        found.note_cached(state, block_of(state))
    assert (found.tails_pay, first(found)) == (False, 2), "nothing is known of tails yet"
    found.note_taken(TWO)
    assert (found.tails_pay, first(found)) == (True, 1), "what the used one goes on from is superseded"
    found.remove(ONE)
    assert first(found) is None
    found.remove(THREE)
    assert not found.tails_pay


def test_one_tail_in_sixteen_takes_room_where_tails_do_not_pay() -> None:
    found = tree(ONE)
    assert sum(found.tail_takes_room() for _ in range(160)) == 10
    found.add(TWO, ONE, tail=True)
    found.note_taken(TWO)
    assert all(found.tail_takes_room() for _ in range(40))


def test_what_was_learned_is_bounded() -> None:
    found = tree(ONE)
    for number in range(100, 200):
        found.add(name(number), ONE, tail=True)
        found.remove(name(number))
    for number in range(200, 217):
        assert not found.tails_pay
        found.add(name(number), ONE, tail=True)
        found.note_taken(name(number))
    assert found.tails_pay


def test_k_and_v_without_a_checkpoint_leaves_after_tails() -> None:
    blocks = Blocks(4)
    found = StateTree(1, blocks)
    for block in (1, 2, 3):
        blocks.state[block] = CACHED
        found.note_end(BlockId(block))
    blocks.children[1] = 1
    assert first(found) == 2, "a block goes on from the first one"
    found.note_end(BlockId(3), next_to_leave=True)
    assert (first(found), first(found, {3})) == (3, 2)
    found.add(ONE, None, tail=True)
    found.note_cached(ONE, BlockId(0))
    assert first(found) == 0


class Chains:
    """The same rules, by whole chains: each checkpoint has the list of those before it, and all is counted anew."""

    def __init__(self) -> None:
        self.chains: dict[BlockHash, tuple[BlockHash, ...]] = {}
        self.tails: set[BlockHash] = set()
        self.asked: set[BlockHash] = set()

    def parent(self, state: BlockHash) -> BlockHash | None:
        return next((each for each in reversed(self.chains[state]) if each in self.chains), None)

    def use(self, state: BlockHash | None) -> None:
        """A tail that is used is none any more, and those are used right before it on its chain."""
        while state is not None and state in self.tails:
            self.tails.remove(state)
            state = self.parent(state)

    def superseded(self) -> set[BlockHash]:
        below = dict.fromkeys(self.chains, 0)
        for state in self.chains:
            above = self.parent(state)
            if above is not None and state not in self.tails:
                below[above] += 1
        return {state for state, count in below.items() if count == 1 and state not in self.asked}


@pytest.mark.parametrize("seed", range(40))
def test_a_walk_agrees_with_whole_chains(seed: int) -> None:
    rng, found, chains = random.Random(seed), StateTree(1, Blocks(0)), Chains()
    cached: set[BlockHash] = set()
    for number in range(1, 200):
        states = list(chains.chains)
        event = rng.random()
        if event < 0.5 or not states:
            above = rng.choice(states) if states and rng.random() < 0.8 else None
            state, tail, asked = name(number), rng.random() < 0.3, rng.random() < 0.1
            found.add(state, above, asked and not tail, tail)
            chains.chains[state] = (*chains.chains[above], above) if above is not None else ()
            chains.tails |= {state} if tail else set()
            chains.asked |= {state} if asked and not tail else set()
            if not tail:
                chains.use(above)
        elif event < 0.65:
            gone = rng.choice(states)
            found.remove(gone)
            cached.discard(gone)
            del chains.chains[gone]
            chains.tails.discard(gone)
        elif event < 0.85:
            state = rng.choice(states)
            found.note_cached(state, block_of(state))
            cached.add(state)
        else:
            state = rng.choice(states)
            found.note_taken(state)
            cached.discard(state)
            chains.use(state)
        want = chains.superseded()
        assert {state for state in chains.chains if found.is_superseded(state)} == want
        early = (want & cached) | (set() if found.tails_pay else chains.tails & cached)
        kept, leaves = set[int](), set[int]()
        while (block := first(found, kept)) is not None:
            kept.add(block)
            leaves.add(block)
        assert leaves == {block_of(state) for state in early}
        twin = found.copy(Blocks(0))
        assert twin.key() == found.key()
