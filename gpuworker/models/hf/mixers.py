"""Mixers: layers that keep a state of fixed size in place of K and V (linear attention, state spaces, convolutions).

A mixer of transformers takes sequences of one length, [B, T, hidden], and a cache with the state of each. A step has
all its rows in one packed row, [1, T, hidden], of any lengths. So each mixer is called for parts of a step: once for
all rows of one length that go on with a state, as all decodes do, and once for all of one length that begin. Its cache
is a `MixerCall`, which gathers the states of these rows and puts back what the mixer made of them.

Each running sequence has a place, the index by which the runner knows it; a row from position 0 on begins without a
state. A step begins or goes on with the states at these places alone; what copies them to pages and back
(`gpuworker/memory/state_store.py`) sees the bytes of a place.

Of drafts only the right ones may change a state. A row of a draft goes on from the row before it, in a call behind that
one's, and leaves its states apart. Those behind the last right draft become those of the place, before the next step:

    place 2 has states behind "a b"; a step computes c, and the drafts d, x
        c: reads place 2, writes place 2      d: reads place 2, writes row 0      x: reads row 0, writes row 1
    d is right and x is not: place 2 = row 0

Rows of one token that go on are stepped by kernels on a GPU, where the states are kept (`mixer_kernels.py`); their
`MixerCall` hands out stand-ins, and nothing is gathered. Kernels are compared with transformers' functions at load.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import AttentionMetadata, Int32Array
from gpuworker.models.hf.kernel_trial import KernelTrial, alike
from gpuworker.models.hf.mixer_calls import MixerCall, Piece, Sizes, aligned_bytes, cut, pieces_in, sizes_of
from gpuworker.models.hf.mixer_kernels import (
    StateSteps,
    fla_chunks,
    has_chunks,
    kernels_run,
    stepped_kinds,
    with_functions,
)

# What a module's code calls on its cache, if it keeps a state.
_UPDATES: Final = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
_CACHES: Final = ("cache_params", "past_key_values")
_NO_LIMIT: Final = (0.0, math.inf)
# The largest difference of a mixer's forms in float32: the norm of the error over that of the result. Forms that agree
# differ by rounding, some 1e-5.
_ALIKE: Final = 2e-3

# The same of a kernel and transformers' function: in float32, and in 16 bits.
_EQUAL: Final = 1e-4
_EQUAL_ROUNDED: Final = 5e-2


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a step for which a mixer is called once: B rows of L tokens."""

    tokens: torch.Tensor | None  # [B * L], index into the step's tokens; None: all of them, in their order
    before: torch.Tensor | None  # [B], where the states are that the rows go on with; None: they begin
    places: torch.Tensor  # [B], where they leave theirs
    shape: tuple[int, int]  # B, L
    of_drafts: bool = False


class _Row(NamedTuple):
    """Where a row of a step finds its states and leaves them, and how many rows of its sequence are before it."""

    before: int
    place: int
    depth: int


_NO_PART: Final = _Part(None, None, torch.empty(0), (0, 0))


