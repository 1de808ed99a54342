"""The byte plan: exact numbers, and refusals that name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.contracts.errors import InvalidConfig
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.checkpoints.stored_tensors import StoredTensors
from gpuworker.memory.byte_plan import GIB, BytePlan, in_words
from gpuworker.models.hf.model import TransformersModel
from gpuworker.plane import memory
from gpuworker.plane.memory import MemoryOptions, mapped_weight_bytes, plan_draft, plan_memory, weight_bytes
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.runner_harness import transformers_model

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim_k=16, head_dim_v=16, dtype="float32")
BLOCK = 3 * 2 * (16 + 16) * 4 * 16  # bytes of a block of 16 slots


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> TransformersModel:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2 * GIB)
    monkeypatch.setattr(memory, "mapped_weight_bytes", lambda: 0)
    return transformers_model(checkpoint("llama"))


def plan(model: TransformersModel, **options: Any) -> BytePlan:
    return plan_memory(model, GEOMETRY, 1024, MemoryOptions(**options))


def test_blocks_may_be_given_by_number(model: TransformersModel) -> None:
    byte_plan = plan(model, kv_blocks=70)
    assert (byte_plan.num_blocks, byte_plan.kv) == (70, 70 * BLOCK)


def test_blocks_may_be_given_by_bytes(model: TransformersModel) -> None:
    assert plan(model, kv_memory=70 * BLOCK + BLOCK - 1).num_blocks == 70


def test_a_quarter_of_what_is_free_is_taken_on_cpu(model: TransformersModel) -> None:
    byte_plan = plan(model)
    room = 2 * GIB - byte_plan.activations - byte_plan.token_table
    assert byte_plan.num_blocks == room // 4 // BLOCK


def test_a_gib_at_most_is_taken_on_cpu(model: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 100 * GIB)
    assert plan(model).num_blocks == GIB // BLOCK


def test_the_context_is_the_models_where_it_fits(model: TransformersModel) -> None:
    assert plan(model, kv_blocks=64).max_model_len == 1024


def test_the_context_shrinks_to_the_pool_when_none_was_asked_for(model: TransformersModel) -> None:
    assert plan(model, kv_blocks=10).max_model_len == 160


def test_sequences_fit_in_whole_blocks(model: TransformersModel) -> None:
    byte_plan = plan(model, kv_blocks=70)
    assert (byte_plan.sequences_of(1024), byte_plan.sequences_of(17), byte_plan.sequences_of(16)) == (1, 35, 70)


@pytest.mark.parametrize("options", [{"kv_blocks": 2**27}, {"max_num_seqs": 2**21, "kv_blocks": 70}])
def test_places_that_an_int32_does_not_hold_are_refused(
    model: TransformersModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1 << 60)
    assert plan(model, **{name: count - 1 for name, count in options.items()} | {"max_model_len": 1023}).num_blocks
    with pytest.raises(InvalidConfig, match="32 bits"):
        plan(model, **options)


def test_the_token_table_counts(model: TransformersModel) -> None:
    assert plan(model, kv_blocks=70, max_num_seqs=8).token_table == 8 * 1025 * 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_memory": BLOCK - 1}, r"--kv-memory: no block fits: one takes 12.0 KiB and 12.0 KiB may be taken"),
        (
            {"kv_blocks": 10, "max_model_len": 200},
            r"200 tokens takes 13 blocks \(156.0 KiB\).* has 10 .* 160 tokens",
        ),
        ({"kv_blocks": 1 << 20}, r"--kv-blocks: 1048576 blocks take 12.0 GiB; 2.0 GiB may be taken on cpu"),
        ({"max_model_len": 2000}, r"--max-model-len: 2000 tokens were asked for; the model's positions end at 1024"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(
    model: TransformersModel, options: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        plan(model, **options)


def test_host_memory_holds_whole_frames_and_lies_in_the_memory_of_a_cpu(model: TransformersModel) -> None:
    byte_plan, without = plan(model, kv_blocks=70, host_memory=9 * BLOCK + 5), plan(model, kv_blocks=70)
    assert (byte_plan.host_frames, byte_plan.frame_bytes, byte_plan.host) == (9, BLOCK, 9 * BLOCK)
    assert without.left - byte_plan.left == 9 * BLOCK
    (line,) = [line for line in byte_plan.lines() if "host memory" in line]
    assert line == "  host memory   108.0 KiB  9 more blocks that left the KV cache"
    assert not any("host memory" in line for line in without.lines())


@pytest.mark.parametrize(
    ("geometry", "size", "words"),
    [
        (GEOMETRY, BLOCK - 1, "is 12.0 KiB, and a block takes 12.0 KiB; ask for more"),
        (GEOMETRY, 1 << 50, r"is 1024.0 TiB, and .* of the host's memory are free; ask for less"),
        (replace(GEOMETRY, window=64), 9 * BLOCK, "every layer of the model attends within a window"),
    ],
)
def test_host_memory_that_keeps_nothing_is_refused(
    model: TransformersModel, geometry: KvGeometry, size: int, words: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"--host-memory: {words}"):
        plan_memory(model, geometry, 1024, MemoryOptions(kv_blocks=70, host_memory=size))


def test_what_host_memory_cannot_keep_a_disk_cannot_either(model: TransformersModel) -> None:
    geometry = replace(GEOMETRY, window=64)
    with pytest.raises(InvalidConfig) as refused:
        plan_memory(model, geometry, 1024, MemoryOptions(kv_blocks=70, host_memory=9 * BLOCK, disk_cache=True))
    words = "every layer of the model attends within a window, and host memory keeps what some layer reads for good"
    assert [(each.field, each.description) for each in refused.value.violations] == [
        ("--host-memory", f"{words}; leave it out"),
        ("--disk-cache", f"{words}; leave it out"),
    ]


def test_a_disk_cache_is_a_line_of_the_plan_and_takes_no_memory(model: TransformersModel) -> None:
    without = plan(model, kv_blocks=70, host_memory=9 * BLOCK)
    byte_plan = replace(without, disk_frames=87125, disk=16 << 30, disk_folder="/cache/worker-0")
    (line,) = [line for line in byte_plan.lines() if line not in without.lines()]
    assert line == "  disk cache     16.0 GiB  87125 more blocks in /cache/worker-0"
    assert byte_plan.left == without.left


# One layer sees everything and two a window: a page has one lane, K and V of a layer in 16 slots.
GROUPED = replace(GEOMETRY, groups=(KvGroup(KvGroupKind.FULL, 0, 1, (0,)), KvGroup(KvGroupKind.WINDOW, 64, 2, (1, 2))))


def grouped(model: TransformersModel, **options: Any) -> BytePlan:
    return plan_memory(model, GROUPED, 1024, MemoryOptions(**options))


def test_host_memory_keeps_pages_where_layers_are_groups(model: TransformersModel) -> None:
    found = grouped(model, kv_blocks=300, host_memory=9 * BLOCK // 3 + 5)
    assert (found.host_frames, found.frame_bytes) == (9, BLOCK // 3)
    assert "  host memory    36.0 KiB  9 more pages that left the KV cache" in found.lines()


@pytest.mark.parametrize("options", [{"disk_cache": True}, {"needs_peers": True}])
def test_a_disk_and_peers_move_pages_of_groups_too(model: TransformersModel, options: dict[str, bool]) -> None:
    assert grouped(model, kv_blocks=300, host_memory=9 * BLOCK // 3 + 5, **options).host_frames == 9


def test_pages_are_counted_where_layers_are_groups(model: TransformersModel) -> None:
    byte_plan = grouped(model, kv_blocks=100)
    assert (byte_plan.block_bytes, byte_plan.kv) == (BLOCK // 3, 100 * BLOCK // 3)
    # All blocks of the full layer, and six of the window with two pages each.
    assert [byte_plan.needed(tokens) for tokens in (16, 96, 1024)] == [3, 18, 64 + 12]
    assert (byte_plan.sequences_of(1024), byte_plan.sequences_of(96), byte_plan.max_model_len) == (1, 5, 1024)
    assert grouped(model, kv_blocks=70).max_model_len == 58 * 16
    assert grouped(model, kv_blocks=17).max_model_len == 5 * 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_memory": BLOCK - 1}, r"--kv-memory: no block fits: one takes 12.0 KiB and 12.0 KiB may be taken"),
        (
            {"kv_blocks": 20, "max_model_len": 200},
            r"200 tokens takes 25 pages \(100.0 KiB\).* has 20 .* 128 tokens",
        ),
        ({"kv_blocks": 1 << 20}, r"--kv-blocks: 1048576 pages take 4.0 GiB; 2.0 GiB may be taken on cpu"),
    ],
)
def test_pages_that_cannot_fit_are_refused_with_the_numbers(
    model: TransformersModel, options: dict[str, int], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        grouped(model, **options)


def test_a_draft_model_has_one_group_and_the_tokens_of_the_targets_longest_sequences(
    model: TransformersModel,
) -> None:
    target = grouped(model, kv_blocks=160)
    draft = plan_draft(target, model, GEOMETRY, 1024, MemoryOptions(max_num_batched_tokens=128))
    assert (target.sequences_of(1024), draft.groups, draft.num_blocks, draft.block_bytes) == (2, (), 2 * 64, BLOCK)


def test_a_device_without_room_is_refused(model: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 0)
    with pytest.raises(InvalidConfig, match="no block fits"):
        plan(model)


def test_tied_weights_count_once() -> None:
    tied = torch.nn.Linear(4, 4, bias=False)
    both = torch.nn.ModuleList([tied, torch.nn.Linear(4, 4, bias=False)])
    both[1].weight = tied.weight
    assert weight_bytes(both) == 4 * 4 * 4


def test_weights_on_pages_of_their_files_are_not_free(tmp_path: Path) -> None:
    save_file({"t": torch.ones(8 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    before = mapped_weight_bytes()
    tensor = StoredTensors(tmp_path)["t"].map()
    assert int(tensor.sum()) == 8 << 20
    assert 8 << 20 <= mapped_weight_bytes() - before <= (8 << 20) + (1 << 14)


def test_mapped_weights_are_taken_off_what_is_free(model: TransformersModel, monkeypatch: pytest.MonkeyPatch) -> None:
    free = plan(model).free
    monkeypatch.setattr(memory, "mapped_weight_bytes", lambda: GIB)
    assert plan(model).free == free - GIB


def test_a_narrower_cache_has_more_blocks(model: TransformersModel) -> None:
    geometry = replace(GEOMETRY, dtype="int8")
    byte_plan = plan_memory(model, geometry, 1024, MemoryOptions(kv_memory=70 * BLOCK))
    assert (byte_plan.block_bytes, byte_plan.num_blocks) == (3 * 2 * (16 + 16 + 8) * 16, 224)


def test_the_ledger_reads_as_a_table(model: TransformersModel) -> None:
    lines = plan(model, kv_blocks=2000, max_num_seqs=8).lines()
    assert lines[4] == "  KV cache       23.4 MiB  2000 blocks of 16 slots in float32, 12.0 KiB each"
    assert lines[6] == "longest context: 1024 tokens (the model's limit)"
    assert lines[7] == "sequences that fit at once: 31 of the longest; at most 8 run in a step"


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB")])
def test_bytes_in_words(count: int, words: str) -> None:
    assert in_words(count) == words


def test_latents_take_fewer_bytes_a_block_and_more_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 2 * GIB)
    monkeypatch.setattr(memory, "mapped_weight_bytes", lambda: 0)
    model = transformers_model(checkpoint("deepseek_v3"))
    options = MemoryOptions(max_num_batched_tokens=128)
    latents = KvGeometry(3, 1, 24, 16, "float32", values_in_keys=True)
    apart = replace(latents, values_in_keys=False)
    less, more = (plan_memory(model, geometry, 1024, options) for geometry in (latents, apart))
    assert (less.block_bytes, more.block_bytes) == (3 * 16 * 24 * 4, 3 * 16 * 40 * 4)
    # Queries and results of 4 heads, in float32 twice; V of the longest context is no copy. Whole prompts have K of 24
    # and V of 12 numbers a head, each of 64 sequences on blocks of its own, and up to twice as many blocks.
    whole = 2 * (128 + 64 * 64) * 4 * (16 + 8 + 12) * 4
    assert less.activations - more.activations == 128 * 4 * (24 + 16) * 8 - 1024 * 16 * 4 + whole
