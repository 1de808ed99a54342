"""The log of arrivals that `quire replay` reads: lengths and keyed hashes of blocks, no text.

The first line is a header, every other line is one request, each a JSON object. A block of `block_size` tokens is named
by a number, and two requests share a prefix as far as their numbers are equal. A file whose name ends with .gz is
unpacked. Public traces are read too:

    Mooncake   {"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [ID, ...]}, an id for 512 tokens
    Azure      columns TIMESTAMP, ContextTokens, GeneratedTokens, of dates and counts: no request shares a prefix
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
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
_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMS: Final = "a log of `quire record`, or a trace of Mooncake or Azure"
# Those of two days at six a second; each takes some 2 KiB of a replay.
MOST_REQUESTS: Final = 1 << 20


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
    """Arrivals in order of time. `suite` says how the recorded suite was made; it is empty for a foreign trace.

    `late_lines` counts the lines of a foreign trace whose time is before that of the line above.
    """

    arrivals: tuple[Arrival, ...]
    block_size: int
    suite: Mapping[str, Any] = field(default_factory=dict)
    late_lines: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at - self.arrivals[0].at if self.arrivals else 0.0

    @property
    def longest_gap(self) -> tuple[float, float]:
        """The longest time without a request, and when it begins: seconds, the latter from the first arrival."""
        times = [each.at for each in self.arrivals]
        return max(((b - a, a - times[0]) for a, b in itertools.pairwise(times)), default=(0.0, 0.0))


def read_trace(path: Path, first: int | None = None) -> Trace:
    """Return a trace of Quire, Mooncake or Azure; of its lines the `first` ones alone.

    Raises InvalidConfig with the line that is wrong, and for a trace of more than MOST_REQUESTS.
    """
    text = "utf-8-sig"  # spreadsheets write a mark before the first line
    try:
        with gzip.open(path, "rt", encoding=text) if path.suffix == ".gz" else path.open(encoding=text) as file:
            # A packed line may be far longer than its file.
            return _parse(path, iter(lambda: file.readline(_MOST_LINE + 1), ""), first)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _wrong(path, f"cannot be unpacked ({error}); the file may be cut or corrupt") from None
    except OSError as error:
        raise InvalidConfig(FieldViolation("LOG", f"{path} cannot be read: {error.strerror}")) from error
    except UnicodeDecodeError:
        raise _wrong(path, f"must be text in UTF-8; expected {_FORMS}") from None


def _parse(path: Path, lines: Iterable[str], most: int | None) -> Trace:
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise _wrong(path, f"is empty; expected {_FORMS}")
    number, line = first
    if "," in line and line.lstrip()[0] not in "{[":
        read_row = _azure_row(path, number, line)
        return _collected(path, (read_row(*each) for each in numbered), most, 1)
    head = _object(path, number, line)
    if "quire_trace" in head:
        if head["quire_trace"] != VERSION:
            raise _wrong(path, f"has version {head['quire_trace']!r}; this quire reads version {VERSION}", 1)
        size = _number(path, number, head, "block_size", 1, 1 << 16)
        suite = {} if head.get("suite") is None else head["suite"]
        if not isinstance(suite, dict):
            raise _wrong(path, f"suite is {shown(suite)}; expected an object, as `quire record` writes it", number)
        arrivals = (_read_line(path, at, _object(path, at, text)) for at, text in numbered)
        # Requests end in another order than they came in.
        return replace(_collected(path, arrivals, most, size), suite=suite, late_lines=0)
    others = (_mooncake_line(path, at, _object(path, at, text)) for at, text in numbered)
    return _collected(path, itertools.chain([_mooncake_line(path, number, head)], others), most, MOONCAKE_BLOCK)


def _collected(path: Path, found: Iterator[Arrival], most: int | None, block_size: int) -> Trace:
    arrivals = list(itertools.islice(found, min(most or MOST_REQUESTS, MOST_REQUESTS)))
    if not arrivals:
        raise _wrong(path, "has no request; record one while requests arrive")
    if most is None and next(found, None) is not None:
        raise _wrong(path, f"has more than {MOST_REQUESTS:,} requests; replay its first ones alone, with --first N")
    late = sum(b.at < a.at for a, b in itertools.pairwise(arrivals))
    arrivals.sort(key=lambda each: each.at)
    if arrivals[-1].at > _MOST_SECONDS or arrivals[0].at < 0:  # times of a clock, in a foreign trace
        arrivals = [replace(each, at=each.at - arrivals[0].at) for each in arrivals]
    if arrivals[-1].at > _MOST_SECONDS:
        raise _wrong(path, f"spans {arrivals[-1].at:,.0f} s; expected a week at most: cut it into parts")
    return Trace(tuple(arrivals), block_size, late_lines=late)


def _azure_row(path: Path, number: int, head: str) -> Callable[[int, str], Arrival]:
    """Return what reads a row of a trace in Azure's form, whose columns stand in `head`. Raises InvalidConfig."""
    columns = [each.strip() for each in _cells(path, number, head)]
    if missing := [name for name in _AZURE if columns.count(name) != 1]:
        what = f"has the columns {shown(columns)}; expected {', '.join(missing)} once, as Azure's traces have them"
        raise _wrong(path, what, number)
    at, prompt, output = map(columns.index, _AZURE)

    def read_row(number: int, line: str) -> Arrival:
        cells = _cells(path, number, line)
        if len(cells) != len(columns):
            raise _wrong(path, f"has {len(cells)} cells; expected {len(columns)}", number)
        return Arrival(
            _moment(path, number, cells[at]),
            _count(path, number, "ContextTokens", cells[prompt], 1),
            _count(path, number, "GeneratedTokens", cells[output], 0),
        )

    return read_row


def _cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except (csv.Error, StopIteration) as error:
        raise _wrong(path, f"has no cells between commas ({error}); the file may be cut or corrupt", number) from None


def _moment(path: Path, number: int, cell: str) -> float:
    """Return the seconds from 1970 of a date and time; without a zone it is UTC."""
    try:
        found = datetime.fromisoformat(cell.strip())
    except ValueError:
        found = None
    if found is None or ":" not in cell:
        what = f"TIMESTAMP is {shown(cell)}; expected a date and time such as 2023-11-16 18:15:46.680"
        raise _wrong(path, what, number)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _count(path: Path, number: int, name: str, cell: str, least: int) -> int:
    word = cell.strip()
    is_count = word.isascii() and word.isdecimal() and len(word) <= len(str(_MOST_TOKENS))
    if not is_count or not least <= int(word) <= _MOST_TOKENS:
        raise _wrong(path, f"{name} is {shown(cell)}; expected {least} to {_MOST_TOKENS}", number)
    return int(word)


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
    at = _time(path, number, line, "timestamp", _LATEST_MS)
    if at != int(at):
        what = f"timestamp is {at!r}; expected whole milliseconds: if it is in seconds, multiply all by 1000"
        raise _wrong(path, what, number)
    tokens = _number(path, number, line, "input_length", 1, _MOST_TOKENS)
    ids, most = _blocks(path, number, line, "hash_ids"), -(-tokens // MOONCAKE_BLOCK)
    if ids and not tokens // MOONCAKE_BLOCK <= len(ids) <= most:
        what = f"hash_ids has {len(ids)} numbers for {tokens} tokens; expected {most}"
        raise _wrong(path, f"{what}: one for each {MOONCAKE_BLOCK} tokens, and one for the rest", number)
    return Arrival(at / 1e3, tokens, _number(path, number, line, "output_length", 0, _MOST_TOKENS), ids)


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
