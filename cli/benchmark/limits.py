"""The limits that a served model meets on a machine: memory bandwidth, cores, blocks of the KV pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cli.benchmark.plan import PROMPTS, STREAMS

_READ_BINDS: Final = 0.6
_CORES_BIND: Final = 0.85
_FROM_CACHES: Final = 1.05
GB, MB = 1e9, 1e6


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: which part of it is used, and what was measured. `share` is None where it was not measured."""

    name: str
    binds: bool
    share: float | None
    words: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured. Rates are tokens a second of one stream, and bytes a second; None was not measured.

    `cores_busy` is of all processes, while the most streams ran. `slots` is the size of the KV pool in tokens.
    """

    read_rate: float | None
    weight_bytes: int
    one_stream: float | None
    cores: int
    cores_busy: float | None
    busy_streams: int
    slots: int
    max_model_len: int
    max_num_seqs: int


def limits(measured: Measured) -> list[Limit]:
    return [*_bandwidth(measured), *_cores(measured), _blocks(measured)]


def _bandwidth(measured: Measured) -> Iterator[Limit]:
    if measured.read_rate is None or measured.one_stream is None:
        return
    used = measured.weight_bytes * measured.one_stream
    share = used / measured.read_rate
    weights, rate = f"{measured.weight_bytes / MB:,.0f} MB", f"{measured.read_rate / GB:.1f} GB/s"
    words = f"one stream reads {used / GB:.1f} of {rate}: {weights} a token"
    if share > _FROM_CACHES:
        words = f"weights of {weights} come from the caches; memory gives {rate}"
    yield Limit("memory bandwidth", _READ_BINDS <= share <= _FROM_CACHES, share, words)


def _cores(measured: Measured) -> Iterator[Limit]:
    if measured.cores_busy is None:
        return
    share, count = measured.cores_busy / measured.cores, measured.busy_streams
    words = f"{measured.cores_busy:.1f} of {measured.cores} busy with {count} stream{'s' if count > 1 else ''}"
    yield Limit("cores", share >= _CORES_BIND, share, words)


def _blocks(measured: Measured) -> Limit:
    """The pool binds where fewer of the longest measured sequences fit than the most streams that were measured."""
    length = min(max(PROMPTS), measured.max_model_len)
    fits, wanted = measured.slots // length, min(max(STREAMS), measured.max_num_seqs)
    sequences = f"{fits:,} sequences of {length:,}; up to {measured.max_num_seqs} run"
    words = f"the pool holds {measured.slots:,} tokens: {sequences}"
    return Limit("KV blocks", fits < wanted, min(1.0, wanted / fits) if fits else 1.0, words)
