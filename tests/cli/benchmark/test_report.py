"""The report of `quire bench`: the data of its pictures, its JSON, and its screen of 80 columns."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from cli.benchmark.advice import Alternative, Comparison
from cli.benchmark.report import Bar, Report, as_json, first_token_bars, ratio_bars, speed_bars
from cli.benchmark.screen import bar_of, described, number, show
from tests.support.bench_report import REPORT

SCREEN = """\
SmolLM2 on a processor
513 MiB of weights in float32, K and V in float32, blocks of 16; 1 of 2 cores
through the native CPU path, up after 7.9 s; the worker has 812 MiB

Output tokens a second, all streams together
  1 stream   40.0  39.0 to 41.0  ━━━━━╸
  8 streams   290    280 to 300  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━

Milliseconds to the first token
  512 tokens      250  250 to 260  ━━━━━━━╸
  2,048 tokens  1,300              ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━
"""


def test_bars_of_speed_and_of_first_tokens_have_their_spread() -> None:
    assert speed_bars(REPORT) == [Bar("1 stream", 40.0, 39.0, 41.0), Bar("8 streams", 290.0, 280.0, 300.0)]
    assert first_token_bars(REPORT) == [Bar("512 tokens", 250.0, 250.0, 260.0), Bar("2,048 tokens", 1300, 1300, 1300)]


def test_bars_of_alternatives_are_ratios() -> None:
    assert ratio_bars(REPORT) == [
        Bar("quantisation int8", 1.5, 1.4, 1.6),
        Bar("threads 2", 1.0, 0.98, 1.01, good=False),
    ]


def test_the_json_has_every_figure_and_value() -> None:
    said = json.loads(json.dumps(as_json(REPORT)))
    assert said["figures"] == {"tok_s_b1": 40.0, "tok_s_b8": 290.0, "ttft_s_512": 0.25, "ttft_s_2048": 1.3}
    assert said["runs"][0]["values"] == [290.0, 280.0, 300.0]
    assert said["comparisons"][0] == {
        "option": "quantization",
        "value": "int8",
        "ratio": 1.5,
        "noise": 0.03,
        "room": 1.0,
        "ratios": [1.5, 1.4, 1.6],
    }
    assert said["advice"][0]["flags"] == "--quantization int8"
    assert said["left_out"] == [{"what": "32 streams", "why": "takes up to 60 s, and 20 s are left"}]
    assert said["machine"]["cores"] == 2
    assert said["setting"]["kv_dtype"] == "float32"


@pytest.mark.parametrize(
    ("value", "words"), [(1234.5, "1,234"), (100.0, "100"), (56.78, "56.8"), (9.876, "9.88"), (0.1234, "0.123")]
)
def test_numbers_have_about_three_digits(value: float, words: str) -> None:
    assert number(value) == words


@pytest.mark.parametrize(
    ("value", "bar"), [(10.0, "━━━━"), (5.0, "━━"), (6.25, "━━╸"), (0.0, "╸")], ids=["whole", "half", "odd", "none"]
)
def test_a_bar_is_drawn_in_half_characters(value: float, bar: str) -> None:
    assert bar_of(value, most=10.0, width=4) == bar


def shown(width: int, report: Report = REPORT) -> list[str]:
    stream = io.StringIO()
    show(report, Console(file=stream, width=width, highlight=False, color_system=None))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_the_screen_has_80_columns() -> None:
    lines = shown(80)
    assert max(map(len, lines)) <= 80
    assert lines[: len(SCREEN.splitlines())] == SCREEN.splitlines()


def test_the_screen_names_limits_advice_and_what_is_left_out() -> None:
    text = " ".join(" ".join(shown(80)).split())
    assert "memory bandwidth binds one stream reads 20.5 of 25.0 GB/s" in text
    assert "cores free 1.2 of 2 busy" in text
    assert "quantisation --quantization int8: 1.50 times the tokens a second" in text
    assert "threads keep 1: 2 gives 1.00, within noise (3 %)" in text
    assert "32 streams takes up to 60 s, and 20 s are left" in text
    assert text.endswith("120 s in all.")


def test_a_gpu_has_no_threads_in_its_words() -> None:
    setting = replace(REPORT.setting, device="cuda:0", quantization="int8")
    assert described(replace(REPORT, setting=setting)).endswith(
        "float32, int8, K and V in float32, blocks of 16; cuda:0"
    )


def test_a_busy_machine_is_named() -> None:
    busy = Comparison(Alternative("threads", "2"), (100.0, 120.0, 96.0), (100.0, 100.0, 100.0))
    assert "differed" not in " ".join(shown(80))
    text = " ".join(shown(80, replace(REPORT, comparisons=(busy,))))
    assert "Equal runs differed by 40 %: something else uses this machine." in text
