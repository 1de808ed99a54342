"""Constrained sequences through the whole engine, on both paths of a model: equality, ends, and no waiting."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams, SequenceId
from common.settings.options import ModelImpl
from gpuworker.native import library as native
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.sampling import sampler
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
from tests.gpuworker.engine.test_equality import driver
from tests.support.checkpoints import EOS, VOCAB_SIZE, tokenizer
from tests.support.gpuworker.engine_harness import PATIENCE, EngineDriver, Result

PATHS: list[ModelImpl] = ["transformers", *(["native"] if native.best() is not None else [])]  # type: ignore[list-item]
REGEX = Constraint(ConstraintKind.REGEX, "[a-f]{3}(-[0-9]{4}){3,4}")
GRAMMAR = Constraint(
    ConstraintKind.GRAMMAR, 'start: term (("+" | "*") term){4,6}\nterm: /[0-9]{1,3}/ | "(" term "-" term ")"'
)
SCHEMA = Constraint(
    ConstraintKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999},'
    ' "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}},'
    ' "required": ["id", "tags"], "additionalProperties": false}',
)
COUNT = 60


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> ModelImpl:
    return request.param  # type: ignore[no-any-return]


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (9, 17, 5, 11, 8, 14)]


SAMPLINGS = [
    *(SamplingParams(temperature=0.0, constraint=each) for each in (REGEX, GRAMMAR, SCHEMA)),
    *(SamplingParams(temperature=1.0, seed=3, constraint=each) for each in (REGEX, SCHEMA)),
    SamplingParams(temperature=0.0),
]


def words(result: Result) -> str:
    return str(tokenizer().decode(result.tokens, skip_special_tokens=True))


def run(engine: EngineDriver, *which: int) -> list[Result]:
    """Run some of the samplings together."""
    started = [engine.submit(prompts()[n], COUNT, SAMPLINGS[n], eos=[EOS]) for n in which]
    engine.finish()
    return [engine.results[sequence] for sequence in started]


def mask_thread_of(engine: EngineDriver) -> GrammarMaskThread:
    assert isinstance(engine.runner, ModelRunner)
    assert engine.runner._masks is not None
    return engine.runner._masks


def left_to_mask_thread(engine: EngineDriver) -> None:
    """Let native steps follow no constraint themselves, for what only the mask thread can meet."""
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.follows_constraints = False


# ---------------------------------------------------------------- equality


def test_outputs_depend_on_neither_path_nor_neighbours_nor_preemption() -> None:
    everyone = range(len(SAMPLINGS))
    found: dict[str, list[list[int]]] = {}
    for path in PATHS:
        with driver("llama", path, 4) as engine:
            found[f"{path}, alone"] = [run(engine, n)[0].tokens for n in everyone]
            found[f"{path}, together"] = [each.tokens for each in run(engine, *everyone)]
            engine.assert_all_free()
        with driver("llama", path, 4, num_blocks=24) as engine:
            results = run(engine, *everyone)
            found[f"{path}, preempted"] = [each.tokens for each in results]
            assert sum(each.preemptions for each in results[:-1]) > 0
            engine.assert_all_free()
    assert len({tuple(map(tuple, tokens)) for tokens in found.values()}) == 1, found


def test_draws_by_torch_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    with driver("llama", "transformers", 16) as engine:
        native_draws = [each.tokens for each in run(engine, *range(len(SAMPLINGS)))]
    monkeypatch.setattr(sampler, "native_rows", lambda *_: None)
    with driver("llama", "transformers", 16) as engine:
        assert [each.tokens for each in run(engine, *range(len(SAMPLINGS)))] == native_draws


def test_outputs_match_and_end_with_a_stop(path: ModelImpl) -> None:
    with driver("llama", path, 16) as engine:
        results = run(engine, *range(len(SAMPLINGS)))
    assert [each.reason for each in results] == [FinishReason.STOP] * 5 + [FinishReason.LENGTH]
    for n, pattern in ((0, REGEX.text), (3, REGEX.text), (2, r"\{ ?\"id\".*\}"), (4, r"\{ ?\"id\".*\}")):
        assert re.fullmatch(pattern, words(results[n])), words(results[n])
    assert [each.usage.output_tokens for each in results] == [len(each.tokens) for each in results]


@pytest.mark.parametrize("follows", [True, False])
def test_a_model_that_would_end_within_a_thought_closes_the_thought(path: ModelImpl, follows: bool) -> None:
    thought = Constraint(ConstraintKind.GRAMMAR, 'start: THOUGHT <[1]> "(" /[0-9]{3}/ ")"\nTHOUGHT: /(?s:.*)/')
    ends = SamplingParams(temperature=0.0, constraint=thought, stop_token_ids=(EOS,), logit_bias=((EOS, 100.0),))
    with driver("llama", path, 4) as engine:
        if not follows:
            left_to_mask_thread(engine)
        first = engine.submit(prompts()[0], COUNT, replace(ends, closing_token_id=1), eos=[EOS])
        other = engine.submit(prompts()[0], COUNT, ends, eos=[EOS])
        engine.finish()
    assert engine.results[first].tokens[0] == 1
    assert engine.results[first].reason is FinishReason.STOP
    assert re.fullmatch(r" ?\( ?\d{3} ?\)", words(engine.results[first]))
    assert engine.results[other].tokens[0] != 1, "nothing stands for the end, and the thought goes on"


def test_a_sequence_that_moves_goes_on_where_it_was(path: ModelImpl) -> None:
    with driver("llama", path, 4) as engine:
        whole = run(engine, 4)[0].tokens
        num_tokens = len(whole) // 2
        moved = engine.submit(
            [*prompts()[4], *whole[:num_tokens]], COUNT - num_tokens, SAMPLINGS[4], eos=[EOS], output_before=num_tokens
        )
        engine.finish()
    assert engine.results[moved].tokens == whole[num_tokens:]


def test_sequences_of_one_request_have_matchers_of_their_own(path: ModelImpl) -> None:
    with driver("llama", path, 4) as engine:
        first = engine.submit(prompts()[0], COUNT, replace(SAMPLINGS[3], seed=1), eos=[EOS])
        others = [
            engine.submit(prompts()[0], COUNT, replace(SAMPLINGS[3], seed=seed), eos=[EOS], fork_of=first)
            for seed in (2, 3, 4)
        ]
        engine.finish()
    texts = [words(engine.results[each]) for each in (first, *others)]
    assert len(set(texts)) == 4
    assert all(re.fullmatch(REGEX.text, text) for text in texts)


# ---------------------------------------------------------------- ends


def test_what_max_tokens_cuts_is_a_beginning_that_the_grammar_allows(path: ModelImpl) -> None:
    with driver("llama", path, 16) as engine:
        engine.submit(prompts()[0], 6, SAMPLINGS[0], eos=[EOS])
        (result,) = engine.finish()
        assert result.reason is FinishReason.LENGTH
        compiler = mask_thread_of(engine)._grammars
        assert compiler.compile(REGEX).matcher().validate_tokens(result.tokens) == len(result.tokens) == 6


def test_the_models_own_end_is_drawn_where_more_could_follow(path: ModelImpl) -> None:
    """It ends the sequence as without a constraint; and where nothing can follow, nothing need be drawn."""
    wants_end = ((EOS, 50.0),)
    some = Constraint(ConstraintKind.REGEX, "ab{2,}")
    with driver("llama", path, 16) as engine:
        asked = SamplingParams(temperature=0.0, constraint=some, logit_bias=wants_end)
        engine.submit(prompts()[0], COUNT, asked, eos=[EOS])
        engine.submit(prompts()[0], COUNT, replace(asked, min_tokens=9), eos=[EOS])
        engine.submit(prompts()[0], COUNT, replace(asked, constraint=Constraint(ConstraintKind.REGEX, "ab")), eos=[EOS])
        results = engine.finish()
    assert [words(each) for each in results] == ["abb", "abbbbbbbb", "ab"]
    assert [each.stop_token for each in results] == [EOS, EOS, None]
    assert {each.reason for each in results} == {FinishReason.STOP}


def test_a_constraint_that_cannot_be_followed_ends_its_own_sequence(path: ModelImpl) -> None:
    broken = SamplingParams(temperature=0.0, constraint=Constraint(ConstraintKind.REGEX, "a(b"))
    with driver("llama", path, 16) as engine:
        alone = run(engine, 2)[0].tokens
        failed = engine.submit(prompts()[0], COUNT, broken, eos=[EOS])
        assert run(engine, 2)[0].tokens == alone
        assert engine.results[failed].reason is FinishReason.ERROR
        assert "unclosed group" in engine.results[failed].message
        assert engine.results[failed].tokens == []
        engine.assert_all_free()


def test_a_runner_that_follows_no_constraints_takes_none(path: ModelImpl) -> None:
    engine = driver("llama", path, 16)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner._masks = None
    with pytest.raises(ValueError, match="has no grammars"):
        engine.runner.add_sequence(SequenceId(1), prompts()[0], SAMPLINGS[0], 9)
    engine.runner.close()


# ---------------------------------------------------------------- nothing hangs


def test_cancelled_sequences_hold_up_nobody_and_leave_nothing(path: ModelImpl) -> None:
    with driver("llama", path, 4) as engine:
        alone = [each.tokens for each in (run(engine, 0)[0], run(engine, 2)[0])]
        for at in (1, 3, 8):
            cancelled = engine.submit(prompts()[1], COUNT, SAMPLINGS[1], eos=[EOS])
            started = [engine.submit(prompts()[n], COUNT, SAMPLINGS[n], eos=[EOS]) for n in (0, 2)]
            while len(engine.results[cancelled].tokens) < at:
                engine.take()
            engine.engine.cancel_request(cancelled, FinishReason.CANCELLED)
            engine.finish()
            assert engine.results[cancelled].reason is FinishReason.CANCELLED
            assert [engine.results[sequence].tokens for sequence in started] == alone
        engine.assert_all_free()
        mask_thread, forgotten = mask_thread_of(engine), threading.Event()
        mask_thread._thread.put(forgotten.set)
        assert forgotten.wait(PATIENCE)
        assert (mask_thread._states, mask_thread._waiting) == ({}, [])


def test_an_engine_stops_amid_constrained_sequences(path: ModelImpl) -> None:
    with driver("llama", path, 4) as engine:
        sequences = [engine.submit(prompts()[n], COUNT, SAMPLINGS[n], eos=[EOS]) for n in range(5)]
        while not engine.results[sequences[0]].tokens:
            engine.take()
        for sequence in sequences:
            engine.engine.cancel_request(sequence, FinishReason.CANCELLED)


def test_a_failed_step_opens_the_masks_of_the_next_one(path: ModelImpl, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode fails while the next one, queued behind it, waits for masks that its token should have brought."""
    with driver("llama", path, 4) as engine:
        left_to_mask_thread(engine)
        alone = run(engine, 2)[0].tokens
        fail_a_draw(engine, monkeypatch)
        sequences = [engine.submit(prompts()[n], COUNT, SAMPLINGS[n], eos=[EOS]) for n in (0, 2)]
        engine.finish()
        assert {engine.results[sequence].reason for sequence in sequences} == {FinishReason.ERROR}
        monkeypatch.undo()
        assert run(engine, 2)[0].tokens == alone
        engine.assert_all_free()


