"""Logs of arrivals: what is written is read again, Mooncake's form too, and a wrong line is named."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from cli.replay import trace
from cli.replay.trace import Arrival, Measured, Trace, lines_of, mooncake_lines, read_trace
from common.contracts.errors import InvalidConfig

FIRST = Arrival(0.5, 40, 8, (11, 12, 13), "acme", 5, Measured(0.25, 0.75, 16, "w0"))
SECOND = Arrival(1.25, 7, 0)
TRACE = Trace((FIRST, SECOND), 16, {"workers": 2})


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(InvalidConfig) as caught:
        read_trace(path)
    (violation,) = caught.value.violations
    return violation.description


def test_a_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path / "log", *lines_of(TRACE))) == TRACE


def test_arrivals_are_put_into_order(tmp_path: Path) -> None:
    mixed = Trace((SECOND, FIRST), 16)
    assert read_trace(written(tmp_path / "log", *lines_of(mixed))).arrivals == (FIRST, SECOND)


def test_a_trace_of_mooncake_has_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    line = {"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 9]}
    found = read_trace(written(tmp_path / "trace", json.dumps(line)))
    assert found == Trace((Arrival(1.5, 600, 3, (7, 9)),), 512)


def test_in_mooncakes_form_equal_prefixes_have_equal_numbers() -> None:
    full = tuple(range(64))  # 1024 tokens
    others = (*full[:32], *range(100, 132))
    arrivals = (Arrival(0, 1024, 1, full), Arrival(1, 1024, 1, others), Arrival(2, 600, 1, full[:37]), Arrival(3, 9, 1))
    ids = [json.loads(line)["hash_ids"] for line in mooncake_lines(Trace(arrivals, 16))]
    assert ids == [[0, 1], [0, 2], [0, 3], [4]]


def test_what_goes_out_in_mooncakes_form_comes_back(tmp_path: Path) -> None:
    trace = Trace((Arrival(0.25, 1024, 5, tuple(range(64))), Arrival(2.0, 512, 6, tuple(range(32)))), 16)
    found = read_trace(written(tmp_path / "trace", *mooncake_lines(trace)))
    assert [(each.at, each.prompt_tokens, each.output_tokens) for each in found.arrivals] == [
        (0.25, 1024, 5),
        (2.0, 512, 6),
    ]
    assert found.arrivals[0].blocks[:1] == found.arrivals[1].blocks


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ((), "is empty; expected a log of `quire record`, or a trace of Mooncake or Azure"),
        (("{",), "log, line 1: is not a JSON object; the file may be cut or corrupt"),
        (("[" * 100_000,), "log, line 1: is not a JSON object; the file may be cut or corrupt"),
        (('{"quire_trace": 9}',), "has version 9; this quire reads version 1"),
        (('{"quire_trace": 1, "block_size": 16, "suite": 5}',), "line 1: suite is 5; expected an object"),
        (('{"quire_trace": 1, "block_size": 16, "suite": [1]}',), "line 1: suite is [1]; expected an object"),
        (('{"quire_trace": 1, "block_size": 0}',), "log, line 1: block_size is 0; expected 1 to 65536"),
        (('{"quire_trace": 1, "block_size": 16}',), "has no request; record one while requests arrive"),
        (('{"quire_trace": 1, "block_size": 16}', '{"at": 0, "prompt": 0, "output": 1}'), "line 2: prompt is 0"),
        (('{"quire_trace": 1, "block_size": 16}', '{"at": NaN, "prompt": 1, "output": 1}'), "line 2: at is nan"),
        (('{"timestamp": "a", "input_length": 1, "output_length": 1}',), "line 1: timestamp is 'a'; expected a time"),
        (
            ('{"quire_trace": 1, "block_size": 16}', '{"at": 1e14, "prompt": 1, "output": 1}'),
            "line 2: at is 100000000000000.0; expected a time from 0 to 604,800",
        ),
        (
            ('{"quire_trace": 1, "block_size": 16}', '{"at": 0, "ttft": 1e14, "prompt": 1, "output": 1}'),
            "line 2: ttft is 100000000000000.0; expected a time from 0 to 86,400",
        ),
        (
            ('{"quire_trace": 1, "block_size": 16}', '{"at": 0, "ttft": 2, "took": 1, "prompt": 1, "output": 1}'),
            "line 2: took is 1.0; expected at least the ttft, 2.0",
        ),
        (('{"timestamp": 1e300, "input_length": 1, "output_length": 1}',), "line 1: timestamp is 1e+300; expected"),
        (
            (
                '{"timestamp": 1000, "input_length": 1, "output_length": 1}',
                '{"timestamp": 604802000, "input_length": 1, "output_length": 1}',
            ),
            "log spans 604,801 s; expected a week at most: cut it into parts",
        ),
        (
            ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}',),
            "line 1: hash_ids must be a list of numbers",
        ),
        (
            ('{"timestamp": 61.25, "input_length": 1, "output_length": 1}',),
            "line 1: timestamp is 61.25; expected whole milliseconds: if it is in seconds, multiply all by 1000",
        ),
        (
            ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2, 3]}',),
            "line 1: hash_ids has 3 numbers for 600 tokens; expected 2: one for each 512 tokens, and one for the rest",
        ),
        (
            ('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2, 3]}',),
            "line 1: hash_ids has 3 numbers for 1024 tokens; expected 2",
        ),
        (
            ('{"timestamp": 0, "input_length": 1600, "output_length": 1, "hash_ids": [1, 2]}',),
            "line 1: hash_ids has 2 numbers for 1600 tokens; expected 4",
        ),
        (
            ('{"timestamp": 0, "input_length": 16777217, "output_length": 1}',),
            "input_length is 16777217; expected 1 to",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: tuple[str, ...], what: str) -> None:
    assert what in refusal(written(tmp_path / "log", *lines))


def test_times_of_a_clock_count_from_the_first_arrival(tmp_path: Path) -> None:
    lines = [f'{{"timestamp": {1_790_000_000_000 + ms}, "input_length": 1, "output_length": 1}}' for ms in (1500, 0)]
    assert [each.at for each in read_trace(written(tmp_path / "log", *lines)).arrivals] == [0.0, 1.5]


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\x00")
    assert "must be text in UTF-8" in refusal(path)
    assert "cannot be read: No such file or directory" in refusal(tmp_path / "nowhere")


def test_a_packed_trace_is_unpacked_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
    path, packed = tmp_path / "trace.jsonl.gz", gzip.compress(f"{line}\n{line}\n".encode())
    path.write_bytes(packed)
    assert [each.blocks for each in read_trace(path).arrivals] == [(1, 2), (1, 2)]
    for wrong in (packed[:-9], packed[:20], b"plain text", b"\x1f\x8b" + b"x" * 40):
        path.write_bytes(wrong)
        with pytest.raises(InvalidConfig, match=r"trace.jsonl.gz cannot be unpacked .*may be cut or corrupt"):
            read_trace(path)


def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 23) + b"{"))
    with pytest.raises(InvalidConfig, match=r"trace.gz, line .*is not a JSON object"):
        read_trace(path)


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"


def test_a_trace_of_azure_has_dates_and_counts_and_no_contents(tmp_path: Path) -> None:
    later = "2023-11-16 19:15:48.930590+01:00,9,0"
    found = read_trace(written(tmp_path / "a.csv", AZURE, ROW, "", later))
    assert [(each.prompt_tokens, each.output_tokens, each.blocks) for each in found.arrivals] == [
        (374, 44, ()),
        (9, 0, ()),
    ]
    assert [each.at for each in found.arrivals] == pytest.approx([0.0, 2.25], abs=1e-5)
    moved = "\ufeffModel,GeneratedTokens, ContextTokens ,TIMESTAMP"
    assert read_trace(written(tmp_path / "b.csv", moved, '"a,b",44,374,2023-11-16T18:15:46')).arrivals == (
        Arrival(0.0, 374, 44),
    )


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ((AZURE,), "has no request"),
        (("Timestamp,Request tokens,ContextTokens", "5,472,18"), "line 1: has the columns ['Timestamp', 'Request tok"),
        (("Timestamp,Request tokens,ContextTokens", "5,472,18"), "expected TIMESTAMP, GeneratedTokens once, as Azure"),
        ((AZURE + ",TIMESTAMP", ROW), "expected TIMESTAMP once, as Azure's traces have them"),
        ((AZURE, ROW, "2023-11-16 18:15:46,374"), "line 3: has 2 cells; expected 3"),
        ((AZURE, '2023-11-16 18:15:46,"374'), "line 2: has no cells between commas (unexpected end of data)"),
        ((AZURE, "2023-11-16 18:15:46,\0,1"), "line 2: "),
        ((AZURE, "1700158546.68,374,44"), "line 2: TIMESTAMP is '1700158546.68'; expected a date and time such as 2"),
        ((AZURE, "2023-11-16,374,44"), "line 2: TIMESTAMP is '2023-11-16'; expected a date and time"),
        ((AZURE, "2023-02-30 18:15:46,374,44"), "line 2: TIMESTAMP is '2023-02-30 18:15:46'; expected a date"),
        ((AZURE, "2023-11-16 18:15:46,0,44"), "line 2: ContextTokens is '0'; expected 1 to 16777216"),
        ((AZURE, "2023-11-16 18:15:46,374.0,44"), "line 2: ContextTokens is '374.0'; expected 1 to 16777216"),
        ((AZURE, "2023-11-16 18:15:46,374,-1"), "line 2: GeneratedTokens is '-1'; expected 0 to 16777216"),
        ((AZURE, f"2023-11-16 18:15:46,374,{'9' * 5000}"), "line 2: GeneratedTokens is '9999"),
        ((AZURE, "2023-11-16 18:15:46,374,\u0665"), "line 2: GeneratedTokens is '\u0665'; expected 0"),
        (
            (AZURE, "0001-01-01 00:00:00+14:00,1,1", "9999-12-31 23:59:59-14:00,1,1"),
            "s; expected a week at most: cut it into parts",
        ),
    ],
)
def test_a_wrong_line_of_azures_form_is_named(tmp_path: Path, lines: tuple[str, ...], what: str) -> None:
    assert what in refusal(written(tmp_path / "log", *lines))


def test_a_date_without_a_zone_is_utc_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In New York no clock says 2:30 on that day."""
    path = written(tmp_path / "a.csv", AZURE, "2024-03-10 01:30:00,1,1", "2024-03-10 03:30:00,1,1")
    monkeypatch.setenv("TZ", "America/New_York")
    try:
        time.tzset()
        assert read_trace(path).seconds == 7200.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_dates_before_1970_count_from_the_first_one_too(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path / "a.csv", AZURE, "1969-12-31 23:59:59,1,1", "1969-12-31 23:59:58,1,1"))
    assert [each.at for each in found.arrivals] == [0.0, 1.0]


