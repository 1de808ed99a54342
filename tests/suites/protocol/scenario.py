"""What a world is made of: requests with known outputs, sizes, and which faults may happen how often."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

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

    def draw(self, node: int, output: int) -> int:
        """Return output token number `output` (from 1) after the prefix `node`: the same in every run."""
        if output == self.stop_at:
            return EOS
        return (node * 7 + content.token_of(node) * 3 + 1) % VOCABULARY

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
    """Sizes and requests of one world. `faults` bounds each kind; `max_faults` all of them together."""

    requests: tuple[Request, ...]
    num_blocks: int
    block_size: int = 2
    budget: int = 4
    long_prefill_cap: int = 0
    runway_slots: int = 2
    runway_reach: int = 4
    max_num_seqs: int = 8
    window: int = 0
    with_index: bool = False
    max_faults: int = 0
    faults: dict[str, int] = field(default_factory=dict, hash=False)
