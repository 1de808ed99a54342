"""The four workloads that every engine is fed: token ids from a seed alone, equal on any machine and any Python.

    W1  mixed lengths: prompts of 32 to 1024 tokens (log-normal, median 200), outputs of 16 to 256
    W2  one system prompt of 768 tokens, and 64 tokens of their own
    W3  conversations in which each turn sends the whole history again
    W4  one stream

Tokens are random ones, or passages of a text. Every request is greedy and runs to exactly `max_new_tokens`. Only
`Random.random` is drawn from, which Python keeps equal from version to version. `python -m bench.lib.workloads` prints
sizes and digests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from cli.benchmark.requests import Request, Workload

VOCABULARY = 32000
_FIRST_ID = 3  # after padding, beginning and end of a sequence
Draw = Callable[[random.Random, int], list[int]]
"""Draws so many tokens in a row."""


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [_FIRST_ID + int(rng.random() * (VOCABULARY - _FIRST_ID)) for _ in range(count)]


def passages_of(text: Sequence[int]) -> Draw:
    """Return what draws passages of a text, given as token ids."""

    def passage(rng: random.Random, count: int) -> list[int]:
        begin = int(rng.random() * (len(text) - count))
        return list(text[begin : begin + count])

    return passage


def mixed(seed: int, count: int = 64, draw: Draw = random_tokens) -> Workload:
    """W1."""
    rng = random.Random(f"W1/{seed}")
    requests = []
    for index in range(count):
        length = max(32, min(1024, round(math.exp(math.log(200.0) + 0.75 * _normal(rng)))))
        output = 16 + int(rng.random() * 241)
        requests.append(Request(f"r{index:03d}", draw(rng, length), output))
    return Workload("W1", requests)


def shared_prefix(seed: int, count: int = 64, draw: Draw = random_tokens) -> Workload:
    """W2."""
    rng = random.Random(f"W2/{seed}")
    head = draw(rng, 768)
    return Workload("W2", [Request(f"r{index:03d}", head + draw(rng, 64), 32) for index in range(count)])


def multi_turn(seed: int, count: int = 16, draw: Draw = random_tokens) -> Workload:
    """W3."""
    turns = 4
    rng = random.Random(f"W3/{seed}")
    said = {(index, turn): draw(rng, 64) for index in range(count) for turn in range(turns)}
    first = [Request(f"c{index:02d}t0", said[index, 0], 48, index, 0) for index in range(count)]
    return Workload("W3", first, turns, said)


def single_stream(seed: int, count: int = 1, draw: Draw = random_tokens) -> Workload:
    """W4, which is one request whatever its `count`."""
    rng = random.Random(f"W4/{seed}")
    return Workload("W4", [Request("r000", draw(rng, 128), 256)])


def warm_up(seed: int = 0, draw: Draw = random_tokens) -> Workload:
    """Return a few requests to run before anything is timed; they share no prefix with the others."""
    rng = random.Random(f"warm/{seed}")
    return Workload("warm", [Request(f"w{index}", draw(rng, 48 + 40 * index), 8) for index in range(6)])


MAKERS: dict[str, Callable[[int, int, Draw], Workload]] = {
    "W1": mixed,
    "W2": shared_prefix,
    "W3": multi_turn,
    "W4": single_stream,
}
TITLES = {"W1": "mixed lengths", "W2": "shared prefix", "W3": "conversations", "W4": "single stream"}
_COUNTS = {"W1": 64, "W2": 64, "W3": 16, "W4": 1}


def make(name: str, seed: int = 0, scale: float = 1.0, draw: Draw = random_tokens) -> Workload:
    """Return a workload; `scale` is the share of its requests (or conversations) to run. Lengths stay."""
    return MAKERS[name](seed, max(1, int(_COUNTS[name] * scale)), draw)


def _normal(rng: random.Random) -> float:
    """Return a standard normal number (Box and Muller 1958)."""
    return math.sqrt(-2.0 * math.log(1.0 - rng.random())) * math.cos(2.0 * math.pi * rng.random())


def main() -> None:
    for name in MAKERS:
        workload = make(name)
        prompts, outputs = zip(*((len(each.prompt), each.max_new_tokens) for each in workload.initial), strict=True)
        print(
            f"{name}: {workload.num_requests} requests, first prompts of {min(prompts)} to {max(prompts)} tokens, "
            f"outputs of {min(outputs)} to {max(outputs)}, digest {workload.digest}"
        )


if __name__ == "__main__":
    main()
