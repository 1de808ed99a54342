"""Draws a trace: its spans as a tree over time, and under each span the decisions and events that explain it.

    chat small        router            0   412 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
    ├─ queue          router      1.20 ms  0.40 ms  ╸
    │     ◆ 1.30 ms  routing: worker-1 (lowest cost)
    └─ stream         router      1.80 ms   410 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
       └─ sequence    gpuworker   2.00 ms   410 ms  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━

The bars take the width that is left. Where they would have less than _MIN_BAR columns, long names are cut.
Times are from the start of the trace. A span whose parent is not here (the client's, or not yet delivered) is a root.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from cli.views.cutting import cut
from common.contracts import gen_ai_names
from quire.decision.v1 import decision_pb2 as pb

# As common/telemetry/decisions.py writes them.
_EVENT, _PREFIX = "decision", "quire.decision."
_WORDS = frozenset({"id", "kind", "chosen", "candidates", "reasons", "victim", "beneficiary"})
_INDENT = "    "


# Decision records in a line for people: the choice, the reason, and the cost of each candidate.
def is_decision(event: pb.SpanEvent) -> bool:
    return event.name == _EVENT and _PREFIX + "chosen" in event.attributes


def decision_lines(event: pb.SpanEvent, at: str, width: int) -> Iterator[Text]:
    """Yield one line for a decision; where it is wider than `width`, its candidates follow on lines of their own."""
    attributes = {
        key.removeprefix(_PREFIX): value for key, value in event.attributes.items() if key.startswith(_PREFIX)
    }
    line = Text.assemble(
        ("◆ ", "yellow"), (f"{at}  ", "dim"), attributes.get("kind", ""), ": ", (attributes["chosen"], "bold")
    )
    reasons = json.loads(attributes.get("reasons", "[]"))
    if reasons:
        line.append(f" ({', '.join(reasons)})")
    if "victim" in attributes or "beneficiary" in attributes:
        line.append(
            f"  {attributes.get('victim', 'nobody')} gave way to {attributes.get('beneficiary', 'nobody')}", "yellow"
        )
    figures = _figures(attributes)
    if figures:
        line.append(f"  {figures}", "dim")
    candidates = [_candidate(json.loads(each)) for each in json.loads(attributes.get("candidates", "[]"))]
    whole = Text.assemble(line, ("  [", "dim"), (" | ".join(candidates), "dim"), ("]", "dim"))
    if candidates and whole.cell_len <= width:
        yield whole
        return
    yield line
    for candidate in candidates:
        name = candidate.partition(" ")[0].rstrip(":")
        yield Text(f"{_INDENT}{'▸' if name == attributes['chosen'] else ' '} {candidate}", "dim")


def plain_attributes(attributes: Mapping[str, str], leave_out: Collection[str] = ()) -> str:
    """Return attributes as `name value`, sorted, without Quire's prefix."""
    kept = sorted(item for item in attributes.items() if item[0] not in leave_out)
    return ", ".join(f"{key.removeprefix('quire.')} {value}" for key, value in kept)


def duration(nanoseconds: int) -> str:
    """Return a duration with three digits or so: 0.031 ms, 4.20 ms, 412 ms, 3.14 s."""
    for unit, size in (("ms", 1e6), ("s", 1e9)):
        value = nanoseconds / size
        if abs(value) < 0.1:
            return f"{value:.3f} {unit}"
        for decimals, limit in ((2, 9.995), (1, 99.95), (0, 999.5)):
            if abs(value) < limit:
                return f"{value:.{decimals}f} {unit}"
    return f"{nanoseconds / 1e9:.0f} s"


def _figures(attributes: Mapping[str, str]) -> str:
    numbers = sorted(
        (key, value) for key, value in attributes.items() if key not in _WORDS and not key.startswith("age.")
    )
    words = [f"{key} {_number(float(value))}" for key, value in numbers]
    ages = [float(value) for key, value in attributes.items() if key.startswith("age.")]
    return ", ".join(words + ([f"oldest signal {max(ages):.3g} s"] if ages else []))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _candidate(candidate: dict[str, Any]) -> str:
    name, cost, rejected, figures = (candidate.pop(key, None) for key in ("name", "cost", "rejected", "figures"))
    terms = ", ".join(f"{term} {_number(value)}" for term, value in candidate.items())
    words = str(name) if cost is None else f"{name} {_number(cost)}"
    if terms:
        words += f": {terms}"
    if figures:
        words += "; " + ", ".join(f"{figure} {_number(value)}" for figure, value in figures.items())
    return f"{words} out: {rejected}" if rejected else words


