"""Reads options from flags, environment and a TOML file; reports every mistake at once, before anything starts.

    flag  >  QUIRE_<SERVICE>_<KEY>  >  QUIRE_<KEY>  >  [service] table in the file  >  top level of the file  >  default

QUIRE_<KEY>_FILE names a file with the value of QUIRE_<KEY>. Secrets have no flags.
The file is named by `--config`, else by QUIRE_CONFIG. All services share environment and file: each service accepts a
key that any of them has; any other key is an error. QUIRE_<SERVICE>_<KEY> is looked at by that service alone. Pydantic
checks the values and converts them.
(pydantic-settings reads the same sources, but stops at the first bad value and forgets which source a value came from.)
"""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import importlib
import os
import reprlib
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from common.contracts.errors import FieldViolation, InvalidConfig, InvalidRequest, PortTaken, QuireError
from common.settings.options import Settings
from common.settings.service_links import service_links
from common.untrusted.rare_lines import redacted
from common.version import quire_version

FAILED_STATUS: Final = 1
# Options or files are refused: the call itself must change.
REFUSED_STATUS: Final = 2
# Another process has the port.
PORT_TAKEN_STATUS: Final = errno.EADDRINUSE


# The exit statuses of all programs: 2 for wrong usage, 1 for what failed (docs/usage.md).
def exit_status(error: QuireError) -> int:
    """Return the exit status of a program that ends with an error."""
    if isinstance(error, PortTaken):
        return PORT_TAKEN_STATUS
    return REFUSED_STATUS if isinstance(error, InvalidRequest) else FAILED_STATUS


# Pydantic's errors in the words of all other errors: the value that was given, and what was expected.
def mistake(problem: Mapping[str, Any]) -> str:
    """Return the words of one of pydantic's `ErrorDetails`; a long value is cut."""
    if problem["type"] == "missing":
        return "is missing"
    if problem["type"] == "extra_forbidden":
        return "is not known; expected nothing of this name"
    return f"is {reprlib.repr(problem['input'])}; {expectation(problem)}"


def expectation(problem: Mapping[str, Any]) -> str:
    """Return what was expected, without pydantic's own phrases."""
    if problem["type"] == "too_short":
        return "expected at least one"
    if problem["type"] == "model_type":
        return "expected an object"
    words = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")
    return words.partition(", unable to ")[0]


