"""The matrix unit of Intel's processors: a process may use it once the kernel gave it the registers, and only then.

What it computes is tested with all other levels, in test_linear.py and attention/test_native_backend.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuworker.native import levels
from gpuworker.native import library as native

pytestmark = pytest.mark.skipif("amx" not in native.levels_here(), reason="no AMX here")

MULTIPLY = """
import torch
from gpuworker.native.library import NativeUnavailable, best, level_of, load
from gpuworker.native.linear import Kind, PackedLinear, Rows

def product(library):
    x, weight = torch.randn(40, 96).bfloat16(), torch.randn(70, 96).bfloat16()
    result = PackedLinear([Rows(weight)], Kind.BF16, library=library)(x)
    torch.testing.assert_close(result, x.float() @ weight.float().T, rtol=1e-4, atol=1e-4)
"""
# A signal stack with room for the registers of AVX-512 and none for those of AMX, whose use the kernel then refuses.
SMALL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(9000)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 9000)), None) == 0
"""


def output_of(script: str) -> str:
    """Return what a script prints in a process of its own, which must end well."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240.0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_whoever_loads_the_level_first_may_use_it() -> None:
    assert output_of(f"{MULTIPLY}\nproduct(load('amx'))\nprint(level_of(best()))") == "amx\n"


def test_a_process_that_the_kernel_refuses_takes_the_level_without_dot_products_of_bf16() -> None:
    script = f"{SMALL_STACK}{MULTIPLY}\nproduct(best())\nprint(level_of(best()))\ntry:\n    load('amx')\n"
    said = output_of(f"{script}except NativeUnavailable as reason:\n    print(reason)")
    assert said.splitlines()[0] == "avx512_vnni"
    assert said.splitlines()[1].startswith("the kernel gives this process no registers of AMX ")


def test_stacks_are_dumped_while_the_registers_are_in_use() -> None:
    """`quire debug dump` has a signal stack; the kernel saves the registers on it, as well as between threads."""
    script = (
        f"import faulthandler, os, signal, sys, threading\n{MULTIPLY}\n"
        "faulthandler.enable()\nfaulthandler.register(signal.SIGUSR1, file=sys.stdout)\n"
        "library, over = load('amx'), threading.Event()\n"
        "def send():\n"
        "    while not over.is_set():\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "        over.wait(0.001)\n"
        "sender = threading.Thread(target=send)\nsender.start()\n"
        "for _ in range(200):\n    product(library)\n"
        "over.set()\nsender.join()\nprint('done')"
    )
    lines = output_of(script).splitlines()
    assert lines[-1] == "done"
    assert any(line.startswith("Current thread") for line in lines)


def test_flags_of_amx_count_only_where_the_kernel_gives_the_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"amx_tile", "amx_bf16", "amx_int8"} <= levels.processor_flags()
    monkeypatch.setattr(levels, "_may_use_amx", lambda: False)
    left = levels.processor_flags()
    assert left.isdisjoint({"amx_tile", "amx_bf16", "amx_int8"})
    assert levels.amx_is_kept()