_COLOURS = {"router": "cyan", "kvmanager": "magenta", "gpuworker": "green"}
_OTHER_COLOURS = ("yellow", "blue", "bright_red")
_MIN_BAR, _MAX_BAR = 16, 96
_MIN_NAME = 12
_TIME_WIDTH = 9
_HANGING = "    "
# Attributes that the heading or the row already shows.
_SAID = frozenset({"quire.request_id", "quire.sequence"})
# Attributes of common conventions, but for how a call ended.
_COMMON = (gen_ai_names.PREFIX, "http.", "url.", "network.", "server.", "rpc.", "db.", "peer.")
_KEPT = frozenset({"http.response.status_code", "rpc.response.status_code"})


def _own(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes without those of common conventions, which repeat Quire's own: --json has them all."""
    return {name: value for name, value in attributes.items() if name in _KEPT or not name.startswith(_COMMON)}


def render_trace(response: pb.GetTraceResponse) -> TraceView:
    """Return a rich renderable of a trace; its bars take the width of the console."""
    return TraceView(response)


@dataclass(frozen=True, slots=True)
class _Row:
    """One span, with the prefixes of its name and of the lines under it."""

    span: pb.Span
    branch: str
    below: str

    @property
    def name(self) -> str:
        """The span's name; of an RPC the service without its package, and the method."""
        service, slash, method = self.span.name.rpartition("/")
        return service.rpartition(".")[2] + slash + method


class TraceView:
    def __init__(self, response: pb.GetTraceResponse) -> None:
        self._trace_id = response.trace_id
        self._spans = {span.span_id: span for span in response.spans}
        self._rows = list(_rows(response.spans))
        self._start = min((span.start_unix_nano for span in response.spans), default=0)
        end = max((_end(span) for span in response.spans), default=0)
        self._length = max(1, end - self._start)  # nanoseconds; the bars divide by it

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._heading()
        if not self._rows:
            return
        services = max(len(_service(row.span)) for row in self._rows)
        room = options.max_width - services - 2 * _TIME_WIDTH - 6
        names = min(max(len(row.branch + row.name) for row in self._rows), max(_MIN_NAME, room - _MIN_BAR))
        bar = max(0, min(_MAX_BAR, room - names))
        yield Text(f"{'':{names + services + 2}}{'start':>{_TIME_WIDTH + 1}}{'took':>{_TIME_WIDTH}}", "dim")
        for row in self._rows:
            yield self._row(row, names, services, bar)
            yield from self._explanations(row, console, options.max_width)

    def _heading(self) -> Text:
        services = sorted({_service(span) for span in self._spans.values()})
        requests = sorted({span.attributes.get("quire.request_id", "") for span in self._spans.values()} - {""})
        heading = Text.assemble(("trace ", "dim"), (self._trace_id, "bold"))
        if requests:
            heading.append(f"  {_plural(len(requests), 'request')} {', '.join(requests)}")
        over = f" over {', '.join(services)}" if services else ""
        counts = f"{_plural(len(self._spans), 'span', with_number=True)} in {duration(self._length)}{over}"
        return heading.append(f"\n{counts}", "dim")

    def _row(self, row: _Row, names: int, services: int, bar: int) -> Text:
        span, service = row.span, _service(row.span)
        failed = span.status == "error"
        line = Text(no_wrap=True, overflow="crop")
        name = cut(row.name, names - len(row.branch))
        line.append(row.branch, "dim").append(name, "bold red" if failed else "bold")
        line.append(" " * (names - len(row.branch + name) + 2))
        line.append(service.ljust(services), _colour(service))
        line.append(self._offset(span.start_unix_nano).rjust(_TIME_WIDTH + 1), "dim")
        line.append((duration(_end(span) - span.start_unix_nano) if span.end_unix_nano else "…").rjust(_TIME_WIDTH))
        line.append("  ").append(self._bar(span, bar), "red" if failed else _colour(service))
        return line

    def _bar(self, span: pb.Span, width: int) -> str:
        """Return the span's place in the trace, in half characters; the shortest span has one."""
        if not width:
            return ""
        first = (span.start_unix_nano - self._start) * 2 * width // self._length
        first = min(first, 2 * width - 1)
        after = max(first + 1, -((self._start - _end(span)) * 2 * width // self._length))
        cells = (2 * (first <= 2 * cell < after) + (first <= 2 * cell + 1 < after) for cell in range(width))
        return "".join(" ╺╸━"[cell] for cell in cells).rstrip()

    def _explanations(self, row: _Row, console: Console, width: int) -> Iterator[Text]:
        """Yield the lines under a span's row; a line that is too wide continues under its own beginning."""
        room = max(_MIN_BAR, width - len(row.below))
        for line in self._lines(row.span, room):
            first, *rest = line.wrap(console, room)
            first.rstrip()
            yield Text.assemble((row.below, "dim"), first)
            hanging = " " * _indent_of(line.plain) + _HANGING
            for more in Text("").join(rest).wrap(console, max(_MIN_BAR, room - len(hanging))) if rest else ():
                yield Text.assemble((row.below + hanging, "dim"), more)

    def _lines(self, span: pb.Span, width: int) -> Iterator[Text]:
        if span.status == "error":
            yield Text(f"✗ {span.status_message or 'failed'}", "red")
        facts = plain_attributes(_own(span.attributes), _SAID)
        if facts:
            yield Text(facts, "dim")
        for event in sorted(span.events, key=lambda event: event.time_unix_nano):
            at = self._offset(event.time_unix_nano)
            if is_decision(event):
                yield from decision_lines(event, at, width)
            else:
                yield Text.assemble(("· ", "dim"), (f"{at}  ", "dim"), event.name, *_facts(event))
        for link in span.links:
            yield Text.assemble(("↪ ", "yellow"), self._link(link))

    def _link(self, link: str) -> str:
        trace_id, _, span_id = link.partition(":")
        known = self._spans.get(span_id) if trace_id == self._trace_id else None
        if known is not None:
            return f"linked to {known.name} ({_service(known)}) in this trace"
        return f"linked to another trace: quire trace {trace_id}"

    def _offset(self, time_ns: int) -> str:
        return "0" if time_ns == self._start else duration(time_ns - self._start)


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _facts(event: pb.SpanEvent) -> tuple[tuple[str, str], ...]:
    facts = plain_attributes(event.attributes, _SAID)
    return ((f"  {facts}", "dim"),) if facts else ()


def _rows(spans: Sequence[pb.Span]) -> Iterator[_Row]:
    """Yield the spans parents first, siblings in the order of their start."""
    known = {span.span_id for span in spans}
    children: dict[str, list[pb.Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_unix_nano, -_end(span))):
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children.setdefault(parent, []).append(span)

    def walk(parent: str, indent: str) -> Iterator[_Row]:
        siblings = children.get(parent, [])
        for span in siblings:
            last, root = span is siblings[-1], parent == ""
            under = indent if root else indent + ("   " if last else "│  ")
            branch = indent if root else indent + ("└─ " if last else "├─ ")
            yield _Row(span, branch, under + ("│  " if children.get(span.span_id) else "   "))
            yield from walk(span.span_id, under)

    yield from walk("", "")


def _end(span: pb.Span) -> int:
    """Return the end of a span; a span that has not ended is drawn with its start as its end."""
    return max(span.start_unix_nano, span.end_unix_nano)


def _service(span: pb.Span) -> str:
    return span.service.removeprefix("quire-")


def _colour(service: str) -> str:
    return _COLOURS.get(service) or _OTHER_COLOURS[sum(service.encode()) % len(_OTHER_COLOURS)]


def _plural(count: int, noun: str, with_number: bool = False) -> str:
    word = noun if count == 1 else noun + "s"
    return f"{count} {word}" if with_number else word