# The flags of other engines: Quire's option of the same meaning, or why there is none.
# The names are those of vLLM, SGLang, text-generation-inference and llama.cpp's server, as of 2026. A flag that
# Quire spells in the same way is not here.
# Quire's option -> the flags of others that mean it.
_OPTIONS: Final[Mapping[str, str]] = {
    "model": "-m --model-path --model-id -hf -hfr --hf-repo",
    "model_name": "--served-model-name -a --alias",
    "max_model_len": "-c --ctx-size --context-length --max-seq-len --max-input-tokens --max-input-length",
    "max_num_seqs": "-np --parallel --max-running-requests --max-batch-size --max-num-sequences --max-seqs --num-slots",
    "max_num_batched_tokens": "-b --batch-size -ub --ubatch-size --max-prefill-tokens --max-batch-prefill-tokens "
    "--chunked-prefill-size --max-num-tokens",
    "max_queued_requests": "--max-concurrent-requests --max-queue-size",
    "long_prefill_cap": "--long-prefill-token-threshold",
    "gpu_memory_utilization": "--mem-fraction-static --cuda-memory-fraction --gpu-mem-util --gpu-memory-fraction "
    "--kv-cache-free-gpu-memory-fraction",
    "kv_memory": "--kv-cache-memory-bytes --kv-cache-memory --max-batch-total-tokens --max-kv-size -cram --cache-ram",
    "host_memory": "--swap-space --kv-offloading-size --hicache-size --hicache-ratio --kv-host-cache-bytes "
    "--host-cache-size --cache-max-entry-count-host",
    "disk_cache": "--hicache-storage-backend",
    "disaggregation": "--disaggregation-mode --kv-transfer-config",
    "kv_events": "--kv-events-config",
    "kv_blocks": "--num-gpu-blocks-override --num-gpu-blocks",
    "kv_cache_dtype": "-ctk --cache-type-k -ctv --cache-type-v --kv-cache-type",
    "block_size": "--page-size --tokens-per-block",
    "quantization": "-q --quantize",
    "threads": "-t -tb --threads-batch --cpu-threads",
    "device": "-ngl --gpu-layers --n-gpu-layers -dev",
    "seed": "-s --random-seed",
    "tensor_parallel_size": "--tp-size --tp --num-shard --sharded",
    "workers": "-dp --data-parallel-size --dp-size --dp",
    "deterministic": "--enable-deterministic-inference",
    "port": "--http-port",
    "host": "--hostname",
    "admin_http_port": "--prometheus-port --metrics-port",
    "cors_origins": "--allowed-origins --cors-allow-origin",
    "public_tls_cert": "--ssl-certfile --ssl-cert-file",
    "public_tls_key": "--ssl-keyfile --ssl-key-file",
    "tenants": "--api-key --api-key-file",
    "trace_endpoint": "--otlp-traces-endpoint --otlp-endpoint",
    "log_level": "-v --verbose --verbosity --uvicorn-log-level --disable-log-requests --log-requests",
    "log_format": "--json-output",
    "load_format": "--skip-load-weights",
    "no_prefix_caching": "--disable-radix-cache --no-enable-prefix-caching --no-cache-prompt",
    "no_cuda_graphs": "--enforce-eager --disable-cuda-graph",
    "redis_url": "--redis",
    "lora": "--lora-modules --lora-adapters --lora-paths",
    "max_loras": "--max-loras-per-batch",
    "draft_model": "-md --model-draft --speculative-model --speculative-draft-model-path",
    "speculative": "--speculative-algorithm --spec-type",
}
_ONE_DEVICE: Final = (
    "--tensor-parallel-size N runs a model in N processes, on several hosts by WORLD_SIZE, RANK, MASTER_ADDR and "
    "MASTER_PORT; --workers N starts N replicas of it"
)
# Why there is no such option -> the flags of others.
_ABSENT: Final[Mapping[str, str]] = {
    _ONE_DEVICE: "-pp --pipeline-parallel-size "
    "--pp-size -ts --tensor-split -sm --split-mode -mg --main-gpu --nnodes --node-rank "
    "--distributed-executor-backend --enable-expert-parallel --ep-size",
    "prefixes are always shared; --no-prefix-caching turns that off": "--enable-prefix-caching --cache-prompt",
    "prompts are always cut into chunks; --max-num-batched-tokens bounds a step": "--enable-chunked-prefill",
    "requests always join the running batch": "-cb --cont-batching --waiting-served-ratio --schedule-policy",
    "weights stay on the device; --host-memory keeps K and V that leave it": "--cpu-offload-gb",
    "--draft-model names a draft model, and --speculative what guesses": "--speculative-config --speculate",
    "drafts are as many as pay": "--num-speculative-tokens --draft-max --speculative-num-steps",
    "--lora NAME=DIR and --lora-dir serve adapters": "--enable-lora --max-cpu-loras --max-loaded-loras",
    "Quire takes text alone": "--limit-mm-per-prompt --mm-processor-kwargs --mmproj",
    "calls of tools are always read; --tool-call-parser none turns that off": "--enable-auto-tool-choice",
    "Quire has its own parsers alone; --tool-call-parser chooses one": "--tool-parser-plugin",
    "thoughts are always read; --reasoning-parser none turns that off": "--enable-reasoning --reasoning-format",
    "code of a checkpoint is never run": "--trust-remote-code",
    "the attention fits device and model; --model-impl chooses the forward": "--attention-backend -fa --flash-attn",
    "llguidance checks every grammar": "--guided-decoding-backend --grammar-backend --structured-outputs-config",
    "weights are mapped from their files": "--mlock --no-mmap --mmap",
    "HF_HOME names the folder of downloads": "--download-dir --huggingface-hub-cache --model-dir",
    "config.json of the checkpoint has it": "--rope-scaling --rope-freq-base --rope-freq-scale --hf-overrides",
    "chat templates are always rendered": "--jinja",
    "/metrics is always there, on the admin plane": "--metrics --enable-metrics",
    "each request has it as a field": "-n --n-predict --predict --temp --temperature --top-p --top-k --min-p "
    "--repeat-penalty --max-tokens --stop",
}
_WHY: Final = {flag: why for why, flags in _ABSENT.items() for flag in flags.split()}
OURS: Final[Mapping[str, str]] = {flag: key for key, flags in _OPTIONS.items() for flag in flags.split()}
FOREIGN: Final = frozenset(OURS) | frozenset(_WHY)


