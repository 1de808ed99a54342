"""Several ranks give the tokens of one: every native kind, precisions, drafts, constraints, preemption and prefix hits.

The ranks are threads of the test, which share no weights and no pool. `tests/suites/e2e/test_ranks.py` has processes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.checkpoint.gguf.folder import gguf_folder
from common.contracts.errors import InvalidConfig
from common.contracts.types import Constraint, ConstraintKind, SamplingParams
from gpuworker.config import GpuWorkerSettings
from gpuworker.models.llama.cpu_model import LlamaCpuModel
from gpuworker.native import library as native
from gpuworker.plane.assembly import ModelPlane, assemble
from tests.gpuworker.engine.test_equality import COUNT, NATIVE, SHAPES, SLOTS, STATES, prompts
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gguf_files import write_model
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.rank_threads import RankThread

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library is not there")
DELTAS = ("qwen3_next", "qwen3_5_moe_text")  # with two key heads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def planned(kind: str, ranks: int, **options: Any) -> ModelPlane:
    fixed: dict[str, Any] = {
        "model": str(checkpoint(kind)),
        "dtype": "float32",
        "block_size": 4,
        "kv_blocks": SLOTS // 4,
        "max_model_len": 256,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "threads": 1,
        "tensor_parallel_size": ranks,
    }
    return assemble(GpuWorkerSettings(**fixed | options), RankThread.start)


def driver(kind: str, ranks: int, **options: Any) -> EngineDriver:
    plane = planned(kind, ranks, **options)
    return EngineDriver(plane.runner, plane.agent_config())


CASES = [(kind, ranks) for kind in NATIVE for ranks in (2, 4) if ranks == 2 or kind not in DELTAS]
QUICK = (("llama", 2), ("mixtral", 2), ("lfm2", 2), ("gemma4_text, experts", 2))


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.rest) for case in CASES],
)
def test_tokens_of_ranks_equal_transformers(kind: str, ranks: int) -> None:
    """Prompts in chunks beside decodes, then again on what is cached."""
    wanted = [hf_greedy(checkpoint(kind), prompt, COUNT) for prompt in prompts()]
    with driver(kind, ranks) as engine:
        assert engine.run(prompts(), COUNT) == wanted
        assert engine.run(prompts(), COUNT) == wanted
        hits = [engine.results[each].cached_tokens for each in list(engine.results)[len(prompts()) :]]
        assert sum(hits) > 0, "the second time, blocks of all ranks are hits"
        engine.assert_all_free()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.rest)])
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(each, marks=pytest.mark.rest) for each in (*STATES, *SHAPES))]
)
def test_preempted_sequences_of_ranks_keep_their_tokens(kind: str, ranks: int) -> None:
    if ranks == 4 and kind in DELTAS:
        return
    asked = [[*prompts()[1][:9], 20 + index] for index in range(6)]
    wanted = [hf_greedy(checkpoint(kind), prompt, 40) for prompt in asked]
    with driver(kind, ranks, kv_blocks=60 if kind in SHAPES else 40, max_model_len=100) as engine:
        assert engine.run(asked, 40) == wanted
        assert sum(result.preemptions for result in engine.results.values()) > 0
        first = engine.submit(asked[0], 40)
        forks = [engine.submit(asked[0], 40, fork_of=first) for _ in range(3)]
        engine.finish()
        assert [engine.results[each].tokens for each in (first, *forks)] == [wanted[0]] * 4
        engine.assert_all_free()


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "speculative": "ngram"},
        {"kv_cache_dtype": "int8"},
        pytest.param({"threads": 2}, marks=pytest.mark.rest),
        pytest.param({"prefix_caching": False}, marks=pytest.mark.rest),
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_ranks_multiply_by_the_numbers_of_one_process(options: dict[str, Any]) -> None:
    """Weights are quantised whole and cut then; constraints and random samples are rank 0's."""
    found, constraint = [], Constraint(ConstraintKind.REGEX, "([a-f]|[0-9]{2}){3,40}")
    sampled = SamplingParams(temperature=1.0, seed=3, constraint=constraint)
    for ranks in (1, 2):
        with driver("llama", ranks, **options) as engine:
            repeated = [prompts()[1] + prompts()[1]]
            greedy = engine.run([*prompts(), *repeated], COUNT)
            masked = engine.submit(prompts()[2], COUNT, sampled)
            engine.finish()
            assert engine.results[masked].message == ""
            found.append((greedy, engine.results[masked].tokens))
            engine.assert_all_free()
    assert found[0] == found[1]


