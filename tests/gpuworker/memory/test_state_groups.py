"""Checkpoints of states as a group of layers: how many pages they take, where there is none, what a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.byte_plan import KIB, BytePlan, bytes_per_block, longest_sequence
from gpuworker.memory.layout import (
    IndexKey,
    LayerShape,
    Reach,
    attending_groups,
    geometry_of,
    page_layout,
    state_group,
    with_groups,
    with_states,
)

WINDOW = Reach(KvGroupKind.WINDOW, 512)


def hybrid(layers: int, attending: Sequence[int], shape: LayerShape, state: int, dtype: str = "bfloat16") -> KvGeometry:
    """Return the geometry of layers of which some attend, and the others keep `state` bytes a sequence each."""
    others = [layer for layer in range(layers) if layer not in attending]
    return with_states(geometry_of(dict.fromkeys(attending, shape), dtype, 0), others, state * len(others), 16)


def conv(channels: int, width: int) -> int:
    """Return the bytes of a convolution's columns, of which transformers keeps as many as the kernel is wide."""
    return channels * width * 2


def heads(count: int, keys: int, values: int) -> int:
    """Return the bytes of a layer's recurrent state, in float32."""
    return count * keys * values * 4


# Published models in bfloat16, blocks of 16 slots: pages a checkpoint, KiB a page. A block of K and V is a page.
# Nemotron-H also has layers of neither kind.
PUBLISHED: dict[str, tuple[KvGeometry, int, int]] = {
    "qwen3-next-80b": (
        hybrid(48, range(3, 48, 4), LayerShape(2, 256, 256), conv(8192, 4) + heads(32, 128, 128)),
        198,
        384,
    ),
    "nemotron-h-8b": (
        with_states(
            geometry_of(dict.fromkeys((7, 18, 29, 40), LayerShape(8, 128, 128)), "bfloat16", 0),
            range(24),
            24 * (conv(10240, 4) + heads(128, 64, 128)),
            16,
        ),
        392,
        256,
    ),
    "lfm2-2.6b": (hybrid(30, range(2, 26, 3), LayerShape(8, 64, 64), conv(2048, 3)), 2, 256),
    "kimi-linear-48b": (
        hybrid(27, (*range(3, 24, 4), 26), LayerShape(1, 576, 512, True), conv(3 * 4096, 4) + heads(32, 128, 128)),
        341,
        126,
    ),
    "granite-4.0-h-small": (
        hybrid(40, range(5, 40, 10), LayerShape(8, 128, 128), conv(8448, 4) + heads(128, 64, 128)),
        586,
        256,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_keep_checkpoints_in_pages(name: str) -> None:
    geometry, pages, size = PUBLISHED[name]
    full, states = geometry.groups
    assert (full.kind, full.pages, states.kind, states.pages) == (KvGroupKind.FULL, 1, KvGroupKind.STATE, pages)
    assert bytes_per_block(geometry, 16) == size * KIB == bytes_per_block(replace(geometry, groups=()), 16)


def test_the_groups_name_their_layers() -> None:
    geometry = hybrid(4, range(2, 3), LayerShape(2, 16, 16), 100)
    assert geometry.groups == (
        KvGroup(KvGroupKind.FULL, 0, 1, (2,)),
        KvGroup(KvGroupKind.STATE, 0, 1, (0, 1, 3)),
    )
    assert state_group(geometry.groups) == geometry.groups[1]
    assert attending_groups(geometry.groups) == geometry.groups[:1]
    assert state_group(()) is None
    assert state_group(geometry.groups[:1]) is None


@pytest.mark.parametrize(("state", "pages"), [(1, 1), (2048, 1), (2049, 2), (4096 * 2048, 4096)])
def test_a_checkpoint_fills_pages(state: int, pages: int) -> None:
    """A page has 2 KiB: K and V of 2 heads of 16 numbers of 2 bytes, 16 slots."""
    geometry = hybrid(2, range(1), LayerShape(2, 16, 16), state)
    assert geometry.groups[1].pages == pages


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_scales_hold_no_states(dtype: str) -> None:
    geometry = hybrid(2, range(1), LayerShape(2, 16, 16), 1025, dtype)
    assert (geometry.groups[1].pages, bytes_per_block(geometry, 16)) == (2, 1024 + 2 * 2 * 16 * 4)


def test_windows_beside_full_layers_keep_their_pages() -> None:
    shape, reaches = LayerShape(2, 16, 16), {0: WINDOW, 1: Reach(), 2: WINDOW}
    grouped = with_groups(geometry_of(dict.fromkeys(reaches, shape), "bfloat16", 0), reaches, {}, 16)
    geometry = with_states(grouped, (3, 4), 5000, 16)
    assert geometry.groups == (*grouped.groups, KvGroup(KvGroupKind.STATE, 0, 3, (3, 4)))
    assert page_layout(geometry) == page_layout(grouped)


def test_a_group_of_states_has_no_parts() -> None:
    layout = page_layout(hybrid(4, range(1, 3), LayerShape(2, 16, 16), 5000))
    assert [part.lanes for part in layout.parts] == [{1: (0,), 2: (1,)}]
    assert layout.lanes == KvGeometry(2, 2, 16, 16, "bfloat16")


WIDE, NARROW = LayerShape(2, 16, 16), LayerShape(3, 16, 16)


@pytest.mark.parametrize(
    "geometry",
    [
        geometry_of({0: WIDE, 1: NARROW}, "bfloat16", 0),
        geometry_of({0: WIDE, 1: LayerShape(4, 16, 16)}, "int8", 0),
        geometry_of({0: replace(WIDE, index=IndexKey(8, "bfloat16"))}, "bfloat16", 0),
        geometry_of({0: WIDE}, "bfloat16", 512),
    ],
)
def test_where_pages_cannot_hold_states_there_are_no_groups(geometry: KvGeometry) -> None:
    assert with_states(geometry, (2,), 100, 16) == geometry


def test_checkpoints_of_more_pages_than_a_block_may_have_are_none() -> None:
    geometry = geometry_of({0: WIDE}, "bfloat16", 0)
    assert with_states(geometry, (1,), 4096 * 2048 + 1, 16) == geometry
    assert with_states(geometry, (1,), 0, 16) == geometry


def plan(num_blocks: int) -> BytePlan:
    geometry = PUBLISHED["qwen3-next-80b"][0]
    page, limit = bytes_per_block(geometry, 16), 262144
    longest = longest_sequence(limit, num_blocks, 16, 0, geometry.groups)
    state = 36 * (conv(8192, 4) + heads(32, 128, 128))
    return BytePlan(
        *("cpu", 0, 0, 0, 0, 0, page, num_blocks, 16, "bfloat16", limit, longest, 8),
        state_bytes=state,
        groups=geometry.groups,
    )


def test_a_plan_says_what_a_checkpoint_takes() -> None:
    lines = plan(20000).lines()
    assert lines[5:8] == [
        "    all tokens       12 layers, 1 page a block, 24.0 KiB a token, at most 16384 blocks a sequence",
        "    checkpoints      36 layers, 198 pages and 74.2 MiB each, as much as K and V of 3168 tokens",
        "  states        594.0 MiB  8 sequences, 74.2 MiB each",
    ]


def test_sequences_need_no_checkpoint() -> None:
    made = plan(200)
    assert (made.needed(16), made.needed(1600), made.sequences_of(1600), made.max_model_len) == (1, 100, 2, 3200)


@pytest.mark.parametrize(
    ("num_blocks", "shortest", "said"),
    [
        (201, 16, "hits from 16 tokens on, where a prompt of 17 or more leaves a checkpoint behind it"),
        (200, 0, "nothing can hit, a prompt of 17 tokens and its checkpoint take 201 pages of 200"),
        (2, 0, "nothing can hit, a prompt of 17 tokens and its checkpoint take 201 pages of 2"),
    ],
)
def test_a_plan_says_which_prefix_can_hit(num_blocks: int, shortest: int, said: str) -> None:
    """Two pages of the prompt, 198 of its checkpoint, and one that its output may bind."""
    made = plan(num_blocks)
    assert (made.shortest_hit, made.prefix_line(caching=True)) == (shortest, f"prefix cache: {said}")
    assert made.prefix_line(caching=False) == "prefix cache: none, every prompt is computed whole"


def test_without_states_a_block_is_the_shortest_hit() -> None:
    made = replace(plan(2), groups=(), state_bytes=0, max_model_len=18)
    said = "prefix cache: hits from 16 tokens on, where a prompt of 17 or more leaves it"
    assert (made.shortest_hit, made.prefix_line(caching=True)) == (16, said)
    assert replace(made, max_model_len=17).shortest_hit == 0, "a prompt of 17 tokens has no room for an output"
    assert replace(made, state_bytes=8).shortest_hit == 0, "states without checkpoints"
    few = replace(made, num_blocks=1)
    assert few.prefix_line(caching=True) == "prefix cache: nothing can hit, a prompt of 17 tokens takes 2 blocks of 1"
