"""Greedy output of the whole engine equals transformers' `generate`, token for token, by kind of model and path."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from cli.suite import embedded
from cli.suite.embedded import EmbeddedChannel
from common.contracts.lease import window_blocks
from common.contracts.types import SequenceId
from common.settings.options import ModelImpl
from gpuworker.config import GpuWorkerSettings
from gpuworker.native import library as native
from gpuworker.plane.assembly import assemble
from kvmanager.contracts.ledger_config import LedgerOptions
from tests.support.checkpoints import WINDOW, checkpoint, hf_greedy
from tests.support.gpuworker.engine_harness import EngineDriver

COUNT = 12
SLOTS = 2048
STATES = ("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_moe_text")
"""Some layers keep a state in place of K and V."""
SHAPES = ("gemma4_text", "gemma4_text, experts")
"""Layers of two shapes, some of which have a window; in the first one the last layers have no K and V of their own."""
DENSE = ("llama", "qwen3", "mistral", "mixtral", "qwen3_moe", "olmoe")
NATIVE = (*DENSE, *STATES, *SHAPES) if native.best() is not None else ()
GROUPED = ("gemma2", "gpt_oss", "llama4_text", *SHAPES)
"""Layers with a window, or with chunks, stand beside layers that see everything."""
HOSTED = ("llama", "qwen3", "mistral", "gpt2", "qwen3_next", "lfm2", "mamba2", *GROUPED)
CASES = [
    *((kind, "transformers") for kind in HOSTED),
    *((kind, "native") for kind in NATIVE),
]


def driver(
    kind: str,
    model_impl: ModelImpl,
    block_size: int,
    prefix_caching: bool = True,
    num_blocks: int = 0,
    max_model_len: int = 0,
    host_memory: int | None = None,
) -> EngineDriver:
    """Return an engine on a tiny checkpoint; the small budget makes prefills go in chunks beside decodes."""
    settings = GpuWorkerSettings(
        model=str(checkpoint(kind)),
        model_impl=model_impl,
        dtype="float32",
        block_size=block_size,
        kv_blocks=num_blocks or SLOTS // block_size,
        max_model_len=max_model_len or min(256, num_blocks * block_size or SLOTS),
        max_num_batched_tokens=48,
        max_num_seqs=8,
        prefix_caching=prefix_caching,
        host_memory=host_memory,
        threads=1,
    )
    plane = assemble(settings)
    return EngineDriver(plane.runner, plane.agent_config())


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def prompts() -> list[list[int]]:
    """Return prompts of odd lengths, two of which share a long prefix."""
    rng = random.Random(5)
    shared = [rng.randrange(6, 264) for _ in range(70)]
    lengths = (1, 17, 33)
    tails = [[rng.randrange(6, 264) for _ in range(n)] for n in (3, 9)]
    return [*([rng.randrange(6, 264) for _ in range(n)] for n in lengths), *(shared + tail for tail in tails)]


# Of each kind of layers and of memory one, on the path that most models of it take.
WHOLE = {
    *(("llama", "transformers"), ("llama", "native"), ("mistral", "native"), ("mixtral", "native")),
    *(("gemma2", "transformers"), ("llama4_text", "transformers"), ("mamba2", "transformers")),
    *(("lfm2", "transformers"), ("lfm2", "native")),
}


def is_quick(case: tuple[str, str], block_size: int, prefix_caching: bool) -> bool:
    """Tell whether `.ci/run` has a test: one of each kind with blocks of every size, others of one size."""
    return block_size == 16 or (case in WHOLE and (prefix_caching or block_size == 4))


MATRIX = [
    pytest.param(
        *case,
        size,
        cached,
        id=f"{'-'.join(case)}-{size}-{'cached' if cached else 'uncached'}",
        marks=() if is_quick(case, size, cached) else pytest.mark.exhaustive,
    )
    for cached in (True, False)
    for size in (4, 16, 64, 256)
    for case in CASES
]


@pytest.mark.parametrize(("kind", "model_impl", "block_size", "prefix_caching"), MATRIX)
def test_tokens_equal_transformers(kind: str, model_impl: ModelImpl, block_size: int, prefix_caching: bool) -> None:
    wanted = [hf_greedy(checkpoint(kind), prompt, COUNT) for prompt in prompts()]
    with driver(kind, model_impl, block_size, prefix_caching) as engine:
        assert engine.run(prompts()[:1], COUNT) == wanted[:1]
        assert engine.run(prompts(), COUNT) == wanted
        assert engine.run(prompts(), COUNT) == wanted
        engine.assert_all_free()


@pytest.mark.parametrize(
    ("kind", "model_impl"), [case for case in CASES if case[0] in ("llama", "qwen3_moe", "mamba2", *STATES, *SHAPES)]
)
def test_preempted_sequences_keep_their_tokens(kind: str, model_impl: ModelImpl) -> None:
    asked = [[*prompts()[1][:9], 20 + index] for index in range(6)]
    wanted = [hf_greedy(checkpoint(kind), prompt, 40) for prompt in asked]
    with driver(kind, model_impl, 4, num_blocks=60 if kind in SHAPES else 40, max_model_len=100) as engine:
        assert engine.run(asked, 40) == wanted
        assert sum(result.preemptions for result in engine.results.values()) > 0
        engine.assert_all_free()


@pytest.mark.parametrize(
    ("kind", "model_impl"),
    [
        *((kind, "transformers") for kind in ("llama", "lfm2", "qwen3_next", "mamba2")),
        *((kind, "native") for kind in STATES if kind in NATIVE),
    ],
)
def test_forks_have_the_tokens_of_their_prompt(kind: str, model_impl: ModelImpl) -> None:
    """Where layers keep states, forks wait for the checkpoint of their prompt; a model without blocks has none."""
    prompt = prompts()[-1]
    wanted = hf_greedy(checkpoint(kind), prompt, COUNT)
    with driver(kind, model_impl, 4) as engine:
        first = engine.submit(prompt, COUNT)
        forks = [engine.submit(prompt, COUNT, fork_of=first) for _ in range(3)]
        engine.finish()
        assert [engine.results[each].tokens for each in (first, *forks)] == [wanted] * 4
        cached = {engine.results[each].cached_tokens for each in forks}
        assert cached == {0 if kind == "mamba2" else (len(prompt) - 1) // 4 * 4}
        engine.assert_all_free()


@pytest.mark.parametrize("model_impl", [impl for kind, impl in CASES if kind == "mistral"])
def test_where_every_layer_has_a_window_long_prompts_run_in_a_pool_that_holds_little_more(
    model_impl: ModelImpl,
) -> None:
    few = window_blocks(WINDOW, 4) + 2
    wanted = [hf_greedy(checkpoint("mistral"), prompt, COUNT) for prompt in prompts()]
    assert max(map(len, prompts())) > 2 * few * 4
    with driver("mistral", model_impl, 4, num_blocks=few, max_model_len=256) as engine:
        assert engine.run(prompts(), COUNT) == wanted
        engine.assert_all_free()


@pytest.mark.parametrize("model_impl", [impl for kind, impl in CASES if kind == "mistral"])
def test_what_the_window_covers_is_used_again_when_the_blocks_before_it_are_gone(model_impl: ModelImpl) -> None:
    """Of 90 computed tokens 88 are in full blocks, and the token behind them reads the last two blocks alone."""
    folder, first = checkpoint("mistral"), prompts()[-1]
    output = hf_greedy(folder, first, COUNT)
    second = [*first, *output, 7, 8, 9]
    wanted = hf_greedy(folder, second, COUNT)
    for prefix_caching, cached_tokens in ((True, 88), (False, 0)):
        with driver("mistral", model_impl, 4, prefix_caching, num_blocks=16, max_model_len=256) as engine:
            assert engine.run([first], COUNT) == [output]
            engine.assert_all_free()
            assert isinstance(engine.channel, EmbeddedChannel)
            assert engine.channel.ledger is not None
            assert engine.channel.ledger.leading_blocks(engine.hashes(second)) == 0, "the first block is still cached"
            assert engine.run([second, second, first], COUNT) == [wanted, wanted, output]
            assert engine.results[SequenceId(2)].usage.cached_tokens == cached_tokens
            engine.assert_all_free()


@pytest.mark.parametrize(("kind", "model_impl"), [case for case in CASES if case[0] in GROUPED])
def test_groups_run_long_prompts_where_one_group_would_not_fit(kind: str, model_impl: ModelImpl) -> None:
    """A pool of pages that hold three quarters of what all layers would take for the longest sequence."""
    output = hf_greedy(checkpoint(kind), prompts()[-1], COUNT)
    second = [*prompts()[-1], *output, 7, 8, 9]
    wanted = hf_greedy(checkpoint(kind), second, COUNT)
    whole = -(-(len(second) + COUNT) // 4)
    with driver(kind, model_impl, 4, num_blocks=9 * whole // 4, max_model_len=4 * whole) as engine:
        assert engine.run([prompts()[-1]], COUNT) == [output]
        assert engine.run([second, second], COUNT) == [wanted, wanted]
        assert engine.results[SequenceId(2)].usage.cached_tokens == 88
        engine.assert_all_free()


@pytest.mark.parametrize(("kind", "pages"), [("gpt_oss", 44), ("qwen3_next", 36)])
def test_prompts_that_begin_with_a_part_in_groups_keep_their_tokens(
    kind: str, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones run to their ends, while long ones begin and get their other pages, or are passed."""
    monkeypatch.setattr(embedded, "LedgerOptions", partial(LedgerOptions, first_part=8))
    long, other = prompts()[-1], prompts()[-2][::-1]
    asked = [prompts()[1], prompts()[2], long, [9, 8, 7], other, [*prompts()[1], 5], long]
    wanted = [hf_greedy(checkpoint(kind), each, COUNT) for each in asked]
    with driver(kind, "transformers", 4, num_blocks=pages, max_model_len=96) as engine:
        assert engine.run(asked, COUNT) == wanted
        assert isinstance(engine.channel, EmbeddedChannel)
        assert engine.channel.ledger is not None
        assert engine.channel.ledger.pool_counts().totals.chunked_grants > 0
        engine.assert_all_free()


