"""The byte plan of a worker, and the bytes of a block of K/V: plain numbers, known without torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.lease import blocks_needed, held_blocks
from common.contracts.limits import MAX_WORKER_BLOCKS
from common.contracts.types import KvGeometry, KvGroup, KvGroupKind
from gpuworker.memory.layout import (
    KV_BYTES,
    SCALED,
    Pool,
    attending_groups,
    kept_numbers,
    page_layout,
    pools_of,
    state_group,
)

TIB, GIB, MIB, KIB = 1 << 40, 1 << 30, 1 << 20, 1 << 10
_SCALE_BYTES = 4
_LINE_BYTES = 64
_CONTEXTS, _CONTEXTS_OF_GROUPS = (1024, 4096, 16384), (1024, 8192, 65536)
# Rows of logits that score prompts in one step: more would cost memory, fewer would make many small steps.
_LEAST_SCORED, _MOST_SCORED, _SCORED_BYTES = 16, 256, 64 << 20


# Why a pool without K/V has no size in bytes.
NO_KV_MEMORY: Final = (
    "no layer of the model attends, so its blocks take no memory; give --max-num-seqs and --max-model-len, or their"
    " number with --kv-blocks"
)


def max_scored_tokens(vocab_size: int) -> int:
    """Return how many tokens of prompts a step scores at most: so many rows of float32 logits as fit, within bounds."""
    return max(_LEAST_SCORED, min(_SCORED_BYTES // (4 * vocab_size), _MOST_SCORED))


def bytes_per_block(geometry: KvGeometry, block_size: int) -> int:
    """Return the bytes of one block in all layers, K, V, their scales and index keys; of a page with groups."""
    if geometry.groups:
        return _bytes_of_pool(Pool(page_layout(geometry).lanes, ()), block_size)
    return sum(_bytes_of_pool(pool, block_size) for pool in pools_of(geometry))


def frame_bytes(geometry: KvGeometry, block_size: int) -> int:
    """Return the bytes of a frame of host memory: those of a block, in whole lines of a processor's cache."""
    return -(-bytes_per_block(geometry, block_size) // _LINE_BYTES) * _LINE_BYTES


def why_no_frames(geometry: KvGeometry, keeps_states: bool) -> str:
    """Return why host memory cannot keep a model's blocks; empty where it can."""
    if keeps_states and state_group(geometry.groups) is None:
        return "the model's layers keep states, of which it takes no checkpoints: no prompt could go on from its blocks"
    if geometry.window:
        return "every layer of the model attends within a window, and host memory keeps what some layer reads for good"
    return "" if geometry.num_layers or geometry.shapes or geometry.groups else _NOTHING_TO_KEEP


_NOTHING_TO_KEEP: Final = "no layer attends, so there are no K and V to keep"


def refuse_tiers(geometry: KvGeometry, keeps_states: bool, on_disk: bool, needs_peers: bool) -> None:
    """Raise InvalidConfig, with the reason, for the options of tiers that can keep nothing of a model.

    `on_disk` is whether there is a disk cache, `needs_peers` whether peers are to fetch.
    """
    beside = [flag for flag, given in (("--disk-cache", on_disk), ("--data-port", needs_peers)) if given]
    if why := why_no_frames(geometry, keeps_states):
        raise InvalidConfig(*(FieldViolation(flag, f"{why}; leave it out") for flag in ("--host-memory", *beside)))


def blocks_without_kv(sequences: int, tokens: int, block_size: int) -> int:
    """Return the blocks of a pool that take no bytes: those of so many sequences, or as many as a manager accepts."""
    return min(sequences * -(-tokens // block_size), MAX_WORKER_BLOCKS)


def _bytes_of_pool(pool: Pool, block_size: int) -> int:
    geometry, index = pool.geometry, pool.index
    per_head = kept_numbers(geometry) * KV_BYTES[geometry.dtype]
    if geometry.dtype in SCALED:
        per_head += (1 if geometry.values_in_keys else 2) * _SCALE_BYTES
    per_token = geometry.num_kv_heads * per_head + (0 if index is None else index.size * KV_BYTES[index.dtype])
    return geometry.num_layers * block_size * per_token


def longest_sequence(wanted: int, num_blocks: int, block_size: int, window: int, groups: Sequence[KvGroup] = ()) -> int:
    """Return the length of the longest sequence that a pool holds, at most `wanted` tokens.

    Where every layer has a window, a pool that holds the window holds every length.
    """
    if blocks_needed(wanted, wanted, block_size, window, groups) <= num_blocks:
        return wanted
    whole = range(1, num_blocks + 1)  # more blocks never need fewer pages
    return block_size * bisect_right(
        whole, num_blocks, key=lambda blocks: blocks_needed(blocks * block_size, 0, block_size, window, groups)
    )


@dataclass(frozen=True, slots=True)
class BytePlan:
    """The uses of one device's memory in bytes, and the capacity of the blocks."""

    device: str
    total: int
    free: int  # before the allocations below, but after the weights
    weights: int
    activations: int
    token_table: int
    block_bytes: int
    num_blocks: int
    block_size: int
    kv_dtype: str
    model_limit: int
    max_model_len: int
    max_num_seqs: int
    graphs: int = 0
    window: int = 0
    state_bytes: int = 0  # of one sequence, for layers that keep a state in place of K and V
    drafted_states: int = 0  # of a step: each draft has states of its own
    groups: tuple[KvGroup, ...] = ()  # where there are some, blocks above are pages
    host_frames: int = 0
    frame_bytes: int = 0  # of host memory: blocks, and gaps between their parts
    disk_frames: int = 0
    disk: int = 0  # bytes of their files
    disk_folder: str = ""

    @property
    def kv(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def states(self) -> int:
        """Bytes of the states of as many sequences as run, and of the drafts of a step."""
        return (self.max_num_seqs + self.drafted_states) * self.state_bytes

    @property
    def host(self) -> int:
        """Bytes of the host tier; on a CPU they are of the same memory as all others."""
        return self.host_frames * self.frame_bytes

    @property
    def left(self) -> int:
        """Bytes that nothing of the plan uses."""
        left = self.free - self.activations - self.graphs - self.token_table - self.states - self.kv
        return left - self.host if self.device == "cpu" else left

    def sequences_of(self, tokens: int) -> int:
        """Return how many sequences of this many tokens fit at once."""
        return self.num_blocks // self.needed(tokens)

    def needed(self, tokens: int) -> int:
        """Return the blocks, or the pages, that a sequence of this many tokens holds at once."""
        return blocks_needed(tokens, tokens, self.block_size, self.window, self.groups)

    @property
    def shortest_hit(self) -> int:
        """Return the tokens of the shortest prefix that can hit; 0 where none can.

        Whole blocks hit, and the last token of a prompt is computed. So the least is a block of a prompt that is a
        token longer. Where layers keep states, that prompt leaves a checkpoint there, for which the pool must have
        pages beside those that the next token binds.
        """
        least, states = self.block_size + 1, state_group(self.groups)
        if self.max_model_len <= least or (self.state_bytes and states is None):
            return 0
        return self.block_size if self.num_blocks >= self._pages_of_a_hit else 0

    @property
    def _pages_of_a_hit(self) -> int:
        """Pages, or blocks, of the shortest prompt that leaves a block behind which another one can go on."""
        states, prompt = state_group(self.groups), self.needed(self.block_size + 1)
        return prompt if states is None else prompt + self.needed(1) + states.pages

    def prefix_line(self, caching: bool) -> str:
        """Return what a prefix must have to hit, where `caching` says whether prompts may share blocks."""
        least, states = self.block_size + 1, state_group(self.groups) is not None
        if not caching:
            return "prefix cache: none, every prompt is computed whole"
        if not self.shortest_hit:
            unit = "pages" if self.groups else "blocks"
            what = f"a prompt of {least} tokens {'and its checkpoint take' if states else 'takes'}"
            return f"prefix cache: nothing can hit, {what} {self._pages_of_a_hit} {unit} of {self.num_blocks}"
        leaves = "leaves a checkpoint behind it" if states else "leaves it"
        return f"prefix cache: hits from {self.shortest_hit} tokens on, where a prompt of {least} or more {leaves}"

    def _of_groups(self) -> Iterator[str]:
        """Yield a line for each group of layers."""
        longest = -(-self.max_model_len // self.block_size)
        for group in attending_groups(self.groups):
            words = "all tokens" if group.kind is KvGroupKind.FULL else f"{group.kind} of {group.span}"
            layers, pages = _counted(len(group.layers), "layer"), _counted(group.pages, "page")
            token = in_words(group.pages * self.block_bytes // self.block_size)
            most = _counted(held_blocks(group, longest, self.block_size), "block")
            yield f"    {words:<16} {layers}, {pages} a block, {token} a token, at most {most} a sequence"

    def _of_checkpoints(self) -> Iterator[str]:
        group = state_group(self.groups)
        if group is None:
            return
        layers, pages = _counted(len(group.layers), "layer"), _counted(group.pages, "page")
        yield f"    checkpoints      {layers}, {pages} and {self._state_in_words()}"

    def _state_in_words(self) -> str:
        if not self.block_bytes:
            return f"{in_words(self.state_bytes)} each"
        pages = sum(group.pages for group in attending_groups(self.groups)) or 1
        tokens = round(self.state_bytes * self.block_size / (pages * self.block_bytes))
        return f"{in_words(self.state_bytes)} each, as much as K and V of {tokens} tokens"

    def _of_frames(self) -> str:
        where = "" if self.device == "cpu" else ", beside the memory of the device"
        return f"{self.host_frames} more {'pages' if self.groups else 'blocks'} that left the KV cache{where}"

    def _of_disk(self) -> str:
        return f"{self.disk_frames} more blocks in {self.disk_folder}"

    def _of_states(self) -> str:
        kept = f"{self.max_num_seqs} sequences" + (f" and {self.drafted_states} drafts" if self.drafted_states else "")
        if state_group(self.groups):
            return f"{kept}, {in_words(self.state_bytes)} each"
        return f"{kept}, {self._state_in_words()}; prompts share no blocks"

    def lines(self) -> list[str]:
        unit = "pages" if self.groups else "blocks"
        kept = f"in {self.kv_dtype}, {in_words(self.block_bytes)} each"
        if not self.block_bytes:
            kept = "that keep nothing: no layer attends"
        whole = self.max_model_len == self.model_limit
        limit = "the model's limit" if whole else f"the model allows {self.model_limit}"
        contexts = _CONTEXTS_OF_GROUPS if self.groups else _CONTEXTS
        fits = [f"{self.sequences_of(n)} of {n // 1024}k" for n in contexts if n < self.max_model_len]
        fits.append(f"{self.sequences_of(self.max_model_len)} of the longest")
        return [
            f"memory of {self.device}: {in_words(self.total)}, {in_words(self.free)} free beside the weights",
            f"  weights      {in_words(self.weights):>10}",
            f"  activations  {in_words(self.activations):>10}",
            *([f"  CUDA graphs  {in_words(self.graphs):>10}"] if self.graphs else []),
            f"  token table  {in_words(self.token_table):>10}",
            f"  KV cache     {in_words(self.kv):>10}  {self.num_blocks} {unit} of {self.block_size} slots {kept}",
            *self._of_groups(),
            *self._of_checkpoints(),
            *([f"  host memory  {in_words(self.host):>10}  {self._of_frames()}"] if self.host_frames else []),
            *([f"  disk cache   {in_words(self.disk):>10}  {self._of_disk()}"] if self.disk_frames else []),
            *([f"  states       {in_words(self.states):>10}  {self._of_states()}"] if self.state_bytes else []),
            f"  left         {in_words(self.left):>10}",
            f"longest context: {self.max_model_len} tokens ({limit})",
            f"sequences that fit at once: {', '.join(fits)}; at most {self.max_num_seqs} run in a step",
        ]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def in_words(count: int) -> str:
    """Return a number of bytes with its unit, e.g. "1.5 GiB"."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