@pytest.mark.parametrize("stored", ["Q8_0", pytest.param("Q4_K", marks=pytest.mark.rest)])
def test_integers_of_a_gguf_file_are_cut_between_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_folder(write_model(tmp_path / "m.gguf", "llama", stored))
    found = []
    for ranks in (1, 2):
        plane = planned("llama", ranks, model=str(folder), max_model_len=64)
        assert isinstance(plane.model, LlamaCpuModel)
        assert "I8" in plane.model.packed.kinds_in_words or "I4" in plane.model.packed.kinds_in_words
        with EngineDriver(plane.runner, plane.agent_config()) as engine:
            found.append(engine.run([prompts()[1], prompts()[2]], COUNT))
            engine.assert_all_free()
    assert found[0] == found[1]


def test_ranks_make_the_vectors_of_one_process() -> None:
    found = []
    for ranks in (1, 2):
        with driver("llama", ranks, pooling="mean") as engine:
            asked = [engine.submit(prompt, 1) for prompt in prompts()[:3]]
            engine.finish()
            found.append([np.frombuffer(engine.results[each].embedding, dtype=np.float32) for each in asked])
            engine.assert_all_free()
    for one, two in zip(*found, strict=True):
        assert len(one) > 0
        np.testing.assert_allclose(two, one, atol=1e-5)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "w8a8"}], ids=["bf16", "w8a8"])
def test_ranks_that_round_otherwise_finish_each_sequence(options: dict[str, Any]) -> None:
    """Sums of parts in bf16, and activations in 8 bits by the scale of each rank's own."""
    with driver("llama", 2, **options) as engine:
        assert [len(tokens) for tokens in engine.run(prompts(), COUNT)] == [COUNT] * len(prompts())
        engine.assert_all_free()


def test_a_rank_has_half_of_the_weights_and_the_pool_says_what_all_take() -> None:
    one, two = planned("llama", 1), planned("llama", 2)
    try:
        assert one.identity == two.identity, "workers of one rank and of two are of one pool"
        assert one.memory.block_bytes == two.memory.block_bytes
        assert two.ranks is not None
        own = (two.model.weight_bytes, *two.ranks.weight_bytes.values())  # type: ignore[union-attr]
        assert all(each < 0.56 * one.memory.weights for each in own), (own, one.memory.weights)
        assert two.runner.executor is not None
        assert two.facts.device_words.startswith("2 ranks, each cpu with 1 thread")
    finally:
        one.runner.close()
        two.runner.close()


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("llama", 3, "does not divide the 4 heads of attention; expected one of 1, 2, 4"),
        ("qwen3_next", 4, "does not divide the 2 key heads of linear attention; expected one of 1, 2"),
        ("gpt2", 2, "gpt2 is not of the Llama family"),
    ],
)
def test_ranks_that_cannot_run_a_model_are_refused_before_they_start(kind: str, ranks: int, said: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        assemble(GpuWorkerSettings(model=str(checkpoint(kind)), tensor_parallel_size=ranks), _never)
    assert said in str(refused.value)
    assert "--tensor-parallel-size" in str(refused.value)


def _never(rank: int, connection: socket.socket, board: int) -> RankThread:
    raise AssertionError("a rank was started")
