"""Which options to try instead of those that are served, and what to recommend from the measured ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Final

LEAST_GAIN: Final = 0.03
"""Differences below this share are within noise, however steady the runs are."""
ROOM: Final = 1.3
"""A KV type is recommended for its room from this ratio of tokens on, where the blocks bind."""
OPTIONS: Final = {
    "quantization": "quantisation",
    "threads": "threads",
    "kv_cache_dtype": "KV type",
    "block_size": "block size",
}
"""Options that are compared, and their names in words."""
_BLOCK_SIZES: Final = (16, 32, 64)
_LOSSY: Final = {"quantization", "kv_cache_dtype"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a suite is served with; `native` means Quire's own forward on a CPU."""

    device: str
    native: bool
    quantization: str
    threads: int
    cores: int
    kv_dtype: str
    block_size: int

    @property
    def on_cpu(self) -> bool:
        return self.device.startswith("cpu")

    def of(self, option: str) -> str:
        """Return the present value of an option."""
        values = {
            "quantization": self.quantization,
            "threads": str(self.threads),
            "kv_cache_dtype": self.kv_dtype,
            "block_size": str(self.block_size),
        }
        return values[option]


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another value of one option."""

    option: str
    value: str

    @property
    def flags(self) -> tuple[str, str]:
        return (f"--{self.option.replace('_', '-')}", self.value)

    @property
    def words(self) -> str:
        return " ".join(self.flags)


def alternatives(setting: Setting) -> list[Alternative]:
    """Return what to try, the most promising value of each option before the second of any."""
    values: dict[str, list[str]] = {
        "quantization": ["int8", "w8a8"] if setting.native and setting.quantization == "none" else [],
        "threads": list(_threads(setting)) if setting.on_cpu else [],
        "kv_cache_dtype": list(_kv_types(setting)),
        "block_size": [str(size) for size in _BLOCK_SIZES if size != setting.block_size],
    }
    rounds = zip_longest(*([Alternative(option, value) for value in found] for option, found in values.items()))
    return [each for turn in rounds for each in turn if each is not None]


def _threads(setting: Setting) -> Iterator[str]:
    for count in (setting.cores, setting.cores // 2):
        if count >= 1 and count != setting.threads:
            yield str(count)


def _kv_types(setting: Setting) -> Iterator[str]:
    if setting.kv_dtype not in ("int8", "fp8"):
        yield "int8"
    if setting.kv_dtype == "float32":
        yield "bfloat16"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Speeds of the suite and of an alternative, in turns. `room` is how many times as many tokens a KV type holds."""

    alternative: Alternative
    before: tuple[float, ...]
    after: tuple[float, ...]
    room: float = 1.0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Alternative over suite, of each turn."""
        return tuple(after / before for before, after in zip(self.before, self.after, strict=True))

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def noise(self) -> float:
        """The share by which equal runs differ: twice the median change from one turn of the suite to the next."""
        changes = [abs(later / earlier - 1) for earlier, later in pairwise(self.before)]
        return max(LEAST_GAIN, 2 * statistics.median(changes)) if changes else LEAST_GAIN

    @property
    def faster(self) -> bool:
        """Whether the gain is above the noise, and there in every turn."""
        return self.ratio > 1 + self.noise and min(self.ratios) > 1

    @property
    def slower(self) -> bool:
        return self.ratio < 1 - self.noise and max(self.ratios) < 1


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do about an option. `flags` is empty where nothing should change."""

    option: str
    flags: str
    reason: str


def advise(setting: Setting, comparisons: Sequence[Comparison], blocks_bind: bool) -> list[Advice]:
    """Return the advice on each option of which an alternative was measured."""
    found = []
    for option in OPTIONS:
        mine = [each for each in comparisons if each.alternative.option == option]
        if mine:
            found.append(_advice(setting, option, mine, blocks_bind))
    return found


def _advice(setting: Setting, option: str, mine: Sequence[Comparison], blocks_bind: bool) -> Advice:
    faster = [each for each in mine if each.faster]
    roomy = [each for each in mine if blocks_bind and each.room >= ROOM and not each.slower]
    if faster:
        best = max(faster, key=lambda each: each.ratio)
        return Advice(option, best.alternative.words, _because(best))
    if roomy:
        best = max(roomy, key=lambda each: each.room)
        return Advice(option, best.alternative.words, _because(best))
    return Advice(option, "", f"keep {setting.of(option)}: " + "; ".join(map(_why_not, mine)))


def _because(best: Comparison) -> str:
    least, greatest = min(best.ratios), max(best.ratios)
    speed = f"{best.ratio:.2f} times the tokens a second ({least:.2f} to {greatest:.2f})"
    words = [speed if best.faster else f"speed within noise ({best.ratio:.2f})"]
    if best.room >= ROOM:
        words.append(f"{best.room:.1f} times the tokens fit")
    if best.alternative.option in _LOSSY:
        words.append("answers change a little")
    return "; ".join(words)


def _why_not(each: Comparison) -> str:
    words = f"{each.alternative.value} gives {each.ratio:.2f}"
    if not each.slower:
        words += f", within noise ({100 * each.noise:.0f} %)"
    return words + (f", and {each.room:.1f} times the tokens fit" if each.room >= ROOM else "")
