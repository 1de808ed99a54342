"""Adapters at several ranks: tokens are PEFT's, loads go beside steps, and all ranks have an adapter or none has.

The ranks are threads of the test, as in `test_ranks.py`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.contracts.adapters import AdapterRef
from common.contracts.errors import InvalidConfig, InvalidRequest
from gpuworker.checkpoints.lora import AdapterRefused, LoraAdapter, read_adapter
from gpuworker.config import GpuWorkerSettings
from gpuworker.native import library as native
from gpuworker.plane import rank_process
from gpuworker.plane.adapters import AdapterStore
from gpuworker.plane.assembly import ModelPlane, assemble
from gpuworker.plane.rank_adapters import RankAdapters
from gpuworker.runner.rank_steps import AdapterLoad
from tests.gpuworker.engine.test_equality import COUNT, prompts
from tests.support.adapters import adapter, tokens_of
from tests.support.checkpoints import checkpoint
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.rank_threads import RankThread

pytestmark = pytest.mark.skipif(native.best() is None, reason="the native library is not there")
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def planned(kind: str, ranks: int, *variants: int, **options: Any) -> ModelPlane:
    fixed: dict[str, Any] = {
        "model": str(checkpoint(kind)),
        "dtype": "float32",
        "block_size": 4,
        "kv_blocks": 256,
        "max_model_len": 256,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "threads": 1,
        "tensor_parallel_size": ranks,
        "prefix_caching": False,
        "lora": tuple(f"own-{each}={adapter(kind, each)}" for each in variants),
    }
    return assemble(GpuWorkerSettings(**fixed | options), RankThread.start)


def weights_of(plane: ModelPlane, name: str) -> object:
    assert plane.adapters is not None
    known = {each.name: each.fingerprint for each in plane.adapters.message().adapters}
    return plane.adapters.find(name, known[name]).weights


def store_of(plane: ModelPlane) -> AdapterStore:
    assert plane.adapters is not None
    return plane.adapters


def run(engine: EngineDriver, plane: ModelPlane, *names: str | None) -> list[list[int]]:
    """Return the tokens of a prompt for each of these adapters, None for the base, all in the same steps."""
    started = [
        engine.submit(prompt, COUNT, adapter=None if name is None else weights_of(plane, name))
        for prompt, name in zip(prompts(), names, strict=False)
    ]
    engine.finish()
    return [engine.results[each].tokens for each in started]


@pytest.mark.parametrize(
    ("kind", "ranks"), [("llama", 2), pytest.param("llama", 4, marks=pytest.mark.rest), ("qwen3", 2)]
)
def test_tokens_of_adapters_at_ranks_are_those_of_peft(kind: str, ranks: int) -> None:
    """Adapters of all linears and of some, of ranks 4, 8 and 16, beside the base, with prompts in chunks."""
    variants = (0, 3, 6)
    plane = planned(kind, ranks, *variants)
    of_rows = (*variants, None)[: len(prompts())]
    with EngineDriver(plane.runner, plane.agent_config()) as engine:
        found = run(engine, plane, *(None if each is None else f"own-{each}" for each in of_rows))
        engine.assert_all_free()
    store_of(plane).close()
    pairs = zip(prompts(), of_rows, strict=False)
    assert found == [tokens_of(kind, variant, prompt, COUNT) for prompt, variant in pairs]


class HeldRead:
    """Reads at ranks other than 0, and waits before it does while it is held."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self.instead: Path | None = None
        self._read = read_adapter
        patch.setattr(rank_process, "read_adapter", self.read)

    def read(self, folder: Path, *given: Any) -> LoraAdapter:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        return self._read(self.instead or folder, *given)


async def test_a_load_waits_for_all_ranks_and_no_stream_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = HeldRead(monkeypatch)
    plane = planned("llama", 2, lora=(), lora_dir=adapter("llama", 0).parent)
    store = store_of(plane)
    with EngineDriver(plane.runner, plane.agent_config()) as engine:
        load = asyncio.create_task(store.load(AdapterRef("sql", ""), adapter("llama", 0).name))
        assert await asyncio.to_thread(held.begun.wait, PATIENCE_S)
        base = await asyncio.to_thread(run, engine, plane, None)
        assert base == [tokens_of("llama", None, prompts()[0], COUNT)]
        assert not load.done()
        assert [each.name for each in store.message().adapters] == []
        held.go_on.set()
        await load
        found = await asyncio.to_thread(run, engine, plane, "sql")
        assert found == [tokens_of("llama", 0, prompts()[0], COUNT)]
    store.close()


@pytest.mark.parametrize(
    ("failure", "instead", "words"),
    [
        (AdapterRefused("its folder cannot be read: stale"), None, "rank 1 cannot load it: its folder cannot be read"),
        (MemoryError("no room"), None, "rank 1 cannot load it: MemoryError: no room"),
        (None, 1, "rank 1 read another content of .* than rank 0; load it again"),
    ],
)
async def test_a_rank_that_cannot_load_ends_the_load_at_all_ranks(
    failure: Exception | None, instead: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, ranks = HeldRead(monkeypatch), list[RankAdapters]()
    held.go_on.set()
    begin = RankAdapters.begin_load

    def noted(rank: RankAdapters, load: AdapterLoad) -> None:
        ranks.append(rank)
        begin(rank, load)

    monkeypatch.setattr(RankAdapters, "begin_load", noted)
    plane = planned("llama", 2, lora=(), lora_dir=adapter("llama", 0).parent)
    store = store_of(plane)
    held.failure, held.instead = failure, None if instead is None else adapter("llama", instead)
    with EngineDriver(plane.runner, plane.agent_config()) as engine:
        with pytest.raises(InvalidRequest, match=words):
            await store.load(AdapterRef("sql", ""), adapter("llama", 0).name)
        assert [each.name for each in store.message().adapters] == []
        held.failure = held.instead = None
        await store.load(AdapterRef("sql", ""), adapter("llama", 0).name)
        found = await asyncio.to_thread(run, engine, plane, "sql", None)
        assert found == [tokens_of("llama", each, prompts()[place], COUNT) for place, each in enumerate((0, None))]
        store.unload("sql")
        gc.collect()
        await asyncio.to_thread(run, engine, plane, None)  # its first step says what is forgotten
    store.close()
    assert ranks[0]._held == {}


def test_a_rank_that_cannot_load_an_adapter_of_the_command_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldRead(monkeypatch)
    held.go_on.set()
    held.failure = AdapterRefused("it is not there")
    with pytest.raises(InvalidConfig, match=r"--lora: own-0=.*: rank 1 cannot load it: it is not there"):
        planned("llama", 2, 0)
