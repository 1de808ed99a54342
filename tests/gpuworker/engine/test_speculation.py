"""Drafts change no token: outputs of an engine that drafts are those of one that does not, whatever guesses.

On the native path they are equal to the bit, in bfloat16: log-probabilities show the bits of logits. Elsewhere tokens
are equal in float32. Predictions are right in parts, so that steps accept all, some and none of their drafts.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from common.contracts.types import SamplingParams
from gpuworker.config import GpuWorkerSettings
from gpuworker.native.library import best
from gpuworker.plane.assembly import assemble
from gpuworker.runner.draft_model import RunnerDraftModel
from gpuworker.scheduling.draft_store import DraftStore
from gpuworker.scheduling.draft_tally import DraftKind, DraftTally
from gpuworker.scheduling.drafting import NO_PRICES
from tests.support.checkpoints import VOCAB_SIZE, checkpoint, nearly
from tests.support.gpuworker.engine_harness import EngineDriver, Result

COUNT = 40
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
RANDOM = SamplingParams(temperature=0.9, top_p=0.95, seed=11, logprobs=2)
ADJUSTED = replace(
    RANDOM,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    min_p=0.01,
    min_tokens=20,
    stop_token_ids=(7, 9, 11),
    logit_bias=((8, 4.0), (7, 4.0)),
    bad_words=((8, 8), (12,)),
)
SAMPLINGS = {"greedy": GREEDY, "random": RANDOM, "adjusted": ADJUSTED}
PATHS = [
    pytest.param("transformers", {"dtype": "float32"}, id="transformers"),
    pytest.param(
        "native",
        {"dtype": "bfloat16", "deterministic": True},
        id="native",
        marks=pytest.mark.skipif(best() is None, reason="the native library was not built"),
    ),
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


KINDS = ["ngram", "draft"]


def engine(
    speculative: str, impl: Any, options: dict[str, Any], num_blocks: int = 512, kind: str = "llama"
) -> EngineDriver:
    """Return an engine on a tiny checkpoint that drafts whenever it has a guess, or never.

    Its draft model is right in parts.
    """
    settings = GpuWorkerSettings(
        model=str(checkpoint(kind)),
        model_impl=impl,
        block_size=4,
        kv_blocks=num_blocks,
        max_model_len=min(192, 4 * num_blocks),
        max_num_batched_tokens=48,
        max_num_seqs=8,
        threads=1,
        device="cpu",
        speculative=speculative,
        **({"draft_model": str(nearly(kind)) if speculative == "draft" else None} | options),
    )
    plane = assemble(settings)
    return EngineDriver(plane.runner, replace(plane.agent_config(), draft_prices=NO_PRICES))


def prompts() -> list[list[int]]:
    """Return prompts of odd lengths; two share a prefix, and the last one repeats itself."""
    rng = random.Random(3)
    made = [[rng.randrange(6, VOCAB_SIZE) for _ in range(n)] for n in (5, 17, 32)]
    return [*made, [*made[2][:24], 20, 21], [30, 31, 32, 33] * 5]


def run(
    driver: EngineDriver,
    sampling: SamplingParams,
    predictions: Sequence[Sequence[int]],
    asked: Sequence[list[int]] | None = None,
) -> list[Result]:
    started = [
        driver.submit(prompt, COUNT, replace(sampling, seed=sampling.seed + number), prediction=prediction)
        for number, (prompt, prediction) in enumerate(zip(asked or prompts(), predictions, strict=True))
    ]
    driver.finish()
    driver.assert_all_free()
    return [driver.results[sequence] for sequence in started]


def partly_right(results: Sequence[Result]) -> list[list[int]]:
    """Return the outputs with tokens that are wrong, missing or too many; the last one is wrong throughout."""
    changes: list[Callable[[list[int]], list[int]]] = [
        lambda tokens: tokens,
        lambda tokens: [*tokens[:5], 6, *tokens[6:]],
        lambda tokens: [*tokens[:9], *tokens[11:]],
        lambda tokens: [*tokens[:7], 6, 6, 6, *tokens[7:]],
        lambda tokens: [6] * len(tokens),
    ]
    return [change(result.tokens) for change, result in zip(changes, results, strict=True)]


def same(found: Sequence[Result], wanted: Sequence[Result], bits: bool) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.message == ""
        assert one.tokens == other.tokens
        assert (one.reason, one.stop_token) == (other.reason, other.stop_token)
        assert [each.token_id for each in one.logprobs] == one.tokens
        if bits:
            assert one.logprobs == other.logprobs


def run_plain(impl: str, options: dict[str, Any], sampling: SamplingParams, kind: str = "llama") -> Sequence[Result]:
    """Return the outputs of an engine that drafts nothing; both kinds of drafts are compared with one run of it."""
    return _run_plain(impl, tuple(options.items()), sampling, kind)


@functools.cache
def _run_plain(impl: str, options: tuple[tuple[str, Any], ...], sampling: SamplingParams, kind: str) -> list[Result]:
    with engine("none", impl, dict(options), kind=kind) as plain:
        found = run(plain, sampling, [()] * 5)
        assert plain.engine.load().drafted_tokens == 0
    return found


@pytest.mark.parametrize(("impl", "options"), PATHS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
@pytest.mark.parametrize("speculative", KINDS)
def test_drafts_change_no_token(impl: str, options: dict[str, Any], sampling: SamplingParams, speculative: str) -> None:
    wanted = run_plain(impl, options, sampling)
    with engine(speculative, impl, options) as drafting:
        same(run(drafting, sampling, partly_right(wanted)), wanted, impl == "native")
        load = drafting.engine.load()
        assert 0 < load.accepted_tokens < load.drafted_tokens
        cached = run(drafting, sampling, partly_right(wanted))
        same(cached, wanted, impl == "native")
        assert any(result.cached_tokens for result in cached)


@pytest.mark.parametrize(("impl", "options"), PATHS)
@pytest.mark.parametrize("speculative", KINDS)
def test_preempted_sequences_keep_their_tokens(impl: str, options: dict[str, Any], speculative: str) -> None:
    wanted = run_plain(impl, options, RANDOM)
    with engine(speculative, impl, options, num_blocks=32) as drafting:
        found = run(drafting, RANDOM, partly_right(wanted))
        same(found, wanted, impl == "native")
        assert sum(result.preemptions for result in found) > 0
        assert sum(result.usage.accepted_draft_tokens for result in found) > 0


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
@pytest.mark.parametrize("speculative", KINDS)
def test_models_with_windows_keep_their_tokens(kind: str, speculative: str) -> None:
    options = {"dtype": "float32"}
    wanted = run_plain("transformers", options, GREEDY, kind)
    with engine(speculative, "transformers", options, kind=kind) as drafting:
        same(run(drafting, GREEDY, partly_right(wanted)), wanted, bits=False)
        assert drafting.engine.load().accepted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *(pytest.param(kind, GREEDY, id=f"{kind}-greedy") for kind in ("qwen3_next", "lfm2", "zamba2", "mamba2")),
        pytest.param("lfm2", ADJUSTED, id="lfm2-adjusted"),
        *(
            pytest.param(kind, ADJUSTED, id=f"{kind}-adjusted", marks=pytest.mark.exhaustive)
            for kind in ("qwen3_next", "zamba2", "mamba2")
        ),
    ],
)
def test_models_that_keep_states_keep_their_tokens(kind: str, sampling: SamplingParams) -> None:
    """In chunked prefills, from checkpoints, and over preemptions; of mamba2 there are no checkpoints."""
    options: dict[str, Any] = {"dtype": "float32"}
    short = [[*prompts()[1][:9], 20 + number] for number in range(6)]
    with engine("none", "transformers", options, kind=kind) as plain:
        wanted, of_short = run(plain, sampling, [()] * 5), run(plain, sampling, [()] * 6, short)
    with engine("ngram", "transformers", options, kind=kind) as drafting:
        same(run(drafting, sampling, partly_right(wanted)), wanted, bits=False)
        load = drafting.engine.load()
        assert 0 < load.accepted_tokens < load.drafted_tokens
        cached = run(drafting, sampling, partly_right(wanted))
        same(cached, wanted, bits=False)
        assert any(result.cached_tokens for result in cached) == (kind != "mamba2")
    with engine("ngram", "transformers", options, num_blocks=30, kind=kind) as drafting:
        often_wrong = [[6 if at % 4 == 3 else token for at, token in enumerate(each.tokens)] for each in of_short]
        found = run(drafting, sampling, often_wrong, short)
        same(found, of_short, bits=False)
        assert sum(result.usage.accepted_draft_tokens for result in found) > 0
        assert sum(result.preemptions for result in found) > 0


def test_a_draft_model_without_states_guesses_for_a_model_with_some() -> None:
    """It knows nothing: a bias makes both models say a token."""
    sampling = SamplingParams(temperature=0.0, logprobs=0, logit_bias=((30, 9.0),))
    options: dict[str, Any] = {"dtype": "float32"}
    with engine("none", "transformers", options, kind="qwen3_next") as plain:
        wanted = run(plain, sampling, [()] * 5)
    with engine("draft", "transformers", options | {"draft_model": str(checkpoint("llama"))}, kind="qwen3_next") as one:
        same(run(one, sampling, [()] * 5), wanted, bits=False)
        drafted, accepted = model_drafts(one)
        assert 0 < accepted < drafted


def test_forks_of_a_model_that_keeps_states_draft_each_for_itself() -> None:
    prompt, found = [*prompts()[2], 40], list[list[list[int]]]()
    for speculative in ("none", "ngram"):
        with engine(speculative, "transformers", {"dtype": "float32"}, kind="lfm2") as driver:
            predictions = found[0] if found else [(), ()]
            first = driver.submit(prompt, COUNT, RANDOM, prediction=predictions[0])
            other = driver.submit(
                prompt, COUNT, replace(RANDOM, seed=99), fork_of=first, prediction=[*predictions[1][:9], 6, 6]
            )
            driver.finish()
            driver.assert_all_free()
            found.append([driver.results[each].tokens for each in (first, other)])
            accepted = [driver.results[each].usage.accepted_draft_tokens for each in (first, other)]
            assert (min(accepted) > 0) == (speculative != "none")
    assert found[0] == found[1]


def test_the_ngrams_of_a_text_that_repeats_itself_are_guessed() -> None:
    """A bias makes the model alternate between few tokens; without a prediction it is guessed from its own output."""
    sampling = SamplingParams(temperature=0.0, logprobs=0, logit_bias=((30, 90.0),))
    with engine("none", "transformers", {"dtype": "float32"}) as plain:
        wanted = run(plain, sampling, [()] * 5)
        steps = plain.engine.load().steps
    with engine("ngram", "transformers", {"dtype": "float32"}) as drafting:
        same(run(drafting, sampling, [()] * 5), wanted, bits=False)
        assert drafting.engine.load().steps < steps / 2


@pytest.mark.parametrize("speculative", KINDS)
def test_a_sequence_that_goes_on_from_an_earlier_run_follows_the_prediction(speculative: str) -> None:
    """As a router submits it again when its worker is lost: the tokens so far are part of the prompt."""
    prompt = prompts()[1]
    with engine("none", "transformers", {"dtype": "float32"}) as plain:
        wanted = plain.run([prompt], COUNT)[0]
    with engine(speculative, "transformers", {"dtype": "float32"}) as drafting:
        moved = drafting.submit([*prompt, *wanted[:15]], COUNT - 15, output_before=15, prediction=wanted)
        drafting.finish()
        assert drafting.results[moved].tokens == wanted[15:]
        usage = drafting.results[moved].usage
        assert usage.accepted_draft_tokens == usage.drafted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_forks_draft_each_for_itself(kind: str) -> None:
    prompt = [*prompts()[2], 40]
    for speculative in ("none", kind):
        with engine(speculative, "transformers", {"dtype": "float32"}) as driver:
            first = driver.submit(prompt, COUNT, RANDOM, prediction=[1, 2, 3])
            other = driver.submit(prompt, COUNT, replace(RANDOM, seed=99), fork_of=first, prediction=[4, 5, 6])
            driver.finish()
            driver.assert_all_free()
            if speculative == "none":
                wanted = driver.results[first].tokens, driver.results[other].tokens
    assert (driver.results[first].tokens, driver.results[other].tokens) == wanted


# ---------------------------------------------------------------- a draft model


def model_drafts(driver: EngineDriver) -> DraftTally:
    return driver.engine.load().drafts.get(DraftKind.MODEL, DraftTally())


@pytest.mark.parametrize(("impl", "options"), PATHS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_the_guesses_of_a_draft_model_are_right_in_parts(
    impl: str, options: dict[str, Any], sampling: SamplingParams
) -> None:
    """Without a prediction: across blocks, in a second run from cached blocks, and behind a chunked prompt."""
    long = [prompt * 4 for prompt in prompts()]
    with engine("none", impl, options) as plain:
        wanted = run(plain, sampling, [()] * 5, long)
    with engine("draft", impl, options) as drafting:
        for _ in range(2):
            found = run(drafting, sampling, [()] * 5, long)
            same(found, wanted, impl == "native")
            assert sum(result.usage.accepted_draft_tokens for result in found) > 0
        assert any(result.cached_tokens for result in found)
        drafted, accepted = model_drafts(drafting)
        assert 0 < accepted < drafted


def test_sequences_lose_their_draft_blocks_to_others_and_keep_their_tokens() -> None:
    """The draft model has room for one or two of five sequences: they take turns, and compute their texts again."""
    options = {"dtype": "float32"}
    with engine("none", "transformers", options) as plain:
        wanted = run(plain, GREEDY, [()] * 5)
    with engine("draft", "transformers", options) as drafting:
        model = drafting.config.draft_model
        assert isinstance(model, RunnerDraftModel)
        model._store = DraftStore(24, 4, max_num_seqs=2)
        same(run(drafting, GREEDY, [()] * 5), wanted, bits=False)
        assert model_drafts(drafting).accepted > 0
        assert model._store.free_blocks == 24, "every sequence has ended"


def test_what_ends_leaves_nothing_in_the_draft_model() -> None:
    with engine("draft", "transformers", {"dtype": "float32"}) as drafting:
        model = drafting.config.draft_model
        assert isinstance(model, RunnerDraftModel)
        free = model._store.free_blocks
        run(drafting, RANDOM, [()] * 5)
        assert model_drafts(drafting).drafted > 0
        assert (model._store.free_blocks, len(model._runner._batch)) == (free, 0)


def test_a_moved_sequence_is_caught_up_before_it_drafts() -> None:
    prompt = prompts()[2]
    with engine("none", "transformers", {"dtype": "float32"}) as plain:
        wanted = plain.run([prompt], COUNT)[0]
    with engine("draft", "transformers", {"dtype": "float32"}) as drafting:
        moved = drafting.submit([*prompt, *wanted[:15]], COUNT - 15, output_before=15)
        drafting.finish()
        assert drafting.results[moved].tokens == wanted[15:]
        assert drafting.results[moved].usage.accepted_draft_tokens > 0


def test_a_draft_model_that_fails_ends_its_guesses_alone(caplog: pytest.LogCaptureFixture) -> None:
    options = {"dtype": "float32"}
    with engine("none", "transformers", options) as plain:
        wanted = run(plain, GREEDY, [()] * 5)
    with engine("draft", "transformers", options) as drafting:
        model = drafting.config.draft_model
        assert isinstance(model, RunnerDraftModel)
        model._runner._failures.note(1, RuntimeError("no such memory"))
        same(run(drafting, GREEDY, [()] * 5), wanted, bits=False)
        assert model_drafts(drafting).drafted == 0
    assert "the draft model failed, and guesses no more" in caplog.text


def test_sequences_longer_than_the_draft_model_go_on_without_it() -> None:
    options = {"dtype": "float32"}
    with engine("none", "transformers", options) as plain:
        wanted = run(plain, GREEDY, [()] * 5)
    with engine("draft", "transformers", options) as drafting:
        model = drafting.config.draft_model
        assert isinstance(model, RunnerDraftModel)
        model._limits = replace(model._limits, max_model_len=50)
        same(run(drafting, GREEDY, [()] * 5), wanted, bits=False)
        assert model_drafts(drafting).accepted > 0
        assert model._store.free_blocks == model._store.num_blocks


def test_tokens_that_one_vocabulary_lacks_are_neither_guessed_nor_read() -> None:
    options = {"dtype": "float32"}
    with engine("none", "transformers", options) as plain:
        wanted = run(plain, RANDOM, [()] * 5)
    for limits in ({"vocab_size": 200}, {"guessable": 200}):
        with engine("draft", "transformers", options) as drafting:
            model = drafting.config.draft_model
            assert isinstance(model, RunnerDraftModel)
            model._limits = replace(model._limits, **limits)
            same(run(drafting, RANDOM, [()] * 5), wanted, bits=False)
