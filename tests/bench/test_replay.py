"""The benchmark of replays, on a few requests."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.lib import trace_moves
from bench.lib.trace_moves import zipf_load
from bench.replay import main
from tests.support.bench_process import run_benchmark


def test_a_few_requests_are_replayed_and_recorded() -> None:
    few = ("--replayed", "40", "--requests", "16", "--rate", "40", "--simulate", "base=5ms,prefill=50us")
    figures, _ = run_benchmark("replay", *few)
    assert (figures["identical_runs"], figures["recorded"]) == (1, 16)
    assert figures.keys() == {
        "identical_runs", "requests_per_s", "times_real_time", "ttft_error_p50", "ttft_error_p90", "itl_error_p50",
        "recorded",
    }  # fmt: skip


def conversations(folder: Path) -> Path:
    """Write a trace in Mooncake's form: six talks whose turns come back after all others, and share a beginning."""
    lines = []
    for turn in range(3):
        for talk in range(6):
            blocks = [0, *range(1000 * talk + 1, 1000 * talk + 2 * turn + 3)]
            line = {"timestamp": 2000 * (6 * turn + talk), "input_length": 512 * len(blocks), "output_length": 6}
            lines.append(json.dumps(line | {"hash_ids": blocks}))
    path = folder / "talks.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_a_trace_is_replayed_with_moves_and_without_by_size_of_pool(tmp_path: Path) -> None:
    trace = ("--trace", str(conversations(tmp_path)), "--trace-workers", "2", "--load", "4")
    steps = ("--costs", "base=5ms,prefill=100us", "--links", "token=8KiB", "--slo-ttft", "0.3")
    figures, _ = run_benchmark("replay", *trace, "--pools", "20", "200", *steps, "--host-times", "6")
    for pool in (20, 200):
        ratio = figures[f"goodput_moves_{pool}"] / figures[f"goodput_none_{pool}"]
        assert figures[f"goodput_ratio_{pool}"] == pytest.approx(ratio, rel=1e-3)
        of_places = [figures[f"hits_moves_{place}_{pool}"] for place in ("pool", "host", "disk", "peer")]
        assert sum(of_places) == pytest.approx(figures[f"hits_moves_{pool}"], abs=1e-5)
        assert figures[f"refused_{pool}"] == 0
    assert figures["hits_moves_20"] > figures["hits_none_20"]
    assert figures["hits_moves_host_20"] > figures["hits_moves_host_200"]
    assert figures["goodput_ratio_20"] >= 1.0


def test_rows_are_kept_and_not_replayed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["--trace", str(conversations(tmp_path)), "--pools", "60", "--costs", "base=5ms,prefill=100us", "--json"]
    words += ["--rows", str(rows), "--trace-workers", "2", "--load", "4"]
    assert main([*words, "--beside", "uncached"]) == 0
    assert len(rows.read_text().splitlines()) == 1
    assert main([*words, "--beside", "uncached", "none"]) == 0
    uncached, none = [json.loads(line) for line in rows.read_text().splitlines()]
    assert uncached | {"beside": "none", "figures": none["figures"]} == none
    assert none["figures"]["hit_share"] > 0.0 == uncached["figures"]["hit_share"]
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    ratio = none["figures"]["goodput"] / uncached["figures"]["goodput"]
    assert figures["goodput_ratio_cache_60"] == pytest.approx(ratio, abs=1e-5)
    monkeypatch.setattr(trace_moves, "replay", None)
    assert main([*words, "--beside", "none", "uncached"]) == 0
    rows.write_text("a row\n")
    with pytest.raises(SystemExit):
        main(words)
    assert "rows.jsonl must have a row of a replay in each line" in capsys.readouterr().err
    words[words.index("--rows") + 1] = str(tmp_path / "nowhere" / "rows")
    with pytest.raises(SystemExit):
        main(words)
    assert "cannot be read and written: No such file" in capsys.readouterr().err


def azure(folder: Path) -> Path:
    """Write a trace in Azure's form: 60 requests of 100 to 690 tokens, and one of 5,000."""
    lines = [f"2023-11-16 18:{number:02}:00.5,{100 + 10 * number},{10 + number % 7}" for number in range(60)]
    path = folder / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines, "2023-11-16 19:00:00,5000,9"]))
    return path


def test_what_fits_is_counted_in_blocks_and_in_regions_of_equal_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trace", str(azure(tmp_path)), "--json", "--pools", "16"]
    assert main([*words, "--reserved", "1024"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    found = {name.removesuffix("_1024_of_4096"): value for name, value in figures.items()}
    assert found["fit_reserved"] == 4
    assert found["fit_paged"] > found["fit_buddy"] > found["fit_reserved"]
    assert found["paged_over_reserved"] == pytest.approx(found["fit_paged"] / 4, abs=1e-5)
    assert found["waste_paged"] < 0.04 < found["waste_buddy"] < found["waste_reserved"]
    assert found["requests_left_out"] == pytest.approx(1 / 61, abs=1e-6)
    for wrong, what in (("8192", "8192 is more than a pool of 4096 tokens"), ("1000", "must be powers of two")):
        with pytest.raises(SystemExit):
            main([*words, "--reserved", wrong])
        assert what in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--trace", str(azure(tmp_path)), "--pools", "1024", "--reserved", "1024"])
    assert "all requests that keep 1024 tokens fit into 262144" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--pools", "0"), "--pools must be above 0"),
        (("--load", "0", "--slo-itl", "-1"), "--load must be above 0; --slo-itl must be above 0"),
        (("--costs", "quick"), "--costs: expected terms of"),
        (("--links", "peer=9"), "--links: is 'peer=9'; expected terms of"),
        ((), "cannot be read"),
    ],
)
def test_wrong_flags_of_a_trace_are_refused(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], what: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "nowhere.jsonl", *flags])
    assert ended.value.code == 2
    assert what in capsys.readouterr().err


def test_a_made_up_load_of_shared_prefixes_is_replayed_with_copies_and_without() -> None:
    """The load is one of a seed, its first prefix is the most frequent one, and blocks come ahead of need."""
    load = zipf_load(400, 10.0, seed=3)
    assert load == zipf_load(400, 10.0, seed=3) != zipf_load(400, 10.0, seed=4)
    counts = Counter(each.blocks for each in load.arrivals)
    assert counts[0, 1, 2, 3] == max(counts.values()) > 400 / 8
    words = ("--zipf", "120", "--trace-workers", "4", "--pools", "250", "--rates", "11", "--links", "token=16KiB")
    figures, _ = run_benchmark("replay", *words)
    assert figures["replicated_250_4w_11"] > 0
    assert figures["goodput_ratio_250_4w_11"] > 0
    assert 0 < figures["hits_with_250_4w_11"] < 1
