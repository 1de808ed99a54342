"""Mixers: layers that keep a state of fixed size in place of K and V (linear attention, state spaces, convolutions).

A mixer of transformers takes sequences of one length, [B, T, hidden], and a cache with the state of each. A step has
all its rows in one packed row, [1, T, hidden], of any lengths. So each mixer is called for parts of a step: once for
all rows of one length that go on with a state, as all decodes do, and once for all of one length that begin. Its cache
is a `_Call`, which gathers the states of these rows and puts back what the mixer made of them.

Each running sequence has a place, the index by which the runner knows it; a row from position 0 on begins without a
state. A step begins or goes on with the states at these places alone; what copies them to pages and back
(`gpuworker/memory/state_store.py`) sees the bytes of a place.

Of drafts only the right ones may change a state. A row of a draft goes on from the row before it, in a call behind that
one's, and leaves its states apart. Those behind the last right draft become those of the place, before the next step:

    place 2 has states behind "a b"; a step computes c, and the drafts d, x
        c: reads place 2, writes place 2      d: reads place 2, writes row 0      x: reads row 0, writes row 1
    d is right and x is not: place 2 = row 0
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import nn

from common.contracts.errors import Unsupported
from gpuworker.attention.interface import AttentionMetadata, Int32Array

# What a module's code calls on its cache, if it keeps a state.
_UPDATES: Final = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
_CACHES: Final = ("cache_params", "past_key_values")
_NO_LIMIT: Final = (0.0, math.inf)
# The largest difference of a mixer's forms in float32: the norm of the error over that of the result. Forms that agree
# differ by rounding, some 1e-5.
_ALIKE: Final = 2e-3

# The states of a mixer begin at multiples of so many bytes, so that they can be seen as numbers of any type.
_ALIGNED: Final = 16

Piece = tuple[str, int]
"""A state of a mixer: its kind, and its number among those of this kind."""


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
        self._signature = inspect.signature(module.forward)
        self.kinds: dict[Piece, torch.Tensor] = {}
        """For each piece one that a sequence had, [1, ...]."""
        self.kept: dict[Piece, torch.Tensor] = {}
        module.forward = self._run

    @property
    def bytes_a_sequence(self) -> int:
        return sum(map(_aligned_bytes, self.kinds.values()))

    def lie_in(self, memory: torch.Tensor) -> None:
        """Keep the states in these bytes, [places, bytes_a_sequence]."""
        first = 0
        for piece, each in self.kinds.items():
            own = memory[:, first : first + each.nbytes].view(each.dtype)
            self.kept[piece] = own.view(len(memory), *each.shape[1:])
            first += _aligned_bytes(each)

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
            call = _Call(None, None)
            result = self._called(self._forward, hidden, options, call)
            self.kinds = {piece: made.detach().clone() for piece, made in call.made.items()}
            return result
        out: Any = None
        with _Products(self._module, hidden) if any(part.of_drafts for part in parts) else nullcontext() as products:
            for part in parts:
                call, own = _Call(self.kept, part.before), cut(hidden, part.tokens, part.shape, hidden.shape[1])
                if products is not None:
                    products.begin(part, own)
                result = self._called(
                    self._forward,
                    own,
                    {name: cut(value, part.tokens, part.shape, hidden.shape[1]) for name, value in options.items()},
                    call,
                )
                call.put_back(self.kept, part.places)
                if products is None or not products.end(result):
                    out = _put(result, out, part, hidden.shape[1])
        return out if products is None else products.put_rest(out)

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
        tokens = hidden.shape[1]
        half, single = tokens // 2, range(tokens // 2, tokens)
        whole, in_parts, by_token = (
            self._in_parts(exact.forward, hidden, options, cuts)
            for cuts in ([0, tokens], [0, half, tokens], [0, *single, tokens])
        )
        if not _alike(by_token, whole):
            raise Unsupported(f"{self.kind.__name__} computes something else token by token than for a whole sequence")
        self._states.token_by_token |= not _alike(in_parts, whole)

    def _in_parts(
        self, forward: Callable[..., Any], hidden: torch.Tensor, options: dict[str, Any], cuts: Sequence[int]
    ) -> torch.Tensor:
        """Return what a mixer in float32 gives for one sequence, [T, ...], in parts from one cut to the next."""
        kept: dict[Piece, torch.Tensor] = {}
        place, found = torch.zeros(1, dtype=torch.int64, device=hidden.device), list[torch.Tensor]()
        for begin, end in pairwise(cuts):
            at = torch.arange(begin, end, device=hidden.device)
            own = (_exact(cut(value, at, (1, end - begin), hidden.shape[1])) for value in (hidden, *options.values()))
            part, *others = own
            call = _Call(kept, place if begin else None)
            result = self._called(forward, part, dict(zip(options, others, strict=True)), call)
            kept = kept | call.made
            found.append((result[0] if isinstance(result, tuple) else result)[0])
        return torch.cat(found)

    def _called(self, forward: Callable[..., Any], hidden: torch.Tensor, options: dict[str, Any], call: _Call) -> Any:
        parameters = self._signature.parameters
        cache = next(name for name in _CACHES if name in parameters)
        mask = {"attention_mask": None} if "attention_mask" in parameters else {}
        return forward(hidden, **options, **mask, **{cache: call})


def _aligned_bytes(state: torch.Tensor) -> int:
    return -(-state.nbytes // _ALIGNED) * _ALIGNED


def _exact(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_exact, value))
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).norm() <= _ALIKE * wanted.norm().clamp_min(1e-12))


def cut(value: Any, at: torch.Tensor | None, shape: tuple[int, int], tokens: int) -> Any:
    """Return the tokens `at`, as [*shape, ...], of what has an entry for each token, [1, T, ...]; the rest as it is.

    None stands for all tokens.
    """
    if isinstance(value, tuple):
        return tuple(cut(each, at, shape, tokens) for each in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, tokens):
        return value
    found = value[0] if at is None else value[0].index_select(0, at)
    return found.reshape(*shape, *value.shape[2:])


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


class _Call:
    """The cache that a mixer sees in one call, by the interface of transformers' `Cache`; layers are not looked at.

    `places` are those whose states it gathers; None: the sequences begin.
    """

    def __init__(self, kept: dict[Piece, torch.Tensor] | None, places: torch.Tensor | None) -> None:
        self._kept, self._places = kept, places
        self.made: dict[Piece, torch.Tensor] = {}

    def put_back(self, kept: dict[Piece, torch.Tensor], places: torch.Tensor) -> None:
        """Write the states that the mixer made, or changed where they were, to the places."""
        for piece, state in self.made.items():
            kept[piece].index_copy_(0, places, state.to(kept[piece].dtype))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._places is not None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(("conv", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Append columns [B, channels, n]; return all that there are, and keep the last ones, as wide as the kernel."""
        piece = ("conv", state_idx)
        before, width = self._get(piece), conv_kernel_size or conv_states.shape[-1]
        columns = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        if (missing := width - columns.shape[-1]) > 0:
            columns = nn.functional.pad(columns, (missing, 0))
        self.made[piece] = columns[..., -width:]
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        self.made["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self._get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.made["linear", 0] = linear_cache

    def _get(self, piece: Piece) -> torch.Tensor | None:
        """Return the rows' states of a piece; a mixer may change them in place."""
        if self._places is None or self._kept is None:
            return None
        if piece not in self.made:
            self.made[piece] = self._kept[piece].index_select(0, self._places)
        return self.made[piece]