def fail_a_draw(engine: EngineDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step from the third one with masks on fail when it reports its samples, as if there were none."""
    calls = iter(range(1000))

    def broken(masks: GrammarBitmask, tokens: list[int]) -> None:
        if next(calls) >= 2:
            raise RuntimeError("the device is gone")
        right(masks, tokens)

    right = GrammarBitmask.sampled
    monkeypatch.setattr(GrammarBitmask, "sampled", broken)


def test_a_native_step_that_fails_opens_the_masks_of_the_next_one() -> None:
    if native.best() is None:
        pytest.skip("the native library was not built")
    with driver("llama", "native", 4) as engine:
        alone = run(engine, 2)[0].tokens
        engine.submit([VOCAB_SIZE + 5] * 9, COUNT, SAMPLINGS[0], eos=[EOS])
        (failed,) = [each for each in engine.finish() if each.reason is FinishReason.ERROR]
        assert "has a token that the model does not know" in failed.message
        assert run(engine, 2)[0].tokens == alone
        engine.assert_all_free()


@pytest.mark.parametrize("late", [1, 4])
def test_a_late_mask_is_waited_for(path: ModelImpl, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with driver("llama", path, 16) as engine:
        left_to_mask_thread(engine)
        alone = run(engine, 0)[0].tokens
        entered, go_on = threading.Event(), threading.Event()
        count, right = iter(range(1, 1000)), GrammarMaskThread._fill

        def slow(mask_thread: GrammarMaskThread, masks: GrammarBitmask) -> None:
            if next(count) == late:
                entered.set()
                assert go_on.wait(PATIENCE)
            right(mask_thread, masks)

        monkeypatch.setattr(GrammarMaskThread, "_fill", slow)
        sequence = engine.submit(prompts()[0], COUNT, SAMPLINGS[0], eos=[EOS])
        assert entered.wait(PATIENCE)
        while engine.engine.load().step_age_seconds < 0.05:
            pass  # time enough for its forward, mostly; and then it draws nothing
        assert len(engine.results[sequence].tokens) < late
        go_on.set()
        engine.finish()
    assert engine.results[sequence].tokens == alone


def test_unconstrained_steps_know_nothing_of_masks(path: ModelImpl, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("nobody has a constraint")

    for name in ("masks", "add", "remove", "sampled"):
        monkeypatch.setattr(GrammarMaskThread, name, unexpected)
    monkeypatch.setattr(GrammarCompiler, "compile", unexpected)
    with driver("llama", path, 16) as engine:
        assert len(run(engine, 5)[0].tokens) == COUNT