def mooncake(*times: int) -> list[str]:
    return [f'{{"timestamp": {time}, "input_length": 1, "output_length": 1}}' for time in times]


def test_lines_in_another_order_than_their_times_are_sorted_and_counted(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path / "log", *mooncake(5, 1, 2, 2, 0)))
    assert [each.at for each in found.arrivals] == [0.0, 0.001, 0.002, 0.002, 0.005]
    assert found.late_lines == 2
    assert read_trace(written(tmp_path / "own", *lines_of(Trace((SECOND, FIRST), 16)))).late_lines == 0


def test_the_longest_time_without_a_request_is_known(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path / "log", *mooncake(1000, 2000, 9500, 9600))).longest_gap == (7.5, 1.0)
    assert read_trace(written(tmp_path / "log", *mooncake(1000))).longest_gap == (0.0, 0.0)


def test_the_first_lines_of_a_trace_are_read_alone(tmp_path: Path) -> None:
    path = written(tmp_path / "log", *mooncake(2, 1), "cut")
    assert [each.at for each in read_trace(path, 2).arrivals] == [0.001, 0.002]
    assert "line 3: is not a JSON object" in refusal(path)


def test_a_trace_of_too_many_requests_is_refused_and_its_first_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_REQUESTS", 3)
    path = written(tmp_path / "log", *mooncake(0, 1, 2, 3))
    assert "has more than 3 requests; replay its first ones alone, with --first N" in refusal(path)
    assert len(read_trace(path, 3).arrivals) == 3
    assert len(read_trace(written(tmp_path / "few", *mooncake(0, 1, 2))).arrivals) == 3
