"""Constraints that native steps follow by themselves (`gpuworker/native/follow.h`): no thread hands masks over.

The package of llguidance exports its C interface. Its functions are found here, and checked: another version, another
layout, or a first mask that differs from that of the Python interface, and Python fills the masks as before.

Each matcher of the C interface has a lexer of its own, which learns its states as it runs. So a sequence that ends
leaves its matcher to a later one of its grammar. The number of matchers and the states of each are bounded. A sequence
that finds none, or whose matcher meets that bound, is followed in Python.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import numpy.typing as npt

from gpuworker.native.follow import LEFT, LEFT_TO_PYTHON, TOKENIZE, FollowerStruct, GrammarStruct
from gpuworker.native.library import best
from gpuworker.native.step_queue import address_of
from gpuworker.scheduling.stopping import FinishCause
from gpuworker.structured.digits import MOST_DIGITS, DigitTokens
from gpuworker.structured.sequence import COMPLETE, Constrained, unfollowable

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from gpuworker.sampling.rows import SampledRow
    from gpuworker.structured.grammars import GrammarCompiler

log = logging.getLogger(__name__)
_VERSION: Final = "llguidance@1.9."
_MOST_MATCHERS: Final = 64
_MOST_STATES: Final = 4096  # of a lexer, some 2 KiB each; those of a common schema stay below a thousand
_SPECIAL: Final = b"\xff"  # how llguidance marks a token that no text spells
_pointer, _size, _bool = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
_uint32, _int32, _uint64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64


class _Unfit(Exception):
    """Constraints cannot be followed natively; the text says why."""


def native_matchers(tokenizer: LLTokenizer, vocab_size: int) -> NativeMatchers | None:
    """Return the C interface over a tokenizer; None, with a log line, where it cannot be used."""
    try:
        return NativeMatchers(tokenizer, vocab_size)
    except _Unfit as reason:
        log.info("constraints are followed in Python, which costs throughput at short steps: %s", reason)
        return None


def follower(grammars: GrammarCompiler, row: SampledRow, foresees: bool = False) -> Follower | None:
    """Return what follows a new sequence in native steps; None where the grammar mask thread must.

    With `foresees`, steps tell which tokens the constraint forces.
    """
    params = row.params
    grammar = None if params.constraint is None else grammars.compiled(params.constraint)
    native = None if grammar is None else grammar.native
    if not isinstance(native, NativeGrammar) or params.thought is not None or params.min_tokens:
        return None
    return native.follower(row.prompt_tokens, lambda output: Constrained.by(grammars, row, output), foresees)


class _Limits(ctypes.Structure):
    """LlgParserLimits; the names are those of LLParserLimits."""

    _fields_ = (
        ("max_items_in_row", _size),
        ("initial_lexer_fuel", _uint64),
        ("step_lexer_fuel", _uint64),
        ("step_max_items", _size),
        ("max_lexer_states", _size),
        ("max_grammar_size", _size),
        ("precompute_large_lexemes", _bool),
        ("verbose_errors", _bool),
    )


_DEFAULTS: Final = (2_000, 1_000_000, 200_000, 50_000, 250_000, 500_000, True, True)


class _Init(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_ = (
        ("tokenizer", _pointer),
        ("log_buffer_level", _uint32),
        ("log_stderr_level", _uint32),
        ("ff_tokens_ok", _bool),
        ("backtrack_ok", _bool),
        ("limits", _Limits),
    )


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", _size),
        ("vocab_size", _uint32),
        ("tok_eos", _uint32),
        *((name, _pointer) for name in ("token_lens", "token_bytes", "tokenizer_json")),
        ("tokenize_assumes_string", _bool),
        ("tokenize_fn", _pointer),
        ("use_approximate_greedy_tokenize_fn", _bool),
        *((name, _pointer) for name in ("tokenize_user_data", "slices", "tok_eos_extra")),
        ("tok_eos_extra_count", _uint32),
    )


class NativeMatchers:
    """llguidance's C interface over one tokenizer. Raises _Unfit where it cannot be used.

    `slots` has an entry for each matcher that may still be made; a list's methods need no lock.
    """

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self._tokenizer: int | None = None
        self._cache: int | None = None
        self.vocab_size, self.ends = vocab_size, np.array(tokenizer.eos_tokens, dtype=np.int32)
        self.library, ours = _llguidance(), best()
        if ours is None:
            raise _Unfit("the native library was not built")
        if tokenizer.vocab_size != vocab_size:
            raise _Unfit(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
        self._ours = ours
        self._slow = TOKENIZE(lambda _, text, size, into, room: _tokenize(tokenizer, text, size, into, room))
        ours.quire_tokenizer_new.restype, ours.quire_tokenizer_free.argtypes = _pointer, (_pointer,)
        self._cache = ours.quire_tokenizer_new(self._slow)
        self._tokenizer = self._made_tokenizer(tokenizer)
        self.slots: list[None] = [None] * _MOST_MATCHERS
        self.grammars: WeakSet[NativeGrammar] = WeakSet()
        self._digits: tuple[DigitTokens, npt.NDArray[np.int32], npt.NDArray[np.uint8]] | None = None

    def _made_tokenizer(self, tokenizer: LLTokenizer) -> int:
        spelled = [_spelled(tokenizer, token) for token in range(self.vocab_size)]
        lengths = np.array([len(each) for each in spelled], dtype=np.uint32)
        text = np.frombuffer(b"".join(spelled), dtype=np.uint8)
        words, more = ctypes.create_string_buffer(200), self.ends[1:].astype(np.uint32)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=self.vocab_size,
            tok_eos=int(self.ends[0]),
            token_lens=lengths.ctypes.data,
            token_bytes=text.ctypes.data,
            tokenize_fn=address_of(self._ours.quire_tokenize),
            tokenize_user_data=self._cache,
            tok_eos_extra=more.ctypes.data if more.size else None,
            tok_eos_extra_count=more.size,
        )
        made: int | None = self.library.llg_new_tokenizer_v2(ctypes.byref(init), words, len(words))
        if made is None:
            raise _Unfit(f"the tokenizer was not taken: {words.value.decode(errors='replace')}")
        return made

    def new_matcher(self, grammar: str) -> int:
        """Return a matcher at the beginning of a grammar. Raises _Unfit."""
        from common.constraint_grammar import parser_limits

        init, limits = _Init(), parser_limits()
        self.library.llg_constraint_init_set_defaults(ctypes.byref(init), self._tokenizer)
        for name, _ in _Limits._fields_:
            setattr(init.limits, name, getattr(limits, name))
        init.limits.max_lexer_states = min(limits.max_lexer_states, _MOST_STATES)
        init.log_buffer_level = init.log_stderr_level = 0
        made: int = self.library.llg_new_matcher(ctypes.byref(init), b"guidance", grammar.encode())
        if self.library.llg_matcher_is_error(made):
            why = self.library.llg_matcher_get_error(made) or b""
            self.library.llg_free_matcher(made)
            raise _Unfit(why.decode(errors="replace"))
        return made

    def grammar(self, text: str, first_mask: bytes, digits: DigitTokens | None) -> NativeGrammar | None:
        """Return a grammar for native steps; None, with a log line, where its first mask is another one."""
        try:
            return NativeGrammar(self, text, first_mask, digits)
        except _Unfit as reason:
            log.info("a constraint is followed in Python: %s", reason)
            return None

    def digit_counts(self, tokens: DigitTokens) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return `tails` and `whole` of the tokens as arrays; a compiler has one such table."""
        if self._digits is None or self._digits[0] is not tokens:
            self._digits = tokens, np.array(tokens.tails, dtype=np.int32), np.array(tokens.whole, dtype=np.uint8)
        return self._digits[1:]

    def take_slot(self) -> bool:
        """Return whether one more matcher may be made; an idle one of any grammar makes room."""
        try:
            self.slots.pop()
        except IndexError:
            return any(grammar.drop_idle() for grammar in tuple(self.grammars))
        return True

    def __del__(self) -> None:
        if self._tokenizer is not None:
            self.library.llg_free_tokenizer(self._tokenizer)
        if self._cache is not None:
            self._ours.quire_tokenizer_free(self._cache)