def advice(flag: str, keys: Collection[str]) -> str | None:
    """Return what to do in place of a flag, for a program with the options `keys`; None for an unknown flag."""
    if flag in OURS:
        same = "--" + OURS[flag].replace("_", "-")
        here = OURS[flag].removeprefix("no_") in keys
        return "is not an option here; " + (f"{same} is the same" if here else f"`quire serve` has {same}")
    return f"is not there: {_WHY[flag]}" if flag in _WHY else None


SettingsT = TypeVar("SettingsT", bound=Settings)

ENV_PREFIX: Final = "QUIRE_"
# The programs that share environment and option file, and the classes of their options. These are imported when a
# program meets a key that it does not know: they take a fifth of most commands' start.
PROGRAMS: Final = {
    "router": "router.config:RouterSettings",
    "kvmanager": "kvmanager.config:KvManagerSettings",
    "gpuworker": "gpuworker.config:GpuWorkerSettings",
    "serve": "cli.config:UpSettings",
    "client": "cli.client:ClientSettings",
}
_FILE: Final = "_FILE"
_NO_VALUE: Final = object()
_DESCRIPTION: Final = (
    "Each option can be a flag, a variable of the environment (its name stands in brackets) or a key of a TOML file; "
    "flags come first."
)


@dataclass(slots=True)
class Reading:
    """The result of one pass over the sources: values, the origin of each in the user's words, and the mistakes."""

    settings: type[Settings]
    # Those of the other programs; None: of all that are installed.
    others: tuple[type[Settings], ...] | None = None
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    # Keys whose value is for this program alone: by flag, QUIRE_<SERVICE>_<KEY> or the table [service].
    own: set[str] = field(default_factory=set)
    violations: list[FieldViolation] = field(default_factory=list)
    # The TOML file that was named, if one was.
    file: Path | None = None

    @property
    def known(self) -> Mapping[str, type[Settings]]:
        """The option classes of all programs that share environment and file, by service."""
        others = installed_settings() if self.others is None else self.others
        return {each.service: each for each in (*others, self.settings)}

    def violate(self, where: str, what: str) -> None:
        self.violations.append(FieldViolation(where, what))

    def take(self, found: Mapping[str, tuple[str, Any]], own: bool = False) -> None:
        """Lay one source (key -> origin, value) over those before it; one of an exclusive group displaces the rest."""
        for group in self.settings.exclusive:
            given = [key for key in group if key in found]
            if len(given) > 1:
                others = " and ".join(found[key][0] for key in given[1:])
                self.violate(found[given[0]][0], f"given together with {others}; expected at most one of them")
            if given:
                for key in group:
                    self.values.pop(key, None)
                self.own.difference_update(group)
        for key, (origin, value) in found.items():
            self.values[key], self.origins[key] = value, origin
        self.own = self.own | found.keys() if own else self.own - found.keys()


def load(
    settings: type[SettingsT],
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    known: Iterable[type[Settings]] | None = None,
    prog: str | None = None,
) -> SettingsT:
    """Return the options in `argv` (without the program's name), environment and file, laid over each other.

    `known` are the option classes of all programs that share environment and file (default: all that are installed).
    Raises InvalidConfig with every violation; exits on `--help`.
    """
    return validate(read(settings, argv, environ, known, prog), settings)


def read(
    settings: type[Settings],
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    known: Iterable[type[Settings]] | None = None,
    prog: str | None = None,
) -> Reading:
    """Return the values of the sources, not yet checked; arguments as for `load`."""
    environ = os.environ if environ is None else environ
    reading = Reading(settings, None if known is None else tuple(known))
    flags, config = _read_flags(reading, argv, prog)
    config = config or environ.get(ENV_PREFIX + "CONFIG")
    if config:
        reading.file = Path(config)
        _read_file(reading, reading.file)
    _read_environment(reading, environ)
    reading.take(flags, own=True)
    return reading


