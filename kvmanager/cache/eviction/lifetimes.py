"""What a policy learns of reuse: after how long blocks of a class are used again, and what a block is worth by its age.

The age of a block is the number of blocks that were released since it was. Ages fall into buckets of half an octave. A
block that waits costs its place for so long; it pays when it is used again. The worth of a block of age a is the
greatest ratio, over all later ages b, of the chance to be used between a and b to the expected wait until the use or b:
the index of Gittins. To evict the block of the least worth is best when blocks are independent of each other.
"""

from __future__ import annotations

_BUCKETS = 2 * 33
_DECAY = 0.9
_FLAT = 1.0
"""Blocks that are assumed to be used again in each bucket before anything was learned."""
_POOLED = 60.0
"""Blocks that are assumed to have the lifetimes of all classes together."""


def bucket_of(age: int) -> int:
    """Return the bucket of an age: two for each power of two, and the last for all that is older."""
    bits = age.bit_length()
    if bits < 2:
        return bits + 1
    bucket = 2 * bits + (age >> (bits - 2) & 1)
    return bucket if bucket < _BUCKETS else _BUCKETS - 1


def _first_age(bucket: int) -> int:
    bits, upper = divmod(bucket, 2)
    return (2 + upper) << (bits - 2) if bits > 1 else max(0, bucket - 1)


_FIRST = [_first_age(bucket) for bucket in range(_BUCKETS + 1)]


class Lifetimes:
    """Uses by class and age. `worth[klass][bucket]` is current after each `learn`.

    Callers add 1 to `evicted[klass]` for each block that was evicted, as one that is never used.
    """

    __slots__ = ("_reused", "evicted", "worth")

    def __init__(self, classes: int) -> None:
        self._reused = [[0.0] * _BUCKETS for _ in range(classes)]
        self.evicted = [0.0] * classes
        self.worth = [[0.0] * _BUCKETS for _ in range(classes)]
        self.learn()

    def reuse(self, klass: int, age: int) -> None:
        """Count a cached block that was used at this age."""
        self._reused[klass][bucket_of(age)] += 1.0

    def regret(self, klass: int, age: int) -> None:
        """Count an evicted block whose content was wanted at this age after all."""
        self.evicted[klass] -= 1.0
        self._reused[klass][bucket_of(age)] += 1.0

    def learn(self) -> None:
        """Compute the worth of all classes and ages anew, and let what was counted fade."""
        pooled = [_FLAT + sum(column) for column in zip(*self._reused, strict=True)]
        never = _FLAT + sum(self.evicted)
        weight = _POOLED / (never + sum(pooled))
        prior = [each * weight for each in pooled]
        unknown = _worths(prior, never * weight)
        for klass, reused in enumerate(self._reused):
            evicted = max(0.0, self.evicted[klass])
            if evicted + sum(reused) < 1.0:
                self.worth[klass] = unknown
                continue
            self.worth[klass] = _worths([a + b for a, b in zip(reused, prior, strict=True)], evicted + never * weight)
            self._reused[klass] = [each * _DECAY for each in reused]
            self.evicted[klass] = evicted * _DECAY


def _worths(reused: list[float], never: float) -> list[float]:
    """Return the worth by age: slopes of the concave hull over (place-time spent, uses) from each age on."""
    alive, spent, uses = sum(reused) + never, 0.0, 0.0
    points = []
    for bucket, count in enumerate(reused):
        points.append((spent, uses))
        width = _FIRST[bucket + 1] - _FIRST[bucket]
        spent += width * (alive - count / 2)
        alive -= count
        uses += count
    hull = [(spent, uses)]
    worths = [0.0] * len(reused)
    for bucket in range(len(points) - 1, -1, -1):
        x, y = points[bucket]
        while len(hull) > 1 and (hull[-2][1] - y) * (hull[-1][0] - x) >= (hull[-1][1] - y) * (hull[-2][0] - x):
            hull.pop()
        worths[bucket] = (hull[-1][1] - y) / (hull[-1][0] - x) if hull[-1][0] > x else 0.0
        hull.append((x, y))
    return worths
