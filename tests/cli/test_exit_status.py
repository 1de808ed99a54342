"""The exit status of each command: 2 for wrong usage, 1 for what failed (docs/usage.md)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from cli.certificates.folder import CertificateFolder
from cli.main import COMMANDS, main
from common.process.ports import free_ports
from common.rpc.roles import Role

# Each line is wrong by itself: no router is asked.
WRONG = (
    "adapters --load sql",
    "advise-block-size nowhere.jsonl",
    "advise-block-size bad.jsonl",
    "advise-block-size log.jsonl --sample 0",
    "advise-block-size log.jsonl --logged-block-size 0",
    "advise-block-size log.jsonl --max-loss -1",
    "advise-block-size log.jsonl --speeds nowhere.json",
    "batch nowhere.jsonl out.jsonl",
    "batch bad.jsonl out.jsonl",
    "batch bad.jsonl bad.jsonl",
    "batch bad.jsonl out.jsonl --concurrency 0",
    "bench --seconds -1",
    "bench nowhere",
    "calibration --limit 0",
    "calibration --since soon",
    "certs certs --days 0",
    "certs file",
    "certs made",
    "chat --max-tokens many",
    "debug undo",
    "decisions --limit 0",
    "decisions --since soon",
    "decisions --service kvmanager --tenant red",
    "demo --model nowhere",
    "demo --svg nowhere/demo.svg",
    "doctor now",
    "explain",
    "explain --token-ids one",
    "explain --chat nowhere.json",
    "generate",
    "generate Hello --regex @nowhere",
    "generate Hello --timeout 0",
    "keys",
    "keys red/blue",
    "keys red --append .",
    "keys red --append nowhere/tenants.toml",
    "pin",
    "pin --system Hello --text Hello",
    "pin --text Hello --compute -1",
    "pins now",
    "prefetch --text Hello",
    "prefetch --worker worker-1",
    "record nowhere/log",
    "record file",
    "record log --seconds 0",
    "replay nowhere.jsonl",
    "replay bad.jsonl",
    "replay log.jsonl --load 0",
    "replay log.jsonl --policy none",
    "reset-cache now",
    "serve --workers 0",
    "serve nowhere",
    "status now",
    "status --watch --every 0",
    "trace",
    "unpin",
    "waste",
    "waste 5 --max-len 4",
    "waste 5 --block-size 0",
    "why --slowest -1",
    "why --last ID",
    "why --last --since soon",
    "why --hit-rate ID",
    "nothing",
)
# No router answers; a name is unknown.
FAILED = (
    "adapters",
    "calibration",
    "chat",
    "debug dump --address nowhere:1",
    "decisions",
    "explain Hello",
    "generate Hello",
    "pin --text Hello",
    "pins",
    "prefetch --text Hello --worker worker-1",
    "record log",
    "reset-cache",
    "status",
    "status --watch",
    "trace ID",
    "unpin NAME",
    "why --last",
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder with a few files, and without a router."""
    grpc, admin, http = free_ports(3)
    monkeypatch.setenv("QUIRE_ADDRESS", f"127.0.0.1:{grpc}")
    monkeypatch.setenv("QUIRE_ADMIN_ADDRESS", f"127.0.0.1:{admin}")
    monkeypatch.setenv("QUIRE_HTTP_ADDRESS", f"127.0.0.1:{http}")
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("bad\n")
    (tmp_path / "file").write_text("")
    made = CertificateFolder(tmp_path / "made").role(Role.ROUTER).cert
    made.parent.mkdir(parents=True)
    made.write_text("")
    (tmp_path / "log.jsonl").write_text('{"prompt_tokens": 9, "output_tokens": 7}\n')
    return tmp_path


def status_of(line: str, program: Callable[[Sequence[str]], int] = main) -> object:
    try:
        return program(line.split())
    except SystemExit as end:
        return end.code


def commands_of(lines: Sequence[str]) -> set[str]:
    return {line.split()[0] for line in lines}


def test_every_command_is_among_them() -> None:
    assert commands_of(WRONG) == {*COMMANDS, "nothing"}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_ends_with_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(line) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_that_is_none_ends_with_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(f"{command} --no-such-flag") == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("line", ["--no-such-flag", "--port many", "--log-level loud"])
@pytest.mark.parametrize("program", ["router.main", "kvmanager.main", "gpuworker.main", "cli.suite.embedded"])
def test_a_service_that_refuses_its_options_ends_with_2(
    program: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(line, importlib.import_module(program).main) == 2
    assert f"  {line.split(maxsplit=1)[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("line", FAILED)
def test_what_failed_ends_with_1(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(line) == 1
    assert capsys.readouterr().err.startswith("quire: ")


@pytest.mark.parametrize("where", ["import", "main"])
def test_ctrl_c_before_a_command_takes_it_ends_in_one_line(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first second of a command is spent on imports."""

    def interrupted(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    if where == "import":
        monkeypatch.setattr("cli.main.importlib.import_module", interrupted)
    else:
        monkeypatch.setattr("cli.commands.status.main", interrupted)
    assert main(["status"]) == 130
    assert capsys.readouterr() == ("", "\nquire: stopped by Ctrl-C\n")
