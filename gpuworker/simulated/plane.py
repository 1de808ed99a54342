"""Builds a data plane without a model, from the configuration of a checkpoint alone; no torch, no weights.

Such a worker serves the same checkpoint as a real one, so router and KV manager do not depend on the simulation.
Its arithmetic has another name, so the two never share a pool or an entry of the prefix index.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from common.checkpoint.hub import checkpoint_directory
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.lease import blocks_needed
from common.contracts.types import KvGeometry, PoolIdentity
from gpuworker.config import GpuWorkerSettings
from gpuworker.memory.byte_plan import (
    GIB,
    NO_KV_MEMORY,
    BytePlan,
    blocks_without_kv,
    bytes_per_block,
    frame_bytes,
    longest_sequence,
    refuse_tiers,
)
from gpuworker.memory.disk_frames import DiskFrames, checked_frames, size_of
from gpuworker.memory.layout import state_group, with_states
from gpuworker.plane.checkpoint_facts import CheckpointFacts, eos_token_ids
from gpuworker.plane.data_plane import DataPlane, Facts, open_disk, pool_identity, with_disk
from gpuworker.scheduling.step_costs import parse_costs
from gpuworker.simulated.memory import IMAGE_BYTES, SimulatedMemory
from gpuworker.simulated.runner import SimulatedRunner
from gpuworker.simulated.tokens import SimulatedTokens, readable_ids

ARITHMETIC: Final = "simulated"
_KV_BYTES: Final = GIB  # that of a CPU's pool, where no option says how large it is
_MAX_NUM_SEQS: Final = 256


@dataclass(frozen=True, slots=True)
class SimulatedPlane(DataPlane):
    """A data plane that takes no memory. `stateful` is whether layers keep states."""

    stateful: bool = False

    @property
    def keeps_states(self) -> bool:
        return self.stateful and state_group(self.memory.groups) is None

    @property
    def image_bytes(self) -> int:
        return IMAGE_BYTES

    def start_lines(self) -> list[str]:
        memory = self.memory
        unit = "pages" if memory.groups else "blocks"
        blocks = f"{memory.num_blocks} {unit} of {memory.block_size} slots, as if kept in {memory.kv_dtype}"
        steps = f"simulated steps, {self.settings.simulate}: no weights, no K/V; {blocks}"
        host = [f"host memory: as if {memory.host_frames} more {unit} were kept"] if memory.host_frames else []
        frames = f"disk cache: as if {memory.disk_frames} more {unit} were kept in {memory.disk_folder}"
        host += [frames] if memory.disk_frames else []
        return [steps, *host, memory.prefix_line(self.prefix_caching)]


def assemble(settings: GpuWorkerSettings) -> SimulatedPlane:
    """Return the plane. Raises InvalidConfig when config.json is missing or lacks a number, or nothing fits."""
    assert settings.simulate is not None
    directory = checkpoint_directory(settings.model, weights=False, revision=settings.revision)
    checkpoint, eos = CheckpointFacts(directory), eos_token_ids(directory)
    geometry = checkpoint.kv_geometry(settings.dtype, settings.kv_cache_dtype, settings.block_size)
    mixers, state_bytes = checkpoint.states(settings.dtype)
    if mixers and settings.speculation != "none":
        what = f"is {settings.speculation}, and layers keep states, which a refused draft would have changed"
        raise InvalidConfig(FieldViolation("--speculative", f"{what}; leave it out"))
    if settings.prefix_caching:
        geometry = with_states(geometry, mixers, state_bytes, settings.block_size)
    max_num_seqs = settings.num_seqs(_MAX_NUM_SEQS)
    identity = pool_identity(settings, directory, geometry, ARITHMETIC)
    follows = mixers or settings.host_memory is not None
    memory = SimulatedMemory(geometry.groups, settings.block_size) if follows else None
    tokens = simulated_tokens(directory, settings.tokenizer)
    runner = SimulatedRunner(parse_costs(settings.simulate), tokens, memory=memory)
    facts = Facts(checkpoint.vocab_size, eos, geometry.dtype, "none", "without a device", "simulated steps")
    usual = checkpoint.usual_len(settings.tokenizer or directory)
    plan = _byte_plan(settings, geometry, checkpoint.context, usual, max_num_seqs)
    if settings.host_memory is not None:
        refuse_tiers(geometry, bool(mixers), settings.disk_cache is not None, settings.needs_peers)
        frame = frame_bytes(geometry, settings.block_size)
        plan = replace(plan, host_frames=settings.host_memory // frame, frame_bytes=frame)
    disk = _open_disk(settings, identity, plan, facts)
    made = (settings, identity, with_disk(plan, disk), runner, max_num_seqs, facts, bool(mixers))
    return SimulatedPlane(*made, images=memory, disk=disk)


def _open_disk(settings: GpuWorkerSettings, identity: PoolIdentity, plan: BytePlan, facts: Facts) -> DiskFrames | None:
    """Open as many frames as the options would give a model; an image here is far smaller than its K and V."""
    if settings.disk_cache is None:
        return None
    frames = checked_frames(settings.disk_cache_bytes, plan.frame_bytes)
    return open_disk(settings, size_of(frames, IMAGE_BYTES), IMAGE_BYTES, identity, facts)


def simulated_tokens(directory: Path, tokenizer: Path | None = None) -> SimulatedTokens:
    """Return the tokens of the simulated workers of a checkpoint; a checker computes the same."""
    vocab_size, eos = CheckpointFacts(directory).vocab_size, eos_token_ids(directory)
    return SimulatedTokens(readable_ids(tokenizer or directory, vocab_size, eos))


def _byte_plan(
    settings: GpuWorkerSettings, geometry: KvGeometry, context: int, usual: int | None, max_num_seqs: int
) -> BytePlan:
    """Return a plan of as many blocks as the options request, or as fit in 1 GiB; they take no memory."""
    size, longest = settings.block_size, min(settings.max_model_len or usual or context, context)
    num_blocks = settings.kv_blocks or _num_blocks(settings, geometry, longest, max_num_seqs)
    window, groups, wanted = geometry.window, geometry.groups, settings.max_model_len or 1
    if num_blocks < blocks_needed(wanted, wanted, size, window, groups):
        unit = "pages" if groups else "blocks"
        what = f"{num_blocks} {unit} of {size} slots do not hold one sequence; give more with --kv-blocks"
        raise InvalidConfig(FieldViolation("--max-model-len", what))
    return BytePlan(
        device="none",
        total=0,
        free=0,
        weights=0,
        activations=0,
        token_table=0,
        block_bytes=0,
        num_blocks=num_blocks,
        block_size=size,
        kv_dtype=geometry.dtype,
        model_limit=context,
        max_model_len=longest_sequence(longest, num_blocks, size, window, groups),
        max_num_seqs=max_num_seqs,
        window=window,
        groups=groups,
    )


def _num_blocks(settings: GpuWorkerSettings, geometry: KvGeometry, longest: int, max_num_seqs: int) -> int:
    if block := bytes_per_block(geometry, settings.block_size):
        return (settings.kv_memory or _KV_BYTES) // block
    if settings.kv_memory is not None:
        raise InvalidConfig(FieldViolation("--kv-memory", NO_KV_MEMORY))
    return blocks_without_kv(max_num_seqs, longest, settings.block_size)
