"""From result lines of several engines to ratios: Quire over the fastest peer, for each workload, type and mode.

Engines ran in turns, so each repetition gives one ratio of neighbouring runs. The figure is the median of these ratios,
and the spread their minimum and maximum.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

OURS: Final = "ours"
NAIVE: Final = "naive"
SHORT: Final = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, order=True, slots=True)
class Setting:
    """The conditions that several engines' runs share."""

    workload: str
    dtype: str
    prefix_caching: bool
    scale: float

    @property
    def name(self) -> str:
        """The setting in the names of figures: W1_bf16, W2_fp32_cached."""
        return f"{self.workload}_{SHORT[self.dtype]}" + ("_cached" if self.prefix_caching else "")

    @staticmethod
    def of(line: Mapping[str, Any]) -> Setting:
        cached = line["prefix_caching"] == "on"
        return Setting(line["workload"], line["dtype"], cached, float(line["scale"]))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Quire over one peer in one setting; `peer_speed` and `our_speed` are median output tokens a second."""

    setting: Setting
    peer: str
    our_speed: float
    peer_speed: float
    median: float
    least: float
    greatest: float


Lines = Sequence[Mapping[str, Any]]


def by_engine(lines: Iterable[Mapping[str, Any]]) -> dict[Setting, dict[str, list[Mapping[str, Any]]]]:
    """Return the lines of each engine in each setting, repetitions in order."""
    found: dict[Setting, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        found[Setting.of(line)][line["engine"]].append(line)
    return {setting: dict(found[setting]) for setting in sorted(found)}


def median_of(lines: Lines, figure: str) -> float:
    return statistics.median(float(line[figure]) for line in lines)


def ratio(setting: Setting, engines: Mapping[str, Lines], peer: str) -> Ratio:
    """Return Quire over this peer; repetitions that one of them lacks do not count."""
    ours, theirs = ({line["rep"]: float(line["output_tok_s"]) for line in engines[name]} for name in (OURS, peer))
    pairs = [ours[rep] / theirs[rep] for rep in sorted(ours.keys() & theirs.keys())]
    speeds = median_of(engines[OURS], "output_tok_s"), median_of(engines[peer], "output_tok_s")
    return Ratio(setting, peer, *speeds, statistics.median(pairs), min(pairs), max(pairs))


def over_fastest(lines: Iterable[Mapping[str, Any]]) -> list[Ratio]:
    """Return the ratio over the peer of the highest median, for each setting in which Quire and a peer ran."""
    found = []
    for setting, engines in by_engine(lines).items():
        peers = [name for name in engines if name != OURS]
        if OURS in engines and peers:
            fastest = max(peers, key=lambda name: median_of(engines[name], "output_tok_s"))
            found.append(ratio(setting, engines, fastest))
    return found


def over_naive(lines: Iterable[Mapping[str, Any]]) -> list[Ratio]:
    """Return the ratio over static batches, on W1."""
    settings = by_engine(lines).items()
    return [
        ratio(setting, engines, NAIVE)
        for setting, engines in settings
        if setting.workload == "W1" and {OURS, NAIVE} <= engines.keys()
    ]


def ratio_figures(lines: Lines) -> dict[str, float]:
    """Return the figures by name: ratio_W1_bf16, its _least and _greatest, and ratio_over_naive_W1 (of float32)."""
    figures: dict[str, float] = {}
    for each in over_fastest(lines):
        name = f"ratio_{each.setting.name}"
        figures |= {name: each.median, f"{name}_least": each.least, f"{name}_greatest": each.greatest}
        figures[f"scale_{each.setting.name}"] = each.setting.scale
    for each in over_naive(lines):
        suffix = "" if each.setting.dtype == "float32" else f"_{SHORT[each.setting.dtype]}"
        figures[f"ratio_over_naive_W1{suffix}"] = each.median
    return figures
