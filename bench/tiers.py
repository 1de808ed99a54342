"""What the host tier gains and costs: an engine whose evicted blocks stay in host memory against one without.

    python -m bench.tiers --json
    python -m bench.tiers --only talks --shape windows    where some layers have a window; states: where they keep some

Both engines run the same random Llama shape on the CPU, over ledgers of their own, in interleaved pairs of alternating
order. Five loads:

* talks: conversations whose histories take three times the pool. Turns come one by one, each of another conversation.
* turns: the same, all conversations at once, each turn as soon as the one before it has its answer.
* swap: sequences that begin together and outgrow the pool, so that some are preempted and go on later.
* unused: prompts that fit into the pool, so that nothing leaves it.
* no_reuse: prompts that share nothing, and each of which makes the one before leave the pool.

Three more are of a disk behind the host tier (`--disk-cache`):

* restart: prompts that share prefixes, before a process is killed and after another one has its folder.
* saving: `no_reuse` with a disk, to which each block is saved, against the host tier alone.
* unused_disk: requests that fill no block, with a disk to which nothing is saved, against the host tier alone.

`swap_ratio` is of whole loads, mostly of decodes. `swap_resume_ratio` is what a preemption costs its own stream: the
seconds from the admission of a preempted sequence to its next token, swapped over recomputed, means of a run. Others
run beside it, so a part of both are their steps. `swap_pause_ratio` begins at the preemption: it has the time in the
queue too, until others have ended. `swap_queued` and `swap_queued_plain` are the share of the queue.

Every pair checks that both engines give the same tokens, and that blocks moved where they should, and nowhere else.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.lib.checkpoints import HYBRID, MEDIUM, SMALL, WINDOWED
from bench.lib.harness import median_interval, parser, progress, report
from bench.lib.models import data_plane, plane_worker
from bench.lib.workers import BenchWorker, Resume, Run
from cli.benchmark.requests import Request, Workload, equal_requests
from common.contracts.lease import TierCopy
from common.contracts.types import BlockId
from gpuworker.memory.byte_plan import frame_bytes
from gpuworker.memory.disk_frames import DiskFrames, size_of
from gpuworker.memory.host_frames import HostFrames
from gpuworker.memory.kv_cache import KvCache
from gpuworker.memory.layout import attending_groups, state_group
from gpuworker.plane.assembly import ModelPlane
from kvmanager.contracts.counts import Totals

BLOCK_SIZE = 16
SHAPES = {"small": SMALL, "128m": MEDIUM, "windows": WINDOWED, "states": HYBRID}
_VOCABULARY = 2000
_SAVE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """A load's pool in blocks, the sequences that run at once, and its requests by a seed."""

    blocks: int
    sequences: int
    workload: Callable[[int], Workload]
    alone: bool = False
    """Whether requests come one by one."""


def conversations(count: int, turns: int, prompt: int, output: int, seed: int) -> Workload:
    """Return conversations that begin together; each turn adds `prompt` tokens and their answer."""
    rng = random.Random(f"turns/{seed}")

    def words(length: int) -> list[int]:
        return [rng.randrange(3, _VOCABULARY) for _ in range(length)]

    initial = [Request(f"c{number:02d}t0", words(prompt), output, number) for number in range(count)]
    later = {(number, turn): words(prompt) for number in range(count) for turn in range(1, turns)}
    return Workload("turns", initial, turns, later)


