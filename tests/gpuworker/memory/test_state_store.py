"""Checkpoints in pages: what is loaded is what was saved, bit by bit, and other pages stay as they are."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import LayerShape, checkpoint_pages, geometry_of, with_states
from gpuworker.memory.state_store import StateStore

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")


def states(size: int, seed: int) -> torch.Tensor:
    """Return bytes of all values."""
    return torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def geometry(layers: int, shape: LayerShape, dtype: str, size: int, block_size: int) -> KvGeometry:
    return with_states(geometry_of(dict.fromkeys(range(layers), shape), dtype, 0), (layers,), size, block_size)


shapes = st.one_of(
    st.builds(LayerShape, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    st.builds(lambda rank, rope: LayerShape(1, rank + rope, rank, True), st.integers(1, 9), st.integers(1, 4)),
)


@given(
    st.integers(1, 4), shapes, st.sampled_from(DTYPES), st.integers(1, 60), st.sampled_from([1, 3, 4, 16]), st.data()
)
def test_two_states_in_pages_of_their_own_are_kept(
    layers: int, shape: LayerShape, dtype: str, words: int, block_size: int, data: st.DataObject
) -> None:
    size = 16 * words
    made = geometry(layers, shape, dtype, size, block_size)
    pages = made.groups[1].pages
    count = 2 * pages + 2
    first, *rest = data.draw(st.permutations(range(count)))
    ones, others = rest[:pages], rest[pages : 2 * pages]
    cache = KvCache(made, count, block_size, CPU)
    for pool in cache.pools:
        pool.view(torch.uint8).fill_(77)
    store, kept = StateStore(cache), [states(size, 0), states(size, 1)]
    store.save(kept[0], ones)
    store.save(kept[1], others)
    for pages_of, wanted in ((ones, kept[0]), (others, kept[1])):
        found = torch.zeros(size, dtype=torch.uint8)
        store.load(pages_of, found)
        assert torch.equal(found, wanted)
        places = store.places(size, pages_of).tolist()
        assert b"".join(ctypes.string_at(at, length) for at, length in places) == bytes(wanted.tolist())
    store.clear(ones)
    keys_of_ones = [] if cache.lanes is None else [cache.lanes.keys[:, ones], cache.lanes.values[:, ones]]
    assert all(not each.view(torch.uint8).any() for each in map(torch.Tensor.contiguous, keys_of_ones))
    found = torch.zeros(size, dtype=torch.uint8)
    store.load(others, found)
    assert torch.equal(found, kept[1])
    unused = [first, *rest[2 * pages :]]
    assert all(bool((pool.view(torch.uint8)[:, unused] == 77).all()) for pool in cache.pools)
    scales = [cache.lanes.key_scales, cache.lanes.value_scales] if cache.lanes is not None else []
    assert all(bool((scale.view(torch.uint8) == 77).all()) for scale in scales if scale is not None)


def test_bytes_lie_in_keys_of_all_lanes_page_by_page_and_then_in_values() -> None:
    """Two lanes of 8 bytes of K and of V a page, and a state of 56 bytes."""
    made = geometry(2, LayerShape(1, 8, 8), "int8", 56, 1)
    cache = KvCache(made, 9, 1, CPU)
    assert cache.lanes is not None
    assert made.groups[1].pages == 2
    StateStore(cache).save(torch.arange(1, 57, dtype=torch.uint8), [7, 3])
    keys, values = cache.lanes.keys, cache.lanes.values
    assert [int(keys[lane, page].flatten()[0]) for page in (7, 3) for lane in (0, 1)] == [1, 9, 17, 25]
    assert [int(values[lane, page].flatten()[0]) for page in (7, 3) for lane in (0, 1)] == [33, 41, 49, 0]
    assert values[0, 3].flatten().tolist() == list(range(49, 57))
    assert int(keys.count_nonzero() + values.count_nonzero()) == 56


def test_groups_of_shapes_that_share_lanes_hold_states_too() -> None:
    shapes = {0: LayerShape(1, 32, 32), 1: LayerShape(4, 16, 16)}
    made = with_states(geometry_of(shapes, "float32", 0), (2,), 6000, 4)
    cache, kept = KvCache(made, 12, 4, CPU), states(6000, 2)
    store, found = StateStore(cache), torch.zeros(6000, dtype=torch.uint8)
    pages = list(range(made.groups[1].pages))
    store.save(kept, pages)
    store.load(pages, found)
    assert torch.equal(found, kept)


def test_too_few_pages_are_refused() -> None:
    made = geometry(2, LayerShape(1, 8, 8), "int8", 56, 1)
    store = StateStore(KvCache(made, 9, 1, CPU))
    with pytest.raises(ValueError, match="a state of 56 bytes does not fit into 1 pages: 32 bytes"):
        store.save(states(56, 0), [4])
    with pytest.raises(ValueError, match="does not fit"):
        store.load([4], states(56, 0))


@pytest.mark.parametrize("page", [-1, 4])
def test_a_page_that_the_cache_does_not_have_is_refused(page: int) -> None:
    made = geometry(1, LayerShape(1, 4, 4), "float32", 64, 4)
    store, state = StateStore(KvCache(made, 4, 4, CPU)), states(64, 0)
    calls = (lambda: store.save(state, [page]), lambda: store.load([page], state), lambda: store.clear([page]))
    for call in (*calls, lambda: store.places(64, [page]), lambda: store.bytes_of([page])):
        with pytest.raises(ValueError, match=r"pages \[-?\d\] of a checkpoint are not among the 4 of the cache"):
            call()


def test_pages_of_another_block_size_are_counted_anew() -> None:
    made = replace(
        geometry(2, LayerShape(1, 8, 8), "int8", 1000, 16),
        groups=(KvGroup(KvGroupKind.FULL, 0, 1, (0, 1)), KvGroup(KvGroupKind.STATE, 0, 2, (2,))),
    )
    assert [checkpoint_pages(made, 1000, size) for size in (16, 8, 1)] == [2, 4, 32]
