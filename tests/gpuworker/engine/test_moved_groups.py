"""Greedy output equals transformers' where windows, chunks and states come back from disk, or from another worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.suite.embedded import EmbeddedChannel
from common.contracts.clock import SystemClock
from common.contracts.lease import Attach, public_incarnation
from common.contracts.transfer_tokens import serve_key_of
from common.settings.options import ModelImpl
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.image_requests import ImageRequests
from gpuworker.engine.transfers import Transfers
from gpuworker.memory.disk_mover import DiskMover
from gpuworker.peers.client import PeerClient
from gpuworker.peers.server import PeerServer, listen
from gpuworker.peers.wire import PeerIdentity
from gpuworker.plane.assembly import ModelPlane, assemble
from kvmanager.contracts.ports import Peer, Reach
from kvmanager.ledger.ledger import Ledger
from kvmanager.ledger.peers import ServingPeer
from tests.gpuworker.engine.test_equality import CASES, prompts
from tests.support.checkpoints import checkpoint, hf_greedy
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.waiting import wait_until

KEY = b"the key of the pool"
MODELS = [
    *(("gemma4_text", "native", 140), ("llama4_text", "transformers", 120), ("qwen3_next", "native", 120)),
    *(("gemma2", "transformers", 120), ("gpt_oss", "transformers", 120), ("gemma4_text", "transformers", 140)),
    *(("qwen3_next", "transformers", 120), ("lfm2", "transformers", 80), ("lfm2", "native", 80)),
]
"""Models, and pages that hold two talks."""


def models(quick: str) -> list[Any]:
    """Return the models that this processor runs; all but one of them are left to `make test-rest`."""
    there = [each for each in MODELS if each[:2] in CASES]
    return [pytest.param(*each, marks=() if each[0] == quick else pytest.mark.rest) for each in there]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def talks() -> list[list[int]]:
    return [prompts()[-1], prompts()[-2][::-1]]


def wanted(kind: str, turns: int) -> list[list[int]]:
    """Return what transformers says in each turn of each talk."""
    said, answers = talks(), list[list[int]]()
    for _ in range(turns):
        for talk in said:
            answers.append(hf_greedy(checkpoint(kind), talk, 6))
            talk += [*answers[-1], 7, 8]
    return answers


def have_turns(engine: EngineDriver, said: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Let each talk have a turn; return the answers, and the cached tokens of each."""
    answers = list[list[int]]()
    for talk in said:
        answers += engine.run([talk], 6)
        talk += [*answers[-1], 7, 8]
    return answers, [each.usage.cached_tokens for each in list(engine.results.values())[-len(said) :]]


def plane_of(kind: str, impl: ModelImpl, pages: int, disk: Path | None = None) -> ModelPlane:
    settings = GpuWorkerSettings(
        model=str(checkpoint(kind)),
        model_impl=impl,
        dtype="float32",
        block_size=4,
        kv_blocks=pages,
        max_model_len=112,
        max_num_batched_tokens=48,
        max_num_seqs=8,
        host_memory=8 << 20,
        disk_cache=disk,
        disk_cache_size=64 << 20 if disk is not None else None,
        data_port=0 if disk is None else None,
        worker_id="worker",
        threads=1,
    )
    return assemble(settings)


def ledger_of(engine: EngineDriver) -> Ledger:
    channel = engine.channel
    assert isinstance(channel, EmbeddedChannel)
    found = wait_until(lambda: channel.ledger, lambda ledger: ledger is not None)
    assert found is not None
    return found


def is_quiet(ledger: Ledger) -> bool:
    return not ledger.state.transfers.open and not ledger.state.transfers.to_save


@contextmanager
def with_disk(plane: ModelPlane) -> Iterator[EngineDriver]:
    engine, disk, images = EngineDriver(plane.runner, plane.agent_config()), plane.disk, plane.images
    assert disk is not None
    assert images is not None
    mover = DiskMover(disk, engine.engine.wake)
    moves = Transfers(images, plane.image_bytes, SystemClock(), mover, None, disk.reset, plane.memory.groups)
    engine.engine.transfer_by(moves, disk.claims(), disk.reset)
    with engine:
        yield engine


