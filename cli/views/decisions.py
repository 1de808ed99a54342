"""Decision records in a line for people: the choice, the reason, and the cost of each candidate."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rich.text import Text

from quire.decision.v1 import decision_pb2 as pb

# As common/telemetry/decisions.py writes them.
_EVENT, _PREFIX = "decision", "quire.decision."
_WORDS = frozenset({"id", "kind", "chosen", "candidates", "reasons", "victim", "beneficiary"})
_INDENT = "    "


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
