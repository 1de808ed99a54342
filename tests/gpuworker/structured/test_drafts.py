"""Drafts of constrained sequences: masks behind them are those of plain steps, and no output changes."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.contracts.types import Constraint, ConstraintKind, SamplingParams, SequenceId, ThoughtBudget
from gpuworker.config import GpuWorkerSettings
from gpuworker.native.library import best
from gpuworker.plane.assembly import assemble
from gpuworker.sampling.masks import GrammarBitmask
from gpuworker.sampling.rows import SampledRow
from gpuworker.scheduling.drafting import NO_PRICES
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
from gpuworker.structured.sequence import Constrained
from tests.support.checkpoints import EOS, VOCAB_SIZE, checkpoint, nearly, tokenizer
from tests.support.gpuworker.engine_harness import EngineDriver, Result

A, B = SequenceId(1), SequenceId(2)
PROMPT, PATIENCE = 5, 120.0
EVERYTHING = set(range(VOCAB_SIZE))
LITERAL = Constraint(ConstraintKind.REGEX, "alpha-beta-[a-f]{3}-gamma-(delta|epsilon)-[0-9]{2}-omega!")
REGEX = Constraint(ConstraintKind.REGEX, "[a-f]{3}(-[0-9]{4}){3,4}")
GRAMMAR = Constraint(
    ConstraintKind.GRAMMAR, 'start: term (("+" | "*") term){4,6}\nterm: /[0-9]{1,3}/ | "(" term "-" term ")"'
)
SCHEMA = Constraint(
    ConstraintKind.JSON_SCHEMA,
    '{"type": "object", "properties": {"identifier": {"type": "integer", "minimum": 0, "maximum": 999},'
    ' "categories": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3}},'
    ' "required": ["identifier", "categories"], "additionalProperties": false}',
)
NUMBER = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "number"}}')
CONSTRAINTS = {"literal": LITERAL, "regex": REGEX, "grammar": GRAMMAR, "schema": SCHEMA, "number": NUMBER}


def tokens_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---------------------------------------------------------------- masks


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(checkpoint("llama") / "tokenizer.json", VOCAB_SIZE, (EOS,))


@pytest.fixture
def mask_thread(grammars: GrammarCompiler) -> Iterator[GrammarMaskThread]:
    made = GrammarMaskThread(grammars, foresee=True)
    yield made
    made.close()


def row(constraint: Constraint, **sampling: Any) -> SampledRow:
    return SampledRow(SamplingParams(constraint=constraint, **sampling), PROMPT, (EOS,))


def plainly(grammars: GrammarCompiler, sampled: SampledRow, output: Sequence[int]) -> set[int] | None:
    """Return what may follow an output without drafts; None where it has ended."""
    assert sampled.params.constraint is not None
    followed = Constrained(grammars.compile(sampled.params.constraint), sampled, output)
    if followed.ending is None:
        bits = np.frombuffer(followed.matcher.compute_bitmask(), dtype=np.uint32).copy()
        followed.settle(bits)
    return None if followed.ending is not None else bits_of(bits)


def bits_of(bits: np.ndarray[Any, Any]) -> set[int]:
    return {token for token in range(VOCAB_SIZE) if int(bits[token // 32]) >> (token % 32) & 1}


def drafted(thread: GrammarMaskThread, sequence: SequenceId, done: int, drafts: Sequence[int]) -> GrammarBitmask:
    """Return the open masks of a step of one sequence with drafts, `done` tokens into its output."""
    count = len(drafts) + 1
    positions = PROMPT + done + np.arange(count)
    masks = thread.masks((sequence,) * count, np.arange(count), positions, {sequence: tuple(drafts)})
    assert masks._open.wait(PATIENCE)
    return masks


def random_output(grammars: GrammarCompiler, sampled: SampledRow, rng: random.Random, most: int) -> list[int]:
    output: list[int] = []
    while len(output) < most and (allowed := plainly(grammars, sampled, output)):
        output.append(rng.choice(sorted(allowed - {EOS} or allowed)))
    return output


@pytest.mark.parametrize("constraint", CONSTRAINTS.values(), ids=list(CONSTRAINTS))
def test_masks_behind_drafts_are_those_of_plain_steps(
    constraint: Constraint, grammars: GrammarCompiler, mask_thread: GrammarMaskThread
) -> None:
    """Drafts that the grammar allows, that complete the output, and that are wrong from some place on."""
    rng, sampled = random.Random(constraint.text), row(constraint, min_tokens=12, stop_token_ids=tuple(tokens_of("5")))
    for number in range(12):
        output = random_output(grammars, sampled, rng, 30)
        done = rng.randrange(len(output))
        drafts = output[done : done + rng.randrange(1, 9)]
        if number % 3 == 0:
            drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB_SIZE)
        sequence = SequenceId(number + 1)
        mask_thread.add(sequence, sampled, output[:done])
        masks = drafted(mask_thread, sequence, done, drafts)
        usable = masks.usable[sequence]
        for n in range(len(drafts) + 1):
            right = plainly(grammars, sampled, [*output[:done], *drafts[:n]])
            assert (n < usable) == (n == 0 or (n - 1 < usable and right is not None)), (number, n)
            if n < usable:
                assert bits_of(masks.bits[n]) == right, (number, n)
        assert masks.ended == {}


def test_too_many_digits_are_counted_through_drafts(grammars: GrammarCompiler, mask_thread: GrammarMaskThread) -> None:
    sampled, output, drafts = row(NUMBER), tokens_of("[" + "7" * 37), tokens_of("77777")
    mask_thread.add(A, sampled, output)
    masks = drafted(mask_thread, A, len(output), drafts)
    digits = set(tokens_of("0123456789"))
    assert [bool(bits_of(mask) & digits) for mask in masks.bits] == [True] * 3 + [False] * 3
    assert masks.usable[A] == 6


def test_refused_drafts_leave_the_sequence_where_it_was(mask_thread: GrammarMaskThread) -> None:
    (a, b, c), wrong = tokens_of("abc"), tokens_of("x")[0]
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, "(ab|ac)+x")), ())
    first = drafted(mask_thread, A, 0, [a, b, a, c])
    second = mask_thread.masks((A,), np.array([0]), np.array([PROMPT + 1]))
    assert [bits_of(mask) for mask in first.bits] == [{a}, {b, c}, {a, wrong}, {b, c}, {a, wrong}]
    first.sampled([a, c, a, c, a], {A: (a, c)})
    third = drafted(mask_thread, A, 2, [wrong])
    assert bits_of(third.bits[0]) == {a, wrong}
    assert (third.usable[A], bits_of(third.bits[1])) == (1, EVERYTHING), "the output is complete behind the draft"
    assert second.ready[0] == 1


def test_a_step_has_sequences_with_drafts_beside_others(mask_thread: GrammarMaskThread) -> None:
    a, b, c = tokens_of("abc")
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, "abc")), ())
    mask_thread.add(B, row(Constraint(ConstraintKind.REGEX, "[bc]a")), ())
    masks = mask_thread.masks(
        (B, A, A, A), np.arange(4), np.array([PROMPT, PROMPT, PROMPT + 1, PROMPT + 2]), {A: (a, b)}
    )
    assert masks._open.wait(PATIENCE)
    assert [bits_of(mask) for mask in masks.bits] == [{b, c}, {a}, {b}, {c}]
    masks.sampled([c, a, b, c], {A: (a, b, c)})
    after = mask_thread.masks((B, A), np.arange(2), np.array([PROMPT + 1, PROMPT + 3]))
    assert after._open.wait(PATIENCE)
    assert bits_of(after.bits[0]) == {a}
    assert list(after.ended) == [A]


def test_a_sequence_that_fails_at_once_ends_whatever_it_drafts(mask_thread: GrammarMaskThread) -> None:
    (a, b), wrong = tokens_of("ab"), tokens_of("x")[0]
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, "ab")), (wrong,))
    masks = drafted(mask_thread, A, 1, [a, b])
    assert list(masks.ended) == [A]
    assert [bits_of(mask) for mask in masks.bits] == [EVERYTHING] * 3


def test_what_is_forced_is_told_once_and_as_early_as_it_is_known(mask_thread: GrammarMaskThread) -> None:
    number, begin, end = tokens_of("1")[0], tokens_of("begin{"), tuple(tokens_of("};"))
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, r"begin\{[0-9]\};[0-9]")), ())
    steps = [mask_thread.masks((A,), np.array([0]), np.array([PROMPT + n])) for n in range(3)]
    assert steps[0]._open.wait(PATIENCE)
    assert steps[0].sampled([begin[0]])[0] == {A: tuple(begin[1:])}
    assert steps[1]._open.wait(PATIENCE)
    assert steps[1].sampled([begin[1]])[0] == {}
    assert steps[2]._open.wait(PATIENCE)
    steps[2].sampled([begin[2]])
    for n, token in enumerate(begin[3:], start=3):
        plain = mask_thread.masks((A,), np.array([0]), np.array([PROMPT + n]))
        assert plain._open.wait(PATIENCE)
        assert plain.sampled([token])[0] == {}
    done = len(begin)
    current, behind = (mask_thread.masks((A,), np.array([0]), np.array([PROMPT + done + n])) for n in range(2))
    assert current._open.wait(PATIENCE)
    settle(mask_thread)
    assert current.sampled([number], at_once=True)[0] == {A: end}, "the masks behind it are filled on this thread"
    assert behind.ready[0] == 1


def test_behind_drafts_is_told_what_is_forced_next(mask_thread: GrammarMaskThread) -> None:
    output, then = tokens_of("ab1"), tuple(tokens_of("};"))
    mask_thread.add(A, row(Constraint(ConstraintKind.REGEX, r"ab[0-9]\};[0-9]")), ())
    masks = drafted(mask_thread, A, 0, output)
    settle(mask_thread)
    assert masks.sampled([*output, then[0]], {A: tuple(output)}, at_once=True)[0] == {A: then}


def settle(mask_thread: GrammarMaskThread) -> None:
    """Wait until the thread has nothing to do."""
    done = threading.Event()
    mask_thread._thread.put(done.set)
    assert done.wait(PATIENCE)
    with mask_thread._thread._turn:
        pass


# ---------------------------------------------------------------- engines

COUNT = 70
_NATIVE = {"dtype": "bfloat16", "deterministic": True}
_BUILT = pytest.mark.skipif(best() is None, reason="the native library was not built")
PATHS = [
    pytest.param("transformers", {"dtype": "float32"}, id="transformers"),
    pytest.param("native", _NATIVE, id="native", marks=_BUILT),
    pytest.param("native", _NATIVE | {"followed": True}, id="followed", marks=_BUILT),
]
THOUGHT = Constraint(ConstraintKind.REGEX, r"\[[a-c]*\]d+")
BUDGET = ThoughtBudget(3, "[", "]", tuple(tokens_of("]")))
SAMPLINGS = [
    *(SamplingParams(temperature=0.0, constraint=each, logprobs=2) for each in (LITERAL, SCHEMA)),
    SamplingParams(temperature=1.0, seed=3, constraint=LITERAL, logprobs=0, repetition_penalty=1.3, min_tokens=30),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, constraint=SCHEMA, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, constraint=GRAMMAR, logprobs=1),
    SamplingParams(temperature=1.0, seed=6, constraint=THOUGHT, thought=BUDGET),
    SamplingParams(temperature=0.0, logprobs=1),
    *(SamplingParams(temperature=1.5, seed=seed, constraint=REGEX, logprobs=0) for seed in range(7, 11)),
]


KINDS = ["ngram", "draft"]


def engine(
    speculative: str, impl: Any, options: dict[str, Any], num_blocks: int = 512, kind: str = "llama"
) -> EngineDriver:
    """Return an engine on a tiny checkpoint that drafts whenever it has a guess, or never.

    Native steps follow a constraint themselves if it has been compiled: with the option `followed`.
    """
    options = dict(options)
    followed = options.pop("followed", False)
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
        draft_model=str(nearly("llama")) if speculative == "draft" else None,
        **options,
    )
    plane = assemble(settings)
    grammars = plane.runner.grammars
    assert grammars is not None
    for sampling in SAMPLINGS if followed else ():
        if sampling.constraint is not None:
            grammars.compile(sampling.constraint)
    return EngineDriver(plane.runner, replace(plane.agent_config(), draft_prices=NO_PRICES))


def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(6, VOCAB_SIZE) for _ in range(length)] for length in (9, 17, 5, 11, 8, 14, 12, 6, 7, 10, 13)]


def run(
    driver: EngineDriver, predictions: Sequence[Sequence[int]], which: Sequence[int] = range(len(SAMPLINGS))
) -> list[Result]:
    started = [
        driver.submit(prompts()[n], COUNT, SAMPLINGS[n], eos=[EOS], prediction=predictions[n] if predictions else ())
        for n in which
    ]
    driver.finish()
    driver.assert_all_free()
    return [driver.results[sequence] for sequence in started]


def same(found: Sequence[Result], wanted: Sequence[Result], bits: bool) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert (one.reason, one.stop_token, one.message) == (other.reason, other.stop_token, other.message)
        assert [each.token_id for each in one.logprobs] == [each.token_id for each in other.logprobs]
        if bits:
            assert one.logprobs == other.logprobs


def run_plain(impl: str, options: dict[str, Any]) -> Sequence[Result]:
    """Return the outputs of an engine that drafts nothing; all that drafts is compared with one run of it."""
    return _run_plain(impl, tuple(options.items()))


@functools.cache
def _run_plain(impl: str, options: tuple[tuple[str, Any], ...]) -> list[Result]:
    with engine("none", impl, dict(options)) as plain:
        found = run(plain, ())
        assert plain.engine.load().drafted_tokens == 0
    return found


@pytest.mark.parametrize(("impl", "options"), PATHS)
@pytest.mark.parametrize("speculative", KINDS)
def test_no_output_changes(impl: str, options: dict[str, Any], speculative: str) -> None:
    """With what the grammars force alone, with right and wrong predictions, and with blocks of an earlier run."""
    wanted = run_plain(impl, options)
    partly_right = [[9 if n % 6 == 5 else token for n, token in enumerate(each.tokens)] for each in wanted]
    with engine(speculative, impl, options) as drafting:
        same(run(drafting, ()), wanted, impl == "native")
        assert drafting.engine.load().accepted_tokens > 0
        cached = run(drafting, partly_right)
        same(cached, wanted, impl == "native")
        assert any(result.cached_tokens for result in cached)


@pytest.mark.parametrize(("impl", "options"), PATHS)
@pytest.mark.parametrize("speculative", KINDS)
def test_preempted_sequences_keep_their_outputs(impl: str, options: dict[str, Any], speculative: str) -> None:
    wanted = run_plain(impl, options)
    with engine(speculative, impl, options, num_blocks=36) as drafting:
        found = run(drafting, ())
        same(found, wanted, impl == "native")
        assert sum(result.preemptions for result in found) > 0
        assert sum(result.usage.accepted_draft_tokens for result in found) > 0


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_models_that_keep_states_keep_their_outputs(kind: str) -> None:
    options = {"dtype": "float32"}
    with engine("none", "transformers", options, kind=kind) as plain:
        wanted = run(plain, [()] * len(SAMPLINGS))
    with engine("ngram", "transformers", options, kind=kind) as drafting:
        found = run(drafting, [(*result.tokens[:9], 6, *result.tokens[10:]) for result in wanted])
        same(found, wanted, bits=False)
        load = drafting.engine.load()
        assert 0 < load.accepted_tokens < load.drafted_tokens


@pytest.mark.parametrize(("impl", "options"), PATHS)
def test_forced_tokens_come_several_a_step(impl: str, options: dict[str, Any]) -> None:
    """Twelve tokens of the literal are not forced, and a step gives at most nine."""
    with engine("ngram", impl, options) as drafting:
        (result,) = run(drafting, (), [0])
        load = drafting.engine.load()
    assert load.steps <= len(result.tokens) / 2
    assert result.usage.accepted_draft_tokens > len(result.tokens) / 2


def test_a_moved_sequence_goes_on_in_the_middle_of_what_is_forced() -> None:
    with engine("none", "transformers", {"dtype": "float32"}) as plain:
        (whole,) = run(plain, (), [2])
    for done in (3, 12, 16):
        with engine("ngram", "transformers", {"dtype": "float32"}) as drafting:
            prompt = [*prompts()[2], *whole.tokens[:done]]
            moved = drafting.submit(prompt, COUNT - done, SAMPLINGS[2], eos=[EOS], output_before=done)
            drafting.finish()
            assert drafting.results[moved].tokens == whole.tokens[done:]
            assert drafting.results[moved].usage.accepted_draft_tokens > 0