@pytest.mark.parametrize(("kind", "impl", "pages"), models(quick="qwen3_next"))
def test_what_groups_had_comes_back_from_disk(kind: str, impl: ModelImpl, pages: int, tmp_path: Path) -> None:
    """A worker that starts anew goes on with the talks of the one before."""
    said, answers = talks(), list[list[int]]()
    with with_disk(plane_of(kind, impl, pages, tmp_path)) as engine:
        answers += have_turns(engine, said)[0]
        wait_until(lambda: is_quiet(ledger_of(engine)), bool)
        assert ledger_of(engine).pool_counts().totals.disk_stores > 0
    with with_disk(plane_of(kind, impl, pages, tmp_path)) as engine:
        again, cached = have_turns(engine, said)
        wait_until(lambda: is_quiet(ledger_of(engine)), bool)
        totals = ledger_of(engine).pool_counts().totals
        ledger_of(engine).check_invariants()
    assert [*answers, *again] == wanted(kind, 2)
    assert min(cached) > 60, "each talk has 70 tokens and more that were computed before"
    assert totals.disk_loads > 0


class Source:
    """The worker that another one asks: a `FindPeer`."""

    def __init__(self, engine: EngineDriver, attach: Attach, asking: Attach) -> None:
        self._ledger, self._peer = ledger_of(engine), ServingPeer(attach, asking, KEY, SystemClock())

    def __call__(self, reach: Reach) -> tuple[Peer, int] | None:
        count = reach(self._ledger)
        return (self._peer, count) if count else None


@contextmanager
def with_port(plane: ModelPlane, name: str) -> Iterator[tuple[EngineDriver, Attach]]:
    """Yield a worker that serves peers and fetches from them, and what it says of itself."""
    engine, images = EngineDriver(plane.runner, plane.agent_config()), plane.images
    assert images is not None
    listener = listen("127.0.0.1", 0, secure=False)
    incarnation = f"life of {name}".encode().ljust(16)
    attach = Attach(name, incarnation, 1, 0, plane.identity, 1, data_address=f"127.0.0.1:{listener.getsockname()[1]}")
    sizes = tuple([group.pages for group in plane.memory.groups])
    public = public_incarnation(incarnation)
    who = PeerIdentity(name, public, plane.image_format, plane.image_bytes, sizes)
    requests = ImageRequests(images, plane.image_bytes, SystemClock(), engine.engine.wake)
    server = PeerServer(listener, lambda: who, requests.ask, lambda: [serve_key_of(KEY, public)])
    client = PeerClient(lambda: who, engine.engine.wake)
    moves = Transfers(images, plane.image_bytes, SystemClock(), None, client, groups=plane.memory.groups)
    engine.engine.serve_images(requests)
    engine.engine.transfer_by(moves)
    try:
        with engine:
            yield engine, attach
    finally:
        server.close()


@pytest.mark.parametrize(("kind", "impl", "pages"), models(quick="llama4_text"))
def test_what_groups_have_comes_from_another_worker(kind: str, impl: ModelImpl, pages: int) -> None:
    """A second worker goes on with the talks of a first one, then the first one with those of the second."""
    said, answers = talks(), list[list[int]]()
    with ExitStack() as stack:
        first, second = [
            stack.enter_context(with_port(plane_of(kind, impl, pages), name)) for name in ("first", "second")
        ]
        for (engine, asking), (other, attach) in ((first, second), (second, first)):
            ledger_of(engine).state.peers = Source(other, attach, asking)
        answers += have_turns(first[0], said)[0]
        again, cached = have_turns(second[0], said)
        answers += again
        back, more = have_turns(first[0], said)
        answers += back
        for engine, _ in (first, second):
            ledger_of(engine).check_invariants()
            assert ledger_of(engine).pool_counts().totals.peer_loads > 0
    assert answers == wanted(kind, 3)
    assert min(cached) > 60
    assert [now > before for now, before in zip(more, cached, strict=True)] == [True, True]
