"""What `quire bench` found, as plain numbers: for the terminal, the plot and --json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cli.benchmark.advice import OPTIONS, Advice, Comparison, Setting
from cli.benchmark.limits import Limit
from cli.benchmark.plan import LeftOut, Run


@dataclass(frozen=True, slots=True)
class Figure:
    """The values of one run, one for each repeat: tokens a second, or seconds to the first token."""

    run: Run
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Report:
    """`seconds` is the length of the whole run. `served` describes model and suite, in words and numbers."""

    machine: Mapping[str, Any]
    served: Mapping[str, Any]
    setting: Setting
    figures: tuple[Figure, ...]
    limits: tuple[Limit, ...]
    comparisons: tuple[Comparison, ...]
    advice: tuple[Advice, ...]
    left_out: tuple[LeftOut, ...]
    seconds: float

    def of(self, kind: str) -> list[Figure]:
        """Return the figures of one kind, smallest run first."""
        mine = [each for each in self.figures if each.run.kind == kind]
        return sorted(mine, key=lambda each: (each.run.streams, each.run.prompt))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a picture: its name, its value, and the least and the greatest that were measured.

    `good` is not set for an alternative that gains nothing.
    """

    name: str
    value: float
    least: float
    greatest: float
    good: bool = True


def unsteadiness(report: Report) -> float:
    """Return the share by which equal runs of the suite differed at most; 0 where nothing was compared."""
    return max((each.noise for each in report.comparisons), default=0.0)


def speed_bars(report: Report) -> list[Bar]:
    """Return tokens a second by number of streams."""
    return [_bar(each, each.run.name, 1.0) for each in report.of("streams")]


def first_token_bars(report: Report) -> list[Bar]:
    """Return milliseconds to the first token by length of the prompt."""
    return [_bar(each, f"{each.run.prompt:,} tokens", 1e3) for each in report.of("ttft")]


def ratio_bars(report: Report) -> list[Bar]:
    """Return the speed of each alternative over that of the suite."""
    return [_ratio_bar(each) for each in report.comparisons]


def _bar(figure: Figure, name: str, scale: float) -> Bar:
    values = [scale * value for value in figure.values]
    return Bar(name, statistics.median(values), min(values), max(values))


def _ratio_bar(each: Comparison) -> Bar:
    name = f"{OPTIONS[each.alternative.option]} {each.alternative.value}"
    return Bar(name, each.ratio, min(each.ratios), max(each.ratios), good=each.faster)


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as an object of JSON. Speeds are tokens a second, times seconds."""
    return {
        "bench": "bench",
        "machine": dict(report.machine),
        "served": dict(report.served),
        "setting": asdict(report.setting),
        "figures": _figures(report),
        "runs": [{**asdict(each.run), "values": list(each.values)} for each in report.figures],
        "limits": [asdict(each) for each in report.limits],
        "comparisons": [_comparison(each) for each in report.comparisons],
        "advice": [asdict(each) for each in report.advice],
        "left_out": [asdict(each) for each in report.left_out],
        "seconds": round(report.seconds, 3),
    }


def _figures(report: Report) -> dict[str, float]:
    speeds = {f"tok_s_b{each.run.streams}": round(each.median, 6) for each in report.of("streams")}
    return speeds | {f"ttft_s_{each.run.prompt}": round(each.median, 6) for each in report.of("ttft")}


def _comparison(each: Comparison) -> dict[str, Any]:
    found = {"ratio": round(each.ratio, 6), "noise": round(each.noise, 6), "room": round(each.room, 6)}
    return {**asdict(each.alternative), **found, "ratios": [round(ratio, 6) for ratio in each.ratios]}
