"""Trains the demo model from nothing on the processor, in a fixed time, on text it generates itself.

    python -m bench.demo_model.train OUT_DIR --minutes 48 --processes 2

Matrices learn with Muon, the rest with AdamW; processes average their gradients over gloo.
"""

import argparse
import copy
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3ForCausalLM

from bench.demo_model import network, rows, tokenizer

LENGTHS: Final = (128, 256, 512, 1024, 2048)
FORCED_AT: Final = (0.0, 0.05, 0.1, 0.2, 0.3)
"""Share of the time after which each length is open even if recall at the shorter one is not yet good."""
GOOD_RECALL: Final = 0.93
MATRIX_RATE: Final = 0.02
OTHER_RATE: Final = 2e-3
WARM_UP_STEPS: Final = 50
DECAY_FROM: Final = 0.5
REPORT_EVERY: Final = 50
SAVE_EVERY: Final = 500


@dataclass(slots=True)
class Curriculum:
    """Opens longer rows once recall is good at the longest open length, or when time forces it."""

    recall: dict[int, float] = field(default_factory=dict)  # running share of value tokens predicted, by row length
    seen: dict[int, int] = field(default_factory=dict)
    level: int = 0

    def draw(self, rng: random.Random) -> int:
        """Half of the steps at the longest open length, the others at any open one."""
        return LENGTHS[self.level if rng.random() < 0.5 else rng.randint(0, self.level)]

    def note(self, length: int, recall: float, elapsed: float) -> None:
        """`elapsed` is the share of the training time that has passed."""
        self.seen[length] = self.seen.get(length, 0) + 1
        share = max(0.05, 1 / self.seen[length])
        self.recall[length] = (1 - share) * self.recall.get(length, 0.0) + share * recall
        longest, last = LENGTHS[self.level], self.level == len(LENGTHS) - 1
        good = self.seen.get(longest, 0) >= 20 and self.recall[longest] > GOOD_RECALL
        if not last and (good or elapsed >= FORCED_AT[self.level + 1]):
            self.level += 1


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line; `tokens` are those in one process's batch, `noise` starts without the draft."""

    out: Path
    minutes: float
    processes: int
    tokens: int
    seed: int
    noise: bool = False


class Trainer:
    """One process's share of the training; every process holds the same weights after every step."""

    def __init__(self, options: Options, rank: int) -> None:
        torch.manual_seed(options.seed)
        self.options, self.rank = options, rank
        learnt = tokenizer.train()
        self.encode = tokenizer.Encoder(learnt)
        special = (self.encode(token)[0] for token in (tokenizer.PAD, tokenizer.BOS, tokenizer.END))
        self.model = network.build(network.configuration(learnt.get_vocab_size(), *special), drafted=not options.noise)
        self.parameters = list(self.model.parameters())
        self.optimizers = _optimizers(self.model)
        self.curriculum = Curriculum()
        self.rng = random.Random(f"{options.seed} rows {rank}")
        self.shared_rng = random.Random(f"{options.seed} lengths")
        self.started = time.monotonic()
        self.elapsed = 0.0
        self.steps = 0

    def run(self) -> None:
        while self.elapsed < 1.0:
            self._set_rates()
            length = self.curriculum.draw(self.shared_rng)
            loss, recall = self._gradients(length)
            recall = self._average(recall)
            torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self.curriculum.note(length, recall, self.elapsed)
            if self.rank == 0 and self.steps % REPORT_EVERY == 0:
                self._report(loss)
            if self.rank == 0 and self.steps % SAVE_EVERY == 0:
                self.save(self.options.out / "latest")

    def save(self, directory: Path) -> None:
        """A complete checkpoint in bfloat16; training goes on in float32."""
        half = copy.deepcopy(self.model).bfloat16()
        half.save_pretrained(directory)
        tokenizer.save(self.encode.tokenizer, directory)

    def _set_rates(self) -> None:
        warm = min(1.0, (self.steps + 1) / WARM_UP_STEPS)
        decay = min(1.0, (1.0 - self.elapsed) / (1.0 - DECAY_FROM))
        for optimizer, rate in zip(self.optimizers, (MATRIX_RATE, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * warm * max(decay, 0.01)

    def _gradients(self, length: int) -> tuple[float, float]:
        """Accumulate the gradients of one batch; its weighted loss and the share of value tokens predicted."""
        ids, weights, recalled = self._batch(length)
        with torch.autocast("cpu", torch.bfloat16):
            states = self.model.model(input_ids=ids, use_cache=False).last_hidden_state  # [rows, length, hidden]
            wanted = (weights[:, 1:] > 0).flatten().nonzero().squeeze(1)
            logits = self.model.lm_head(states[:, :-1].flatten(0, 1)[wanted])  # [wanted, vocabulary]
        targets, weight = ids[:, 1:].flatten()[wanted], weights[:, 1:].flatten()[wanted]
        losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        recallable = recalled[:, 1:].flatten()[wanted]
        hits = (logits.argmax(-1) == targets)[recallable]
        return loss.item(), hits.float().mean().item() if len(hits) else 0.0

    def _batch(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, weights and value marks, each [rows, length], padded with weight zero."""
        drawn = [rows.draw(self.rng, self.encode, length) for _ in range(max(1, self.options.tokens // length))]
        ids = torch.zeros(len(drawn), length, dtype=torch.long)
        weights = torch.zeros(len(drawn), length)
        recalled = torch.zeros(len(drawn), length, dtype=torch.bool)
        for i, row in enumerate(drawn):
            ids[i, : len(row)] = torch.tensor(row.ids)
            weights[i, : len(row)] = torch.tensor(row.weights)
            recalled[i, : len(row)] = torch.tensor(row.recalled)
        return ids, weights, recalled

    def _average(self, recall: float) -> float:
        """Average gradients, recall and clock over the processes, so that all of them decide alike."""
        elapsed = (time.monotonic() - self.started) / (self.options.minutes * 60)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients] + [torch.tensor([recall, elapsed])])
        if self.options.processes > 1:
            dist.all_reduce(flat)
            flat /= self.options.processes
        means = torch.split_with_sizes(flat, [g.numel() for g in gradients] + [2])[:-1]
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))
        self.elapsed = flat[-1].item()
        return flat[-2].item()

    def _report(self, loss: float) -> None:
        seconds = time.monotonic() - self.started
        tokens = self.steps * self.options.tokens * self.options.processes
        recall = " ".join(f"{length}:{value:.3f}" for length, value in sorted(self.curriculum.recall.items()))
        rate = tokens / seconds
        line = f"{seconds:6.0f} s  step {self.steps}  loss {loss:.3f}  {rate:.0f} tok/s  recall {recall}\n"
        sys.stdout.write(line)
        sys.stdout.flush()


def _optimizers(model: Qwen3ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return (
        torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    )


def _process(rank: int, options: Options, rendezvous: str) -> None:
    torch.set_num_threads(1)
    if options.processes > 1:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.processes)
    trainer = Trainer(options, rank)
    trainer.run()
    if rank == 0:
        trainer.save(options.out)
    if options.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=48.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens in one process's batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="start from noise alone, to see what the draft is worth")
    options = Options(**vars(parser.parse_args()))
    options.out.mkdir(parents=True, exist_ok=True)
    rendezvous = f"file://{options.out.resolve()}/.rendezvous-{os.getpid()}"
    spawn(_process, args=(options, rendezvous), nprocs=options.processes)


if __name__ == "__main__":
    main()