class MixerStates:
    """The states of all mixers of a model, for as many sequences as there are places. Used by one thread at a time.

    `reserve` allocates them, `begin` announces a step; the next forward of the model is that step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._mixers = [_Mixer(each, self) for each in model.modules() if _keeps_state(each)]
        self.parts: Sequence[_Part] | None = None
        """Those of the step that runs; None: modules run as transformers has them, without a state."""
        self.kept = torch.empty((0, 0), dtype=torch.uint8)
        """The states as bytes, a row a place and a draft, [places + drafts, bytes_a_sequence]; `reserve` makes it."""
        self._places = 0
        self._drafted: dict[int, list[int]] = {}  # place -> the rows of `kept` of its drafts in the last step
        self.learning = self.comparing = False
        self.token_by_token = False
        """Whether a row of several tokens that goes on with a state is computed one token at a time."""
        self.steps = StateSteps()
        self.stepped: dict[type, Sizes] = {}
        """The classes of mixers whose rows of one token kernels step, and the states with which they were tried."""
        self.chunked: set[type] = set()
        """The classes of mixers of which fla-core computes all other rows."""
        self.kernels_in_words: list[str] = []
        """What runs in kernels and why other things do not; empty where no kernels run."""

    def __len__(self) -> int:
        return len(self._mixers)

    @property
    def layers(self) -> frozenset[int]:
        """The layers that have a mixer."""
        return frozenset(mixer.layer for mixer in self._mixers)

    @property
    def bytes_a_sequence(self) -> int:
        """The bytes of one sequence's states; 0 before `learn`."""
        return sum(mixer.bytes_a_sequence for mixer in self._mixers)

    @property
    def layout(self) -> str:
        """Names, types and shapes of all states, as a digest."""
        pieces = [
            (each.layer, str(piece), str(made.dtype), tuple(made.shape[1:]))
            for each in self._mixers
            for piece, made in each.kinds.items()
        ]
        return f"transformers, {sha256(repr(pieces).encode()).hexdigest()[:16]}"

    @contextmanager
    def learn(self) -> Iterator[None]:
        """Within this context one packed sequence runs, from its start; each mixer shows which states it has."""
        self.learning = True
        try:
            yield
        finally:
            self.learning = False

    def compare(self, run: Callable[[], object]) -> None:
        """Compare, in float32, a sequence whole, in two parts and with its second half token by token, in one mixer of
        each class; `run` runs the model on one packed sequence.

        In 16 bits a difference between these would look like rounding. Where parts differ, `token_by_token` is set.
        Raises Unsupported where single tokens differ too.
        """
        self.comparing, compared = True, set[type]()
        for mixer in self._mixers:
            mixer.compares = mixer.kind not in compared
            compared.add(mixer.kind)
        try:
            run()
        finally:
            self.comparing = False

    def reserve(self, places: int, drafts: int = 0) -> None:
        """Allocate the states of so many sequences, and of drafts in one step, in place of those before.

        Call after `learn`.
        """
        device = next((each.device for mixer in self._mixers for each in mixer.kinds.values()), None)
        self.kept = torch.zeros((places + drafts, self.bytes_a_sequence), dtype=torch.uint8, device=device)
        self._places, self._drafted = places, {}
        first = 0
        for mixer in self._mixers:
            mixer.lie_in(self.kept[:, first : first + mixer.bytes_a_sequence])
            first += mixer.bytes_a_sequence

    def begin(self, step: AttentionMetadata, places: Int32Array) -> None:
        """Plan a step whose row r is of the sequence at places[r]; a row behind one of the same place is of a draft.

        Raises ValueError for more drafts than were reserved.
        """
        start = step.context_len - np.diff(step.query_start)
        rows = self._rows(places.tolist())
        self.parts = _parts(step.query_start, start, rows, step.device.query_start.device, self.token_by_token)

    def accept(self, place: int, drafts: int) -> None:
        """Make the states behind so many drafts, one at least, of the last step those of their place."""
        self.kept[place].copy_(self.kept[self._drafted[place][drafts - 1]])

    def _rows(self, places: list[int]) -> list[_Row]:
        rows, drafted, following = dict[int, _Row](), dict[int, list[int]](), self._places
        found = []
        for place in places:
            last = rows.get(place)
            if last is None:
                row = _Row(place, place, 0)
            else:
                row = _Row(last.place, following, last.depth + 1)
                drafted.setdefault(place, []).append(following)
                following += 1
            rows[place] = row
            found.append(row)
        if following > len(self.kept):
            asked, most = following - self._places, len(self.kept) - self._places
            raise ValueError(f"a step has {asked} drafts of sequences with states; {most} were reserved")
        self._drafted = drafted
        return found

    def end(self) -> None:
        """Forget the step."""
        self.parts = None


def correct_mixers(model: nn.Module) -> list[str]:
    """Correct mixers whose code in transformers contradicts itself or their configuration. Return what was corrected.

    nemotron_h and zamba2 bound time steps from below in prefills, by `time_step_min`, and not in decodes. That entry is
    about the numbers that a training begins with. The configuration of nemotron_h says `time_step_limit`, which nothing
    reads there; that of zamba2 says no bounds, and there are none.
    """
    said = set()
    for module in model.modules():
        found: Any = getattr(module, "time_step_limit", None) if _keeps_state(module) else None
        limit, why = _time_step_limit(getattr(module, "config", None), found)
        if found is None or limit is None or tuple(found) == tuple(limit):
            continue
        setattr(module, "time_step_limit", tuple(limit))  # noqa: B010
        said.add(f"time steps are bounded by {tuple(limit)}, as {why}, and not by {tuple(found)}")
    return sorted(said)


