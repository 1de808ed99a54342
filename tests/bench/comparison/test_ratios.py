"""Ratios over the peers, from made-up result lines: pairs of one repetition, the fastest peer, fixed names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.comparison import table as ratio_table
from bench.comparison.ratios import Setting, over_fastest, ratio_figures
from bench.comparison.table import all_figures, print_report


def line(engine: str, speed: float, rep: int = 0, **more: Any) -> dict[str, Any]:
    said = {"workload": "W1", "dtype": "float32", "prefix_caching": "off", "scale": 0.5, "engine": engine, "rep": rep}
    figures = {"output_tok_s": speed, "ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "itl_p50_ms": 3.0, "itl_p99_ms": 4.0}
    return said | figures | {"peak_rss_mib": 100.0, "start_s": 5.0, "agreement": 1.0} | more


def three_turns() -> list[dict[str, Any]]:
    """Ours beats openvino by 1.5, 1.25 and 1.0; vllm's best run is the fastest of all, its median is not."""
    speeds = {"ours": (300, 250, 200), "openvino": (200, 200, 200), "vllm": (400, 150, 100), "naive": (50, 50, 50)}
    return [line(name, speed, rep) for name, runs in speeds.items() for rep, speed in enumerate(runs)]


def test_the_ratio_is_the_median_of_runs_side_by_side_over_the_fastest_peer() -> None:
    (found,) = over_fastest(three_turns())
    assert (found.peer, found.our_speed, found.peer_speed) == ("openvino", 250.0, 200.0)
    assert (found.median, found.least, found.greatest) == (1.25, 1.0, 1.5)


def test_figures_have_their_fixed_names() -> None:
    figures = ratio_figures(three_turns())
    assert figures == {
        "ratio_W1_fp32": 1.25,
        "ratio_W1_fp32_least": 1.0,
        "ratio_W1_fp32_greatest": 1.5,
        "scale_W1_fp32": 0.5,
        "ratio_over_naive_W1": 5.0,
    }


def test_types_and_modes_stand_apart() -> None:
    more: dict[str, Any] = {"dtype": "bfloat16", "workload": "W2", "prefix_caching": "on"}
    lines = [*three_turns(), line("ours", 90, **more), line("vllm", 100, **more)]
    figures = ratio_figures(lines)
    assert figures["ratio_W2_bf16_cached"] == 0.9
    assert figures["ratio_W1_fp32"] == 1.25
    assert Setting.of(lines[-1]).name == "W2_bf16_cached"


def test_a_ratio_over_static_batches_in_another_type_says_so() -> None:
    lines = [line("ours", 90, dtype="bfloat16"), line("naive", 45, dtype="bfloat16")]
    assert ratio_figures(lines)["ratio_over_naive_W1_bf16"] == 2.0


def test_a_repetition_that_one_engine_lacks_does_not_count() -> None:
    (found,) = over_fastest([line("ours", 100, 0), line("ours", 900, 1), line("vllm", 100, 0)])
    assert (found.median, found.greatest) == (1.0, 1.0)


def test_without_peers_there_is_no_ratio() -> None:
    assert over_fastest([line("ours", 100)]) == []


def test_every_engine_has_its_speed_memory_and_start() -> None:
    figures = all_figures([*three_turns(), line("ours", 250, 3, peak_rss_mib=150.0)])
    assert figures["tok_s_W1_fp32_vllm"] == 150.0
    assert figures["peak_rss_mib_ours_fp32"] == 150.0
    assert (figures["start_s_naive_fp32"], figures["agreement_naive_fp32"]) == (5.0, 1.0)


def test_the_report_shows_all_engines_and_ends_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(three_turns(), [Path("lines.jsonl")], as_json=True)
    *text, last = capsys.readouterr().out.splitlines()
    (row,) = (each for each in text if each.startswith("W1_fp32") and "openvino" in each)
    assert row.split()[-5:] == ["1.25", "(1.00", "to", "1.50)", "openvino"]
    assert json.loads(last)["figures"]["ratio_W1_fp32"] == 1.25


def test_tables_are_printed_again_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, lines in zip(files, (three_turns()[:6], three_turns()[6:]), strict=True):
        path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    monkeypatch.setattr("sys.argv", ["bench.comparison.table", *map(str, files), "--json"])
    ratio_table.main()
    *text, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["figures"] == {key: round(value, 6) for key, value in all_figures(three_turns()).items()}
    assert text[-1] == f"result lines: {files[0]}, {files[1]}"
