"""What the commands print with, and how they end."""

from __future__ import annotations

import pytest
from rich.console import Console

from cli.client import run_command
from common.errors import Unavailable


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(console: Console) -> None:
        console.print("x[0] :smile: 'a'", markup=False)

    assert run_command(body) == 0
    assert capsys.readouterr().out == "x[0] :smile: 'a'\n"


def test_an_error_is_one_line_and_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(_: Console) -> None:
        raise Unavailable("nobody is there")

    assert run_command(body) == 1
    assert capsys.readouterr().err == "quire: nobody is there\n"
