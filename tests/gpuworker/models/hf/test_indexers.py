"""Layers that attend by index: the same tokens as transformers, from index keys on the blocks of K and V."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from common.contracts.errors import Unsupported
from common.contracts.lease import Copy
from common.contracts.types import BlockId, KvGeometry, SequenceId
from gpuworker.attention import index_keys
from gpuworker.attention.backends import BackendOptions, make_backend
from gpuworker.attention.index_keys import IndexPart, PagedIndexKeys
from gpuworker.attention.interface import AttentionMetadata
from gpuworker.memory.byte_plan import bytes_per_block
from gpuworker.memory.kv_cache import KvCache
from gpuworker.models.hf import indexers
from gpuworker.models.hf.loader import random_module, refuse_unsupported
from gpuworker.models.hf.model import TransformersModel
from gpuworker.models.hf.tiny import tiny_config
from gpuworker.models.self_test import self_test
from gpuworker.models.threshold_test import beyond_thresholds, tiny_model
from gpuworker.scheduling.batch_plan import ScheduledRow, StepPlan
from tests.support.gpuworker.full_forward import greedy_tokens, random_prompt
from tests.support.gpuworker.runner_harness import GREEDY, Driver, runner_on

CPU = torch.device("cpu")
A, B, C = SequenceId(1), SequenceId(2), SequenceId(3)
KEEPS = 9  # positions, of those that a query sees
# Two layers with index keys, and one that shares those of the layer before.
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]}
LAYERS: dict[str, dict[str, Any]] = {
    "axk2": {"num_hidden_layers": 2},
    "deepseek_v32": {"num_hidden_layers": 2},
    "dots3_note_text": {},
    "glm_moe_dsa": SHARED,
    "hy_v4": SHARED,
}
FAMILIES = tuple(LAYERS)


@functools.cache
def module_of(family: str) -> PreTrainedModel:
    """Return a model with random weights as transformers runs it."""
    whole = CONFIG_MAPPING[family](**LAYERS[family])
    module = random_module(tiny_config(whole), torch.float32, 0, CPU)
    assert module.config.index_topk == KEEPS
    module.train(False)
    return module


def model_of(family: str, kv_dtype: str | None = None) -> TransformersModel:
    return TransformersModel(copy.deepcopy(module_of(family)), kv_dtype)


def greedy(family: str, prompt: list[int], count: int, guess: Sequence[int] = ()) -> list[int]:
    return greedy_tokens(module_of(family), prompt, count, guess)


def shape_by_test(model: TransformersModel) -> KvGeometry:
    return self_test(model, lambda cache: make_backend("auto", cache), length=48)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str, block_size: int) -> None:
    """Prefills in chunks beside decodes, before and beyond the positions that are kept."""
    runner = runner_on(model_of(family), block_size, max_model_len=96)
    cases = [(random_prompt(length), chunk) for length, chunk in ((1, 9), (33, 7), (48, 13), (9, 1))]
    driver = Driver(runner, block_size)
    streams = [driver.add(prompt, 16, chunk) for prompt, chunk in cases]
    driver.run()
    runner.close()
    for (prompt, _), stream in zip(cases, streams, strict=True):
        assert stream.output == greedy(family, prompt, 16, stream.output)


def row(sequence: SequenceId, start: int, length: int, *blocks: int, drafts: tuple[int, ...] = ()) -> ScheduledRow:
    return ScheduledRow(sequence, start, length, tuple(map(BlockId, blocks)), samples=True, drafts=drafts)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_shared_and_copied_blocks_hold_what_was_written(family: str, kv_dtype: str) -> None:
    """A prefix hit on the blocks of another sequence, a copied block, and a sequence that is computed anew."""
    prompt = random_prompt(19)
    runner = runner_on(model_of(family, kv_dtype), 4)
    for sequence in (A, B, C):
        runner.add_sequence(sequence, prompt, GREEDY, len(prompt))
    first = runner.submit_step(StepPlan(1, (row(A, 0, 19, 5, 2, 8, 6, 9),))).result(timeout=60).sampled[A]
    copies = (Copy(BlockId(9), BlockId(3), 2),)
    plan = StepPlan(2, (row(B, 18, 1, 5, 2, 8, 6, 3), row(C, 16, 3, 5, 2, 8, 6, 7)), copies)
    found = runner.submit_step(plan).result(timeout=60).sampled
    assert found == {B: first, C: first}
    if kv_dtype == "float32":
        assert list(first) == greedy(family, prompt, 1)
    runner.remove(A)
    runner.add_sequence(A, [*prompt, *first], GREEDY, len(prompt))  # preempted, and back on other blocks
    anew = runner.submit_step(StepPlan(3, (row(A, 0, 20, 11, 12, 13, 14, 15),))).result(timeout=60).sampled[A]
    assert runner.submit_step(StepPlan(4, (row(B, 19, 1, 5, 2, 8, 6, 3),))).result(timeout=60).sampled[B] == anew
    runner.close()


def test_a_row_reads_what_a_later_row_of_the_step_writes() -> None:
    """B and C go on behind the prefix that A computes in the same step; decodes stand first."""
    prompt, family = random_prompt(17), "deepseek_v32"
    runner = runner_on(model_of(family), 4)
    for sequence in (A, B, C):
        runner.add_sequence(sequence, prompt, GREEDY, len(prompt))
    rows = (row(B, 16, 1, 5, 2, 8, 6, 9), row(C, 12, 5, 5, 2, 8, 3, 7), row(A, 0, 17, 5, 2, 8, 6, 10))
    found = runner.submit_step(StepPlan(1, rows)).result(timeout=60).sampled
    wanted = tuple(greedy(family, prompt, 1))
    assert found == {A: wanted, B: wanted, C: wanted}
    runner.close()


def test_drafts_are_verified_by_index() -> None:
    family, prompt = "deepseek_v32", random_prompt(13)
    wanted = greedy(family, prompt, 5)
    runner = runner_on(model_of(family), 4)
    runner.add_sequence(A, prompt, GREEDY, len(prompt))
    runner.submit_step(StepPlan(1, (row(A, 0, 13, 0, 1, 2, 3),))).result(timeout=60)
    drafts = (wanted[1], wanted[2], (wanted[3] + 1) % 160)
    drafted = StepPlan(2, (row(A, 13, 1, 0, 1, 2, 3, 4, drafts=drafts),), drafts=3)
    assert runner.submit_step(drafted).result(timeout=60).sampled[A] == tuple(wanted[1:4])
    # The index key of the refused draft is overwritten.
    last = runner.submit_step(StepPlan(3, (row(A, 16, 1, 0, 1, 2, 3, 4),))).result(timeout=60)
    assert last.sampled[A] == (wanted[4],)
    runner.close()


def test_calls_are_no_larger_than_their_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is cut into calls of one to a few tokens, and decodes into calls of one or two."""
    monkeypatch.setattr(index_keys, "MAX_INDEX_SCORES", 16 * 70)
    test_tokens_are_those_of_transformers("deepseek_v32", 4)


