"""The log of arrivals that `quire replay` reads: lengths and keyed hashes of blocks, no text.

The first line is a header, every other line is one request, each a JSON object. A block of `block_size` tokens is named
by a number, and two requests share a prefix as far as their numbers are equal. Mooncake's traces have no header and
blocks of 512 tokens; they are read and written too. A file whose name ends with .gz is unpacked.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from common.checkpoint.bounded_json import shown
from common.contracts.errors import FieldViolation, InvalidConfig

VERSION: Final = 1
MOONCAKE_BLOCK: Final = 512
_MOST_TOKENS: Final = 1 << 24
_MOST_LINE: Final = 1 << 22
# A week. Time without requests takes time to replay too: a thousandth of it, or less.
_MOST_SECONDS: Final = 7 * 86400.0
# Seconds that a request took, a day: steps are fitted to it.
_MOST_TOOK: Final = 86400.0
# Traces may have times of a clock, in milliseconds from 1970.
_LATEST_MS: Final = 1e13


@dataclass(frozen=True, slots=True)
class Measured:
    """What happened to a request when it was recorded: seconds from its arrival, and cached tokens of its prompt."""

    first_token_s: float
    finished_s: float
    cached_tokens: int = 0
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at` is in seconds from the beginning of the trace.

    `blocks` names the full blocks of its prompt, and of its output as far as that was recorded.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time. `suite` says how the recorded suite was made; it is empty for a foreign trace."""

    arrivals: tuple[Arrival, ...]
    block_size: int
    suite: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else 0.0