def _time_step_limit(config: Any, found: Any) -> tuple[Any, str]:
    """Return the bounds of time steps that a configuration means, None where they are those found, and who says so."""
    if (limit := getattr(config, "time_step_limit", None)) is not None:
        return limit, "its configuration says"
    if found is not None and found[0] == getattr(config, "time_step_min", None):
        return _NO_LIMIT, "in its decodes"
    return None, ""


def _parts(
    query_start: Int32Array, start: Int32Array, found: Sequence[_Row], device: torch.device, token_by_token: bool
) -> list[_Part]:
    """Return the calls for a step's rows, in order: one for those of each length that go on, one for those that begin.

    Drafts come behind the rows that they go on from, in calls of their own.
    """
    rows: dict[tuple[int, int, bool], list[int]] = {}
    for row, (count, first) in enumerate(zip(np.diff(query_start).tolist(), start.tolist(), strict=True)):
        rows.setdefault((found[row].depth, count, first > 0), []).append(row)
    parts = []
    for (depth, count, goes_on), some in sorted(rows.items()):
        places = [found[row].place for row in some]
        before = [found[row].before for row in some] if goes_on else None
        at_once = 1 if goes_on and token_by_token else count
        for done in range(0, count, at_once):
            tokens = query_start[some][:, None] + np.arange(done, done + at_once)
            part = _part(tokens, before, places, len(tokens.flat) == query_start[-1], device)
            parts.append(replace(part, of_drafts=depth > 0))
            before = places if goes_on else None
    return parts


def _part(tokens: Any, before: list[int] | None, places: list[int], is_all: bool, device: torch.device) -> _Part:
    at = None if is_all else torch.from_numpy(tokens.ravel().astype(np.int64)).to(device)
    return _Part(at, None if before is None else _index(before, device), _index(places, device), tokens.shape)


