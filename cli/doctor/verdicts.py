"""Judges what a machine has. Pure: facts in, one verdict a line out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from cli.doctor.facts import Facts, PortUse

State = Literal["ok", "note", "fail"]
_OLDEST_PYTHON: Final = (3, 11)
_GIB: Final = 1 << 30
_LEAST_MEMORY: Final = 2 * _GIB
_LEAST_FILES: Final = 1024
_LEVEL_WORDS: Final = {
    "amx": "AVX-512 with bf16, AMX",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512_vnni": "AVX-512 with VNNI, without bf16",
    "avx512": "AVX-512, without VNNI and bf16",
    "avx_vnni": "AVX2 with VNNI, without AVX-512",
    "avx2": "AVX2, without AVX-512",
    "neon_dotprod": "NEON with dot products of bytes",
    "neon": "NEON, without dot products",
    "scalar": "no vector instructions that Quire has kernels for",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check. `note`: Quire runs, but not at its best; `fail`: `quire serve` would not start. `todo` says more."""

    name: str
    state: State
    found: str
    todo: str = ""


def judge(facts: Facts) -> Iterator[Verdict]:
    """Yield one verdict for each part, what everything else needs first."""
    yield _python(facts)
    yield _torch(facts)
    yield _compiler(facts)
    yield _processor(facts)
    yield _kernels(facts)
    yield _memory(facts)
    if facts.disk_folder:
        yield _disk(facts)
    yield _limits(facts)
    yield _redis(facts)
    yield _ports(facts.ports)
    yield _folder(facts)
    if facts.proxies:
        yield _proxies(facts)


def _python(facts: Facts) -> Verdict:
    found = ".".join(map(str, facts.python))
    if facts.python[:2] >= _OLDEST_PYTHON:
        return Verdict("Python", "ok", found)
    return Verdict("Python", "fail", found, "Quire needs Python 3.11 or newer; name one with PYTHON=... make install")


def _torch(facts: Facts) -> Verdict:
    if facts.torch is None or facts.transformers is None:
        lacks = " and ".join(name for name in ("torch", "transformers") if getattr(facts, name) is None)
        todo = "workers need them: make install, or pip install 'quire-llm[gpuworker]'"
        return Verdict("torch", "fail", f"no {lacks}", todo)
    found = f"{facts.torch}, transformers {facts.transformers}"
    if facts.nvidia and "+cpu" in facts.torch:
        todo = "there is an NVIDIA device, and this torch is a build for CPUs; install one for CUDA to use it"
        return Verdict("torch", "note", found, todo)
    if facts.nvidia and facts.triton is None:
        todo = "kernels for GPUs need triton: pip install 'quire-llm[gpu]'; or serve with --device cpu"
        return Verdict("torch", "fail", f"{found}, NVIDIA device, no triton", todo)
    return Verdict("torch", "ok", f"{found}{', NVIDIA device' if facts.nvidia else ''}")


def _compiler(facts: Facts) -> Verdict:
    if facts.compiler is not None:
        return Verdict("compiler", "ok", facts.compiler)
    if facts.kernels_missing is None:
        return Verdict("compiler", "ok", "none, and none is needed: the kernels are built")
    todo = "it builds the CPU kernels: install one (Debian: apt-get install g++), and build them"
    return Verdict("compiler", "note", "no C++ compiler on PATH (c++, g++, clang++) or in CXX", todo)


def _processor(facts: Facts) -> Verdict:
    cores = f"{facts.cores} {'core' if facts.cores == 1 else 'cores'}"
    found = f"{_LEVEL_WORDS.get(facts.level, facts.level)}; {cores}"
    if facts.amx_kept:
        found = f"AVX-512, and AMX, which the kernel keeps to itself; {cores}"
        todo = "prompts of models in bf16 are several times slower; Linux gives AMX from 5.16 on, sandboxes may not"
        return Verdict("processor", "note", found, todo)
    if facts.level == "scalar":
        return Verdict("processor", "note", found, "Quire runs several times slower than with AVX2")
    return Verdict("processor", "ok", found)