@pytest.mark.parametrize(("kind", "model_impl"), [case for case in CASES if case[0] in STATES])
def test_prompts_go_on_from_checkpoints_of_states(kind: str, model_impl: ModelImpl) -> None:
    """One is left behind each output's last block; where another prompt parts from it within, the first one to do so
    leaves one there."""
    folder, first = checkpoint(kind), prompts()[-1]
    output = hf_greedy(folder, first, COUNT)
    second, parted = [*first, *output, 7, 8, 9], [*first[:50], 20, 21, 22]
    asked = [second, second, parted, [*first[:50], 30, 31]]
    wanted = [hf_greedy(folder, each, COUNT) for each in asked]
    with driver(kind, model_impl, 4) as engine:
        assert engine.run([first], COUNT) == [output]
        found = [engine.run([each], COUNT)[0] for each in asked]
        assert found == wanted
        cached = [engine.results[SequenceId(number)].usage.cached_tokens for number in range(2, 6)]
        # The second time, the second turn hits up to the block of its last token.
        assert cached == [(len(first) + COUNT - 1) // 4 * 4, (len(second) - 1) // 4 * 4, 0, 48]
        assert isinstance(engine.channel, EmbeddedChannel)
        assert engine.channel.ledger is not None
        # The prompt that parts has K and V of what it shares.
        assert engine.channel.ledger.pool_counts().totals.misses_by_reason["unresumable"] == 1
        engine.assert_all_free()


# Of each pool, pages that hold hardly more than one talk with its output.
IN_HOST = [
    *(("gemma2", "transformers", 56), ("gpt_oss", "transformers", 60), ("llama4_text", "transformers", 60)),
    *(("gemma4_text", "transformers", 70), ("qwen3_next", "transformers", 60), ("lfm2", "transformers", 40)),
    *((kind, "native", pages) for kind, pages in (("gemma4_text", 70), ("qwen3_next", 60), ("lfm2", 40))),
]


@pytest.mark.parametrize(("kind", "model_impl", "pages"), [each for each in IN_HOST if each[:2] in CASES])
def test_what_groups_lost_comes_back_from_host_memory(kind: str, model_impl: ModelImpl, pages: int) -> None:
    """Talks go on in turns, and each turn evicts what the others have: K and V, windows and states are loaded again."""
    folder, talks = checkpoint(kind), [prompts()[-1], prompts()[-2][::-1], [*prompts()[2], *prompts()[1]]]
    found = dict[bool, tuple[list[list[int]], int]]()
    for host_memory in (None, 8 << 20):
        said, answers, cached = [talk.copy() for talk in talks], list[list[int]](), 0
        with driver(kind, model_impl, 4, num_blocks=pages, max_model_len=112, host_memory=host_memory) as engine:
            for _ in range(2):
                for talk in said:
                    (answer,) = engine.run([talk], 6)
                    answers.append(answer)
                    talk += [*answer, 7, 8]
                    cached += list(engine.results.values())[-1].usage.cached_tokens
            assert isinstance(engine.channel, EmbeddedChannel)
            assert engine.channel.ledger is not None
            totals = engine.channel.ledger.pool_counts().totals
            assert (totals.host_loads > 0) == (host_memory is not None)
            engine.channel.ledger.check_invariants()
            engine.assert_all_free()
        found[host_memory is not None] = answers, cached
    asked, wanted = [talk.copy() for talk in talks], list[list[int]]()
    for _ in range(2):
        for talk in asked:
            wanted.append(hf_greedy(folder, talk, 6))
            talk += [*wanted[-1], 7, 8]
    assert found[True][0] == found[False][0] == wanted
    assert found[True][1] > found[False][1], "host memory has what the pool lost"


@pytest.mark.parametrize(("kind", "model_impl", "pages"), [each for each in IN_HOST if each[:2] in CASES])
def test_preempted_sequences_of_groups_are_swapped(kind: str, model_impl: ModelImpl, pages: int) -> None:
    """Sequences that outgrow the pool take turns, forks beside them: what one has lost, its next grant loads."""
    asked = [[*prompts()[1][:9], 20 + index] for index in range(6)]
    wanted = [hf_greedy(checkpoint(kind), prompt, 40) for prompt in asked]
    with driver(kind, model_impl, 4, num_blocks=pages, max_model_len=100, host_memory=8 << 20) as engine:
        assert engine.run(asked, 40) == wanted
        first = engine.submit(asked[0], 40)
        forks = [engine.submit(asked[0], 40, fork_of=first) for _ in range(3)]
        engine.finish()
        assert [engine.results[each].tokens for each in (first, *forks)] == [wanted[0]] * 4
        assert sum(result.preemptions for result in engine.results.values()) > 0
        assert isinstance(engine.channel, EmbeddedChannel)
        assert engine.channel.ledger is not None
        assert engine.channel.ledger.pool_counts().totals.host_loads > 0
        engine.assert_all_free()