def _index(places: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(places, dtype=torch.int64).to(device)


def _keeps_state(module: nn.Module) -> bool:
    """Return whether the code of a module's forward writes a state into its cache."""
    if not hasattr(module, "layer_idx"):
        return False
    try:
        code = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return any(f".{name}(" in code for name in _UPDATES)


class _Mixer:
    """One module, whose forward is replaced, and its states: piece -> [places, ...]."""

    def __init__(self, module: Any, states: MixerStates) -> None:
        self.layer, self.kind, self.compares = int(module.layer_idx), type(module), False
        self._module, self._states, self._forward = module, states, module.forward
        self._step_forward = self._chunk_forward = self._forward
        self._kernels = stepped_kinds(module)
        self._stepped = frozenset[str]()
        self._has_chunks = has_chunks(module)
        self._signature = inspect.signature(module.forward)
        self.kinds: dict[Piece, torch.Tensor] = {}
        """For each piece one that a sequence had, [1, ...]."""
        self.kept: dict[Piece, torch.Tensor] = {}
        module.forward = self._run

    @property
    def bytes_a_sequence(self) -> int:
        return sum(map(aligned_bytes, self.kinds.values()))

    def lie_in(self, memory: torch.Tensor) -> None:
        """Keep the states in these bytes, [places, bytes_a_sequence]."""
        self.kept = pieces_in(memory, self.kinds)

    def _run(self, *given: Any, **named: Any) -> Any:
        parts = self._states.parts
        if parts is None and not (self._states.learning or (self._states.comparing and self.compares)):
            return self._forward(*given, **named)
        bound = self._signature.bind(*given, **named)
        hidden, options = self._options(bound)
        if parts is None and self._states.comparing:
            self._compare(hidden, options)
            return self._forward(*given, **named)
        if parts is None:
            call = MixerCall(None, None)
            result = self._called(self._forward, hidden, options, call)
            self.kinds = {piece: made.detach().clone() for piece, made in call.made.items()}
            self._choose_forwards()
            return result
        out: Any = None
        with _Products(self._module, hidden) if any(part.of_drafts for part in parts) else nullcontext() as products:
            for part in parts:
                forward, stepped = self._way(part)
                call = MixerCall(self.kept, part.before, part.places, stepped)
                own = cut(hidden, part.tokens, part.shape, hidden.shape[1])
                if products is not None:
                    products.begin(part, own)
                result = self._called(
                    forward,
                    own,
                    {name: cut(value, part.tokens, part.shape, hidden.shape[1]) for name, value in options.items()},
                    call,
                )
                call.put_back(self.kept, part.places)
                if products is None or not products.end(result):
                    out = _put(result, out, part, hidden.shape[1])
        return out if products is None else products.put_rest(out)

    def _choose_forwards(self) -> None:
        """Let kernels run that were tried with states as these are."""
        self._step_forward = self._chunk_forward = self._forward
        self._stepped = frozenset()
        if self._states.stepped.get(self.kind) == sizes_of(self.kinds):
            self._stepped = self._kernels
            self._step_forward = with_functions(self._module, self._states.steps.functions())
        if self.kind in self._states.chunked:
            self._chunk_forward = with_functions(self._module, fla_chunks())

    def _way(self, part: _Part) -> tuple[Callable[..., Any], frozenset[str]]:
        """Return the forward that computes a part, and the kinds of states that it steps where they are kept."""
        if part.before is not None and part.shape[1] == 1:
            return self._step_forward, self._stepped
        return self._chunk_forward, frozenset()

    def _options(self, bound: inspect.BoundArguments) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the hidden states and the other arguments. Masks of padding, and what describes packed rows, go."""
        known = {
            name: value
            for name, value in bound.arguments.items()
            if self._signature.parameters[name].kind is not inspect.Parameter.VAR_KEYWORD
        }
        first = next(iter(known))
        hidden = known.pop(first)
        for name in ("attention_mask", *_CACHES):
            known.pop(name, None)
        return hidden, known

    def _compare(self, hidden: torch.Tensor, options: dict[str, Any]) -> None:
        replaced = vars(self._module).pop("forward")
        try:
            exact = copy.deepcopy(self._module).float()
        finally:
            self._module.forward = replaced
        functions, exactly = self._states.steps.functions(), {name: _exact(value) for name, value in options.items()}
        trial = KernelTrial(self._called, functions, exact, _exact(hidden), exactly, _EQUAL)
        tokens = hidden.shape[1]
        half, single = tokens // 2, range(tokens // 2, tokens)
        whole, in_parts, by_token = (
            trial.in_parts(exact.forward, cuts)[0] for cuts in ([0, tokens], [0, half, tokens], [0, *single, tokens])
        )
        if not alike(by_token, whole, _ALIKE):
            raise Unsupported(f"{self.kind.__name__} computes something else token by token than for a whole sequence")
        self._states.token_by_token |= not alike(in_parts, whole, _ALIKE)
        if kernels_run(hidden.device):
            rounded = KernelTrial(self._called, functions, self._module, hidden, options, _EQUAL_ROUNDED)
            self._try_kernels([trial] if hidden.dtype == torch.float32 else [trial, rounded])

    def _try_kernels(self, trials: Sequence[KernelTrial]) -> None:
        """Note which kernels compute what transformers' functions do, and say why others do not."""
        say, name = self._states.kernels_in_words.append, self.kind.__name__
        if not self._kernels:
            say(f"{name}: states are gathered and put back at each step, since no kernel has its step")
        elif reason := next(filter(None, (trial.why_not_stepped(self._kernels) for trial in trials)), ""):
            say(f"{name}: states are gathered and put back at each step: {reason}")
        else:
            self._states.stepped[self.kind] = trials[-1].sizes
            others = sorted({kind for kind, _ in trials[-1].sizes} - self._kernels)
            rest = f", and its {' and '.join(others)} states are gathered: no kernel has their step" if others else ""
            say(f"{name}: kernels step {' and '.join(sorted(self._kernels))} states in place{rest}")
        if not self._has_chunks:
            return
        # In the model's own type alone: floats it may multiply in TF32.
        if reason := trials[-1].why_not_chunked():
            say(f"{name}: prefills run in torch: {reason}")
        else:
            self._states.chunked.add(self.kind)
            say(f"{name}: prefills run in kernels of fla-core")

    def _called(
        self, forward: Callable[..., Any], hidden: torch.Tensor, options: dict[str, Any], call: MixerCall
    ) -> Any:
        """Call a forward of the mixer for [B, L, hidden], with `call` as its cache."""
        self._states.steps.call = call
        parameters = self._signature.parameters
        cache = next(name for name in _CACHES if name in parameters)
        mask = {"attention_mask": None} if "attention_mask" in parameters else {}
        try:
            return forward(hidden, **options, **mask, **{cache: call})
        finally:
            self._states.steps.call = None


def _exact(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _put(result: Any, out: Any, part: _Part, tokens: int) -> Any:
    """Write the tokens of a part, [B, L, ...], to their places in [1, T, ...], which is made where `out` is None.

    Of a tuple each entry is written. What has no entry for each token, such as a state, becomes None.
    """
    if isinstance(result, tuple):
        return tuple(_put(each, out and out[n], part, tokens) for n, each in enumerate(result))
    if not isinstance(result, torch.Tensor) or result.shape[:2] != part.shape:
        return None
    if part.tokens is None:
        return result.reshape(1, tokens, *result.shape[2:])
    if out is None:
        out = result.new_empty((1, tokens, *result.shape[2:]))
    out[0, part.tokens] = result.flatten(0, 1)
    return out


class _Products:
    """Within it a mixer's linear layers read their weights once in a step, and not in the call for each draft.

    Those that multiply the mixer's hidden states do so for all tokens when they are first called. The one that gives
    the result is left out of the calls for drafts, and multiplies what all of these hand to it.
    """

    def __init__(self, module: nn.Module, hidden: torch.Tensor) -> None:
        self._hidden = hidden
        linears = [each for each in module.modules() if hasattr(each, "in_features") and "forward" not in vars(each)]
        self._forwards = {each: each.forward for each in linears}
        self._products: dict[nn.Module, torch.Tensor] = {}
        self._results: dict[nn.Module, torch.Tensor] = {}  # of the call that runs
        self._last: nn.Module | None = None
        self._part, self._of_part = _NO_PART, hidden
        self._rest: list[tuple[_Part, torch.Tensor]] = []

    def __enter__(self) -> _Products:
        for linear in self._forwards:
            setattr(linear, "forward", partial(self._product, linear))  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        for linear in self._forwards:
            del linear.forward

    def begin(self, part: _Part, hidden: torch.Tensor) -> None:
        """Announce a call of the mixer for a part, and its hidden states."""
        self._part, self._of_part, self._results = part, hidden, {}

    def end(self, result: Any) -> bool:
        """Return whether the result of a call is to be multiplied yet; `put_rest` does it."""
        found: Any = result[0] if isinstance(result, tuple) else result
        if self._last is None:
            self._last = next((linear for linear, made in self._results.items() if made is found), None)
            return False
        made = self._results.get(self._last)
        if made is None or made is not found or not self._part.of_drafts:
            return False
        self._rest.append((self._part, made))
        return True

    def put_rest(self, out: Any) -> Any:
        """Return the results [1, T, ...] with those of drafts, which were left out."""
        if self._rest and self._last is not None:
            given = torch.cat([each.flatten(0, 1) for _, each in self._rest])
            counts = [part.shape[0] * part.shape[1] for part, _ in self._rest]
            made = self._forwards[self._last](given[None])[0].split(counts)
            whole = out[0] if isinstance(out, tuple) else out
            for (part, _), each in zip(self._rest, made, strict=True):
                whole[0, part.tokens] = each
        return out

    def _product(self, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if linear is self._last and self._part.of_drafts:
            made = x
        elif x is self._of_part:
            if linear not in self._products:
                self._products[linear] = self._forwards[linear](self._hidden)
            made = cut(self._products[linear], self._part.tokens, self._part.shape, self._hidden.shape[1])
        else:
            made = self._forwards[linear](x)
        self._results[linear] = made
        return made
