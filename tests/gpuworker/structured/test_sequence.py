"""What a constrained sequence may draw: against brute force over a tiny language, and how its output ends."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cli.demo_model import CHECKPOINT
from common.contracts.errors import InvalidRequest, Unsupported
from common.contracts.types import Constraint, ConstraintKind, FinishReason, SamplingParams
from gpuworker.sampling.rows import SampledRow
from gpuworker.structured.grammars import Grammar, GrammarCompiler
from gpuworker.structured.sequence import COMPLETE, Constrained, allow_others

PIECES = ["<end>", "<other end>", "a", "b", "c", "ab", "ba", "abc", "cc"]
END, OTHER_END, A, B = 0, 1, 2, 3
VOCAB = 40  # wider than the tokenizer, as models have it, and more than one word of a mask
PROMPT = 7


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ("c", "c")]
    made = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(PIECES)}, merges=merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(PIECES[:2])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def follow(
    path: Path, constraint: Constraint, output: Sequence[int] = (), eos: tuple[int, ...] = (END,), **sampling: object
) -> Constrained:
    params = SamplingParams(constraint=constraint, **sampling)  # type: ignore[arg-type]
    return Constrained(GrammarCompiler(path, VOCAB, eos).compile(constraint), SampledRow(params, PROMPT, eos), output)


def allowed(followed: Constrained) -> set[int]:
    """Return what may be drawn, as the mask thread finds it out."""
    bits = np.frombuffer(followed.matcher.compute_bitmask(), dtype=np.uint32).copy()
    followed.settle(bits)
    return {token for token in range(32 * len(bits)) if int(bits[token // 32]) >> (token % 32) & 1}


def language(pattern: str, longest: int) -> list[str]:
    words = ("".join(each) for size in range(longest + 1) for each in itertools.product("abc", repeat=size))
    return [word for word in words if re.fullmatch(pattern, word)]


@pytest.mark.parametrize("pattern", ["(ab|ba){1,3}", "a{0,2}b?(cc)*c?", "(a|b|c){4}", "abc|abcc|b"])
def test_what_may_be_drawn_is_what_some_word_of_the_language_goes_on_with(tokenizer_json: Path, pattern: str) -> None:
    longest = 8
    words, rng = language(pattern, longest), random.Random(pattern)
    for _ in range(8):
        output: list[int] = []
        while True:
            text = "".join(PIECES[token] for token in output)
            if len(text) > longest - 3:
                break  # what follows may be part of a longer word than those of the list
            following = {n for n, piece in enumerate(PIECES) if n > OTHER_END and text + piece in _starts(words)}
            expected = following | ({END} if text in words and following else set())
            followed = follow(tokenizer_json, regex(pattern), output)
            if not following:
                assert text in words
                allowed(followed)
                assert followed.ending == COMPLETE
                break
            assert followed.ending is None
            assert allowed(followed) == expected, (pattern, text)
            output.append(rng.choice(sorted(following)))


def _starts(words: Sequence[str]) -> set[str]:
    return {word[:size] for word in words for size in range(len(word) + 1)}


def test_any_of_several_ends_ends_the_output(tokenizer_json: Path) -> None:
    both = (END, OTHER_END)
    assert allowed(follow(tokenizer_json, regex("ab*"), [A], both)) == {END, OTHER_END, B}
    for end in both:
        assert follow(tokenizer_json, regex("ab*"), [A, end], both).ending == COMPLETE


def test_without_an_end_in_the_checkpoint_the_output_ends_where_nothing_can_follow(tokenizer_json: Path) -> None:
    assert allowed(follow(tokenizer_json, regex("ab{0,2}"), [A], eos=())) == {B}
    followed = follow(tokenizer_json, regex("ab{0,2}"), [A, B, B], eos=())
    assert followed.ending == COMPLETE


def test_an_end_that_lies_outside_of_the_vocabulary_is_none(tokenizer_json: Path) -> None:
    assert allowed(follow(tokenizer_json, regex("ab{0,2}"), [A], eos=(VOCAB + 3,))) == {B}


def test_before_min_tokens_an_end_is_allowed_only_where_nothing_else_is(tokenizer_json: Path) -> None:
    assert allowed(follow(tokenizer_json, regex("ab*"), [A], min_tokens=2)) == {B}
    assert allowed(follow(tokenizer_json, regex("ab*"), [A, B], min_tokens=2)) == {END, B}
    assert follow(tokenizer_json, regex("ab"), [A, B], min_tokens=9).ending == COMPLETE


def test_before_min_tokens_a_stop_token_is_allowed_only_where_the_grammar_demands_it(tokenizer_json: Path) -> None:
    stops = (B, VOCAB + 100)
    assert allowed(follow(tokenizer_json, regex("a(b|c)a"), [A], min_tokens=5, stop_token_ids=stops)) == {4, 6}
    assert allowed(follow(tokenizer_json, regex("ab"), [A], min_tokens=5, stop_token_ids=stops)) == {B}


def test_ignoring_the_end_does_not_put_off_that_of_a_complete_output(tokenizer_json: Path) -> None:
    assert follow(tokenizer_json, regex("ab?"), [A, END], ignore_eos=True).ending == COMPLETE
    assert END in allowed(follow(tokenizer_json, regex("ab?"), [A], ignore_eos=True))


def test_a_token_that_the_grammar_does_not_allow_is_an_error_that_says_where(tokenizer_json: Path) -> None:
    ending = follow(tokenizer_json, regex("ab"), [A, A]).ending
    assert ending is not None
    assert ending.reason is FinishReason.ERROR
    assert ending.message.startswith("the constraint cannot be followed after 1 tokens: ")
    assert not ending.wrong_field


def test_a_grammar_that_passes_a_limit_is_to_blame_itself(tokenizer_json: Path) -> None:
    words = " | ".join(f'"a{"b" * (each % 40)}{"c" * (each // 40)}"' for each in range(6000))
    ending = follow(tokenizer_json, Constraint(ConstraintKind.GRAMMAR, f"start: {words}"), [A]).ending
    assert ending is not None
    assert (ending.reason, ending.wrong_field) == (FinishReason.ERROR, "grammar")


def test_a_constraint_that_leads_to_a_dead_end_is_to_blame_itself(tokenizer_json: Path) -> None:
    """No token of the vocabulary spells what has to follow. Another worker would meet the same."""
    followed = follow(tokenizer_json, regex("a(bz|cz)"), [A])
    while followed.ending is None and (following := allowed(followed)):
        followed.consume(min(following))
    assert followed.ending is not None
    assert (followed.ending.reason, followed.ending.wrong_field) == (FinishReason.ERROR, "regex")
    assert "nothing is allowed that the tokenizer can spell" in followed.ending.message


def test_after_the_end_positions_go_on_and_nothing_else_does(tokenizer_json: Path) -> None:
    followed = follow(tokenizer_json, regex("ab"), [A, B])
    followed.consume(B)
    assert (followed.position, followed.ending) == (PROMPT + 3, COMPLETE)


def test_matchers_of_one_grammar_are_apart(tokenizer_json: Path) -> None:
    grammar = GrammarCompiler(tokenizer_json, VOCAB, (END,)).compile(regex("ab|ba"))
    one, other = (Constrained(grammar, SampledRow(SamplingParams(), PROMPT), output) for output in ([A], [B]))
    assert (allowed(one), allowed(other)) == ({B}, {A})


# ---------------------------------------------------------------- compiling


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (regex("a(b"), "unclosed group"),
        (regex("z"), "nothing is allowed that the tokenizer can spell"),
        (Constraint(ConstraintKind.GRAMMAR, "start: nothing_of_the_kind"), "unknown name"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "poem"}'), "Invalid type"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "EOF while parsing an object"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"enum": []}'), "nsatisfiable"),
    ],
)
def test_what_does_not_compile_is_refused_under_the_name_of_its_kind(
    tokenizer_json: Path, constraint: Constraint, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        GrammarCompiler(tokenizer_json, VOCAB, (END,)).compile(constraint)
    assert [violation.field for violation in refused.value.violations] == [constraint.kind.value]


def test_a_constraint_is_compiled_once(tokenizer_json: Path) -> None:
    compiler = GrammarCompiler(tokenizer_json, VOCAB, (END,))
    assert compiler.compiled(regex("ab")) is None
    assert compiler.compile_soon(regex("ab")).result(timeout=120) is compiler.compiled(regex("ab"))


def test_ends_that_a_router_names_end_a_text_under_a_constraint(tokenizer_json: Path) -> None:
    compiler = GrammarCompiler(tokenizer_json, VOCAB, (END,))
    other = END + 1
    compiler.know_ends([END, other, VOCAB])
    assert set(compiler.compile(regex("ab")).eos_ids) == {END, other}
    compiler.know_ends([END + 2])
    assert set(compiler.compile(regex("ba")).eos_ids) == {END, other}


def test_a_grammar_whose_lexer_has_met_its_limit_is_compiled_anew(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matchers share the lexer: none that came later would get any further."""
    monkeypatch.setattr("common.constraint_grammar.parser_limits", lambda: LLParserLimits(max_lexer_states=64))
    compiler, constraint = GrammarCompiler(tokenizer_json, VOCAB, (END,)), regex("(a|b)*a(a|b){40}c")
    row = SampledRow(SamplingParams(constraint=constraint), PROMPT, (END,))
    first, chance = compiler.compile(constraint), random.Random(1)
    worn = Constrained(first, row, [])
    while worn.ending is None:
        worn.consume(chance.choice(sorted(allowed(worn))))
    assert "lexer error" in worn.ending.message
    with pytest.raises(AssertionError):
        _go_on(Constrained(first, row, []), [A, B])
    assert compiler.compiled(constraint) is None
    _go_on(Constrained(compiler.compile(constraint), row, []), [A, B])