def validate(reading: Reading, settings: type[SettingsT]) -> SettingsT:
    """Return the options that were read. Raises InvalidConfig with every violation, those of the reading included."""
    try:
        result = settings.model_validate(reading.values)
    except ValidationError as error:
        for problem in error.errors():
            reading.violate(*_in_words(problem, reading.origins, settings))
        raise InvalidConfig(*reading.violations) from None
    for impossible in result.problems():
        reading.violate(reading.origins.get(_key_of(impossible.field), impossible.field), impossible.description)
    if reading.violations:
        raise InvalidConfig(*reading.violations)
    return result


def load_or_exit(settings: type[SettingsT], argv: Sequence[str] | None = None, prog: str | None = None) -> SettingsT:
    """Return the options of this process; on bad ones print every violation to stderr and exit with status 2.

    `prog` names the command in the help, where that is not the program itself (`quire serve`).
    """
    try:
        return load(settings, sys.argv[1:] if argv is None else argv, prog=prog)
    except InvalidConfig as error:
        refuse(error)


def refuse(error: InvalidConfig, heading: str = "") -> NoReturn:
    """Print each violation on a line of its own to stderr, under a heading, and exit with its status.

    Without a heading the error came before anything was started.
    """
    count = len(error.violations)
    lines = [heading or f"{count} bad option{'s' if count > 1 else ''}; nothing was started."]
    lines += [f"  {violation.field}: {violation.description}" for violation in error.violations]
    print("\n".join(lines), file=sys.stderr)  # noqa: T201
    sys.exit(exit_status(error))


@functools.cache
def installed_settings() -> tuple[type[Settings], ...]:
    """Return the option classes of all `PROGRAMS`."""
    found = [(*place.split(":"),) for place in PROGRAMS.values()]
    return tuple(getattr(importlib.import_module(module), name) for module, name in found)


def flag_of(key: str) -> str:
    """Return the flag of a key: block_size -> --block-size."""
    return "--" + key.replace("_", "-")


def _key_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def env_of(key: str, info: FieldInfo) -> str:
    """Return the environment variable that sets a key: its own name where it has one, else QUIRE_<KEY>."""
    return _extra(info, "env") or ENV_PREFIX + key.upper()


def is_secret(info: FieldInfo) -> bool:
    """Return whether a value is for no eyes: it has no flag, and no message shows it."""
    return _extra(info, "secret") is not None


def _extra(info: FieldInfo, name: str) -> str | None:
    extra = info.json_schema_extra
    return str(extra[name]) if isinstance(extra, dict) and name in extra else None


