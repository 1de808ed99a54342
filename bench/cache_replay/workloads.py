"""Five seeded workloads with the shapes that public traces of LLM services show; a block is 64 tokens.

* system_prompts: single requests of programs; few long prompts in common, tails of their own (Bailian, trace B).
* chat: conversations whose users think between turns; reuse within minutes, skewed (Bailian, trace A; ShareGPT).
* prefix_tree: templates, tools and examples that branch, each branch of another popularity (Zipf).
* documents: long documents with some questions each, and batch jobs that read others once (Mooncake, L-Eval).
* agents: tasks of many steps that wait for tools; tasks of a kind share the tools' description (Mooncake).

Popularity drifts: programs, documents and templates come and go, so that counts of the past mislead a little.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from common.contracts.lease import LAST_BLOCK, RetainedBlocks
from common.contracts.types import BlockHash


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """One request: the hashes of its prompt's full blocks, and those of the blocks that its output fills.

    `at` is in seconds, for requests with `retention` or a `session`, and for those that last: their blocks are in use
    for so long.
    """

    prompt: tuple[BlockHash, ...]
    output: tuple[BlockHash, ...]
    at: float = 0.0
    retention: tuple[RetainedBlocks, ...] = ()
    lasts: float = 0.0
    session: str = ""


BLOCK_SIZE: Final = 64

Timed = tuple[float, CacheRequest]


class _Hashes:
    """New hashes, each for a content that no request had before."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def take(self, count: int) -> tuple[BlockHash, ...]:
        return tuple(BlockHash(next(self._numbers).to_bytes(16, "little")) for _ in range(count))


