"""Simulated steps: what they cost, which tokens they draw, and a worker's data plane made of them without a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.contracts.errors import InvalidConfig
from common.contracts.transfers import Medium, Place, Transfer
from common.contracts.types import (
    BlockHash,
    FrameId,
    KvGeometry,
    KvGroup,
    KvGroupKind,
    SamplingParams,
    SequenceId,
    TokenLogprobs,
)
from gpuworker.config import GpuWorkerSettings
from gpuworker.scheduling.batch_plan import ScheduledRow, ScoredPart, StepPlan
from gpuworker.scheduling.step_costs import DEFAULT_COSTS, StepCosts, parse_costs
from gpuworker.simulated.plane import SimulatedPlane, assemble, simulated_tokens
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens, readable_ids

CONFIG = {
    "vocab_size": 9,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "eos_token_id": 5,
}
ON_DISK = Place(Medium.DISK, FrameId(5))
VOCABULARY = {"<pad>": 0, "a": 1, "\u0120b1": 2, "\u00e4": 3, "!": 4, "end": 5, "\u2581c": 6, "d": 7, "e": 8, "f": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = {
        "model": {"vocab": VOCABULARY},
        "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 7, "content": "</s>"}],
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


def plane(folder: Path, **options: Any) -> SimulatedPlane:
    made = assemble(GpuWorkerSettings(model=str(folder), simulate="base=1ms", **options))
    made.runner.close()
    return made


def row(sequence: int, start: int, length: int, samples: bool) -> ScheduledRow:
    return ScheduledRow(SequenceId(sequence), start, length, (), samples)


def test_costs_are_read_in_their_units() -> None:
    assert parse_costs(DEFAULT_COSTS) == StepCosts(0.005, 20e-6, 50e-6)
    assert parse_costs("prefill=1.5ms, base=2s") == StepCosts(2.0, 0.0, 0.0015)


@pytest.mark.parametrize("text", ["", "5ms", "base=5", "base=-1ms", "base=1ms,base=2ms", "sleep=1ms", "base=1ms,"])
def test_costs_that_say_nothing_clear_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected terms of base=5ms"):
        parse_costs(text)


def test_a_step_costs_its_base_its_draws_and_what_it_prefills() -> None:
    costs = StepCosts(base=0.004, decode=0.001, prefill=0.0001)
    runner = SimulatedRunner(costs, SimulatedTokens([3, 4]))
    for sequence in (1, 2):
        runner.add_sequence(SequenceId(sequence), [7] * 11, SamplingParams(), 11)
    plan = StepPlan(1, (row(1, 11, 1, True), row(2, 0, 11, True)))
    assert runner.submit_step(plan).result(60.0).seconds == pytest.approx(0.004 + 2 * 0.001 + 10 * 0.0001)
    runner.close()


def test_a_token_follows_from_seed_and_position_alone() -> None:
    tokens = SimulatedTokens([10, 11, 12, 13, 14])
    expected = {seed: tokens.expected(seed, 4, 3) for seed in (1, 2**63)}
    runner = SimulatedRunner(StepCosts(), tokens)
    for sequence, seed in ((1, 1), (2, 2**63), (9, 1)):
        runner.add_sequence(SequenceId(sequence), [7] * 4, SamplingParams(seed=seed), 4)
    first = runner.submit_step(StepPlan(1, (row(1, 0, 4, True), row(2, 0, 4, True)))).result(60.0).sampled
    second = (
        runner.submit_step(StepPlan(2, (row(1, 4, 1, True), row(2, 4, 1, True), row(9, 0, 5, True))))
        .result(60.0)
        .sampled
    )
    assert first == {1: expected[1][:1], 2: expected[2**63][:1]}
    assert second == {1: expected[1][1:2], 2: expected[2**63][1:2], 9: expected[1][1:2]}
    runner.close()


def test_a_chunk_of_a_prompt_draws_nothing() -> None:
    runner = SimulatedRunner(StepCosts(), SimulatedTokens([3]))
    runner.add_sequence(SequenceId(1), [7] * 9, SamplingParams(), 9)
    assert runner.submit_step(StepPlan(1, (row(1, 0, 4, False),))).result(60.0).sampled == {}
    runner.close()


def test_who_asks_for_log_probabilities_gets_those_of_a_sure_draw() -> None:
    runner = SimulatedRunner(StepCosts(), SimulatedTokens([3]))
    runner.add_sequence(SequenceId(1), [7], SamplingParams(logprobs=1), 1)
    runner.add_sequence(SequenceId(2), [7], SamplingParams(), 1)
    result = runner.submit_step(StepPlan(1, (row(1, 0, 1, True), row(2, 0, 1, True)))).result(60.0)
    assert result.logprobs == {1: (TokenLogprobs(3, 0.0, ((3, 0.0),)),)}
    runner.close()


def test_every_token_of_a_scored_prompt_is_sure() -> None:
    runner = SimulatedRunner(StepCosts(), SimulatedTokens([3]))
    runner.add_sequence(SequenceId(1), [7, 8, 9, 5], SamplingParams(prompt_logprobs=0), 3)
    result = runner.submit_step(StepPlan(1, (row(1, 0, 4, True),), (), (ScoredPart(0, 1, 2),))).result(60.0)
    assert result.prompt_logprobs == {1: (TokenLogprobs(9, 0.0, ((9, 0.0),), rank=1),)}
    runner.close()


def test_a_step_queued_behind_another_is_done_after_it() -> None:
    runner = SimulatedRunner(StepCosts(base=0.02), SimulatedTokens([3]))
    first, second = runner.submit_step(StepPlan(1, ())), runner.submit_step(StepPlan(2, ()))
    assert not second.done()
    assert (second.result(60.0).step, first.done()) == (2, True)
    runner.close()


def test_only_plain_words_of_the_vocabulary_are_drawn(folder: Path) -> None:
    assert readable_ids(folder, 9, [5]) == [1, 2, 6, 8], "no special token, no end, nothing past the embedding"


def test_without_a_tokenizer_every_id_but_the_ends_is_drawn(tmp_path: Path) -> None:
    assert readable_ids(tmp_path, 6, [0, 3]) == [1, 2, 4, 5]


def test_whoever_has_the_checkpoint_knows_the_tokens(folder: Path) -> None:
    tokens = simulated_tokens(folder)
    assert sorted(tokens.expected(123, 0, 4)) == [1, 2, 6, 8]
    assert tokens.expected(123, 4, 4) == tokens.expected(123, 0, 4)


def test_the_plane_has_the_sizes_of_the_checkpoint(folder: Path) -> None:
    made = plane(folder, kv_blocks=8, max_num_seqs=5)
    assert made.identity.kv_geometry == KvGeometry(2, 2, 8, 8, "float32")
    assert (made.memory.num_blocks, made.memory.max_model_len, made.max_num_seqs) == (8, 64, 5)
    assert (made.facts.vocab_size, made.facts.eos) == (9, (5,))
    assert made.memory_message().kv_cache == 0


@pytest.mark.parametrize(
    ("kind", "key", "group"),
    [
        ("sliding_attention", "sliding_window", KvGroupKind.WINDOW),
        ("chunked_attention", "attention_chunk_size", KvGroupKind.CHUNK),
    ],
)
def test_layers_of_several_kinds_are_groups(folder: Path, kind: str, key: str, group: KvGroupKind) -> None:
    kinds = {"num_hidden_layers": 3, "layer_types": [kind, "full_attention", kind], key: 32}
    (folder / "config.json").write_text(json.dumps(CONFIG | kinds))
    made = plane(folder, kv_blocks=12, max_num_seqs=5)
    groups = (KvGroup(KvGroupKind.FULL, 0, 1, (1,)), KvGroup(group, 32, 2, (0, 2)))
    assert made.agent_config().groups == made.identity.kv_geometry.groups == groups
    assert (made.memory.num_blocks, made.memory.max_model_len) == (12, 64)
    assert plane(folder, kv_blocks=11).memory.max_model_len == 48
    with pytest.raises(InvalidConfig, match="11 pages of 16 slots do not hold"):
        plane(folder, kv_blocks=11, max_model_len=64)
    (folder / "config.json").write_text(json.dumps(CONFIG | kinds | {key: 64}))
    assert plane(folder).identity.kv_geometry.groups == ()


def test_the_pool_is_as_large_as_the_bytes_allow(folder: Path) -> None:
    per_block = 2 * 16 * 2 * (8 + 8) * 4
    assert plane(folder, kv_memory=str(10 * per_block)).memory.num_blocks == 10
    assert plane(folder).memory.num_blocks == (1 << 30) // per_block


def test_a_pool_too_small_for_what_was_asked_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="3 blocks of 16 slots do not hold"):
        plane(folder, kv_blocks=3, max_model_len=64)


def test_a_configuration_that_lacks_a_number_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}))
    with pytest.raises(InvalidConfig, match="has no number under num_attention_heads"):
        plane(tmp_path)


def test_simulated_and_real_workers_are_never_in_one_pool(folder: Path) -> None:
    ours = plane(folder).identity
    assert ours.arithmetic == "simulated", "an arithmetic that no model reports"


def test_bad_costs_are_refused_with_the_other_options() -> None:
    with pytest.raises(ValueError, match="expected terms of"):
        GpuWorkerSettings(model=".", simulate="fast")


def test_a_plane_has_as_many_frames_on_disk_as_a_model_would_and_finds_them_again(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"block_size": 32, "host_memory": 1 << 20, "disk_cache_size": 1 << 20}
    options["disk_cache"] = tmp_path / "disk"
    made = plane(folder, worker_id="w1", **options)
    assert made.disk is not None
    # A block of 32 slots takes 8 KiB: two layers, K and V of two heads, 8 floats each.
    assert made.disk_frames == made.attach("w1", "").disk_frames == ((1 << 20) - (64 << 10)) // (8192 + 128)
    assert f"disk cache: as if 118 more blocks were kept in {tmp_path}/disk/w1" in made.start_lines()
    move = Transfer(1, BlockHash(b"h" * 16), BlockHash(b"p" * 16), 0, Place(Medium.HOST, FrameId(1)), ON_DISK)
    assert made.images is not None
    made.disk.write(move, made.images.take(move.source))
    made.disk.close()
    assert (tmp_path / "disk" / "w1" / "images").stat().st_size < 8192 * 118 // 2
    again = plane(folder, worker_id="w1", **options)
    assert again.disk is not None
    assert [(each.block, each.hash) for each in again.disk.claims().contents] == [(5, b"h" * 16)]
    again.disk.close()
    other = plane(folder, **options)
    assert other.disk is not None
    assert (other.disk.folder, other.disk.claims().contents) == (tmp_path / "disk" / "unnamed-0", ())
    other.disk.close()


def test_a_plane_whose_disk_cache_holds_no_block_is_refused_as_a_model_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--disk-cache-size: is 68.0 KiB, and one block takes 68.1 KiB"):
        plane(folder, host_memory=1 << 20, disk_cache=tmp_path / "d", disk_cache_size=68 << 10)
