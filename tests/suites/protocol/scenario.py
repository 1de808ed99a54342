"""What a world is made of: requests with known outputs, sizes, and which faults may happen how often."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from common.contracts.lease import RetainedBlocks
from common.contracts.transfers import TransferEnd
from common.contracts.types import TRIMMED, BlockId, KvGroup, KvGroupKind
from gpuworker.scheduling.drafting import Speculation
from tests.suites.protocol import content

EOS = 9
VOCABULARY = 2
"""Ordinary tokens: so few that prompts and outputs of different requests run into each other."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request. It ends after `max_tokens` outputs, or with output number `stop_at` if that is not 0."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_at: int = 0
    priority: int = 0
    fork_of: int | None = None
    no_cache: bool = False
    tenant: str = ""
    drafts: bool = False
    retention: tuple[RetainedBlocks, ...] = ()
    """For walks alone: copies of a world retain nothing."""

    def draw(self, node: int, output: int) -> int:
        """Return output token number `output` (from 1) after the prefix `node`: the same in every run."""
        if output == self.stop_at:
            return EOS
        return drawn_after(node)

    @property
    def outputs(self) -> tuple[int, ...]:
        """All tokens that the request must deliver unless it is cancelled."""
        return _outputs(self)


@cache
def _outputs(request: Request) -> tuple[int, ...]:
    node, found = content.path(request.prompt)[-1], []
    for output in range(1, request.max_tokens + 1):
        found.append(request.draw(node, output))
        if found[-1] == EOS:
            break
        node = content.child(node, found[-1])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Sizes and requests of one world. `faults` bounds each kind; `max_faults` all of them together.

    `partly`: parts of cached blocks are reused, although blocks are small. `first_part`: prompts begin with so many
    slots of their blocks and get the others later; 0: with all. `least_saved`: a checkpoint that saves more tokens is
    waited for. `tail_share`: the part of the pool that tails take at most. `admissions`: those of one batch at most,
    where a report is answered; None: any number. `max_wait`: after so many seconds a sequence is old, and after
    `in_turn` admissions by priority one that is old comes next; the clock stands still but for the fault "age".
    Where the pool has `groups`, `num_blocks` counts pages. `frames` are those of the worker's host memory, `disk` those
    on its disk, which has the full blocks of `warm` from an earlier life.
    Each `peers`-th prompt (0: none) is at a peer with all its blocks, as the manager believes. What a fetch of one of
    them brings is its content, or it ends as one of `peer_ends` says. Prompts are wished for ahead of need, so often.
    """

    requests: tuple[Request, ...]
    num_blocks: int
    block_size: int = 2
    frames: int = 0
    disk: int = 0
    warm: tuple[int, ...] = ()
    peers: int = 0
    peer_ends: tuple[TransferEnd, ...] = tuple(TransferEnd)
    wishes: int = 0
    budget: int = 4
    long_prefill_cap: int = 0
    runway_slots: int = 2
    runway_reach: int = 4
    max_num_seqs: int = 8
    window: int = 0
    groups: tuple[KvGroup, ...] = ()
    max_preemptions: int = 4
    partly: bool = False
    first_part: int = 0
    least_saved: int = 64
    tail_share: float = 0.125
    admissions: int | None = None
    max_wait: float = 0.0
    in_turn: int = 1
    with_index: bool = False
    max_faults: int = 0
    faults: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers whose K/V lies in the same blocks, of `pages` pages; the first page of a place has number `first_part`."""

    kind: KvGroupKind
    span: int
    pages: int
    first_part: int = 0

    @property
    def keeps_states(self) -> bool:
        """Whether blocks are checkpoints of states, and no K/V."""
        return self.kind is KvGroupKind.STATE

    def first_read(self, position: int) -> int:
        """Return the first position that the token at a position reads."""
        if self.kind is KvGroupKind.CHUNK:
            return position - position % self.span
        return max(0, position - self.span + 1) if self.span else 0

    def parts_at(self, table: Sequence[BlockId], place: int) -> Iterator[tuple[int, BlockId]]:
        """Yield the parts of a place and the pages that hold them, by a table of pages; TRIMMED where it ends."""
        for page in range(self.pages):
            at = place * self.pages + page
            yield self.first_part + page, table[at] if at < len(table) else TRIMMED


def layers_of(scenario: Scenario) -> tuple[Layers, ...]:
    """Return the groups of a world's layers; where its pool has none, all layers are one."""
    if not scenario.groups:
        return (Layers(KvGroupKind.WINDOW if scenario.window else KvGroupKind.FULL, scenario.window, 1),)
    found, part = [], 0
    for each in scenario.groups:
        found.append(Layers(each.kind, each.span, each.pages, part))
        part += each.pages
    return tuple(found)


class Guesser:
    """Drafts up to three tokens in every state, of which none, one or two are those that a request draws there."""

    behind = None

    def __init__(self, tokens: Sequence[int], _: Speculation | None = None) -> None:
        self._nodes = content.path(tuple(tokens))

    @property
    def chance(self) -> float:
        return 1.0

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._nodes.append(content.child(self._nodes[-1], token))

    def propose(self, most: int) -> tuple[int, ...]:
        """Guess right where the number of tokens is even, and once more where four does not divide it; then wrong."""
        nodes, found = self._nodes[-1:], []
        rights = (len(self._nodes) % 2 == 0) + (len(self._nodes) % 4 == 2)
        for guess in range(min(most, 3)):
            token = drawn_after(nodes[-1])
            found.append(token if guess < rights else (token + 1) % VOCABULARY)
            nodes.append(content.child(nodes[-1], found[-1]))
        return tuple(found)

    def copy(self) -> Guesser:
        twin = Guesser(())
        twin._nodes = self._nodes.copy()
        return twin


def drawn_after(node: int) -> int:
    """Return the ordinary token that is drawn after a prefix."""
    return content.draw(node) % VOCABULARY
