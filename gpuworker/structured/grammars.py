"""Compiles constraints into grammars that masks are computed from, and caches them: clients repeat their schemas.

`llguidance` is imported when the first constraint comes: an engine without constraints runs where it is not installed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from common.contracts.errors import FieldViolation, InvalidRequest, Unsupported
from common.contracts.types import Constraint, ConstraintKind
from gpuworker.structured.digits import DigitTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


# A thread on which tenants take turns: who queues much work delays others by one piece of it at a time.
class Turns(Generic[ItemT]):
    """Plain round robin over tenants; within a tenant by arrival. Items are unique. Not for several threads."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, OrderedDict[ItemT, None]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def put(self, tenant: str, item: ItemT) -> None:
        """Add an item; a tenant that had none joins the end of the round."""
        self._lines.setdefault(tenant, OrderedDict())[item] = None

    def take(self) -> ItemT | None:
        """Remove and return the next item; its tenant goes to the end of the round. None when nothing waits."""
        if not self._lines:
            return None
        tenant, line = self._lines.popitem(last=False)
        item, _ = line.popitem(last=False)
        if line:
            self._lines[tenant] = line
        return item

    def discard(self, tenant: str, item: ItemT) -> None:
        """Remove an item, if it still waits."""
        line = self._lines.get(tenant)
        if line is not None and item in line:
            del line[item]
            if not line:
                del self._lines[tenant]


class FairThread(Generic[ResultT]):
    """Runs work on one thread of an executor. Any thread may call `submit`."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._lock = executor, threading.Lock()
        self._turns: Turns[Future[ResultT]] = Turns()
        self._work: dict[Future[ResultT], Callable[[], ResultT]] = {}
        self._running = False

    def submit(self, tenant: str, work: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `work` when it is the tenant's turn. Work whose future is cancelled before that leaves at once."""
        future: Future[ResultT] = Future()
        with self._lock:
            self._turns.put(tenant, future)
            self._work[future] = work
            idle, self._running = not self._running, True
        future.add_done_callback(lambda done: self._withdraw(tenant, done))
        if idle:
            self._executor.submit(self._run)
        return future

    def _withdraw(self, tenant: str, future: Future[ResultT]) -> None:
        with self._lock:
            self._turns.discard(tenant, future)
            self._work.pop(future, None)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            future, work = due
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - the future ends, whatever the error is
                    future.set_exception(error)

    def _next(self) -> tuple[Future[ResultT], Callable[[], ResultT]] | None:
        with self._lock:
            future = self._turns.take()
            self._running = future is not None
            return None if future is None else (future, self._work.pop(future))


_KEPT = 64  # recently used grammars; those of live sequences stay anyway
_MOST_WORDS = 500
# llguidance recurses along chains of rules. What a router has let pass took less than the usual 8 MiB of its examiner.
_STACK_BYTES = 64 << 20
DEAD_END = "nothing is allowed that the tokenizer can spell"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A compiled constraint. `eos_ids` are the tokens that mean the end of the text to llguidance.

    `ends_by_token` is False where the checkpoint has no such token: the ids are then stand-ins and are never sampled.
    All matchers share one lexer, whose states only grow in number. A grammar is `worn` once its lexer has met a limit:
    it would then fail every later sequence.
    """

    prototype: LLMatcher
    eos_ids: tuple[int, ...]
    ends_by_token: bool
    worn: bool = False
    digits: DigitTokens | None = None
    """Set where the constraint holds JSON, whose numbers must not run away."""
    native: object = None
    """The form that native steps follow; None where they do not."""

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning; the matchers of a grammar share the lexer states that each has built."""
        return self.prototype.deep_copy()


class NativeCompiler(Protocol):
    """Makes the forms of grammars that native steps follow."""

    def grammar(self, text: str, first_mask: bytes, digits: DigitTokens | None) -> object:
        """Return the form of a grammar whose first mask is known; None where it has none."""
        ...


