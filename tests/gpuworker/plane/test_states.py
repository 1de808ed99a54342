"""A worker whose model keeps states: what it takes of memory, which prompts share blocks, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.checkpoint.context import USUAL_OF_STATES
from common.contracts.errors import InvalidConfig, Unsupported
from common.contracts.limits import MAX_WORKER_BLOCKS
from common.contracts.types import KvGroupKind
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import GIB, in_words
from gpuworker.models.hf.mixers import MixerStates
from gpuworker.native import library as native
from gpuworker.plane import memory
from gpuworker.plane.assembly import ModelPlane, assemble, refuse_unequal_drafts
from gpuworker.scheduling.drafting import MAX_STEP_DRAFTS
from gpuworker.simulated import plane as simulated
from tests.support.checkpoints import checkpoint

STATE = 2 * 64 * 3 * 4
"""Bytes of a sequence's states: two convolutions of lfm2, of 64 channels and 3 columns in float32."""
BLOCK = 2 * 2 * 16 * 4 * 16
"""Bytes of a block, or a page, of its one layer that attends: K and V of 2 heads of 16 numbers, 16 slots."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def assembled(kind: str = "lfm2", **options: Any) -> ModelPlane:
    settings = {
        "kv_blocks": 64,
        "threads": 1,
        "device": "cpu",
        "dtype": "float32",
        "model_impl": "transformers",
    } | options
    plane = assemble(GpuWorkerSettings(model=str(checkpoint(kind)), **settings))
    plane.runner.close()
    return plane


def test_states_take_memory_beside_the_blocks() -> None:
    plan = assembled(max_num_seqs=5, prefix_caching=False).memory
    without = assembled("llama", max_num_seqs=5).memory
    assert (plan.block_bytes, plan.state_bytes, plan.states) == (BLOCK, STATE, 5 * STATE)
    assert plan.left == plan.free - plan.activations - plan.token_table - 5 * STATE - 64 * BLOCK
    assert (without.state_bytes, without.states) == (0, 0)
    (line,) = [line for line in plan.lines() if "states" in line]
    each = "5 sequences, 1.5 KiB each, as much as K and V of 6 tokens; prompts share no blocks"
    assert line == f"  states          7.5 KiB  {each}"
    assert not [line for line in without.lines() if "states" in line]


@pytest.mark.skipif(native.best() is None, reason="the native library was not built")
def test_native_states_have_a_column_less() -> None:
    """A convolution of width 3 reads two inputs of those before; a convolution begins at a multiple of 64 bytes."""
    assert assembled(max_num_seqs=5, model_impl="native").memory.state_bytes == STATE * 2 // 3


@pytest.mark.parametrize("model_impl", ["transformers", "auto"])
@pytest.mark.parametrize("kind", ["lfm2", "llama"])
def test_prompts_go_on_from_checkpoints(kind: str, model_impl: str) -> None:
    plane = assembled(kind, model_impl=model_impl)
    config, attach = plane.agent_config(), plane.attach("w0", "")
    assert (config.prefix_caching, config.keeps_states, attach.prefix_caching) == (True, False, True)
    assert [group.kind for group in config.groups] == ([KvGroupKind.FULL, KvGroupKind.STATE] if kind == "lfm2" else [])
    assert config.groups == attach.identity.kv_geometry.groups


@pytest.mark.parametrize("model_impl", ["transformers", "auto"])
@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"pooling": "last"}])
def test_a_worker_without_checkpoints_computes_every_prompt(options: dict[str, Any], model_impl: str) -> None:
    plane = assembled(model_impl=model_impl, **options)
    config, attach = plane.agent_config(), plane.attach("w0", "")
    assert (config.prefix_caching, config.keeps_states, attach.prefix_caching) == (False, True, False)
    assert config.groups == attach.identity.kv_geometry.groups == ()


def test_a_pool_that_holds_no_checkpoint_serves_without_hits() -> None:
    lines = assembled("qwen3_next", kv_blocks=5).start_lines()
    assert "    checkpoints      3 layers, 3 pages and 10.5 KiB each, as much as K and V of 42 tokens" in lines
    what = "nothing can hit, a prompt of 17 tokens and its checkpoint take 6 pages of 5"
    assert lines[-1] == f"prefix cache: {what}"
    words = "hits from 16 tokens on, where a prompt of 17 or more leaves a checkpoint behind it"
    assert assembled("qwen3_next", kv_blocks=6).start_lines()[-1] == f"prefix cache: {words}"
    whole = assembled("qwen3_next", prefix_caching=False).start_lines()
    assert whole[-1] == "prefix cache: none, every prompt is computed whole"


@pytest.mark.parametrize(("free", "most"), [(GIB, 64), (40 * STATE, 10), (STATE, 1)])
def test_fewer_sequences_run_where_their_states_are_large(
    free: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the free memory at most, unless an option says how many; one runs always."""
    plane = assembled()
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    assert memory.most_sequences(plane.model, 64) == most


def test_more_sequences_than_have_room_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_estimate", lambda *_: 0)
    monkeypatch.setattr(memory, "mapped_weight_bytes", lambda: 0)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1000 * STATE)
    what = r"--max-num-seqs: 2000 sequences keep states of 1\.5 KiB each, 2\.9 MiB in all, and .* may be taken on cpu"
    with pytest.raises(InvalidConfig, match=what):
        assembled(max_num_seqs=2000, max_model_len=16)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_drafts_are_refused_on_the_native_path(kind: str) -> None:
    with pytest.raises(InvalidConfig, match=r"--speculative: is ngram, and its layers keep states.*leave it out"):
        assembled(kind, speculative="ngram", model_impl="auto")