def _blocks(rng: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    """Return the blocks of a text whose tokens are log-normal within bounds."""
    tokens = max(least, min(most, round(math.exp(math.log(median) + sigma * rng.gauss(0.0, 1.0)))))
    return max(1, round(tokens / BLOCK_SIZE))


def _seconds(rng: random.Random, median: float, sigma: float) -> float:
    return math.exp(math.log(median) + sigma * rng.gauss(0.0, 1.0))


class _Popular:
    """Items by Zipf's law; after each `life` draws one of them is replaced by a new one at a random rank."""

    def __init__(self, rng: random.Random, count: int, exponent: float, life: int, make: Callable[[], object]) -> None:
        self._rng, self._make, self._life = rng, make, life
        self._items = [make() for _ in range(count)]
        weights = [1.0 / rank**exponent for rank in range(1, count + 1)]
        self._bounds = list(itertools.accumulate(weights))
        self._draws = 0

    def draw(self) -> object:
        self._draws += 1
        if self._draws % self._life == 0:
            self._items[self._rng.randrange(len(self._items))] = self._make()
        return self._rng.choices(self._items, cum_weights=self._bounds)[0]


# ---------------------------------------------------------------- the workloads


def system_prompts(seed: int, requests: int) -> list[CacheRequest]:
    """Programs with system prompts of 300 to 6,000 tokens, and a user's text that never comes again."""
    rng, hashes = random.Random(f"system_prompts {seed}"), _Hashes()
    programs = _Popular(rng, 400, 0.9, 40, lambda: hashes.take(_blocks(rng, 960, 0.8, 320, 6400)))
    found = []
    for _ in range(requests):
        prompt = (*programs.draw(), *hashes.take(_blocks(rng, 256, 0.9, 16, 3200)))  # type: ignore[misc]
        found.append(CacheRequest(prompt, hashes.take(_blocks(rng, 160, 0.8, 16, 960))))
    return found


def chat(seed: int, requests: int) -> list[CacheRequest]:
    """Conversations: some users ask once, some go on for long; minutes pass between two turns."""
    rng, hashes = random.Random(f"chat {seed}"), _Hashes()
    systems = [hashes.take(_blocks(rng, 400, 0.5, 128, 1280)) for _ in range(6)]

    return _merged(lambda begin: _talk(rng, hashes, systems, begin), _arrivals(rng, 0.5), requests)


def _talk(
    rng: random.Random, hashes: _Hashes, systems: Sequence[tuple[BlockHash, ...]], begin: float
) -> Iterator[Timed]:
    history: tuple[BlockHash, ...] = rng.choice(systems)
    goes_on, now = rng.betavariate(1.0, 1.2), begin
    while len(history) < 32_768 // BLOCK_SIZE:
        history += hashes.take(_blocks(rng, 80, 1.2, 16, 4000))
        answer = hashes.take(_blocks(rng, 320, 0.7, 16, 1920))
        yield now, CacheRequest(history, answer)
        if rng.random() > goes_on:
            return
        history += answer
        now += 10.0 + _seconds(rng, 60.0, 1.2)


def prefix_tree(seed: int, requests: int) -> list[CacheRequest]:
    """A tree of templates: each request walks down some levels, by Zipf at each, and ends in a text of its own."""
    rng, hashes = random.Random(f"prefix_tree {seed}"), _Hashes()

    @dataclass
    class Node:
        blocks: tuple[BlockHash, ...]
        children: _Popular | None = None

    def node() -> Node:
        return Node(hashes.take(_blocks(rng, 192, 0.6, 32, 960)))

    root, found = Node(()), []
    for _ in range(requests):
        at, prompt = root, list[BlockHash]()
        for level in range(rng.choice((2, 3, 3, 4, 4, 5))):
            at.children = at.children or _Popular(rng, (40, 20, 12, 8, 8)[level], 0.9, 150, node)
            at = at.children.draw()  # type: ignore[assignment]
            prompt += at.blocks
        prompt += hashes.take(_blocks(rng, 64, 0.8, 16, 640))
        found.append(CacheRequest(tuple(prompt), hashes.take(_blocks(rng, 128, 0.7, 16, 640))))
    return found


def documents(seed: int, requests: int) -> list[CacheRequest]:
    """Documents of 1,600 to 32,000 tokens with a few questions each, beside a job that reads others once each."""
    rng, hashes = random.Random(f"documents {seed}"), _Hashes()

    def session(begin: float) -> Iterator[Timed]:
        document, now = hashes.take(_blocks(rng, 4800, 0.7, 1600, 32000)), begin
        readers = rng.choice((1, 1, 1, 2, 6))
        goes_on = 0.85 if readers > 1 else 0.6
        while True:
            question = hashes.take(_blocks(rng, 48, 0.6, 16, 320))
            yield now, CacheRequest(document + question, hashes.take(_blocks(rng, 160, 0.6, 16, 960)))
            if rng.random() > goes_on:
                return
            now += 5.0 + _seconds(rng, 90.0, 1.0) / readers

    def scan(begin: float) -> Iterator[Timed]:
        for number in range(30):
            text = hashes.take(_blocks(rng, 4800, 0.7, 1600, 32000))
            yield begin + 4.0 * number, CacheRequest(text, hashes.take(_blocks(rng, 160, 0.6, 16, 960)))

    def either(begin: float) -> Iterator[Timed]:
        return scan(begin) if rng.random() < 0.04 else session(begin)

    return _merged(either, _arrivals(rng, 2.5), requests)


def agents(seed: int, requests: int) -> list[CacheRequest]:
    """Tasks of many steps: a step appends a tool's answer and comes back when the tool is done, mostly in seconds."""
    rng, hashes = random.Random(f"agents {seed}"), _Hashes()
    kinds = _Popular(rng, 12, 0.8, 400, lambda: hashes.take(_blocks(rng, 4000, 0.5, 1280, 12800)))

    return _merged(lambda begin: _task(rng, hashes, kinds, begin), _arrivals(rng, 1.3), requests)


def _task(rng: random.Random, hashes: _Hashes, kinds: _Popular, begin: float) -> Iterator[Timed]:
    shared: tuple[BlockHash, ...] = kinds.draw()  # type: ignore[assignment]
    history, now = shared + hashes.take(_blocks(rng, 192, 1.0, 16, 3200)), begin
    goes_on, slow = rng.choice((0.5, 0.9, 0.95)), rng.random() < 0.2
    while len(history) < 65_536 // BLOCK_SIZE:
        call = hashes.take(_blocks(rng, 96, 0.8, 16, 960))
        yield now, CacheRequest(history, call)
        if rng.random() > goes_on:
            return
        history += call + hashes.take(_blocks(rng, 192, 1.3, 16, 4800))
        waits = rng.random() < (0.4 if slow else 0.05)
        now += 3.0 + (_seconds(rng, 180.0, 0.8) if waits else _seconds(rng, 5.0, 1.0))


def agents_and_scans(seed: int, requests: int) -> list[CacheRequest]:
    """A few tasks that wait for slow tools, among single requests and jobs that read documents once.

    A task says by retention that it comes back, for five minutes as by `cache_control`; its last step says nothing. The
    first step looks as a single request does.
    """
    rng, hashes, numbers = random.Random(f"agents_and_scans {seed}"), _Hashes(), itertools.count()
    kinds = _Popular(rng, 12, 0.8, 400, lambda: hashes.take(_blocks(rng, 1000, 0.5, 320, 3200)))
    asks = (RetainedBlocks(0, LAST_BLOCK, 60, 300.0),)

    def task(begin: float, steps: int) -> Iterator[Timed]:
        shared: tuple[BlockHash, ...] = kinds.draw()  # type: ignore[assignment]
        history, now = shared + hashes.take(_blocks(rng, 1000, 1.0, 64, 6400)), begin
        session = f"task {next(numbers)}"
        for step in range(steps):
            call = hashes.take(_blocks(rng, 96, 0.8, 16, 960))
            yield now, CacheRequest(history, call, now, asks if step < steps - 1 else (), session=session)
            history += call + hashes.take(_blocks(rng, 192, 1.3, 16, 4800))
            now += 3.0 + _seconds(rng, 90.0, 0.6)

    def scan(begin: float) -> Iterator[Timed]:
        for number in range(30):
            text = hashes.take(_blocks(rng, 4800, 0.7, 1600, 32000))
            at = begin + 2.0 * number
            yield at, CacheRequest(text, hashes.take(_blocks(rng, 160, 0.6, 16, 960)), at)

    def either(begin: float) -> Iterator[Timed]:
        if rng.random() < 0.04:
            return scan(begin)
        return task(begin, rng.choice((4, 8)) if rng.random() < 0.08 else 1)

    return _merged(either, _arrivals(rng, 0.8), requests)


def agents_and_chats(seed: int, requests: int) -> list[CacheRequest]:
    """The tasks of `agents`, which come back after seconds, the conversations of `chat`, after minutes, and scans."""
    rng, hashes, numbers = random.Random(f"agents_and_chats {seed}"), _Hashes(), itertools.count()
    kinds = _Popular(rng, 12, 0.8, 400, lambda: hashes.take(_blocks(rng, 4000, 0.5, 1280, 12800)))
    systems = [hashes.take(_blocks(rng, 400, 0.5, 128, 1280)) for _ in range(6)]

    def sessions(begin: float) -> Iterator[Timed]:
        name = f"session {next(numbers)}"
        talk = _task(rng, hashes, kinds, begin) if rng.random() < 0.4 else _talk(rng, hashes, systems, begin)
        return ((at, replace(request, at=at, session=name)) for at, request in talk)

    def scan(begin: float) -> Iterator[Timed]:
        for number in range(30):
            text, at = hashes.take(_blocks(rng, 4800, 0.7, 1600, 32000)), begin + 2.0 * number
            yield at, CacheRequest(text, hashes.take(_blocks(rng, 160, 0.6, 16, 960)), at)

    return _merged(lambda begin: scan(begin) if rng.random() < 0.03 else sessions(begin), _arrivals(rng, 0.8), requests)


def by_recency(seed: int, requests: int) -> list[CacheRequest]:
    """Conversations of which the next one to go on depends only on how many others went on since: LRU is best."""
    rng, hashes = random.Random(f"by_recency {seed}"), _Hashes()
    recent, found = list[tuple[BlockHash, ...]](), list[CacheRequest]()
    for _ in range(requests):
        if not recent or rng.random() < 0.1:
            history = hashes.take(_blocks(rng, 1280, 1.0, 64, 32_768))
        else:
            others = min(len(recent) - 1, int(5 * (rng.paretovariate(0.5) - 1.0)))
            history = recent.pop(-1 - others)
        found.append(CacheRequest(history, ()))
        recent.append(history)
    return found


WORKLOADS: dict[str, Callable[[int, int], list[CacheRequest]]] = {
    "system_prompts": system_prompts,
    "chat": chat,
    "prefix_tree": prefix_tree,
    "documents": documents,
    "agents": agents,
}


def _arrivals(rng: random.Random, mean_gap: float) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(1.0 / mean_gap)
        yield now


def _merged(session: Callable[[float], Iterator[Timed]], begins: Iterator[float], count: int) -> list[CacheRequest]:
    """Return the first `count` requests of all sessions in the order of their times."""
    waiting: list[tuple[float, int, CacheRequest, Iterator[Timed]]] = []
    number, begin, found = itertools.count(), next(begins), list[CacheRequest]()
    while len(found) < count:
        while not waiting or begin <= waiting[0][0]:
            _push(waiting, next(number), session(begin))
            begin = next(begins)
        _, _, request, rest = heapq.heappop(waiting)
        found.append(request)
        _push(waiting, next(number), rest)
    return found


def _push(waiting: list[tuple[float, int, CacheRequest, Iterator[Timed]]], number: int, rest: Iterator[Timed]) -> None:
    step = next(rest, None)
    if step is not None:
        heapq.heappush(waiting, (step[0], number, step[1], rest))


def working_set(requests: Sequence[CacheRequest]) -> int:
    """Return the pool with which nothing that comes again would be lost: the most blocks that are live at once.

    A block is live from the first request that has it to the last request that asks for it.
    """
    first: dict[BlockHash, int] = {}
    last: dict[BlockHash, int] = {}
    for number, request in enumerate(requests):
        for block in (*request.prompt, *request.output):
            first.setdefault(block, number)
        last.update(dict.fromkeys(request.prompt, number))
    change = [0] * (len(requests) + 1)
    for block, end in last.items():
        change[first[block]] += 1
        change[end] -= 1
    return max(itertools.accumulate(change))
