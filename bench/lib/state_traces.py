"""Hits of a model whose layers keep states, over those of full attention alone, on three made-up traces.

Both run a real ledger and agent, without a model, on pools of the same bytes, with the default policy of eviction. The
first quarter of a trace fills the pool and is not counted.

* `system`: 24 system prompts of 1,500 to 6,000 tokens, some more popular than others, and one question each.
* `chat`: 60 chats at once, of some ten turns. Most of them think before they answer, and the next prompt lacks that.
* `agent`: 24 agents at once, whose contexts grow to some 80,000 tokens; at times all but a third is rewritten.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from bench.lib.harness import progress
from bench.lib.kv_groups import Figure, Pair
from common.contracts.lease import DEFAULT_RETENTION_PRIORITY
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.byte_plan import GIB

_PAGE: Final = 384 * 1024
"""Bytes of a block of K and V of Qwen3-Next-80B, which is a page; its checkpoints have 198 of them."""
_CHECKPOINT: Final = 198
_SIZES: Final = (10, 40)
_SPAN: Final = 1 << 17
"""Token ids: a text begins at a random one and goes on with the next ones, so that texts share no block by chance."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a trace; the first message of its prompt has `first` tokens."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    first: int


def _text(rng: random.Random, least: int, most: int) -> tuple[int, ...]:
    begin = rng.randrange(_SPAN)
    return tuple(range(begin, begin + rng.randint(least, most)))


def system_trace(count: int, rng: random.Random) -> Iterator[Turn]:
    systems = [_text(rng, 1500, 6000) for _ in range(24)]
    weights = [1 / (rank + 1) for rank in range(24)]
    for _ in range(count):
        (chosen,) = rng.choices(systems, weights)
        yield Turn(chosen + _text(rng, 150, 900), _text(rng, 100, 500), len(chosen))


@dataclass(slots=True)
class _Chat:
    texts: list[tuple[int, ...]]
    thinks: bool = False
    turns: int = field(default=0)

    def prompt(self) -> tuple[int, ...]:
        return tuple([token for text in self.texts for token in text])


def chat_trace(count: int, rng: random.Random) -> Iterator[Turn]:
    systems, live = [_text(rng, 800, 3000) for _ in range(6)], list[_Chat]()
    for _ in range(count):
        while len(live) < 60:
            live.append(_Chat([rng.choice(systems)], thinks=rng.random() < 0.6))
        chat = rng.choice(live)
        chat.turns += 1
        chat.texts.append(_text(rng, 40, 400))
        prompt, answer = chat.prompt(), _text(rng, 100, 700)
        thought = _text(rng, 300, 2000) if chat.thinks else ()
        yield Turn(prompt, thought + answer, len(chat.texts[0]))
        chat.texts.append(answer)
        if chat.turns > 10 or rng.random() < 0.02:
            live.remove(chat)


def agent_trace(count: int, rng: random.Random) -> Iterator[Turn]:
    systems, live = [_text(rng, 6000, 14000) for _ in range(6)], list[_Chat]()
    for _ in range(count):
        while len(live) < 24:
            live.append(_Chat([rng.choice(systems)]))
        agent = rng.choice(live)
        agent.turns += 1
        agent.texts.append(_text(rng, 200, 3500))
        if agent.turns > 3 and rng.random() < 0.06:
            agent.texts[max(1, len(agent.texts) // 3) :] = [_text(rng, 500, 1500)]
        answer = _text(rng, 100, 700)
        yield Turn(agent.prompt(), answer, len(agent.texts[0]))
        agent.texts.append(answer)
        if agent.turns > 30 or rng.random() < 0.02:
            live.remove(agent)


_TRACES: Final = {"system": (system_trace, 600), "chat": (chat_trace, 900), "agent": (agent_trace, 300)}
"""Each with the requests of a trace."""


def _hits(geometry: KvGeometry, gib: int, turns: list[Turn]) -> tuple[float, float]:
    """Return cached tokens over prompt tokens, and over those whose K and V were there."""
    pair, cached, asked, present = Pair(geometry, gib * GIB // _PAGE), 0, 0, 0
    for number, turn in enumerate(turns):
        there = pair.present(turn.prompt)
        # What a router says of the first message of a chat.
        got = pair.serve(turn.prompt, turn.output, turn.first, DEFAULT_RETENTION_PRIORITY)
        if number >= len(turns) // 4:
            cached, asked, present = cached + got, asked + len(turn.prompt), present + there
    return cached / asked, cached / present


def trace_figures() -> Iterator[Figure]:
    """Yield the hits of each trace, and their share of those of full attention alone."""
    full, states = KvGroup(KvGroupKind.FULL, 0, 1, ()), KvGroup(KvGroupKind.STATE, 0, _CHECKPOINT, ())
    shapes = [KvGeometry(1, 1, 1, 1, "bfloat16", groups=groups) for groups in ((), (full, states))]
    for name, (trace, count) in _TRACES.items():
        turns = list(trace(count, random.Random(1)))
        for gib in _SIZES:
            progress(f"{name}, {gib} GiB")
            (alone, _), (hybrid, resumed) = (_hits(shape, gib, turns) for shape in shapes)
            yield f"trace_hits_{name}_{gib}", hybrid, "cached tokens over prompt tokens, with states"
            yield f"resume_share_{name}_{gib}", resumed, "cached tokens over those whose K and V were there"
            yield f"hits_over_full_{name}_{gib}", hybrid / alone, "hits over full attention alone, of as many bytes"
