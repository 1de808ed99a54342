"""The usage of processes, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

from bench.lib.at_rest import Usage, usage_of


def process(proc: Path, pid: int, cpu: tuple[int, int], threads: dict[int, int], children: str = "") -> None:
    for thread, switches in threads.items():
        (task := proc / str(pid) / "task" / str(thread)).mkdir(parents=True)
        (task / "children").write_text(children if thread == pid else "")
        status = f"Name:\tpython\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t9999\n"
        (task / "status").write_text(status)
    before = "S " + " ".join("7" * 10)  # state, then ten fields that are something else
    (proc / str(pid) / "stat").write_text(f"{pid} (a name (odd) 1 2) {before} {cpu[0]} {cpu[1]} 5000 6000 20 0\n")


def test_all_threads_of_all_processes_below_count(tmp_path: Path) -> None:
    process(tmp_path, 10, (100, 20), {10: 5, 11: 7}, children="20 30 ")
    process(tmp_path, 20, (1, 2), {20: 1000})
    process(tmp_path, 30, (0, 0), {30: 1}, children="40")
    process(tmp_path, 40, (50, 27), {40: 0, 41: 2})
    process(tmp_path, 50, (9000, 9000), {50: 9000})
    assert usage_of(10, tmp_path, ticks=100) == Usage(2.0, 1015)
    assert usage_of(30, tmp_path, ticks=100) == Usage(0.77, 3)