def test_layers_that_keep_every_head_attend_by_index_too() -> None:
    """Where latents cannot be absorbed: K and V of 4 heads beside the index key."""
    module: Any = copy.deepcopy(module_of("deepseek_v32"))
    for each in module.modules():
        if hasattr(each, "expand_kv"):
            each.kv_b_proj = nn.Sequential(each.kv_b_proj)
    model = TransformersModel(module)
    assert "K and V of every head are kept" in model.absorbed.reason
    assert shape_by_test(model).shapes == "a=4x24+16,16:float32 aa"
    runner, prompt = runner_on(model, 4, max_model_len=96), random_prompt(30)
    driver = Driver(runner, 4)
    stream = driver.add(prompt, 12, 7)
    driver.run()
    runner.close()
    assert stream.output == greedy("deepseek_v32", prompt, 12)


# ---------------------------------------------------------------- what a token keeps


@pytest.mark.parametrize(
    ("family", "shapes", "numbers"),
    [
        ("deepseek_v32", "a=1x24/16,16:float32 aa", 2 * (24 + 16)),
        ("glm_moe_dsa", "a=1x24/16,16:float32 b=1x24/16 aab", 3 * 24 + 2 * 16),
    ],
)
def test_a_token_keeps_latents_and_index_keys_of_layers_with_an_indexer(family: str, shapes: str, numbers: int) -> None:
    geometry = shape_by_test(model_of(family))
    assert geometry.shapes == shapes
    assert bytes_per_block(geometry, 16) == 16 * numbers * 4
    cache = KvCache(geometry, 3, 16, CPU)
    assert sum(pool.nbytes for pool in cache.pools) == 3 * bytes_per_block(geometry, 16)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrow_caches_pass_the_test_at_start(family: str, kv_dtype: str) -> None:
    """K and V are rounded; index keys stay in the type of the model."""
    found = self_test(model_of(family, kv_dtype), lambda cache: make_backend("auto", cache))
    assert (found.dtype, found.shapes.count(":float32")) == (kv_dtype, 1)


def test_sixteen_bits_pass_the_test_at_start() -> None:
    module = random_module(tiny_config(CONFIG_MAPPING["deepseek_v32"]()), torch.bfloat16, 0, CPU)
    found = self_test(TransformersModel(module), lambda cache: make_backend("auto", cache))
    assert found.shapes.startswith("a=1x24/16,16:bfloat16 ")


# ---------------------------------------------------------------- what is refused