class NativeGrammar:
    """A constraint for native steps. Raises _Unfit where its first mask is not `first_mask`."""

    def __init__(self, matchers: NativeMatchers, text: str, first_mask: bytes, digits: DigitTokens | None) -> None:
        self._prototype: int | None = None
        self._matchers, library = matchers, matchers.library
        self._idle: list[int] = []  # a list's methods need no lock
        # llguidance 1.9 resets a matcher wrongly whose text begins with a token by its number: digits are allowed then.
        self._resets = "<[" not in text
        self._prototype = matchers.new_matcher(text)
        found = ctypes.create_string_buffer(4 * self.num_words)  # Python's mask may have a word more
        failed = library.llg_matcher_compute_mask_into(self._prototype, found, len(found))
        if failed or found.raw != first_mask[: len(found)]:
            raise _Unfit("the first mask is not that of the Python interface")
        functions = {
            "clone": library.llg_clone_matcher,
            "reset": library.llg_matcher_reset,
            "consume": library.llg_matcher_consume_token,
            "mask": library.llg_matcher_compute_mask_into,
            "is_stopped": library.llg_matcher_is_stopped,
            "forced": library.llg_matcher_compute_ff_tokens,
        }
        self.struct = GrammarStruct(
            **{name: address_of(function) for name, function in functions.items()},
            left=_left,
            prototype=self._prototype,
            ends=matchers.ends.ctypes.data,
            vocab=matchers.vocab_size,
            num_ends=len(matchers.ends),
            most_digits=MOST_DIGITS,
        )
        if digits is not None:
            self._kept = tails, whole = matchers.digit_counts(digits)
            self.struct.tails, self.struct.whole = tails.ctypes.data, whole.ctypes.data
        matchers.grammars.add(self)

    def follower(
        self, begin: int, constrained: Callable[[Sequence[int]], Constrained], foresees: bool = False
    ) -> Follower | None:
        """Return what follows a sequence whose output begins at a position; None where no matcher is to be had.

        `constrained` follows the output from its beginning in Python, where native code does not judge.
        """
        try:
            matcher = self._idle.pop()
        except IndexError:
            return Follower(self, None, begin, constrained, foresees) if self._matchers.take_slot() else None
        return Follower(self, matcher, begin, constrained, foresees)

    @property
    def num_words(self) -> int:
        """The words of a mask."""
        return -(-self._matchers.vocab_size // 32)

    def give_back(self, matcher: int | None, sound: bool) -> None:
        """Keep a matcher for a later sequence if it is sound, and can be reset."""
        if matcher is not None and sound and self._resets:
            self._idle.append(matcher)
            return
        self._matchers.library.llg_free_matcher(matcher)  # which may be none
        self._matchers.slots.append(None)

    def drop_idle(self) -> bool:
        """Free a matcher that no sequence has, if there is one: another grammar takes its slot."""
        try:
            self._matchers.library.llg_free_matcher(self._idle.pop())
        except IndexError:
            return False
        return True

    def __del__(self) -> None:
        while self._prototype is not None and self.drop_idle():
            self._matchers.slots.append(None)
        self._matchers.library.llg_free_matcher(self._prototype)


class Follower:
    """One sequence under a constraint. Native steps own `struct` from the first step with the sequence to the last."""

    def __init__(
        self,
        grammar: NativeGrammar,
        matcher: int | None,
        begin: int,
        constrained: Callable[[Sequence[int]], Constrained],
        foresees: bool = False,
    ) -> None:
        self._grammar, self._constrained, self.foresees = grammar, constrained, foresees
        self._state: Constrained | None = None
        self._known = 0
        self._ending = COMPLETE
        self._bits = np.zeros(grammar.num_words, dtype=np.uint32)
        self.struct = FollowerStruct(
            grammar=ctypes.addressof(grammar.struct),
            matcher=matcher,
            bits=self._bits.ctypes.data,
            id=next(_ids),
            begin=begin,
            position=begin,
            filled=-1,
        )
        _followers[self.struct.id] = self

    @property
    def ending(self) -> FinishCause:
        """Why no token follows, once a step says that none does."""
        return self._ending

    def judge(self, output: Sequence[int]) -> bool:
        """Follow the output in Python, and fill the mask; return whether a token follows."""
        try:
            if self._state is None:
                self._state = self._constrained(output)
            else:
                for token in output[self._known :]:
                    self._state.consume(token)
            self._known, ending = len(output), self._state.ending
            if ending is None:
                self._state.matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
                self._state.settle(self._bits)
                ending = self._state.ending
        except BaseException as error:  # noqa: BLE001 - the step waits for this, whatever the error is
            ending = unfollowable(error)
        if ending is not None:
            self._ending = ending
        return ending is None

    def __del__(self) -> None:
        self._grammar.give_back(self.struct.matcher, sound=self.struct.state != LEFT_TO_PYTHON and self._state is None)


_ids = itertools.count(1)
_followers: WeakValueDictionary[int, Follower] = WeakValueDictionary()


def _judge(number: int, output: ctypes._Pointer[ctypes.c_int32], count: int, bits: int) -> int:
    follower = _followers.get(number)
    return 0 if follower is not None and follower.judge(output[:count]) else 1


_left = LEFT(_judge)


def _tokenize(tokenizer: LLTokenizer, text: int, size: int, into: ctypes._Pointer[ctypes.c_uint32], room: int) -> int:
    tokens = tokenizer.tokenize_bytes(ctypes.string_at(text, size))
    kept = (_uint32 * min(len(tokens), room))(*tokens[:room])
    ctypes.memmove(into, kept, ctypes.sizeof(kept))
    return len(tokens)


def _spelled(tokenizer: LLTokenizer, token: int) -> bytes:
    """Return the bytes of a token as llguidance keeps them."""
    text = tokenizer.decode_bytes([token])
    if tokenizer.is_special_token(token):
        return _SPECIAL + text
    return b"" if text == b"<[%d]>" % token else text


def _llguidance() -> ctypes.CDLL:
    """Return the C interface of the package. Raises _Unfit where it is not the known one."""
    from llguidance import _lib

    library = ctypes.CDLL(str(_lib.__file__))
    try:
        for name, result, *arguments in _FUNCTIONS:
            function = getattr(library, f"llg_{name}")
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _Unfit(f"llguidance exports no {error}") from error
    version = library.llg_get_version().decode()
    if not version.startswith(_VERSION):
        raise _Unfit(f"llguidance has the version {version.split()[0]}, and the interface of {_VERSION}x is known")
    init, guard = (ctypes.c_uint8 * (ctypes.sizeof(_Init) + 8))(), ctypes.sizeof(_Init)
    init[guard:] = [0xA5] * 8
    library.llg_constraint_init_set_defaults(init, None)
    limits = _Init.from_buffer(init).limits
    if tuple(getattr(limits, name) for name, _ in _Limits._fields_) != _DEFAULTS or set(init[guard:]) != {0xA5}:
        raise _Unfit("llguidance lays its options out in another way")
    return library


_FUNCTIONS: Final = (
    ("get_version", ctypes.c_char_p),
    ("constraint_init_set_defaults", None, _pointer, _pointer),
    ("new_tokenizer_v2", _pointer, _pointer, ctypes.c_char_p, _size),
    ("free_tokenizer", None, _pointer),
    ("new_matcher", _pointer, _pointer, ctypes.c_char_p, ctypes.c_char_p),
    ("free_matcher", None, _pointer),
    ("clone_matcher", _pointer, _pointer),
    ("matcher_reset", _int32, _pointer),
    ("matcher_consume_token", _int32, _pointer, _uint32),
    ("matcher_compute_mask_into", _int32, _pointer, _pointer, _size),
    ("matcher_is_stopped", _bool, _pointer),
    ("matcher_compute_ff_tokens", _int32, _pointer, _pointer, _size),
    ("matcher_is_error", _bool, _pointer),
    ("matcher_get_error", ctypes.c_char_p, _pointer),
)
