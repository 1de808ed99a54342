"""The interface between a worker's process and its data plane; importable without torch."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from common.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from common.checkpoint.pooling import Pooling, name_of, needs_every_token
from common.contracts.errors import FieldViolation, InvalidConfig
from common.contracts.lease import Attach, public_incarnation
from common.contracts.types import KvGeometry, PoolIdentity
from common.version import quire_version
from common.wire.identity_codec import identity_to_proto
from common.wire.lease_codec import INCARNATION_BYTES
from gpuworker.config import GpuWorkerSettings
from gpuworker.engine.ports import MaskLateness, RankLoad
from gpuworker.memory.byte_plan import BytePlan, max_scored_tokens
from gpuworker.memory.disk_frames import DiskFrames, images_made_of, open_for_worker, size_of
from gpuworker.plane.adapters import AdapterStore
from gpuworker.scheduling.batch_plan import StepRunner
from gpuworker.scheduling.drafting import DraftModel, NewDrafter, NgramDrafter
from gpuworker.scheduling.images import Images
from gpuworker.scheduling.outcomes import AgentConfig
from gpuworker.structured.grammars import GrammarCompiler
from quire.gpuworker.v1 import gpuworker_pb2 as pb


def pool_identity(
    settings: GpuWorkerSettings,
    directory: Path,
    geometry: KvGeometry,
    arithmetic: str,
    pooling: Pooling | None = None,
) -> PoolIdentity:
    """Return the identity that a worker must share with its pool; random weights differ by their seed."""
    seed = settings.seed if settings.load_format == "dummy" else None
    fingerprints = model_fingerprint(directory, seed), tokenizer_fingerprint(settings.tokenizer or directory)
    return PoolIdentity(*fingerprints, settings.block_size, geometry, arithmetic=arithmetic, pooling=name_of(pooling))


@dataclass(frozen=True, slots=True)
class Facts:
    """The description of a model and its device. `software` is names and versions, such as "torch 2.13.0".

    `state_layout` says what the bytes of checkpoints are, where layers keep states.
    """

    vocab_size: int
    eos: tuple[int, ...]
    dtype: str
    device: str
    device_words: str
    software: str
    state_layout: str = ""


def images_made_with(settings: GpuWorkerSettings, facts: Facts) -> Mapping[str, str]:
    """Return what decides the bytes of images beside the identity of the pool."""
    made_with = {"dtype": facts.dtype, "quantization": settings.quantization}
    return made_with | ({"states": facts.state_layout} if facts.state_layout else {})


def open_disk(
    settings: GpuWorkerSettings, size_bytes: int, image_bytes: int, identity: PoolIdentity, facts: Facts
) -> DiskFrames | None:
    """Open the worker's part of the disk cache; None without one.

    Raises InvalidConfig where it cannot be used.
    """
    root = settings.disk_cache
    if root is None:
        return None
    if needs_every_token(identity.pooling):
        what = f"keeps cached blocks, and a vector of pooling {identity.pooling} needs every token; leave it out"
        raise InvalidConfig(FieldViolation("--disk-cache", what))
    made_with = images_made_with(settings, facts)
    return open_for_worker(
        root.expanduser(),
        settings.worker_id,
        lambda folder: DiskFrames.open(folder, size_bytes, image_bytes, identity, made_with),
    )


def with_disk(memory: BytePlan, disk: DiskFrames | None) -> BytePlan:
    """Return the byte plan of a worker that has these frames on disk."""
    if disk is None:
        return memory
    size = size_of(disk.num_frames, memory.frame_bytes)
    return replace(memory, disk_frames=disk.num_frames, disk=size, disk_folder=str(disk.folder))


_DISAGGREGATION: Final[dict[str, pb.Disaggregation.ValueType]] = {
    "none": pb.DISAGGREGATION_UNSPECIFIED,
    "prefill": pb.DISAGGREGATION_PREFILL,
    "decode": pb.DISAGGREGATION_DECODE,
}


@dataclass(frozen=True, slots=True)
class DataPlane:
    """A step runner, the sizes that it was made with, and the description of the worker.

    `images` are those of its blocks and host frames, `disk` its frames on disk; None without them. Whoever moves
    images between the two closes the disk.
    """

    settings: GpuWorkerSettings
    identity: PoolIdentity
    memory: BytePlan
    runner: StepRunner
    max_num_seqs: int
    facts: Facts
    images: Images | None = field(default=None, kw_only=True)
    disk: DiskFrames | None = field(default=None, kw_only=True)

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts may begin with cached blocks.

        Not where the hidden state of every token is needed, nor where layers keep a state of which there are no
        checkpoints: cached blocks of K and V do not say what it was behind them.
        """
        every = needs_every_token(self.identity.pooling)
        return self.settings.prefix_caching and not every and not self.keeps_states

    @property
    def host_frames(self) -> int:
        """The blocks that host memory keeps beside the pool; none where no prompt begins with cached blocks."""
        return self.memory.host_frames if self.prefix_caching else 0

    @property
    def serves_peers(self) -> bool:
        """Whether other workers fetch blocks from this one."""
        return self.settings.data_port is not None and self.images is not None

    @property
    def disk_frames(self) -> int:
        """The blocks that the disk cache keeps."""
        return 0 if self.disk is None else self.disk.num_frames

    @property
    def image_bytes(self) -> int:
        """The bytes of the image of a block, or of a page where layers are groups."""
        return self.memory.frame_bytes

    @property
    def image_format(self) -> bytes:
        """16 bytes that are equal for workers whose images hold the same: they can fetch from each other."""
        made_with = images_made_with(self.settings, self.facts)
        return sha256(images_made_of(self.identity, self.image_bytes, made_with)).digest()[:16]

    @property
    def keeps_states(self) -> bool:
        """Whether layers of the model keep a state in place of K and V, and it is in no checkpoint."""
        return False

    @property
    def draft_model(self) -> DraftModel | None:
        """What guesses beside n-grams; None without --draft-model."""
        return None

    @property
    def new_drafter(self) -> NewDrafter | None:
        """What makes the drafters of sequences; None without --speculative."""
        if self.settings.speculation == "none":
            return None
        return NgramDrafter if self.draft_model is None else self.draft_model.new_drafter

    @property
    def served_adapters(self) -> AdapterStore | None:
        """The LoRA adapters of the worker; None where it serves none."""
        return None

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The compiler of requests' constraints; None where the runner supports none."""
        return None

    def report_lost_rank(self, to: Callable[[str], None]) -> None:
        """Call `to` with the reason when a rank of the worker is lost, on another thread: the process is to end."""

    def rank_load(self) -> RankLoad:
        """Return how many ranks run the steps, and what their plans took."""
        return RankLoad()

    def mask_lateness(self) -> MaskLateness:
        """Return how often and how long sampling has waited for masks."""
        return MaskLateness()

    def agent_config(self) -> AgentConfig:
        """Return the sizes and policies of the lease agent."""
        settings = self.settings
        return AgentConfig(
            num_blocks=self.memory.num_blocks,
            block_size=settings.block_size,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_cap=settings.long_prefill_cap or 0,
            window=self.identity.kv_geometry.window,
            groups=self.identity.kv_geometry.groups,
            prefix_caching=self.prefix_caching,
            keeps_states=self.keeps_states,
            max_num_seqs=self.max_num_seqs,
            max_scored_tokens=max_scored_tokens(self.facts.vocab_size),
            new_drafter=self.new_drafter,
            draft_model=self.draft_model,
            host_frames=self.host_frames,
            disk_frames=self.disk_frames,
            serves_peers=self.serves_peers,
        )

    def attach(self, worker_id: str, address: str) -> Attach:
        """Return the identity part of an attach, with a new incarnation, which is secret."""
        return Attach(
            worker_id=worker_id,
            incarnation=secrets.token_bytes(INCARNATION_BYTES),
            session=0,
            epoch_seen=0,
            identity=self.identity,
            num_blocks=self.memory.num_blocks,
            address=address,
            prefix_caching=self.prefix_caching,
            max_num_seqs=self.max_num_seqs,
            host_frames=self.host_frames,
            disk_frames=self.disk_frames,
        )

    def start_lines(self) -> list[str]:
        """Return the lines about memory that a worker prints before it serves."""
        return [*self.memory.lines(), self.memory.prefix_line(self.prefix_caching)]

    def info(self, attach: Attach) -> pb.WorkerInfo:
        facts = self.facts
        return pb.WorkerInfo(
            worker_id=attach.worker_id,
            incarnation=public_incarnation(attach.incarnation),
            address=attach.address,
            model=self.settings.model,
            identity=identity_to_proto(self.identity),
            num_blocks=self.memory.num_blocks,
            max_model_len=self.memory.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos,
            device=facts.device,
            dtype=facts.dtype,
            version=f"quire {quire_version()}, {facts.software}",
            prefix_caching=self.prefix_caching,
            disaggregation=_DISAGGREGATION[self.settings.disaggregation],
            fetches_blocks=self.serves_peers and self.host_frames > 0,
        )

    def memory_message(self) -> pb.MemoryPlan:
        memory = self.memory
        return pb.MemoryPlan(
            total=memory.total,
            weights=memory.weights,
            kv_cache=memory.kv,
            activations=memory.activations,
            reserved=memory.token_table + memory.graphs + memory.states,
            longest_context=memory.max_model_len,
            sequences_at_1k=memory.sequences_of(1024),
            sequences_at_4k=memory.sequences_of(4096),
            sequences_at_16k=memory.sequences_of(16384),
        )


def default_worker_id(port: int) -> str:
    """Return the name of a worker for which no option gives one."""
    return f"{socket.gethostname()}-{port}"
