"""What a user reads after a wrong argument: what was wrong and what was expected, in a line, and never a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.main import COMMANDS, main
from common.process.ports import free_ports

DEEP = "[" * 100_000
FILES = {"deep.json": DEEP, "list.json": "[1, 2, 3]", "three.toml": "tenants = 3", "many.toml": "[[tenants]]"}
NO_ADDRESS = "expected HOST:PORT, with [..] around an IPv6 address"
NO_PATH = "is empty; expected a path"
NO_MESSAGES = "--chat: has no messages; expected"
NO_HOST_NAME = "expected a host name such as quire.example.org or *.example.org, or an address"
NO_TABLE = "`tenants` must be a table; expected tables such as [tenants.red]"

WRONG: tuple[tuple[Sequence[str], str], ...] = (
    (["generate", "Hi", "--address", ""], f"--address: is ''; {NO_ADDRESS}"),
    (["generate", "Hi", "--address", "nowhere"], f"--address: is 'nowhere'; {NO_ADDRESS}"),
    (["generate", "Hi", "--address", "http://127.0.0.1:1"], NO_ADDRESS),
    (["chat", "--address", "127.0.0.1:99999"], NO_ADDRESS),
    (["status", "--admin-address", "127.0.0.1:port"], NO_ADDRESS),
    (["batch", "binary", "out", "--http-address", ""], NO_ADDRESS),
    (["generate", "Hi", "--max-tokens", "9" * 20], f"--max-tokens: is {'9' * 20}; expected -2147483648 to 2147483647"),
    (["generate", "Hi", "--seed", "9" * 30], f"--seed: is {'9' * 30}; expected -9223372036854775808 to "),
    (["generate", "Hi", "--regex", "@binary"], "--regex: binary cannot be read: it is not UTF-8"),
    (["generate", "-"], "PROMPT: of standard input is not UTF-8; expected text"),
    (["explain", "a", "--n", "9999999999"], "--n: is 9999999999; expected -2147483648 to 2147483647"),
    (["explain", "--chat", "deep.json"], "--chat: is not valid JSON: "),
    (["pin", "--chat", "deep.json"], "--chat: is not valid JSON: "),
    (["explain", "--chat", "list.json"], NO_MESSAGES),
    (["pin", "--chat", "list.json"], NO_MESSAGES),
    (["advise-block-size", "deep.json"], "line 1: is not valid JSON: "),
    (["advise-block-size", "."], "log: . cannot be read: Is a directory"),
    (["advise-block-size", "binary"], "log: binary cannot be read: it is not UTF-8"),
    (["advise-block-size", "-"], "log: - cannot be read: it is not UTF-8"),
    (["advise-block-size", "log.jsonl", "--speeds", "binary"], "--speeds: binary cannot be read: it is not UTF-8"),
    (["advise-block-size", "log.jsonl", "--speeds", "."], "--speeds: . cannot be read: Is a directory"),
    (["advise-block-size", "log.jsonl", "--speeds", "deep.json"], "does not end with the JSON line of bench.phases;"),
    (["advise-block-size", "log.jsonl", "--speeds", "list.json"], "does not end with the JSON line of bench.phases;"),
    (["keys", "red", "--append", "three.toml"], NO_TABLE),
    (["keys", "red", "--append", "many.toml"], NO_TABLE),
    (["keys", "red", "--append", "binary"], "--append: binary is not a TOML file of tenants: "),
    (["keys", "red", "--append", ""], NO_PATH),
    (["certs", ""], NO_PATH),
    (["record", ""], NO_PATH),
    (["replay", ""], NO_PATH),
    (["why", "--last", "--log", ""], NO_PATH),
    (["status", "--state-dir", ""], NO_PATH),
    (["certs", "made", "--public-name", ""], NO_HOST_NAME),
    (["certs", "made", "--public-name", "two words"], NO_HOST_NAME),
    (["certs", "made", "--public-name", ".".join(["a" * 60] * 5)], NO_HOST_NAME),
    (["why", "--hit-rate", "--since", "99999999d"], "--since: is '99999999d'; expected 36500d at most"),
    (["why", "--last", "--since", "99999999d"], "--since: is '99999999d'; expected 36500d at most"),
    (["decisions", "--until", "99999999h"], "--until: is '99999999h'; expected 36500d at most"),
    (["calibration", "--since", "99999999d"], "--since: is '99999999d'; expected 36500d at most"),
    (["record", "log", "--seconds", "nan"], "--seconds, --requests: are to be above 0"),
    (["waste", "0"], "LENGTH: is '0'; expected a whole number from 1 to 2147483647"),
    (["waste", "5", "-8"], "LENGTH: is '-8'; expected a whole number from 1 to 2147483647"),
    (["waste", "1.5"], "LENGTH: is '1.5'; expected a whole number from 1 to 2147483647"),
    (["waste", "9" * 5000], f"LENGTH: is '{'9' * 5000}'; expected a whole number from 1 to 2147483647"),
    (["waste", "٣"], "LENGTH: is '٣'; expected a whole number from 1 to 2147483647"),
    (["waste", "5", "9", "--max-len", "8"], "--max-len: is 8, and a sequence has 9 tokens; expected the longest"),
    (["waste", "5", "--max-len", "0"], "--max-len: is '0'; expected a whole number from 1 to 2147483647"),
    (["waste", "5", "--block-size", "16,0"], "--block-size: is '0'; expected a whole number from 1 to 2147483647"),
    (["waste", "5", "--block-size", "16,"], "--block-size: is ''; expected a whole number from 1 to 2147483647"),
    (["waste", *["5"] * 262_145], "LENGTH: is given 262145 times; expected at most 262144, the sequences of a worker"),
    (["serve", "--workers", "9" * 14], f"--workers: is '{'9' * 14}'; expected a whole number from 1 to 4096, or auto"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with a few files and without a router; standard input is not text."""
    for name, port in zip(("ADDRESS", "ADMIN_ADDRESS", "HTTP_ADDRESS"), free_ports(3), strict=True):
        monkeypatch.setenv(f"QUIRE_{name}", f"127.0.0.1:{port}")
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": 9, "output_tokens": 7}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    """Return what a command says when it refuses its arguments."""
    try:
        status: object = main(words)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    return err


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(words)[:60] for words, _ in WRONG])
def test_a_wrong_argument_is_named_with_what_was_expected(
    words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    before = sorted(folder.iterdir())
    assert said in refusal(capsys, words)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("words", [[], *([command] for command in COMMANDS)], ids=["", *COMMANDS])
def test_bytes_that_are_no_text_are_refused_by_every_command(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, [*words, os.fsdecode(b"\xff\xfe")])
    assert said == f"quire: argument {len(words) + 1} is '\\udcff\\udcfe'; expected text in UTF-8\n"


def test_a_host_without_an_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Hi", "--address", "a..b:50051"]) == 1
    said = "no router answers at a..b:50051: the host 'a..b' has no address;"
    assert capsys.readouterr().err == f"quire: {said} name another HOST:PORT\n"


@pytest.mark.parametrize("command", ["why --hit-rate", "why --last", "decisions", "calibration"])
def test_the_longest_span_of_time_fits_a_question(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--since", "36500d"]) == 1
    assert "no router answers" in capsys.readouterr().err