def build_parser(settings: type[Settings], prog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a program's flags; its help shows each default and environment variable."""
    words = f" [{settings.positional.upper()}]" if settings.positional else ""
    parser = _Parser(prog, f"%(prog)s{words} [--OPTION VALUE ...]", formatter_class=_HelpFormatter, allow_abbrev=False)
    parser.description = _DESCRIPTION
    parser.add_argument("--config", metavar="FILE", help="TOML file with options (environment: QUIRE_CONFIG)")
    parser.add_argument("--version", action="version", version=f"%(prog)s {quire_version()}")
    groups: dict[type, argparse._ArgumentGroup] = {}
    for key, info in settings.model_fields.items():
        if is_secret(info):  # every user of a machine can read the flags of a process
            continue
        owner = next(base for base in reversed(settings.__mro__) if key in getattr(base, "model_fields", {}))
        if owner not in groups:
            groups[owner] = parser.add_argument_group(owner.__doc__)
        _add_flag(groups[owner], key, info)
    return parser


class _HelpFormatter(argparse.HelpFormatter):
    """Wide, and without brackets around a value: `nargs="?"` only serves to note a missing one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return super()._format_args(action, default_metavar).strip("[]")


class _Parser(argparse.ArgumentParser):
    """Reports no mistakes itself: the caller reports them together with all others."""

    def error(self, message: str) -> NoReturn:
        raise InvalidConfig(FieldViolation("command line", message))


def _add_flag(group: argparse._ArgumentGroup, key: str, info: FieldInfo) -> None:
    text = f"{info.description or ''} ({_default(info)}{env_of(key, info)})".replace("%", "%%")
    common: dict[str, Any] = {"dest": key, "default": argparse.SUPPRESS, "help": text}
    if info.annotation is bool:
        group.add_argument(flag_of(key), action=argparse.BooleanOptionalAction, **common)
        return
    action = "append" if get_origin(info.annotation) is tuple else "store"
    bare = _extra(info, "bare") or _NO_VALUE  # the value of the flag without an argument
    names = (*str(_extra(info, "short") or "").split(), flag_of(key))
    group.add_argument(*names, action=action, nargs="?", const=bare, metavar=_metavar(key, info), **common)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required; "
    if _extra(info, "unsaid") is not None:  # the description names the default
        return ""
    if isinstance(info.default, bool):
        return f"default {'on' if info.default else 'off'}; "
    return "" if info.default in (None, ()) else f"default {info.default}; "


def _metavar(key: str, info: FieldInfo) -> str:
    choices = [each for each in get_args(info.annotation) if isinstance(each, str)]
    return "|".join(choices) or key.rpartition("_")[2].upper()


def _read_flags(
    reading: Reading, argv: Sequence[str], prog: str | None
) -> tuple[dict[str, tuple[str, Any]], str | None]:
    """Return the flags as key -> (origin, value) and the value of --config; note unknown flags."""
    parser = build_parser(reading.settings, prog)
    try:
        parsed, rest = parser.parse_known_args(_without_foreign_flags(reading, argv))
    except InvalidConfig as error:
        reading.violations += error.violations
        return {}, None
    words = _refuse_unknown_flags(reading, rest)
    found = vars(parsed)
    config = found.pop("config")
    flags: dict[str, tuple[str, Any]] = {}
    for key, value in found.items():
        if value is _NO_VALUE or (isinstance(value, list) and _NO_VALUE in value):
            reading.violate(flag_of(key), "has no value; expected one after it")
        else:
            flags[key] = (flag_of(key), value)
    _take_words(reading, words, flags)
    return flags, config


def _take_words(reading: Reading, words: Sequence[str], flags: dict[str, tuple[str, Any]]) -> None:
    """Let the first word without a flag set the positional option; note the other words."""
    key = reading.settings.positional
    for word in words:
        if not key:
            reading.violate(word, "was not expected; options start with --")
        elif key in flags:
            reading.violate(word, f"was not expected: {flags[key][0]} is {flags[key][1]!r} already")
        else:
            flags[key] = (key.upper(), word)


def _without_foreign_flags(reading: Reading, argv: Sequence[str]) -> list[str]:
    """Note each flag of another engine, and return the other words; the value of such a flag goes with it."""
    kept: list[str] = []
    after_foreign = False
    for word in argv:
        name, has_value, _ = word.partition("=")
        if name in FOREIGN and _key_of(name) not in reading.settings.model_fields:
            reading.violate(name, advice(name, reading.settings.model_fields) or "")
            after_foreign = not has_value
            continue
        if not after_foreign or word.startswith("-"):
            kept.append(word)
        after_foreign = False
    return kept


def _refuse_unknown_flags(reading: Reading, rest: Sequence[str]) -> list[str]:
    """Note each unknown flag; return the words that belong to no flag."""
    flags = [flag_of(key) for key in (*reading.settings.model_fields, "config")]
    words: list[str] = []
    after_flag = False
    for word in rest:
        name, has_value, _ = word.partition("=")
        if word.startswith("-"):
            reading.violate(name, "is not an option here" + _nearest(name, flags))
        elif not after_flag:
            words.append(word)
        after_flag = word.startswith("-") and not has_value
    return words


def _read_environment(reading: Reading, environ: Mapping[str, str]) -> None:
    """Take QUIRE_* (and names such as REDIS_URL that a field claims); a variable for this service alone wins."""
    links = service_links(environ, ENV_PREFIX)
    environ = {name: value for name, value in environ.items() if name not in links}
    shared: dict[str, tuple[str, Any]] = {}
    own: dict[str, tuple[str, Any]] = {}
    for key, info in reading.settings.model_fields.items():
        general, special = _names(reading.settings, key)
        shared |= _first(reading, environ, key, general, env_of(key, info))
        own |= _first(reading, environ, key, special)
    for name in sorted(_foreign(reading.settings, environ)):
        names = {ENV_PREFIX + "CONFIG", *(name for each in reading.known.values() for name in _variables(each))}
        if name not in names:
            reading.violate(name, "is an unknown variable" + _nearest(name, names))
    reading.take(shared)
    reading.take(own, own=True)


def _foreign(settings: type[Settings], environ: Mapping[str, str]) -> Iterator[str]:
    """Yield variables that are neither one program's own nor one of these options: some program may have such a key."""
    services = tuple(f"{ENV_PREFIX}{each}_".upper() for each in PROGRAMS if each != settings.service)
    names = {ENV_PREFIX + "CONFIG", *_variables(settings)}
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in names and not name.startswith(services):
            yield name


def _names(settings: type[Settings], key: str) -> tuple[str, str]:
    """Return the variables that set a key: for all programs, and for this one."""
    return ENV_PREFIX + key.upper(), ENV_PREFIX + f"{settings.service}_{key}".upper()


def _variables(settings: type[Settings]) -> Iterator[str]:
    for key in settings.model_fields:
        for name in _names(settings, key):
            yield name
            yield name + _FILE


def _first(reading: Reading, environ: Mapping[str, str], key: str, *names: str) -> dict[str, tuple[str, Any]]:
    """Return the value of the first variable that is set; <NAME>_FILE names a file with the value, such as a secret."""
    for name in names:
        if name in environ:
            return {key: (name, environ[name])}
        if name + _FILE in environ:
            return _from_file(reading, key, name + _FILE, Path(environ[name + _FILE]))
    return {}


def _from_file(reading: Reading, key: str, name: str, path: Path) -> dict[str, tuple[str, Any]]:
    try:
        return {key: (name, path.read_text().strip())}
    except (OSError, UnicodeDecodeError) as error:
        reading.violate(name, f"names {path}, which cannot be read ({_reason(error)}); expected a file with the value")
        return {}


def _read_file(reading: Reading, path: Path) -> None:
    """Take the top level of a TOML file, then the table of this service; note every unknown key."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        return reading.violate(str(path), f"cannot be read ({_reason(error)}); expected a TOML file")
    except tomllib.TOMLDecodeError as error:
        return reading.violate(str(path), f"is not valid TOML: {error}")
    tables = {name: content.pop(name) for name in list(content) if name in reading.known}
    everywhere = {key for settings in reading.known.values() for key in settings.model_fields}
    reading.take(_known_keys(reading, path, content, everywhere))
    for name, table in tables.items():
        if not isinstance(table, dict):
            reading.violate(f"{name} in {path}", f"is a value; expected a table [{name}]")
            continue
        found = _known_keys(reading, path, table, set(reading.known[name].model_fields), f"{name}.")
        if name == reading.settings.service:
            reading.take(found, own=True)
    return None


def _known_keys(
    reading: Reading, path: Path, table: Mapping[str, Any], known: set[str], prefix: str = ""
) -> dict[str, tuple[str, Any]]:
    for key in table.keys() - known:
        reading.violate(f"{prefix}{key} in {path}", "is an unknown key" + _nearest(key, known))
    mine = reading.settings.model_fields.keys() & table.keys()
    return {key: (f"{prefix}{key} in {path}", table[key]) for key in sorted(mine)}


def _in_words(problem: ErrorDetails, origins: Mapping[str, str], settings: type[Settings]) -> tuple[str, str]:
    """Return the origin of a value, and its mistake, from one of pydantic's errors."""
    expected = expectation(problem)
    if not problem["loc"]:
        return "options", expected
    key = str(problem["loc"][0])
    if problem["type"] == "missing":
        return flag_of(key), "is missing; it has no default"
    shown = "a secret" if is_secret(settings.model_fields[key]) else redacted(repr(problem["input"]))
    return origins.get(key, flag_of(key)), f"is {shown}; {expected}"


def _nearest(name: str, known: Iterable[str]) -> str:
    bare = {each.lstrip("-"): each for each in sorted(known)}
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)
    return f"; did you mean {bare[close[0]]}?" if close else ""


def _reason(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be read, without its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