def test_each_draft_of_a_step_has_states_of_its_own() -> None:
    plan = assembled(max_num_seqs=5, speculative="ngram").memory
    assert (plan.drafted_states, plan.states) == (MAX_STEP_DRAFTS, (5 + MAX_STEP_DRAFTS) * STATE)
    assert plan.left == plan.free - plan.activations - plan.token_table - plan.states - plan.kv
    assert "  states         55.5 KiB  5 sequences and 32 drafts, 1.5 KiB each" in plan.lines()
    assert assembled("llama", speculative="ngram").memory.drafted_states == 0


def test_fewer_sequences_run_beside_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = assembled()
    monkeypatch.setattr(memory, "free_bytes", lambda _: 4 * 40 * STATE)
    assert [memory.most_sequences(plane.model, 64, drafts) for drafts in (0, 32, 64)] == [40, 8, 1]


def test_drafts_whose_states_have_no_room_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_estimate", lambda *_: 0)
    monkeypatch.setattr(memory, "mapped_weight_bytes", lambda: 0)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 30 * STATE)
    what = r"--max-num-seqs: 1 sequences and 32 drafts keep states of 1\.5 KiB each, .* leave out --speculative"
    with pytest.raises(InvalidConfig, match=what):
        assembled(max_num_seqs=1, max_model_len=16, speculative="ngram")


def test_drafts_are_refused_where_the_native_path_keeps_states() -> None:
    class Native:
        states, device, dtype = object(), torch.device("cpu"), torch.float32

    native: Any = Native()
    with pytest.raises(InvalidConfig, match=r"--speculative: is ngram, and its layers keep states, .*transformers"):
        refuse_unequal_drafts("ngram", native, None)


def test_states_that_follow_refused_drafts_are_found_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixerStates, "accept", lambda *_: None)
    assembled("qwen3_next")
    with pytest.raises(Unsupported, match=r"qwen3_next cannot be served with drafts"):
        assembled("qwen3_next", speculative="ngram")


def test_it_is_no_draft_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"--draft-model: its layers keep states.*take another one"):
        assembled("llama", draft_model=str(checkpoint("lfm2")))


def test_blocks_without_kv_are_as_many_as_all_sequences_of_the_longest_need() -> None:
    plan = assembled("mamba2", kv_blocks=None, max_num_seqs=5, max_model_len=100).memory
    assert (plan.num_blocks, plan.block_bytes, plan.kv, plan.max_model_len) == (5 * 7, 0, 0, 100)
    assert plan.left == plan.free - plan.activations - plan.token_table - plan.states
    said = "\n".join(plan.lines())
    assert "  KV cache            0 B  35 blocks of 16 slots that keep nothing: no layer attends\n" in said
    assert f"5 sequences, {in_words(plan.state_bytes)} each; prompts share no blocks\n" in said
    assert "longest context: 100 tokens (the model allows 1048576)\n" in said
    assert "sequences that fit at once: 5 of the longest; at most 5 run" in said


@pytest.mark.parametrize(
    ("given", "blocks", "longest"),
    [
        ({}, 64 * USUAL_OF_STATES // 16, USUAL_OF_STATES),
        ({"kv_blocks": 10}, 10, 160),
        ({"max_model_len": 1 << 18}, MAX_WORKER_BLOCKS, 1 << 18),
    ],
    ids=["none", "blocks", "length"],
)
def test_a_length_or_blocks_may_be_given(given: dict[str, int], blocks: int, longest: int) -> None:
    plan = assembled("mamba2", **({"kv_blocks": None} | given)).memory
    assert (plan.num_blocks, plan.max_model_len) == (blocks, longest)


def test_blocks_that_keep_nothing_have_no_size_in_bytes() -> None:
    with pytest.raises(InvalidConfig, match=r"--kv-memory: no layer .*give --max-num-seqs and --max-model-len, or .*"):
        assembled("mamba2", kv_blocks=None, kv_memory=GIB)


def test_a_simulated_worker_has_the_blocks_of_a_real_one() -> None:
    asked: dict[str, Any] = {"model": str(checkpoint("mamba2")), "max_num_seqs": 5, "simulate": "base=1ms"}
    plan = simulated.assemble(GpuWorkerSettings(**asked)).memory
    assert (plan.num_blocks, plan.max_model_len) == (5 * USUAL_OF_STATES // 16, USUAL_OF_STATES)
    with pytest.raises(InvalidConfig, match="--kv-memory: no layer of the model attends"):
        simulated.assemble(GpuWorkerSettings(**asked, kv_memory=GIB))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_simulated_worker_has_the_checkpoints_of_a_real_one(dtype: str) -> None:
    asked: dict[str, Any] = {"model": str(checkpoint("qwen3_next")), "simulate": "base=1ms", "dtype": dtype}
    simulating = simulated.assemble(GpuWorkerSettings(**asked))
    assert simulating.identity.kv_geometry == assembled("qwen3_next", dtype=dtype).identity.kv_geometry
