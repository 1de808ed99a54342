"""Constraints that native steps follow: masks, tokens and ends are those of Python, which takes over where it must."""

from __future__ import annotations

import ctypes
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from gpuworker.native.follow import TOKENIZE, FollowerStruct, GrammarStruct
from gpuworker.native.library import best
from gpuworker.runner.model_runner import ModelRunner
from gpuworker.sampling.rows import SampledRow
from gpuworker.sampling.sampler import SamplingBatch
from gpuworker.scheduling.stopping import FinishCause
from gpuworker.structured import native_matchers as matchers
from gpuworker.structured.digits import MOST_DIGITS
from gpuworker.structured.grammars import GrammarCompiler
from gpuworker.structured.mask_thread import GrammarMaskThread
from gpuworker.structured.native_matchers import Follower, NativeMatchers, follower, native_matchers
from gpuworker.structured.sequence import COMPLETE, Constrained
from tests.gpuworker.engine.test_equality import driver
from tests.support.checkpoints import EOS, VOCAB_SIZE
from tests.support.gpuworker.engine_harness import EngineDriver, Result

pytestmark = pytest.mark.skipif(best() is None, reason="the native library was not built")
TEXTS = ["a", "b", "c", "ab", "ba", "abc", "cc", '"', "{", "}", ":", ",", " ", "[", "]", "0", "1", "23", "-", ".", '":']
PIECES = ["<end>", "<other end>", "<tool>", *TEXTS]
END, A, B, ONE = 0, 3, 4, 3 + TEXTS.index("1")
VOCAB, PROMPT = 70, 5  # wider than the tokenizer, and no multiple of a word
CPU = torch.device("cpu")
JSON = '{"type": "object", "properties": {"ab": {"type": "integer"}, "abc": {"type": "array",'
JSON += ' "items": {"enum": ["a", "cc"]}, "minItems": 1}}, "required": ["ab", "abc"]}'
CONSTRAINTS = {
    "regex": Constraint(ConstraintKind.REGEX, "(ab|ba){1,9}c?"),
    "text": Constraint(ConstraintKind.REGEX, "[a-c]{3,}-[01]*"),
    "choice": Constraint(ConstraintKind.GRAMMAR, 'start: "abc" | "abcc" | "b" | "cab"'),
    "lark": Constraint(ConstraintKind.GRAMMAR, 'start: term ("," term)*\nterm: /[abc]+/ | "[" term "]"'),
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, JSON),
    "numbers": Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}'),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the process's number of threads, which assembling sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ("c", "c"), ("2", "3"), ('"', ":")]
    spelled = [*(piece.replace(" ", "Ġ") for piece in PIECES), "2", "3"]
    vocabulary = {piece: n for n, piece in enumerate(spelled)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(PIECES[:3])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def grammars(tokenizer_json: Path) -> GrammarCompiler:
    made = GrammarCompiler(tokenizer_json, VOCAB, (END,))
    made.make_native = native_matchers
    return made


def row_of(constraint: Constraint, **sampling: object) -> SampledRow:
    return SampledRow(SamplingParams(constraint=constraint, **sampling), PROMPT, (END,))  # type: ignore[arg-type]


def followed(grammars: GrammarCompiler, row: SampledRow) -> Follower:
    assert row.params.constraint is not None
    grammars.compile(row.params.constraint)
    found = follower(grammars, row)
    assert found is not None
    return found


def native_of(grammars: GrammarCompiler) -> NativeMatchers:
    assert isinstance(grammars._native, NativeMatchers)
    return grammars._native


def step(each: Follower, output: Sequence[int]) -> set[int] | FinishCause:
    """Sample behind an output; return the tokens that the mask allowed, or why none follows."""
    batch = SamplingBatch([row_of(CONSTRAINTS["regex"], temperature=0.0)], VOCAB, CPU, [each])
    known = [7] * PROMPT + list(output)
    table = torch.zeros((1, len(known) + 1), dtype=torch.int32)
    table[0, : len(known)] = torch.tensor(known, dtype=torch.int32)
    point = batch.at(np.array([len(known)], dtype=np.int64), np.zeros(1, dtype=np.int32))
    sampled = batch.sample(torch.zeros((1, VOCAB)), point, table)
    if sampled.ended:
        return sampled.ended[0]
    found = tokens_of(each._bits)
    assert sampled.tokens.tolist() == [min(found)]
    return found


def wanted(constrained: Constrained) -> set[int] | FinishCause:
    """Return what `step` must, as Python finds it."""
    if constrained.ending is not None:
        return constrained.ending
    bits = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    constrained.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    constrained.settle(bits)
    return constrained.ending or tokens_of(bits)


def tokens_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


def walk(grammars: GrammarCompiler, row: SampledRow, rng: random.Random, at_once: int = 1, most: int = 90) -> list[int]:
    """Follow a random output on both ways; return it."""
    ours, theirs, output = followed(grammars, row), Constrained.by(grammars, row, ()), list[int]()
    while len(output) < most:
        allowed = wanted(theirs)
        if len(output) % at_once == 0 or isinstance(allowed, FinishCause):
            assert step(ours, output) == allowed, output
        if isinstance(allowed, FinishCause):
            return output
        token = rng.choice(sorted(allowed))
        output.append(token)
        theirs.consume(token)
    return output


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_and_ends_are_those_of_python(grammars: GrammarCompiler, name: str) -> None:
    rng = random.Random(name)
    for number in range(12):
        walk(grammars, row_of(CONSTRAINTS[name]), rng, at_once=1 + number % 3)
    assert native_of(grammars).slots.count(None) == matchers._MOST_MATCHERS - 1, "one matcher served all walks"


@pytest.mark.parametrize("first", [A, ONE])
def test_a_grammar_that_begins_with_a_token_by_its_number_begins_anew(grammars: GrammarCompiler, first: int) -> None:
    """llguidance allows digits behind a reset; so no matcher of such a grammar is used twice."""
    row = row_of(Constraint(ConstraintKind.GRAMMAR, f"start: <[{first}]> <[{B}]>"))
    for _ in range(3):
        ours = followed(grammars, row)
        for output in ([], [first]):
            assert step(ours, output) == {[first, B][len(output)]}
        assert step(ours, [first, B]) == COMPLETE
        del ours


def test_digits_that_run_away_are_left_to_python(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = count_judged(monkeypatch)
    row = row_of(CONSTRAINTS["numbers"])
    ours, theirs = followed(grammars, row), Constrained.by(grammars, row, ())
    output = [3 + TEXTS.index("["), *[ONE] * (MOST_DIGITS + 3)]
    for count, token in enumerate(output, start=1):
        theirs.consume(token)
        found = wanted(theirs)
        assert step(ours, output[:count]) == found
        assert isinstance(found, set)
        assert (ONE in found) == (count - 1 < MOST_DIGITS)
    assert judged == [4]


def test_a_token_that_is_not_allowed_ends_the_sequence_with_the_same_words(grammars: GrammarCompiler) -> None:
    row = row_of(CONSTRAINTS["regex"])
    for output in ([A, B, A, A], [A, 69], [A, -1], [A, VOCAB + 3]):
        found = step(followed(grammars, row), output)
        assert isinstance(found, FinishCause)
        assert found.reason is FinishReason.ERROR
    wrong = [A, B, A, A]
    assert step(followed(grammars, row), wrong) == wanted(Constrained.by(grammars, row, wrong))


def test_a_sequence_that_has_ended_stays_so(grammars: GrammarCompiler) -> None:
    output = [3 + TEXTS.index("ba")]
    ours = followed(grammars, row_of(Constraint(ConstraintKind.REGEX, "ba")))
    assert step(ours, output) == COMPLETE
    assert step(ours, [*output, A]) == COMPLETE


def test_a_lexer_that_meets_its_bound_is_replaced_by_python(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers, "_MOST_STATES", 64)
    judged, rng = count_judged(monkeypatch), random.Random(1)
    row = row_of(Constraint(ConstraintKind.REGEX, "(a|b)*a(a|b){40}c"))
    walk(grammars, row, rng)
    assert judged[0] > 0
    assert native_of(grammars).slots.count(None) == matchers._MOST_MATCHERS, "a matcher that failed is freed"


def test_any_error_in_python_ends_the_sequence_alone(
    grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = followed(grammars, row_of(CONSTRAINTS["regex"]))

    def broken(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Constrained, "by", broken)
    found = step(ours, [A, A])
    assert isinstance(found, FinishCause)
    assert "no such luck" in found.message


def test_matchers_are_bounded_and_given_back(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "_MOST_MATCHERS", 2)
    regex, other = row_of(CONSTRAINTS["regex"]), row_of(CONSTRAINTS["choice"])
    first, second = followed(grammars, regex), followed(grammars, regex)
    assert follower(grammars, regex) is None
    step(first, [A, B])
    step(second, [])
    del first
    again = followed(grammars, regex)
    assert step(again, []) == wanted(Constrained.by(grammars, regex, ())), "a matcher begins anew"
    del again
    grammars.compile(CONSTRAINTS["choice"])
    assert follower(grammars, other) is not None, "an idle matcher of another grammar makes room"
    del second
    grammars._recent.clear()
    assert len(native_of(grammars).slots) == 2


@pytest.mark.parametrize("sampling", [{"min_tokens": 3}, {"constraint": None}])
def test_what_python_follows_better_is_left_to_it(grammars: GrammarCompiler, sampling: dict[str, object]) -> None:
    grammars.compile(CONSTRAINTS["regex"])
    assert follower(grammars, SampledRow(replace(row_of(CONSTRAINTS["regex"]).params, **sampling), PROMPT)) is None  # type: ignore[arg-type]


def test_a_constraint_that_is_not_compiled_yet_holds_up_no_step(grammars: GrammarCompiler) -> None:
    assert follower(grammars, row_of(CONSTRAINTS["regex"])) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_VERSION", "llguidance@0.7.", "has the version"),
        ("_DEFAULTS", (1,) * 8, "lays its options out"),
        ("_FUNCTIONS", (("no_such_function", None),), "exports no"),
    ],
)
def test_another_llguidance_leaves_constraints_to_python(
    grammars: GrammarCompiler,
    name: str,
    value: object,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(matchers, name, value)
    with caplog.at_level(logging.INFO):
        assert grammars.compile(CONSTRAINTS["regex"]).native is None
    assert words in caplog.text
    assert follower(grammars, row_of(CONSTRAINTS["regex"])) is None


def test_a_grammar_whose_first_mask_differs_is_left_to_python(
    grammars: GrammarCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    grammars.compile(CONSTRAINTS["regex"])
    with caplog.at_level(logging.INFO):
        assert native_of(grammars).grammar("start: /ab/", bytes(12), None) is None
    assert "first mask is not that" in caplog.text
    with caplog.at_level(logging.INFO):
        assert native_of(grammars).grammar("start: nothing", bytes(12), None) is None


def test_structures_have_the_size_that_the_library_has() -> None:
    library = best()
    assert library is not None
    assert ctypes.sizeof(GrammarStruct) == library.quire_grammar_bytes()
    assert ctypes.sizeof(FollowerStruct) == library.quire_follower_bytes()


def test_texts_are_tokenized_once_within_a_bound() -> None:
    library, asked = best(), list[bytes]()
    assert library is not None

    def slow(_: object, text: int, size: int, into: object, room: int) -> int:
        asked.append(ctypes.string_at(text, size))
        for n in range(min(size, room)):
            into[n] = asked[-1][n]  # type: ignore[index]
        return size

    library.quire_tokenizer_new.restype, called = ctypes.c_void_p, TOKENIZE(slow)
    made, into = ctypes.c_void_p(library.quire_tokenizer_new(called)), (ctypes.c_uint32 * 300)()
    library.quire_tokenize.restype = ctypes.c_size_t

    def tokenize(text: bytes, room: int = 300) -> list[int]:
        count = library.quire_tokenize(made, text, ctypes.c_size_t(len(text)), into, ctypes.c_size_t(room))
        assert count == len(text)
        return into[: min(count, room)]

    assert tokenize(b"abc") == tokenize(b"abc") == list(b"abc")
    assert tokenize(b"abc", room=2) == list(b"ab")
    assert tokenize(b"a\0c") == list(b"a\0c")
    assert asked == [b"abc", b"a\0c"]
    assert tokenize(b"x" * 257) == tokenize(b"x" * 257) == [ord("x")] * 257
    assert len(asked) == 4, "long texts are not kept"
    for n in range(1 << 16):
        tokenize(b"%d" % n)
    asked.clear()
    tokenize(b"abc")
    assert asked == [b"abc"], "the cache began anew"
    library.quire_tokenizer_free(made)


# ---------------------------------------------------------------- whole engines

SAMPLINGS = [
    *(
        SamplingParams(temperature=temperature, seed=seed, constraint=each, logit_bias=bias, logprobs=1)
        for seed, each in enumerate(
            (
                Constraint(ConstraintKind.REGEX, "[a-f]{3}(-[0-9]{4}){3,4}"),
                Constraint(ConstraintKind.REGEX, "[a-z ]{4,}"),
                Constraint(
                    ConstraintKind.GRAMMAR, 'start: term (("+" | "*") term){4,6}\nterm: /[0-9]{1,3}/ | "(" term ")"'
                ),
                Constraint(ConstraintKind.JSON_SCHEMA, JSON),
                Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "number"}'),
            )
        )
        for temperature, bias in ((0.0, ()), (1.0, ()), (1.0, ((EOS, 3.0),)))
    ),
    SamplingParams(temperature=1.0, seed=4, constraint=CONSTRAINTS["text"], min_tokens=20, logit_bias=((EOS, 50.0),)),
    SamplingParams(temperature=1.0, seed=5),
]


def outcomes(engine: EngineDriver, natively: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Result], int]:
    """Run all samplings, and more that are cancelled; return the results, and how many sequences the thread got."""
    runner, made = engine.runner, []
    assert isinstance(runner, ModelRunner)
    assert runner.grammars is not None
    right = GrammarMaskThread.add

    def add(masks: GrammarMaskThread, *args: object) -> None:
        made.append(args)
        right(masks, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GrammarMaskThread, "add", add)
    runner.follows_constraints = natively
    for each in SAMPLINGS:
        if each.constraint is not None:
            runner.grammars.compile(each.constraint)
    rng = random.Random(3)
    shared = [rng.randrange(6, VOCAB_SIZE) for _ in range(9)]
    started = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = [*shared, *(rng.randrange(6, VOCAB_SIZE) for _ in range(number))]
        started.append(engine.submit(prompt, 48, sampling, eos=[EOS]))
        if number % 4 == 3:
            cancelled = engine.submit(prompt, 48, sampling, eos=[EOS])
            engine.engine.cancel_request(cancelled, FinishReason.CANCELLED)
    engine.finish()
    engine.assert_all_free()
    monkeypatch.undo()
    return [engine.results[each] for each in started], len(made)


@pytest.mark.parametrize("num_blocks", [0, 40], ids=["roomy", "preempted"])
def test_engines_give_the_tokens_and_ends_of_the_mask_thread(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, object] = {}
    for natively in (False, True, True):
        with driver("llama", "native", 4, num_blocks=num_blocks) as engine:
            results, in_python = outcomes(engine, natively, monkeypatch)
        said = [(each.tokens, each.reason, each.stop_token, each.message) for each in results]
        logprobs = [entry.logprob for each in results for entry in each.logprobs]
        assert found.setdefault("said", said) == said
        # Their last bits depend on the rows beside them, which differ with the cancelled ones.
        assert found.setdefault("logprobs", logprobs) == pytest.approx(logprobs, abs=1e-4)
        assert {FinishReason.STOP, FinishReason.LENGTH} <= {each.reason for each in results}
        preemptions = sum(each.preemptions for each in results)
        assert (preemptions > 0) == bool(num_blocks)
        # Without native steps the mask thread gets every constraint; with them, only those with min_tokens.
        assert in_python >= len(SAMPLINGS) - 1 if not natively else in_python <= 1 + preemptions


def count_judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    judged, right = [0], Follower.judge

    def judge(each: Follower, output: Sequence[int]) -> bool:
        judged[0] += 1
        return right(each, output)

    monkeypatch.setattr(Follower, "judge", judge)
    return judged