def _kernels(facts: Facts) -> Verdict:
    forced = facts.asked_level != facts.level
    if facts.kernels_missing is None:
        lower = f", as QUIRE_CPU_LEVEL asks; the processor runs {facts.level}" if forced else ""
        return Verdict("kernels", "note" if forced else "ok", f"native, for {facts.asked_level}{lower}")
    if forced:
        todo = f"{facts.kernels_missing}; or unset QUIRE_CPU_LEVEL"
        return Verdict("kernels", "fail", f"QUIRE_CPU_LEVEL is {facts.asked_level}", todo)
    return Verdict("kernels", "note", "torch's, which are several times slower", facts.kernels_missing)


def _memory(facts: Facts) -> Verdict:
    found = f"{_gib(facts.memory_free)} free of {_gib(facts.memory_total)}"
    if facts.host_memory > facts.memory_free:
        todo = f"--host-memory asks for {_gib(facts.host_memory)} in all; ask for less, or leave it out"
        return Verdict("memory", "fail", found, todo)
    if facts.memory_free >= _LEAST_MEMORY:
        return Verdict("memory", "ok", found)
    todo = "a small model needs about 2 GiB; --kv-memory 256MiB makes the KV pool smaller"
    return Verdict("memory", "note", found, todo)


def _disk(facts: Facts) -> Verdict:
    if facts.disk_room is None:
        todo = "name another folder: quire serve --disk-cache DIR, or leave it out"
        return Verdict("disk", "fail", f"{facts.disk_folder} cannot be written", todo)
    found = f"{_gib(facts.disk_room)} free in {facts.disk_folder}, or taken by caches"
    if not facts.checksums:
        return Verdict("disk", "fail", found, "--disk-cache needs the package xxhash: pip install 'xxhash>=4.1'")
    if facts.disk_cache > facts.disk_room:
        todo = f"--disk-cache-size asks for {_gib(facts.disk_cache)} in all; ask for less, or name another folder"
        return Verdict("disk", "fail", found, todo)
    return Verdict("disk", "ok", found)


def _limits(facts: Facts) -> Verdict:
    files = "any number of" if facts.open_files is None else str(facts.open_files)
    if facts.address_space is not None:
        found = f"address space {_gib(facts.address_space)}"
        return Verdict("limits", "note", found, "torch reserves more than it uses: ulimit -v unlimited")
    if facts.open_files is not None and facts.open_files < _LEAST_FILES:
        return Verdict("limits", "note", f"{files} open files", f"each stream is one: ulimit -n {_LEAST_FILES} or more")
    return Verdict("limits", "ok", f"{files} open files")


def _redis(facts: Facts) -> Verdict:
    if facts.redis is None:
        return Verdict("Redis", "fail", "none", facts.redis_missing)
    return Verdict("Redis", "ok", facts.redis)


def _ports(ports: tuple[PortUse, ...]) -> Verdict:
    taken = [each for each in ports if each.taken_by]
    if not taken:
        return Verdict("ports", "ok", f"{', '.join(str(each.port) for each in ports)} are free")
    found = ", ".join(f"{each.port} is taken by {each.taken_by}" for each in taken)
    flags = ", ".join(dict.fromkeys(f"{each.flag} N" for each in taken))
    return Verdict("ports", "fail", found, f"choose others: quire serve {flags}; or is a suite running? quire status")


def _folder(facts: Facts) -> Verdict:
    if facts.folder_writable:
        return Verdict("folder", "ok", f"{facts.folder} can be written")
    return Verdict(
        "folder", "fail", f"{facts.folder} cannot be written", "name another one: quire serve --state-dir DIR"
    )


def _proxies(facts: Facts) -> Verdict:
    found = f"{', '.join(facts.proxies)}; Quire's own connections use none"
    if facts.proxies_spare_loopback:
        return Verdict("proxies", "ok", found)
    todo = "other clients may send what is for this machine there: export no_proxy=localhost,127.0.0.1,::1"
    return Verdict("proxies", "note", found, todo)


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
