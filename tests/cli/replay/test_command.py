"""`quire replay`: its table, its document, what it refuses, and the arrivals that it exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.commands.record import suite_of
from cli.commands.replay import main, recorded_options
from cli.replay.trace import Arrival, Measured, Trace, lines_of, read_trace
from common.contracts.types import KvGroup, KvGroupKind
from quire.inference.v1 import inference_pb2

MEASURED = Measured(0.02, 0.2, 0, "w0")
ARRIVALS = tuple(Arrival(0.25 * number, 40, 8, (1, 2), measured=MEASURED) for number in range(12))


def log(folder: Path, suite: dict[str, object] | None = None, arrivals: tuple[Arrival, ...] = ARRIVALS) -> str:
    path = folder / "log"
    path.write_text("".join(f"{line}\n" for line in lines_of(Trace(arrivals, 16, suite or {}))), encoding="utf-8")
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_replay_stands_beside_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([log(tmp_path, {"workers": 2, "num_blocks": 64, "max_num_seqs": 8}), "--seeds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "12 requests in 2.8 s"
    assert lines[1].split() == ["recorded", "replayed"]
    assert "prompt tokens from the cache" in "".join(lines)
    assert any(line.startswith("A step: ") for line in lines)


def test_the_window_of_the_log_is_that_of_the_replayed_workers(tmp_path: Path) -> None:
    path = log(tmp_path, {"workers": 2, "window": 48})
    assert recorded_options(read_trace(Path(path))).window == 48
    assert recorded_options(read_trace(Path(log(tmp_path)))).window == 0


FULL, WINDOW = {"kind": "full", "span": 0, "pages": 2}, {"kind": "window", "span": 128, "pages": 3}
GROUPS = (KvGroup(KvGroupKind.FULL, 0, 2, (4, 5)), KvGroup(KvGroupKind.WINDOW, 128, 3, (0,)))


def test_the_groups_of_a_recorded_pool_are_those_of_the_replayed_workers(tmp_path: Path) -> None:
    worker = inference_pb2.WorkerStatus(num_blocks=64, max_num_seqs=8)
    suite = suite_of(inference_pb2.GetStatusResponse(workers=[worker]), GROUPS)
    assert suite["groups"] == [FULL, WINDOW]
    found = recorded_options(read_trace(Path(log(tmp_path, suite)))).groups
    assert found == tuple(replace(each, layers=()) for each in GROUPS)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("full", "the log's groups: must be a list of 2 to 16"),
        ([FULL], "the log's groups: must be a list of 2 to 16"),
        ([FULL, FULL], "the log's groups[1]: must be an object of kind chunk or window"),
        ([WINDOW, WINDOW], "the log's groups[0]: must be an object of kind full"),
        ([FULL, {**WINDOW, "span": 0}], "the log's groups[1].span: is 0; expected 1 to 16777216"),
        ([{**FULL, "pages": True}, WINDOW], "the log's groups[0].pages: is True; expected 1 to 4096"),
    ],
)
def test_groups_of_another_form_are_refused(
    groups: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refusal(capsys, log(tmp_path, {"groups": groups}))


def test_a_change_is_a_column_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--blocks", "8", "--no-prefix-caching", "--runway", "max", "--router", "least-loaded", "--load", "4")
    assert main([log(tmp_path), "--seeds", "1", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["columns"]) == ["recorded", "replayed", "changed"]
    assert found["columns"]["replayed"]["hit_share"]["mean"] > found["columns"]["changed"]["hit_share"]["mean"] == 0
    assert (found["requests"], len(found["digest"])) == (12, 64)


def test_each_policy_is_a_column_on_top_of_the_other_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--workers", "3", "--policy", "round-robin", "--policy", "no-prefix-caching+runway-max")
    assert main([log(tmp_path), "--seeds", "1", "--json", *flags]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert list(columns) == ["recorded", "replayed", "changed", "round-robin", "no-prefix-caching+runway-max"]
    changed, turns, nothing_shared = [columns[name]["hit_share"]["mean"] for name in [*columns][2:]]
    # Each of three workers computes the prefix once in turns; where it is, costs say, the others go.
    assert changed > turns > nothing_shared == 0


@pytest.mark.plots
def test_a_picture_stands_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "what-if.svg"
    assert main([log(tmp_path), "--seeds", "2", "--policy", "least-loaded", "--plot", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["recorded", "replayed", "least-loaded"]
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    assert "12 requests in 3 s, 2 seeds" in drawn


def test_given_costs_are_not_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([log(tmp_path), "--seeds", "1", "--costs", "base=7ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    costs = {"base": 0.007, "decode": 0.0, "prefill": 0.0, "frame": 0.0}
    assert (found["timing"]["costs"], found["errors"]) == (costs, None)


def test_blocks_that_move_have_lines_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--workers", "2", "--router", "round-robin", "--host-blocks", "64", "--peers", "--links", "token=1KiB")
    assert main([log(tmp_path), "--seeds", "1", "--json", *flags, "--policy", "no-transfers"]) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert columns["changed"]["hit_peer_share"]["mean"] > 0.0
    assert "hit_peer_share" not in columns["replayed"]
    assert "hit_peer_share" not in columns["no-transfers"]
    assert main([log(tmp_path), "--seeds", "1", *flags]) == 0
    assert "at another worker" in capsys.readouterr().out


def test_no_host_memory_for_the_layers_of_a_log_with_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refusal(capsys, log(tmp_path, {"window": 64}), "--host-blocks", "8", "--costs", "base=1ms")
    what = "is for host memory, which keeps nothing of models whose every layer has a window, as this log's has"
    assert f"--host-blocks: {what}" in found


def test_a_public_trace_is_replayed_with_what_its_reader_must_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines out of order, a long time without requests, no contents, and a request that no pool holds."""
    times, lengths = ("18:00:00", "18:20:00", "18:00:01"), (40, 60, 70_000)
    rows = [f"2023-11-16 {time},{length},4" for time, length in zip(times, lengths, strict=True)]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    assert main(["--trace", str(path), "--seeds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "3 requests in 1,200.0 s",
        "Lines with an earlier time than the one above: 1. The order is that of the times.",
        "It names no contents, so no request shares a prefix with another one.",
        "No request comes for 1,199 s, from 1 s on; figures a second count that time.",
    ]
    assert "replayed: 1 refused, as they are longer than a worker's pool or context." in lines
    words = ["--trace", str(path), "--seeds", "1", "--json", "--first", "1", "--workers", "2"]
    assert main([*words, "--policy", "round-robin"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["refused"]) == (1, {"replayed": {}, "round-robin": {}})
    assert list(found["columns"]) == ["replayed", "round-robin"], "no suite was recorded that could stand beside"
    assert found["remarks"] == ["It names no contents, so no request shares a prefix with another one."]


def test_one_trace_is_given_by_one_of_two_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), (log(tmp_path), "--trace", log(tmp_path))):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    assert "argument --trace: not allowed with argument LOG" in capsys.readouterr().err