def loads(scale: float, pairs: int = 1) -> dict[str, Sizes]:
    """Return the loads; `scale` is that of the number of requests, `pairs` how often they come."""
    chats = max(4, round(12 * scale))
    rows = max(4, round(12 * scale))
    whole = 4 * (192 + 16) // BLOCK_SIZE  # blocks of a conversation at its end
    long = (320 + 320) // BLOCK_SIZE
    return {
        "talks": Sizes(chats * whole // 3, 3, lambda seed: conversations(chats, 4, 192, 16, seed), alone=True),
        "turns": Sizes(chats * whole // 3, 3, lambda seed: conversations(chats, 4, 192, 16, seed)),
        "swap": Sizes(rows * long // 2, rows, lambda seed: equal_requests(rows, 320, 320, seed, _VOCABULARY)),
        "unused": Sizes(rows * 18 * (pairs + 2), rows, lambda seed: equal_requests(rows, 192, 32, seed, _VOCABULARY)),
        "no_reuse": Sizes(
            4 * (256 + 32) // BLOCK_SIZE, 3, lambda seed: equal_requests(2 * rows, 256, 24, seed, _VOCABULARY)
        ),
    }


def short_requests(scale: float) -> Sizes:
    """Return requests that fill no block."""
    requests, tokens = max(4, round(400 * scale)), BLOCK_SIZE // 2
    return Sizes(64, 12, lambda seed: equal_requests(requests, tokens, tokens - 1, seed, _VOCABULARY))


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of a load with the host tier and one without; blocks that were copied into frames and out of them.

    `redone` are full blocks that preemptions made the engines compute again, with the tier and without.
    """

    tiered: Run
    plain: Run
    stores: int
    loads: int
    redone_tiered: int
    redone_plain: int

    @property
    def throughput(self) -> float:
        return (self.tiered.tokens / self.tiered.seconds) / (self.plain.tokens / self.plain.seconds)

    @property
    def ttft(self) -> float:
        return statistics.mean(_later(self.tiered)) / statistics.mean(_later(self.plain))


def _later(run: Run) -> list[float]:
    """Return the times to first tokens of all turns but the first ones, from their admission to the queue on."""
    found = [record.first_token for record in run.records.values() if record.request.turn]
    return found or run.first_tokens


@contextmanager
def engines(plane: ModelPlane, sizes: Sizes, frames: int) -> Iterator[tuple[BenchWorker, BenchWorker]]:
    """Run an engine with frames and one without, each with a pool of the load's size."""
    changes: dict[str, Any] = {"num_blocks": pages_of(plane, sizes.blocks), "max_num_seqs": sizes.sequences}
    with ExitStack() as stack:
        tiered = stack.enter_context(plane_worker(plane, BLOCK_SIZE, **changes, host_frames=pages_of(plane, frames)))
        yield tiered, stack.enter_context(plane_worker(plane, BLOCK_SIZE, **changes))


def pages_of(plane: ModelPlane, blocks: int) -> int:
    """Return the pages of a pool for so many blocks of each group, and a checkpoint of states for each turn of talks.

    Where the pool has no groups, they are the blocks.
    """
    groups = plane.identity.kv_geometry.groups
    states = state_group(groups)
    pages = blocks * sum(group.pages for group in attending_groups(groups)) if groups else blocks
    return pages if states is None else pages + blocks * BLOCK_SIZE // (192 + 16) * states.pages


def drive(worker: BenchWorker, sizes: Sizes, workload: Workload, salt: str) -> Run:
    """Run a load on an engine; where requests come one by one, the seconds are those of all of them."""
    if not sizes.alone:
        return worker.drive(workload, salt)
    whole, following = Run(), list(workload.initial)
    while following:
        request = following.pop(0)
        run = worker.drive(Workload("alone", [request]), salt)
        (record,) = run.records.values()
        whole.records[request.rid] = record
        whole.seconds, whole.tokens = whole.seconds + run.seconds, whole.tokens + run.tokens
        whole.first_tokens += run.first_tokens
        following += filter(None, [workload.follow_up(request, record.tokens)])
    return whole


def _redone(totals: Totals) -> int:
    return totals.recompute_query_blocks - totals.recompute_hit_blocks


def measure(plane: ModelPlane, name: str, sizes: Sizes, pairs: int) -> Iterator[Pair]:
    """Yield `pairs` pairs of a load after one that warms up. Raises AssertionError where tokens differ."""
    frames = 6 * sizes.blocks
    with engines(plane, sizes, frames) as (tiered, plain):
        engines_of = {"tiered": tiered, "plain": plain}
        for index in range(pairs + 1):
            runs, before = dict[str, Run](), {name: each.totals for name, each in engines_of.items()}
            for which in ("tiered", "plain") if index % 2 else ("plain", "tiered"):
                runs[which] = drive(engines_of[which], sizes, sizes.workload(index), salt=f"{name}-{index}")
            same = [each.tokens for _, each in sorted(runs["tiered"].records.items())]
            assert same == [each.tokens for _, each in sorted(runs["plain"].records.items())], "tokens differ"
            totals = tiered.totals
            pair = Pair(
                runs["tiered"],
                runs["plain"],
                totals.host_stores - before["tiered"].host_stores,
                totals.host_loads - before["tiered"].host_loads,
                _redone(totals) - _redone(before["tiered"]),
                _redone(plain.totals) - _redone(before["plain"]),
            )
            if index:
                progress(f"{name}: pair {index} of {pairs}, throughput {pair.throughput:.3f}", end=index == pairs)
                yield pair


def figures_of(name: str, pairs: list[Pair]) -> dict[str, float]:
    """Return a load's figures by their fixed names; costs are seconds with the host tier over seconds without."""
    ratio, lower, upper = median_interval([pair.throughput for pair in pairs])
    moved = {
        f"stores_{name}": statistics.median(pair.stores for pair in pairs),
        f"loads_{name}": statistics.median(pair.loads for pair in pairs),
    }
    if name == "talks":
        ratio, lower, upper = median_interval([pair.ttft for pair in pairs])
    if name in RATIOS:
        figure = RATIOS[name]
        return {figure: ratio, f"{figure}_lower": lower, f"{figure}_upper": upper, **moved}
    if name == "swap":
        with_tier, without = (
            sum(each) for each in zip(*((p.redone_tiered, p.redone_plain) for p in pairs), strict=True)
        )
        moved |= {"swap_redone": with_tier / without if without else 0.0, "swap_redone_plain": without / len(pairs)}
        moved |= resume_figures(pairs)
    figure = COSTS[name]
    return {figure: 1 / ratio, f"{figure}_lower": 1 / upper, f"{figure}_upper": 1 / lower, **moved}


def resume_figures(pairs: Sequence[Pair]) -> dict[str, float]:
    """Return what preemptions cost their streams; of pairs in which both engines preempted, none: no figures."""
    both = [(pair.tiered.resumes, pair.plain.resumes) for pair in pairs if pair.tiered.resumes and pair.plain.resumes]
    figures: dict[str, float] = {"swap_resumes": sum(len(pair.tiered.resumes) for pair in pairs)}
    if not both:
        return figures

    def resumed(each: Resume) -> float:
        return each.resumed

    def paused(each: Resume) -> float:
        return each.queued + each.resumed

    for figure, seconds in (("swap_resume_ratio", resumed), ("swap_pause_ratio", paused)):
        ratios = [statistics.mean(map(seconds, one)) / statistics.mean(map(seconds, other)) for one, other in both]
        figures |= dict(zip(_intervals(figure), median_interval(ratios), strict=True))
    for place, suffix in enumerate(("", "_plain")):
        runs = [each[place] for each in both]
        figures[f"swap_resume_seconds{suffix}"] = statistics.median(statistics.mean(map(resumed, run)) for run in runs)
        shares = [sum(each.queued for each in run) / sum(map(paused, run)) for run in runs]
        figures[f"swap_queued{suffix}"] = statistics.median(shares)
    return figures


# ---------------------------------------------------------------- a disk behind the host tier


def sharers(count: int, families: int, seed: int) -> Workload:
    """Return prompts of which each begins like every `families`-th other one, and ends like none."""
    shared = random.Random("families")
    begins = [[shared.randrange(3, _VOCABULARY) for _ in range(256)] for _ in range(families)]
    rng = random.Random(f"tails/{seed}")
    tails = ([rng.randrange(3, _VOCABULARY) for _ in range(40)] for _ in range(count))
    return Workload("restart", [Request(f"r{n:03d}", begins[n % families] + tail, 8) for n, tail in enumerate(tails)])


@dataclass(frozen=True, slots=True)
class Restart:
    """Shares of prompt tokens that were hits, before a restart and behind it; times to first tokens behind it."""

    before: float
    after: float
    ttft: float
    ttft_without: float


def _hits(run: Run) -> float:
    records = run.records.values()
    return sum(each.cached_tokens for each in records) / sum(len(each.request.prompt) for each in records)


def _await_saves(worker: BenchWorker) -> None:
    deadline = time.monotonic() + _SAVE_SECONDS
    while worker.saves:
        if time.monotonic() > deadline:
            raise TimeoutError(f"blocks are still being saved after {_SAVE_SECONDS:.0f} s")
        time.sleep(0.01)


def open_disk(plane: ModelPlane, folder: Path, frames: int) -> DiskFrames:
    """Open frames of this model in a folder."""
    size = frame_bytes(plane.identity.kv_geometry, BLOCK_SIZE)
    return DiskFrames.open(folder, size_of(frames, size), size, plane.identity)


def measure_restart(plane: ModelPlane, requests: int, folder: Path, first_seed: int) -> Restart:
    """Run prompts on an engine, and more of their kind on the one after it, with its disk and with none.

    The second one has what a process leaves that is killed while it saves: a copy of its files. Requests come one by
    one. Raises AssertionError where tokens differ or nothing came from disk.
    """
    families = 10
    blocks = families * 16 + 64
    changes: dict[str, Any] = {"num_blocks": blocks, "max_num_seqs": 4, "host_frames": blocks}
    sizes = Sizes(blocks, 4, lambda seed: sharers(requests, families, seed), alone=True)
    with plane_worker(plane, BLOCK_SIZE, open_disk(plane, folder, 64 * blocks), **changes) as worker:
        drive(worker, sizes, sizes.workload(first_seed), "restart")
        before = _hits(drive(worker, sizes, sizes.workload(first_seed + 1), "restart"))
        shutil.copytree(folder, left := folder.with_name("left"))
    last = sizes.workload(first_seed + 2)
    with plane_worker(plane, BLOCK_SIZE, open_disk(plane, left, 64 * blocks), **changes) as worker:
        warm = drive(worker, sizes, last, "restart")
        assert worker.totals.disk_loads, "nothing came from disk"
    with plane_worker(plane, BLOCK_SIZE, **changes) as worker:
        cold = drive(worker, sizes, last, "restart")
    tokens = [[each.tokens for _, each in sorted(run.records.items())] for run in (warm, cold)]
    assert tokens[0] == tokens[1], "tokens differ"
    first = [statistics.mean(run.first_tokens[:families]) for run in (warm, cold)]
    return Restart(before, _hits(warm), *first)


def restart_figures(plane: ModelPlane, requests: int, rounds: int) -> dict[str, float]:
    found = list[Restart]()
    for number in range(rounds):
        with tempfile.TemporaryDirectory(prefix="quire-tiers-") as folder:
            found.append(measure_restart(plane, requests, Path(folder) / "worker", 3 * number))
        progress(f"restart: {number + 1} of {rounds}, hits {found[-1].after:.3f}", end=number + 1 == rounds)
    warm = median_interval([each.after / each.before for each in found])
    ttft = median_interval([each.ttft / each.ttft_without for each in found])
    figures = dict(zip(_intervals("warm_restart"), warm, strict=True))
    figures["warm_restart_hits_before"] = statistics.median(each.before for each in found)
    return figures | dict(zip(_intervals("warm_restart_ttft"), ttft, strict=True))


def saving_figures(plane: ModelPlane, sizes: Sizes, pairs: int) -> dict[str, float]:
    """Return throughput where each block is saved to disk and none comes back, over that with the host tier alone."""
    ratios, saved = beside_disk(plane, sizes, pairs, "saving")
    assert all(saved), "nothing was saved"
    figures = dict(zip(_intervals("throughput_ratio_disk"), median_interval(ratios), strict=True))
    return figures | {"saved_saving": statistics.median(saved)}


def unused_disk_figures(plane: ModelPlane, sizes: Sizes, pairs: int) -> dict[str, float]:
    """Return seconds of prompts that are shorter than a block, of which nothing is saved, with a disk over without."""
    ratios, saved = beside_disk(plane, sizes, pairs, "unused_disk")
    assert not any(saved), f"{saved} blocks were saved"
    ratio, lower, upper = median_interval(ratios)
    return dict(zip(_intervals("disk_cost_when_unused"), (1 / ratio, 1 / upper, 1 / lower), strict=True))


def beside_disk(plane: ModelPlane, sizes: Sizes, pairs: int, name: str) -> tuple[list[float], list[int]]:
    """Return the throughput of an engine with a disk over one that has the host tier alone, and the blocks it saved."""
    changes: dict[str, Any] = {
        "num_blocks": sizes.blocks,
        "max_num_seqs": sizes.sequences,
        "host_frames": 6 * sizes.blocks,
    }
    ratios, saved = list[float](), list[int]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-tiers-"))) / "worker"
        disk = open_disk(plane, folder, 64 * sizes.blocks)
        engines_of = {
            "disk": stack.enter_context(plane_worker(plane, BLOCK_SIZE, disk, **changes)),
            "plain": stack.enter_context(plane_worker(plane, BLOCK_SIZE, **changes)),
        }
        for index in range(pairs + 1):
            runs, before = dict[str, Run](), engines_of["disk"].totals.disk_stores
            for which in ("disk", "plain") if index % 2 else ("plain", "disk"):
                runs[which] = drive(engines_of[which], sizes, sizes.workload(index), salt=f"{name}-{index}")
            _await_saves(engines_of["disk"])
            if index:
                rates = {which: run.tokens / run.seconds for which, run in runs.items()}
                ratios.append(rates["disk"] / rates["plain"])
                saved.append(engines_of["disk"].totals.disk_stores - before)
                progress(f"{name}: pair {index} of {pairs}, throughput {ratios[-1]:.3f}", end=index == pairs)
    return ratios, saved


def _intervals(figure: str) -> tuple[str, str, str]:
    return figure, f"{figure}_lower", f"{figure}_upper"


RATIOS = {"talks": "ttft_ratio_host", "turns": "throughput_ratio_host"}
COSTS = {"swap": "swap_ratio", "unused": "cost_when_unused", "no_reuse": "cost_without_reuse"}
NOTES = {
    "ttft_ratio_host": "mean time to first token of later turns, with the host tier over without; median of pairs",
    "throughput_ratio_host": "tokens a second of the same load, with over without",
    "swap_ratio": "seconds of sequences that outgrow the pool, with the host tier over without",
    "swap_resume_ratio": "seconds from the admission after a preemption to the next token, with over without; means",
    "swap_resume_seconds": "these seconds with the host tier; plain: without",
    "swap_pause_ratio": "the same from the preemption on, so with the time in the queue",
    "swap_queued": "share of that time that is spent in the queue, with the host tier; plain: without",
    "swap_resumes": "preemptions behind which a token came, with the host tier, in all runs",
    "swap_redone": "full blocks that preemptions made the engine compute again, with over without",
    "swap_redone_plain": "such blocks of a run without the host tier, mean",
    "cost_when_unused": "seconds of a load of which nothing leaves the pool, with over without",
    "cost_without_reuse": "seconds of a load of which everything leaves and nothing comes back, with over without",
    "stores_turns": "blocks that were copied into frames in a run of the turns; loads: out of them",
    "warm_restart": "share of prompt tokens that are hits behind a restart with a disk, over before it",
    "warm_restart_hits_before": "that share before",
    "warm_restart_ttft": "mean time to first token of each prefix's first prompt then, with the disk over without",
    "throughput_ratio_disk": "tokens a second while each block is saved and none comes back, with over without",
    "saved_saving": "blocks that were saved in such a run",
    "disk_cost_when_unused": "seconds of a load of which nothing is saved, with a disk over without",
    "load_over_memcpy": "bytes a second of loading 64 blocks from frames, over one memcpy of as many bytes",
}


def load_over_memcpy(plane: ModelPlane, rounds: int = 41) -> float:
    """Return how fast frames are loaded into scattered blocks, over a plain copy of as many bytes; median of rounds."""
    count, rng = 64, random.Random(5)
    geometry = plane.identity.kv_geometry
    cache = KvCache(geometry, 512, BLOCK_SIZE, torch.device("cpu"))
    cache.frames = frames = HostFrames(cache.pools, frame_bytes(geometry, BLOCK_SIZE), 512)
    for pool in cache.pools:
        pool.fill_(1)
    frames.images.fill_(1)
    size = count * frames.image_bytes
    source, target = torch.ones(2, size, dtype=torch.uint8)
    ratios = []
    for _ in range(rounds):
        blocks, numbers = rng.sample(range(512), count), rng.sample(range(512), count)
        copies = [TierCopy(BlockId(b), BlockId(f), load=True) for b, f in zip(blocks, numbers, strict=True)]
        began = time.perf_counter()
        cache.copy_blocks(copies)
        middle = time.perf_counter()
        target.copy_(source)
        ratios.append((time.perf_counter() - middle) / (middle - began))
    return statistics.median(ratios)


def main() -> None:
    flags: argparse.ArgumentParser = parser(__doc__)
    flags.add_argument("--pairs", type=int, default=5, help="interleaved pairs of each load")
    flags.add_argument("--shape", choices=SHAPES, default="small", help="the model: small ones, or one of 128 M")
    flags.add_argument("--dtype", default="float32", help="type of weights and of K and V")
    flags.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    flags.add_argument("--only", choices=[*loads(1.0), "restart", "saving", "unused_disk"], help="one load alone")
    args = flags.parse_args()
    plane = data_plane(
        None,
        SHAPES[args.shape],
        device="cpu",
        dtype=args.dtype,
        kv_blocks=1024,
        max_num_seqs=64,
        max_model_len=2048,
        deterministic=True,  # how prompts are cut changes no bit, so tokens can be compared
    )
    figures: dict[str, float] = {}
    for name, sizes in loads(args.scale, args.pairs).items():
        if args.only in (None, name):
            figures |= figures_of(name, list(measure(plane, name, sizes, args.pairs)))
    if args.only in (None, "restart"):
        figures |= restart_figures(plane, max(20, round(100 * args.scale)), args.pairs)
    if args.only in (None, "saving"):
        figures |= saving_figures(plane, loads(args.scale, args.pairs)["no_reuse"], args.pairs)
    if args.only in (None, "unused_disk"):
        figures |= unused_disk_figures(plane, short_requests(args.scale), args.pairs)
    if args.only is None:
        figures["load_over_memcpy"] = load_over_memcpy(plane)
    report("tiers", figures, NOTES, args.json)


if __name__ == "__main__":
    main()