def at_start(family: str) -> None:
    """Test a tiny model of a configuration of the usual sizes beyond its thresholds, as a worker does at its start."""
    config = CONFIG_MAPPING[family]()
    config.max_position_embeddings = 1 << 16
    beyond_thresholds(
        config,
        lambda tiny, length: self_test(tiny_model(tiny, CPU), lambda cache: make_backend("auto", cache), length=length),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_test_at_start_goes_beyond_the_positions_that_are_kept(family: str) -> None:
    at_start(family)


def cut_one_late(begin: Any) -> Any:
    """Keys go to the slots of tokens of the step that come one later."""

    def shifted(self: PagedIndexKeys, step: AttentionMetadata) -> None:
        begin(self, step)
        self._slots = self._slots.roll(1)

    return shifted


def rows_swapped(parts: Any) -> Any:
    """Each row reads the keys of another."""

    def swapped(self: PagedIndexKeys, heads: int, size: int) -> list[IndexPart]:
        found = parts(self, heads, size)
        last = self._step.num_rows - 1
        return [IndexPart(each.tokens, last - each.rows, each.positions, each.context) for each in found]

    return swapped


def positions_of_the_step(parts: Any) -> Any:
    """Each row chooses as if its chunk began at position 0."""

    def moved(self: PagedIndexKeys, heads: int, size: int) -> list[IndexPart]:
        found = parts(self, heads, size)
        return [
            IndexPart(each.tokens, each.rows, each.positions - each.positions[:, :1], each.context) for each in found
        ]

    return moved


@pytest.mark.parametrize(
    ("name", "change"), [("begin", cut_one_late), ("parts", rows_swapped), ("parts", positions_of_the_step)]
)
def test_an_indexer_that_is_cut_wrongly_fails_the_test_at_start(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedIndexKeys, name, change(getattr(PagedIndexKeys, name)))
    words = r"deepseek_v32 cannot be served beyond index_topk 2048.*run through the paged cache"
    with pytest.raises(Unsupported, match=words):
        at_start("deepseek_v32")


def test_a_model_that_ignores_its_indices_fails_the_test_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexers, "_all_of", lambda found, parts, count: torch.arange(count).expand(count, -1))
    with pytest.raises(Unsupported, match="run packed, its logits differ"):
        at_start("deepseek_v32")


@pytest.mark.parametrize("family", ["qwen4_exp_text", "glm5_next_text"])
def test_indexers_that_choose_blocks_of_tokens_are_refused(family: str) -> None:
    with pytest.raises(Unsupported, match="chooses blocks of tokens"):
        refuse_unsupported(CONFIG_MAPPING[family]())


def test_the_same_bits_in_every_batch_are_refused() -> None:
    cache = KvCache(shape_by_test(model_of("deepseek_v32")), 3, 16, CPU)
    with pytest.raises(Unsupported, match="--deterministic cannot be kept: layers that attend by index"):
        make_backend("auto", cache, BackendOptions(deterministic=True))


# ---------------------------------------------------------------- the calls of a step


Call = tuple[list[int], list[int], list[list[int]], int]


def parts_of(rows: list[tuple[int, int]], heads: int = 1, size: int = 1) -> list[Call]:
    """Return the calls of rows (start, length): their tokens, rows, positions and context."""
    start, length = np.array(rows, dtype=np.int32).T
    query_start = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(length, dtype=np.int32)))
    found = index_keys._parts(query_start, start + length, heads, size, CPU)
    return [(each.tokens.tolist(), each.rows.tolist(), each.positions.tolist(), each.context) for each in found]


def test_calls_go_by_position_and_single_tokens_of_like_contexts_go_together() -> None:
    """At most half of what a call gathers is padding, so 40 is alone; 9 is before a chunk from 10, and 12 behind it."""
    assert parts_of([(40, 1), (12, 1), (9, 1), (20, 1), (10, 3), (0, 2)]) == [
        ([7, 8], [5], [[0, 1]], 2),
        ([2], [2], [[9]], 10),
        ([4, 5, 6], [4], [[10, 11, 12]], 13),
        ([1, 3], [1, 3], [[12], [20]], 21),
        ([0], [0], [[40]], 41),
    ]


def test_a_chunk_is_cut_where_its_scores_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_keys, "MAX_INDEX_SCORES", 60)
    assert [tokens for tokens, *_ in parts_of([(6, 1), (7, 1), (8, 2)], heads=3)] == [[0, 1], [2, 3]]
    assert [tokens for tokens, *_ in parts_of([(6, 1), (7, 1), (8, 2)], heads=4)] == [[0], [1], [2], [3]]
    assert [tokens for tokens, *_ in parts_of([(6, 1), (7, 1), (8, 2)], size=4)] == [[0], [1], [2, 3]]
    assert [tokens for tokens, *_ in parts_of([(0, 3)], heads=10)] == [[0, 1], [2]]
    assert [tokens for tokens, *_ in parts_of([(5, 3)], heads=4)] == [[0], [1], [2]], "tokens of one row go in turn"
    assert [tokens for tokens, *_ in parts_of([(0, 5)], heads=6)] == [[0, 1], [2, 3], [4]]