def test_a_sequence_on_a_worn_lexer_goes_on_with_one_of_its_own(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sequence has worn it; this one is neither ended nor moved."""
    monkeypatch.setattr("common.constraint_grammar.parser_limits", lambda: LLParserLimits(max_lexer_states=64))
    compiler, constraint = GrammarCompiler(tokenizer_json, VOCAB, (END,)), regex("(a|b)*a(a|b){40}c")
    row, chance = SampledRow(SamplingParams(constraint=constraint), PROMPT, (END,)), random.Random(1)
    first = compiler.compile(constraint)
    ours = Constrained(first, row, [A, B], lambda: compiler.compile(constraint))
    wearing = Constrained(first, row, [])
    while wearing.ending is None:
        wearing.consume(chance.choice(sorted(allowed(wearing))))
    _go_on(ours, [A, B])
    assert ours.position == PROMPT + 4
    assert first.worn


def test_a_sequence_that_wears_a_lexer_of_its_own_is_to_blame_itself(
    tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other worker would get further, so the error names the field, and the router moves nothing."""
    monkeypatch.setattr("common.constraint_grammar.parser_limits", lambda: LLParserLimits(max_lexer_states=64))
    compiler, constraint = GrammarCompiler(tokenizer_json, VOCAB, (END,)), regex("(a|b)*a(a|b){40}c")
    row, chance = SampledRow(SamplingParams(constraint=constraint), PROMPT, (END,)), random.Random(1)
    made: list[int] = []

    def anew() -> Grammar:
        made.append(1)
        return compiler.compile(constraint)

    followed = Constrained(compiler.compile(constraint), row, [], anew)
    while followed.ending is None:
        followed.consume(chance.choice(sorted(allowed(followed))))
    assert (followed.ending.reason, followed.ending.wrong_field) == (FinishReason.ERROR, "regex")
    assert len(made) == 1


def _go_on(followed: Constrained, tokens: Sequence[int]) -> None:
    for token in tokens:
        assert token in allowed(followed)
        followed.consume(token)
    assert followed.ending is None


def test_a_long_chain_of_rules_overflows_no_stack(tokenizer_json: Path) -> None:
    """llguidance recurses along it; an overflow would end this process."""
    block_hashes = "start: a0\n" + "".join(f"a{each}: a{each + 1}\n" for each in range(4000)) + 'a4000: "ab"'
    compiler = GrammarCompiler(tokenizer_json, VOCAB, (END,))
    grammar = compiler.compile_soon(Constraint(ConstraintKind.GRAMMAR, block_hashes)).result(timeout=60.0)
    assert grammar.matcher().compute_bitmask()


def test_grammars_are_forgotten_unless_they_are_in_use(tokenizer_json: Path) -> None:
    compiler = GrammarCompiler(tokenizer_json, VOCAB, (END,))
    used = compiler.compile(regex("ab"))
    compiler.compile(regex("ba"))
    for count in range(1, 70):
        compiler.compile(regex(f"a{{{count}}}"))
    assert compiler.compiled(regex("ab")) is used
    assert compiler.compiled(regex("ba")) is None


def test_a_checkpoint_without_a_tokenizer_follows_no_constraint(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        GrammarCompiler(tmp_path / "tokenizer.json", VOCAB, (END,)).compile(regex("ab"))


def test_a_tokenizer_that_is_wider_than_the_model_is_refused(tokenizer_json: Path) -> None:
    with pytest.raises(Unsupported, match="vocab size too small"):
        GrammarCompiler(tokenizer_json, 5, (END,)).compile(regex("ab"))


def test_a_host_without_llguidance_says_what_to_install(tokenizer_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(Unsupported, match=r"install quire-llm\[gpuworker\]"):
        GrammarCompiler(tokenizer_json, VOCAB, (END,)).compile(regex("ab"))


def test_a_grammar_that_costs_more_with_each_token_ends_before_others_wait_long_for_it() -> None:
    path = CHECKPOINT / "tokenizer.json"
    ambiguous = Constraint(ConstraintKind.GRAMMAR, "start: s\ns: s s s | s s | /./ |")
    tokens = Tokenizer.from_file(str(path))
    params = SamplingParams(constraint=ambiguous)
    compiler = GrammarCompiler(path, tokens.get_vocab_size(), (END,))
    followed = Constrained(compiler.compile(ambiguous), SampledRow(params, PROMPT, (END,)), ())
    for token in tokens.encode("abcdefghij klmno pqrstu vwxyz " * 6).ids:
        if followed.ending is None:
            allowed(followed)
            followed.consume(token)
    assert followed.ending is not None
    assert "Too many items" in followed.ending.message


def test_masks_that_allow_no_more_than_ends_are_found_and_left_as_they_are() -> None:
    masks = np.zeros((4, 2), dtype=np.uint32)
    masks[0, 0] = 1 << 3  # an end
    masks[1] = 1 << 3, 1 << 31  # two ends
    masks[2] = 1 << 3 | 1 << 5, 0  # another token beside an end of the same word
    masks[3, 1] = 1 << 30
    before = masks.copy()
    assert allow_others(masks, (3, 4, 63, 64)) == [False, False, True, True]
    assert (masks == before).all()
