"""The output of a batch: what counts as done, and how a file is repaired whose writer was killed at any byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.batch.results import Result, ResultFile
from common.contracts.errors import InvalidRequest, Unavailable

OK = Result("a", 200, "req-1", {"id": "x", "text": "é\n"})
REFUSED = Result("b", 400, "req-2", {"error": {"message": "no"}})
FAILED = Result("c", error="after 10 attempts: connection refused")


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def test_lines_have_the_form_of_openai() -> None:
    answered, failed = json.loads(OK.line()), json.loads(FAILED.line())
    assert answered["id"].startswith("batch_req_")
    assert answered["response"] == {"status_code": 200, "request_id": "req-1", "body": {"id": "x", "text": "é\n"}}
    assert (answered["custom_id"], answered["error"], failed["response"]) == ("a", None, None)
    assert failed["error"] == {"code": "unavailable", "message": "after 10 attempts: connection refused"}
    assert OK.line().count(b"\n") == 1


def test_a_body_in_json_stays_as_it_is() -> None:
    line = Result('a "b"', 200, "req-1", raw=b'{"x":1.50,"y":"\\u00e9"}').line()
    assert line.endswith(b'"request_id": "req-1", "body": {"x":1.50,"y":"\\u00e9"}}, "error": null}\n')
    entry = json.loads(line)
    assert (entry["custom_id"], entry["response"]["body"]) == ('a "b"', {"x": 1.5, "y": "é"})


def test_an_error_has_the_code_that_it_is_given() -> None:
    entry = json.loads(Result("a", error="too late", code="batch_expired").line())
    assert (entry["response"], entry["error"]) == (None, {"code": "batch_expired", "message": "too late"})


def test_answers_are_done_and_failures_are_sent_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as file:
        for result in (OK, FAILED, REFUSED):
            file.write(result)
    with ResultFile(path) as file:
        assert file.done == {"a": True, "b": False}
        assert file.repaired
        assert ids(path) == ["a", "b"]
        file.write(Result("c", 200))
    assert ids(path) == ["a", "b", "c"]


def test_a_file_that_is_whole_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(OK.line() + REFUSED.line())
    before = path.read_bytes(), path.stat().st_ino
    with ResultFile(path) as file:
        assert not file.repaired
    assert (path.read_bytes(), path.stat().st_ino) == before


def test_a_kill_at_any_byte_costs_one_line_at_most(tmp_path: Path) -> None:
    first, second = OK.line(), REFUSED.line()
    path = tmp_path / "out.jsonl"
    for cut in range(len(second) + 1):
        path.write_bytes(first + second[:cut])
        with ResultFile(path) as file:
            whole = cut >= len(second) - 1  # all of it, with or without its end
            assert file.done == ({"a": True, "b": False} if whole else {"a": True}), cut
            file.write(Result("z", 200))
        assert ids(path) == (["a", "b", "z"] if whole else ["a", "z"]), cut
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


def test_a_line_in_the_middle_that_is_no_result_goes_and_a_double_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"\xff\xfe\n" + OK.line() + b"[]\n\n" + OK.line() + b'{"custom_id": "q"}\n' + REFUSED.line())
    with ResultFile(path) as file:
        assert file.done == {"a": True, "b": False}
    assert ids(path) == ["a", "b"]


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(OK.line()[:-9])  # so that the first run replaces the file
    with ResultFile(path), pytest.raises(Unavailable, match="another run of quire batch"):
        ResultFile(path)
    with ResultFile(path) as file:
        assert file.done == {}


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be written: No such file"):
        ResultFile(tmp_path / "none" / "out.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device of a full disk is Linux's")
def test_a_full_disk_ends_a_run_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ResultFile(tmp_path / "out.jsonl")
    file._file.close()
    with Path("/dev/full").open("ab", buffering=0) as full, file:
        monkeypatch.setattr(file, "_file", full)
        with pytest.raises(Unavailable, match=r"cannot be written: No space left on device; the answers so far are"):
            file.write(OK)
