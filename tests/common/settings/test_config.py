"""Options from flags, environment and a TOML file: precedence, conversion, and every mistake reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, TypeAdapter

from common.contracts.errors import InvalidConfig
from common.settings.config import PROGRAMS, installed_settings, load, load_or_exit, read
from common.settings.options import Address, Addresses, BlockSize, Bytes, Count, DType, Port, ServiceSettings, Settings
from common.version import quire_version
from router.config import RouterSettings


class Other(Settings):
    """options of another service"""

    service: ClassVar[str] = "other"
    beyond: int = Field(0, description="known elsewhere")


class Demo(ServiceSettings):
    """options of the demo"""

    service: ClassVar[str] = "demo"
    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("kv_blocks", "kv_memory"),)

    port: Port = Field(1, description="a port")
    block_size: BlockSize = Field(16, description="slots in a block")
    kv_blocks: Count | None = Field(None, description="blocks")
    kv_memory: Bytes | None = Field(None, description="bytes")
    worker: Addresses = Field((), description="workers")
    manager: Address = Field("127.0.0.1:50052", description="the manager")
    deterministic: bool = Field(False, description="the same bits")
    simulate: str | None = Field(None, description="no model", json_schema_extra={"bare": "base=5ms"})


def demo(*argv: str, **environ: str) -> Demo:
    return load(Demo, argv, environ, known=[Other])


def violations(*argv: str, **environ: str) -> dict[str, str]:
    with pytest.raises(InvalidConfig) as caught:
        demo(*argv, **environ)
    return {violation.field: violation.description for violation in caught.value.violations}


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "quire.toml"
    path.write_text(text)
    return str(path)


def test_defaults_hold_when_nothing_is_given() -> None:
    assert (demo().port, demo().block_size, demo().worker, demo().deterministic) == (1, 16, (), False)


def test_a_flag_may_stand_for_a_value_when_it_has_none() -> None:
    assert [demo(*words).simulate for words in ((), ("--simulate",), ("--simulate", "base=1ms"))] == [
        None,
        "base=5ms",
        "base=1ms",
    ]
    assert demo("--simulate", "--port", "7").port == 7


def test_each_source_wins_over_the_one_below_it(tmp_path: Path) -> None:
    file = toml(tmp_path, "port = 2\n[demo]\nport = 3\n")
    assert demo("--config", file).port == 3
    assert demo("--config", file, QUIRE_PORT="4").port == 4
    assert demo("--config", file, QUIRE_PORT="4", QUIRE_DEMO_PORT="5").port == 5
    assert demo("--config", file, "--port", "6", QUIRE_PORT="4", QUIRE_DEMO_PORT="5").port == 6


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    assert demo(QUIRE_CONFIG=toml(tmp_path, "block_size = 64")).block_size == 64


def test_a_repeated_flag_makes_a_list_and_so_does_a_comma_in_the_environment(tmp_path: Path) -> None:
    assert demo("--worker", "a:1", "--worker", "[::1]:2").worker == ("a:1", "[::1]:2")
    assert demo(QUIRE_WORKER="a:1, b:2").worker == ("a:1", "b:2")
    assert demo("--config", toml(tmp_path, 'worker = ["a:1"]')).worker == ("a:1",)


@pytest.mark.parametrize(("text", "size"), [("1000", 1000), ("4GiB", 4 << 30), ("1.5k", 1500), ("512 MiB", 512 << 20)])
def test_bytes_may_carry_a_unit(text: str, size: int) -> None:
    assert demo("--kv-memory", text).kv_memory == size


def test_a_switch_has_a_negative() -> None:
    assert demo("--deterministic").deterministic
    assert not demo("--no-deterministic", QUIRE_DETERMINISTIC="true").deterministic


def test_redis_url_is_read_by_its_usual_name_and_by_quires_own() -> None:
    assert demo(REDIS_URL="redis://a").redis_url == "redis://a"
    assert demo(REDIS_URL="redis://a", QUIRE_REDIS_URL="redis://b").redis_url == "redis://b"


def test_keys_of_other_services_are_accepted_and_left_to_them(tmp_path: Path) -> None:
    file = toml(tmp_path, 'beyond = "not checked here"\n[other]\nbeyond = 1\n')
    assert demo("--config", file, QUIRE_BEYOND="x", QUIRE_OTHER_BEYOND="y").port == 1


def test_what_is_meant_for_one_program_alone_is_distinguished(tmp_path: Path) -> None:
    config = ("--config", toml(tmp_path, "host = 'a'\nblock_size = 32\n[demo]\nblock_size = 64\nport = 3\n"))
    reading = read(Demo, (*config, "--deterministic"), {"QUIRE_PORT": "4", "QUIRE_DEMO_KV_BLOCKS": "5"}, known=[Other])
    assert reading.own == {"block_size", "deterministic", "kv_blocks"}  # QUIRE_PORT is above the table


def test_everything_wrong_is_reported_at_once(tmp_path: Path) -> None:
    file = toml(tmp_path, "blok_size = 4\nmanager = 'nowhere'\n[other]\nbeyon = 1\n")
    found = violations(
        *("--config", file, "--prot", "3", "--block-size", "17", "--kv-memory", "much"),
        QUIRE_PORT="70000",
        QUIRE_WORKR="a:1",
    )
    assert found == {
        "--prot": "is not an option here; did you mean --port?",
        f"blok_size in {file}": "is an unknown key; did you mean block_size?",
        f"other.beyon in {file}": "is an unknown key; did you mean beyond?",
        "QUIRE_WORKR": "is an unknown variable; did you mean QUIRE_WORKER?",
        "QUIRE_PORT": "is '70000'; expected less than or equal to 65535",
        "--block-size": "is '17'; expected a power of two from 4 to 256",
        "--kv-memory": "is 'much'; expected a number of bytes such as 512MiB, 4GiB or 1000000",
        f"manager in {file}": "is 'nowhere'; expected HOST:PORT, with [..] around an IPv6 address",
    }


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64, 128, 256])
def test_block_sizes_are_powers_of_two(size: int) -> None:
    assert demo("--block-size", str(size)).block_size == size


@pytest.mark.parametrize("size", ["0", "2", "12", "512", "-16"])
def test_other_block_sizes_are_refused(size: str) -> None:
    assert violations("--block-size", size) == {"--block-size": f"is '{size}'; expected a power of two from 4 to 256"}


@pytest.mark.parametrize(
    ("given", "blocks"), [("8", 8), ("8k", 8000), ("8K", 8000), ("8Ki", 8192), ("1.5M", 1_500_000), ("0.5ki", 512)]
)
def test_counts_may_have_a_unit(given: str, blocks: int) -> None:
    assert demo("--kv-blocks", given).kv_blocks == blocks


@pytest.mark.parametrize("given", ["8b", "1.0001k", "k", "8 k", "1e3"])
def test_other_counts_are_refused(given: str) -> None:
    (said,) = violations("--kv-blocks", given).values()
    assert said == f"is {given!r}; expected a valid integer"


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_types_have_the_names_of_other_engines_too(given: str, dtype: str) -> None:
    assert TypeAdapter(DType).validate_python(given) == dtype


def test_flags_of_other_engines_are_answered_and_their_values_taken_with_them() -> None:
    found = violations("--ctx-size", "4096", "-pp=2", "-m", "x", "--page-size", "17", "--port", "x", "stray")
    one_device = (
        "is not there: --tensor-parallel-size N runs a model in N processes, on several hosts by WORLD_SIZE, RANK, "
        "MASTER_ADDR and MASTER_PORT; --workers N starts N replicas of it"
    )
    assert found == {
        "--ctx-size": "is not an option here; `quire serve` has --max-model-len",
        "-pp": one_device,
        "-m": "is not an option here; `quire serve` has --model",
        "--page-size": "is not an option here; --block-size is the same",
        "--port": "is 'x'; expected a valid integer",
        "stray": "was not expected; options start with --",
    }


def test_a_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(Demo, ["--version", "--bogus"], {}, prog="quire-demo")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"quire-demo {quire_version()}\n")


def test_a_flag_without_its_value_is_named_along_with_the_rest() -> None:
    assert violations("--manager", "--port", "x") == {
        "--manager": "has no value; expected one after it",
        "--port": "is 'x'; expected a valid integer",
    }


def test_a_stray_word_is_refused() -> None:
    assert violations("serve") == {"serve": "was not expected; options start with --"}


class WithWord(Demo):
    """options with a positional one"""

    positional: ClassVar[str] = "simulate"


def test_a_word_without_a_flag_sets_the_positional_option() -> None:
    for words in (("h", "--port", "3"), ("--port", "3", "h"), ("--deterministic", "h")):
        assert load(WithWord, words, {"QUIRE_SIMULATE": "other"}, known=[Other]).simulate == "h"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("h", "--simulate", "g"), {"h": "was not expected: --simulate is 'g' already"}),
        (("h", "g"), {"g": "was not expected: SIMULATE is 'h' already"}),
        (("--simulat", "g", "h"), {"--simulat": "is not an option here; did you mean --simulate?"}),
    ],
)
def test_a_second_value_of_the_positional_option_is_refused(words: tuple[str, ...], said: dict[str, str]) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(WithWord, words, {}, known=[Other])
    assert {each.field: each.description for each in caught.value.violations} == said


def test_a_flag_that_resembles_none_gets_no_proposal() -> None:
    assert violations("--nope") == {"--nope": "is not an option here"}


def test_exclusive_options_of_one_source_are_refused() -> None:
    assert violations("--kv-blocks", "4", "--kv-memory", "1k") == {
        "--kv-blocks": "given together with --kv-memory; expected at most one of them"
    }


def test_an_exclusive_option_displaces_the_other_of_a_lower_source() -> None:
    settings = demo("--kv-blocks", "4", QUIRE_KV_MEMORY="1k")
    assert (settings.kv_blocks, settings.kv_memory) == (4, None)


def test_a_file_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    assert (
        violations("--config", missing)[missing] == "cannot be read (No such file or directory); expected a TOML file"
    )
    broken = toml(tmp_path, "port = ")
    assert violations("--config", broken)[broken].startswith("is not valid TOML")


def test_help_shows_default_and_environment_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        demo("--help")
    text = capsys.readouterr().out
    assert done.value.code == 0
    assert "--block-size SIZE" in text
    assert "slots in a block (default 16; QUIRE_BLOCK_SIZE)" in text
    assert "options of every service" in text
    assert "(REDIS_URL)" in text


def test_a_process_with_bad_options_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        load_or_exit(Demo, ["--port", "x", "--bogus"])
    lines = capsys.readouterr().err.splitlines()
    assert done.value.code == 2
    assert lines[0] == "2 bad options; nothing was started."
    assert len(lines) == 3


def test_the_programs_have_the_names_of_their_services() -> None:
    assert [settings.service for settings in installed_settings()] == list(PROGRAMS)


def test_what_is_for_another_program_is_left_to_it() -> None:
    """It refuses what is wrong there; nobody else needs to know its keys."""
    assert load(Demo, (), {"QUIRE_ROUTER_NO_KEY": "1", "QUIRE_KVMANAGER_PORT": "x"}).port == 1
    with pytest.raises(InvalidConfig, match="QUIRE_DEMO_PROT: is an unknown variable; did you mean QUIRE_DEMO_PORT"):
        load(Demo, (), {"QUIRE_DEMO_PROT": "1"})
    with pytest.raises(InvalidConfig, match="QUIRE_ROUTER_INDEX_TIMEOU: is an unknown variable; did you mean"):
        load(RouterSettings, ("--model", "."), {"QUIRE_ROUTER_INDEX_TIMEOU": "1"})
    assert load(Demo, (), {"QUIRE_INDEX_TIMEOUT": "1"}).port == 1  # a key of the router