class GrammarCompiler:
    """Compiles constraints over the tokenizer of a checkpoint. All methods may be called from any thread.

    `vocab_size` is the width of the logits, `eos` are the checkpoint's ids for the end of a text.
    """

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self._path, self._eos = tokenizer_json, tuple(token for token in eos if token < vocab_size)
        self._eos_set = frozenset(eos)
        self._lock, self._tokenizing = threading.Lock(), threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._digits: DigitTokens | None = None
        self._thread: FairThread[Grammar] = FairThread(_deep_thread("quire-grammars"))
        self.make_native: Callable[[LLTokenizer, int], NativeCompiler | None] | None = None
        """Set where native steps follow constraints themselves, over the tokenizer and the width of the logits."""
        self._native: NativeCompiler | None = None
        self.ends: tuple[int, ...] = ()
        """The tokens that mean the end of a text to llguidance, for all grammars; known once one was compiled."""
        self._recent: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._used: WeakValueDictionary[Constraint, Grammar] = WeakValueDictionary()

    def know_ends(self, ends: Collection[int]) -> None:
        """Add ends that a router names, as those of a chat template; they count if they come before any constraint."""
        if self._tokenizer is None and not self._eos_set.issuperset(ends):
            self._eos = tuple(dict.fromkeys((*self._eos, *(token for token in ends if token < self.vocab_size))))
            self._eos_set = self._eos_set.union(ends)

    def compiled(self, constraint: Constraint) -> Grammar | None:
        """Return the grammar if some sequence uses it or it was used lately; never waits for a compilation."""
        with self._lock:
            grammar = self._used.get(constraint)
            if grammar is None or grammar.worn:
                return None
            self._keep(constraint, grammar)
        return grammar

    def compile_soon(self, constraint: Constraint, tenant: str = "") -> Future[Grammar]:
        """Compile on a thread for that, where tenants take turns; the future has what `compile` returns or raises."""
        return self._thread.submit(tenant, lambda: self.compile(constraint))

    def compile(self, constraint: Constraint) -> Grammar:
        """Return the grammar of a constraint; takes up to some tenths of a second, bounded by llguidance's limits.

        Raises InvalidRequest when it does not compile or allows nothing, Unsupported when this worker cannot follow
        any constraint.
        """
        grammar = self.compiled(constraint) or self._compile(constraint)
        with self._lock:
            self._keep(constraint, grammar)
        return grammar

    def spelling(self) -> Callable[[int], bytes]:
        """Return what spells a token; special tokens are spelled too. Raises Unsupported as `compile` does."""
        return _spelling(self._tokens())

    def _keep(self, constraint: Constraint, grammar: Grammar) -> None:
        self._used[constraint] = self._recent[constraint] = grammar
        self._recent.move_to_end(constraint)
        if len(self._recent) > _KEPT:
            self._recent.popitem(last=False)

    def _compile(self, constraint: Constraint) -> Grammar:
        tokenizer = self._tokens()
        from llguidance import LLMatcher

        from common.constraint_grammar import grammar_of, parser_limits

        try:
            text = grammar_of(constraint)
        except ValueError as error:
            raise _refusal(constraint, str(error)) from error
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
        first_mask = b""
        if not matcher.is_error():
            first_mask = matcher.compute_bitmask()  # what allows nothing shows only now
        if matcher.is_error():
            raise _refusal(constraint, complaint(matcher))
        holds_json = constraint.kind is ConstraintKind.JSON_SCHEMA or "%json" in constraint.text
        digits = self._digit_tokens() if holds_json else None
        native = None if self._native is None else self._native.grammar(text, first_mask, digits)
        return Grammar(matcher, self.ends, bool(self._eos), digits=digits, native=native)

    def _digit_tokens(self) -> DigitTokens:
        """Look at every token, once: a tenth of a second for a large vocabulary."""
        with self._tokenizing:
            if self._digits is None:
                assert self._tokenizer is not None, "a grammar was compiled with it"
                self._digits = DigitTokens.of(_spelling(self._tokenizer), self.vocab_size)
            return self._digits

    def _tokens(self) -> LLTokenizer:
        """Read the tokenizer, once: a second for a large vocabulary."""
        with self._tokenizing:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
                self.ends = tuple(self._tokenizer.eos_tokens)
                if self.make_native is not None and self._eos:
                    self._native = self.make_native(self._tokenizer, self.vocab_size)
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            what = "this worker cannot follow constraints: llguidance is not installed there"
            raise Unsupported(f"{what}; install quire-llm[gpuworker], or just llguidance") from error
        if not self._path.is_file():
            raise Unsupported(f"a constraint needs the tokenizer, and there is no {self._path.name} in the checkpoint")
        try:
            return LLTokenizer(str(self._path), n_vocab=self.vocab_size, eos_token=list(self._eos) or None)
        except ValueError as error:
            what = f"the tokenizer of this checkpoint cannot be constrained: {error}"
            raise Unsupported(f"{what}; it must spell its tokens as bytes, within the model's vocabulary") from error


def _spelling(tokenizer: LLTokenizer) -> Callable[[int], bytes]:
    return lambda token: tokenizer.decode_bytes([token])


def _deep_thread(name: str) -> ThreadPoolExecutor:
    """Return a thread whose stack is deep; Python sets that for all threads that start from now on, so one starts."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, name)
        executor.submit(int)
    finally:
        threading.stack_size(before)
    return executor


def _refusal(constraint: Constraint, words: str) -> InvalidRequest:
    return InvalidRequest(FieldViolation(constraint.kind.value, f"cannot be followed: {words}"))


def complaint(matcher: LLMatcher) -> str:
    """Return in one line why a matcher cannot go on."""
    error = matcher.get_error()
    if "NoExtension" in error:
        return DEAD_END
    return " ".join(error.split())[:_MOST_WORDS]