def test_arrivals_are_exported_and_read_again(tmp_path: Path) -> None:
    path = log(tmp_path)
    for form in ("quire", "mooncake"):
        assert main([path, "--export", str(tmp_path / form), "--form", form]) == 0
    assert read_trace(tmp_path / "quire").arrivals == ARRIVALS
    assert [each.prompt_tokens for each in read_trace(tmp_path / "mooncake").arrivals] == [40] * 12


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--workers", "0"), "--workers: is 0; expected 1 to 1024"),
        (("--blocks", "-1"), "--blocks: is -1; expected 1 to 1048576"),
        (("--seeds", "0"), "--seeds: is 0; expected 1 to 1000"),
        (("--first", "0"), "--first: is 0; expected 1 to 1048576"),
        (("--load", "0"), "--load: is 0; expected a number above 0"),
        (("--costs", "base=quick"), "--costs: "),
        (("--host-blocks", "-1"), "--host-blocks: is -1; expected 0 to 1048576"),
        (("--disk-blocks", "8"), "--disk-blocks: needs --host-blocks: what comes from disk"),
        (("--peers",), "--peers: needs --host-blocks"),
        (("--host-blocks", "8", "--links", "peer=1Gb/s"), "--links: is 'peer=1Gb/s'; expected terms of host=8GB/s,"),
        (("--policy", "lru+fastest"), "--policy: is 'fastest'; expected cost, "),
        (("--policy", "lru") * 9, "--policy: is given 9 times; 8 at most"),
        (("--plot", "figures.pdf"), "--plot: is figures.pdf; expected a file that ends with .png or .svg"),
        (("--plot", "nowhere/a.png"), "--plot: nowhere/a.png cannot be written"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], what: str
) -> None:
    assert what in refusal(capsys, log(tmp_path), *flags)


def test_a_corrupt_log_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the log's workers: is 'many'" in refusal(capsys, log(tmp_path, {"workers": "many"}))
    assert "the log's window: is 0; expected 1 to 16777216" in refusal(capsys, log(tmp_path, {"window": 0}))
    assert "cannot be read" in refusal(capsys, str(tmp_path / "nowhere"))
    path = Path(log(tmp_path))
    assert "cannot be made: File exists" in refusal(capsys, str(path), "--export", str(path))
