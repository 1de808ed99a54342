"""The table at the end of a run, and the file by which the next run hands out its tests."""

from __future__ import annotations

from pathlib import Path

from tests.support.durations import parts_of, read_durations, table, write_durations

REPORT = """<testsuites><testsuite tests="{tests}" skipped="1" failures="1" errors="0" time="{time}">
<testcase file="tests/test_a.py" name="one" time="2.25"/><testcase file="tests/test_a.py" name="two" time="0.5"/>
<testcase file="tests/test_b.py" name="three" time="0.25"/></testsuite></testsuites>"""


def test_each_part_has_its_tests_and_its_seconds(tmp_path: Path) -> None:
    (tmp_path / "test.xml").write_text(REPORT.format(tests=3, time=1.5))
    (tmp_path / "triton.xml").write_text(REPORT.format(tests=3, time=7.5))
    (tmp_path / "test.seconds").write_text("12\n")  # with the collection, which the report does not count
    (tmp_path / "check.seconds").write_text("60\n")
    (tmp_path / "check.log").write_text("all is clean\n")
    lines = table(list(parts_of(tmp_path))).splitlines()
    assert [line.split() for line in lines] == [
        ["part", "tests", "failed", "skipped", "seconds"],
        ["check", "0", "0", "0", "60"],
        ["test", "2", "1", "1", "12"],
        ["triton", "2", "1", "1", "8"],
        [],
        ["seconds", "slowest", "files"],
        ["5.5", "tests/test_a.py"],
        ["0.5", "tests/test_b.py"],
    ]


def test_seconds_of_files_that_did_not_run_are_kept_while_the_files_exist(tmp_path: Path) -> None:
    file = tmp_path / "tests/durations.json"
    file.parent.mkdir()
    (tmp_path / "tests/test_kept.py").touch()
    file.write_text('{"tests/test_kept.py": 3.0, "tests/test_gone.py": 4.0, "tests/test_a.py": 9.0}')
    (tmp_path / "test.xml").write_text(REPORT.format(tests=3, time=1.5))
    write_durations(list(parts_of(tmp_path)), file)
    # test_b.py takes next to nothing.
    assert read_durations(file) == {
        "tests/test_a.py": 2.8,
        "tests/test_kept.py": 3.0,
    }


def test_without_the_file_every_file_is_new(tmp_path: Path) -> None:
    assert read_durations(tmp_path / "durations.json") == {}