def read_trace(path: Path) -> Trace:
    """Return a trace of Quire or of Mooncake. Raises InvalidConfig with the line that is wrong."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            # A packed line may be far longer than its file.
            return _parse(path, iter(lambda: file.readline(_MOST_LINE + 1), ""))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _wrong(path, f"cannot be unpacked ({error}); the file may be cut or corrupt") from None
    except OSError as error:
        raise InvalidConfig(FieldViolation("LOG", f"{path} cannot be read: {error.strerror}")) from error
    except UnicodeDecodeError:
        raise _wrong(path, "must be text in UTF-8; expected a log of `quire record`, or a Mooncake trace") from None


def _parse(path: Path, lines: Iterable[str]) -> Trace:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise _wrong(path, "is empty; expected a log of `quire record`, or a trace of Mooncake")
    head = _object(path, *first)
    if "quire_trace" in head:
        if head["quire_trace"] != VERSION:
            raise _wrong(path, f"has version {head['quire_trace']!r}; this quire reads version {VERSION}", 1)
        read, size = _read_line, _number(path, 1, head, "block_size", 1, 1 << 16)
        arrivals = [read(path, number, _object(path, number, line)) for number, line in numbered]
        return _ordered(path, arrivals, size, head.get("suite") or {})
    arrivals = [_mooncake_line(path, first[0], head)]
    arrivals += [_mooncake_line(path, number, _object(path, number, line)) for number, line in numbered]
    return _ordered(path, arrivals, MOONCAKE_BLOCK, {})


def _ordered(path: Path, arrivals: list[Arrival], block_size: int, suite: Mapping[str, Any]) -> Trace:
    if not arrivals:
        raise _wrong(path, "has no request; record one while requests arrive")
    arrivals = sorted(arrivals, key=lambda each: each.at)
    if arrivals[-1].at > _MOST_SECONDS:  # times of a clock, in a foreign trace
        arrivals = [replace(each, at=each.at - arrivals[0].at) for each in arrivals]
    if arrivals[-1].at > _MOST_SECONDS:
        raise _wrong(path, f"spans {arrivals[-1].at:,.0f} s; expected a week at most: cut it into parts")
    return Trace(tuple(arrivals), block_size, suite)


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line) if len(line) <= _MOST_LINE else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _wrong(path, "is not a JSON object; the file may be cut or corrupt", number)
    return found


def _read_line(path: Path, number: int, line: Mapping[str, Any]) -> Arrival:
    measured = None
    if line.get("ttft") is not None:
        cached = _number(path, number, line, "cached", 0, _MOST_TOKENS) if "cached" in line else 0
        first, took = (_time(path, number, line, name, _MOST_TOOK) for name in ("ttft", "took"))
        if took < first:
            raise _wrong(path, f"took is {took!r}; expected at least the ttft, {first!r}", number)
        measured = Measured(first, took, cached, str(line.get("worker", "")))
    return Arrival(
        _time(path, number, line, "at", _MOST_SECONDS),
        _number(path, number, line, "prompt", 1, _MOST_TOKENS),
        _number(path, number, line, "output", 0, _MOST_TOKENS),
        _blocks(path, number, line, "blocks"),
        str(line.get("tenant", "")),
        _number(path, number, line, "priority", -100, 100) if "priority" in line else 0,
        measured,
    )


def _mooncake_line(path: Path, number: int, line: Mapping[str, Any]) -> Arrival:
    return Arrival(
        _time(path, number, line, "timestamp", _LATEST_MS) / 1e3,
        _number(path, number, line, "input_length", 1, _MOST_TOKENS),
        _number(path, number, line, "output_length", 0, _MOST_TOKENS),
        _blocks(path, number, line, "hash_ids"),
    )


def _number(path: Path, number: int, line: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(path, f"{name} is {shown(value)}; expected {least} to {most}", number)
    return value


def _time(path: Path, number: int, line: Mapping[str, Any], name: str, most: float) -> float:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise _wrong(path, f"{name} is {shown(value)}; expected a time from 0 to {most:,.0f}", number)
    return float(value)


def _blocks(path: Path, number: int, line: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = line.get(name, [])
    if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in value):
        raise _wrong(path, f"{name} must be a list of numbers", number)
    return tuple(value)


def _wrong(path: Path, what: str, number: int | None = None) -> InvalidConfig:
    where = f"{path.name}, line {number}: " if number else f"{path} "
    return InvalidConfig(FieldViolation("LOG", f"{where}{what}"))


# ---------------------------------------------------------------- writing


def header(block_size: int, suite: Mapping[str, Any]) -> str:
    """Return the first line of a log."""
    return json.dumps({"quire_trace": VERSION, "block_size": block_size, "suite": dict(suite)})


def line_of(arrival: Arrival) -> str:
    """Return a request's line of a log; what is empty is left out."""
    line: dict[str, Any] = {
        "at": round(arrival.at, 6),
        "prompt": arrival.prompt_tokens,
        "output": arrival.output_tokens,
    }
    if arrival.blocks:
        line["blocks"] = list(arrival.blocks)
    if arrival.tenant:
        line["tenant"] = arrival.tenant
    if arrival.priority:
        line["priority"] = arrival.priority
    if (measured := arrival.measured) is not None:
        line |= {"ttft": round(measured.first_token_s, 6), "took": round(measured.finished_s, 6)}
        line |= {"cached": measured.cached_tokens, "worker": measured.worker}
    return json.dumps(line, separators=(",", ":"))


def lines_of(trace: Trace) -> Iterator[str]:
    """Yield the lines of a log."""
    yield header(trace.block_size, trace.suite)
    for arrival in trace.arrivals:
        yield line_of(arrival)


def mooncake_lines(trace: Trace) -> Iterator[str]:
    """Yield the lines of the same arrivals in Mooncake's form: a number for each 512 tokens, and for the rest.

    A number names all tokens before its end, as those of a log do; so the last one of ours before it names it.
    """
    ids: dict[tuple[int, int], int] = {}
    for request, arrival in enumerate(trace.arrivals):
        full = arrival.prompt_tokens // trace.block_size
        hash_ids = []
        for end in range(MOONCAKE_BLOCK, arrival.prompt_tokens + MOONCAKE_BLOCK, MOONCAKE_BLOCK):
            known = min(len(arrival.blocks), full, end // trace.block_size)
            # Less than a block may follow that has no name.
            whole = known > 0 and min(end, arrival.prompt_tokens) - known * trace.block_size < trace.block_size
            key = (end, arrival.blocks[known - 1]) if whole else (-end, request)
            hash_ids.append(ids.setdefault(key, len(ids)))
        line = {"timestamp": round(1000 * arrival.at), "input_length": arrival.prompt_tokens}
        yield json.dumps(line | {"output_length": arrival.output_tokens, "hash_ids": hash_ids})
