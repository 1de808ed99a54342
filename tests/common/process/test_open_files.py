"""A process without file descriptors says so once, and once more when it has some again."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys

import pytest

from common.process.watchdog import OpenFiles

# Takes every descriptor that the process may have, looks three times, gives them back, and looks twice.
REAL = """
import logging, os, resource
logging.basicConfig(format="%(levelname)s %(message)s")
from common.process.watchdog import OpenFiles
files, taken = OpenFiles(), []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files.look()
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
for _ in range(3):
    files.look()
for each in taken:
    os.close(each)
for _ in range(2):
    files.look()
"""


def test_a_process_that_has_none_left_says_so_once_and_so_it_does_when_there_are_some_again() -> None:
    said = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True).stderr.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["ERROR", "WARNING"]
    assert "the process has all 64 that it may have; raise ulimit -n" in said[0]


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENFILE, "fs.file-max"), (errno.EMFILE, "ulimit -n"), (errno.EACCES, "")]
)
def test_the_words_name_the_limit_and_other_errors_are_none(
    number: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def opens() -> int:
        raise OSError(number, os.strerror(number))

    files = OpenFiles(opens)
    with caplog.at_level(logging.WARNING):
        files.look()
    assert files.exhausted is bool(words)
    assert [words in record.getMessage() for record in caplog.records] == [True] * bool(words)
