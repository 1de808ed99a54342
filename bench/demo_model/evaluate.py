"""Measures the abilities of a checkpoint of the demo model; README.md has the figures of the one that ships.

    python -m bench.demo_model.evaluate [CHECKPOINT] [--probes 100]

Prints recall of held-out facts by distance, density and kind, and the share of well-formed answers by length of
context. It also prints whether bfloat16 answers as float32 does, and the recall with a wrong block in the KV cache.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache, PreTrainedModel, Qwen3ForCausalLM

from bench.demo_model import grammar, probes
from bench.demo_model.probes import Probe
from bench.demo_model.tokenizer import ASSISTANT, END, USER, Encoder
from cli.demo_model import CHECKPOINT, prompts, words, world

DISTANCES: Final = (32, 64, 128, 256, 512, 1024, 1900)
DENSITIES: Final = (0.25, 1.0)
LENGTHS: Final = (64, 256, 512, 1024, 1900)
KIND_DISTANCE: Final = 256
BLOCK_SIZE: Final = 16
STORY_TOKENS: Final = 96


class Judge:
    """A loaded checkpoint and the measurements on it; each measurement draws its probes from its own seed."""

    def __init__(self, checkpoint: Path, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.model: PreTrainedModel = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        self.model.train(False)
        self.encode = Encoder(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
        self.count = count

    def draw(self, distance: int, density: float) -> list[Probe]:
        rng = random.Random(f"{distance} {density}")
        return [probes.draw(rng, self.encode, distance, density) for _ in range(self.count)]

    @torch.inference_mode()
    def recalls(self, probe: Probe) -> bool:
        """True when the greedy answer is the right one, to its end token."""
        logits = self.model(torch.tensor([probe.context + probe.answer]), use_cache=False).logits[0]
        return _answers(logits[len(probe.context) - 1 : -1], probe)

    @torch.inference_mode()
    def recalls_with_block(self, probe: Probe, spoil: Callable[[Probe], int]) -> bool:
        """As `recalls`, after the cache block of index `spoil(probe)` was overwritten with another block."""
        shared = len(probe.context) - len(probe.context) % BLOCK_SIZE - BLOCK_SIZE  # whole blocks, as a shared prefix
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([probe.context[:shared]]), past_key_values=cache, use_cache=True)
        wrong, other = spoil(probe), (spoil(probe) + 2) % (shared // BLOCK_SIZE)
        for layer in cache.layers:
            for name in ("keys", "values"):
                states = getattr(layer, name)  # [1, kv heads, tokens, head_dim]
                _block(states, wrong).copy_(_block(states, other).clone())
        rest = torch.tensor([probe.context[shared:] + probe.answer])
        logits = self.model(rest, past_key_values=cache, use_cache=True).logits[0]
        return _answers(logits[len(probe.context) - shared - 1 : -1], probe)

    @torch.inference_mode()
    def generate(self, ids: list[int], temperature: float = 0.0, tokens: int = STORY_TOKENS) -> list[int]:
        """The continuation of `ids`, greedy at temperature 0."""
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        out = self.model.generate(prompt, attention_mask=mask, max_new_tokens=tokens, **drawn)  # type: ignore[operator]
        return list(out[0, len(ids) :].tolist())

    def text(self, ids: list[int]) -> str:
        return str(self.encode.tokenizer.decode(ids))


def _block(states: torch.Tensor, index: int) -> torch.Tensor:
    return states[:, :, index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]


def _answers(logits: torch.Tensor, probe: Probe) -> bool:
    """True when the likeliest token at every position of `logits` [answer, vocabulary] is the answer's."""
    return bool(logits.argmax(-1).tolist() == probe.answer)


def own_block(probe: Probe) -> int:
    return probe.value_at // BLOCK_SIZE


def later_block(probe: Probe) -> int:
    """A block four further on, which holds no part of the fact."""
    return probe.value_at // BLOCK_SIZE + 4


def recall_table(judge: Judge) -> Iterable[str]:
    """Recall by distance and density, as Markdown lines."""
    yield "| distance (tokens) | " + " | ".join(f"density {density}" for density in DENSITIES) + " |"
    yield "| --- " * (1 + len(DENSITIES)) + "|"
    for distance in DISTANCES:
        cells = []
        for density in DENSITIES:
            drawn = judge.draw(distance, density)
            facts = sum(probe.facts for probe in drawn) / len(drawn)
            cells.append(f"{_share(judge.recalls(probe) for probe in drawn):.2f} ({facts:.0f} facts)")
        yield f"| {distance} | " + " | ".join(cells) + " |"


def kinds_table(judge: Judge) -> Iterable[str]:
    """Recall by kind of fact, as Markdown lines."""
    yield f"| kind of fact, at {KIND_DISTANCE} tokens and density 1.0 | recalled | asked |"
    yield "| --- | --- | --- |"
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    rng = random.Random("kinds")
    for _ in range(10 * judge.count):
        probe = probes.draw(rng, judge.encode, KIND_DISTANCE, 1.0)
        asked[probe.fact.relation.key] += 1
        right[probe.fact.relation.key] += judge.recalls(probe)
    for relation in world.RELATIONS:
        key = relation.key
        yield f"| {key} | {right[key] / max(1, asked[key]):.2f} | {asked[key]} |"


def fluency_table(judge: Judge) -> Iterable[str]:
    """Shares of well-formed text by length of context, as Markdown lines."""
    yield "| context (tokens) | greedy answers well formed | stories well formed (temperature 0.7) | tokens a story |"
    yield "| --- | --- | --- | --- |"
    torch.manual_seed(0)
    rng = random.Random("stories")
    count = max(1, judge.count // 2)
    for length in LENGTHS:
        drawn = judge.draw(length, 1.0)[:count]
        answers = [judge.text(judge.generate(probe.context, tokens=24)) for probe in drawn]
        stories = []
        for probe in drawn:
            request = world.STORY_REQUEST.format(a=rng.choice(words.NAMES))
            ask = judge.encode(END + USER + request + END + ASSISTANT)
            stories.append(judge.generate(probe.context + probe.answer[:-1] + ask, temperature=0.7))
        long = sum(map(len, stories)) / count
        fluent = _share(grammar.well_formed(judge.text(story)) for story in stories)
        yield f"| {length} | {_share(map(grammar.well_formed, answers)):.2f} | {fluent:.2f} | {long:.0f} |"


def precision_line(judge: Judge, half: Judge) -> str:
    """The share of answers on which bfloat16 and float32 agree, token for token."""
    drawn = [probe for distance in (64, 512) for probe in judge.draw(distance, 1.0)]
    same = sum(judge.generate(probe.context, tokens=24) == half.generate(probe.context, tokens=24) for probe in drawn)
    return f"bfloat16 gives float32's greedy answer for {same} of {len(drawn)} questions"


def block_lines(judge: Judge) -> Iterable[str]:
    """Recall with a correct cache, and with one block of it wrong."""
    drawn = judge.draw(KIND_DISTANCE, 1.0)
    yield f"recall at {KIND_DISTANCE} tokens, cache untouched: {_share(map(judge.recalls, drawn)):.2f}"
    for name, spoil in (("the fact's block", own_block), ("an unrelated block", later_block)):
        share = _share(judge.recalls_with_block(probe, spoil) for probe in drawn)
        yield f"with {name} ({BLOCK_SIZE} tokens) overwritten by another: {share:.2f}"


def prompts_line(judge: Judge) -> str:
    """How many of the demonstration prompts are answered right."""
    asked = prompts.questions(20)
    facts = prompts.system_text()
    right = 0
    for question in asked:
        chat = f"<|bos|><|system|> {facts}{END}{USER} {question.text}{END}{ASSISTANT}"
        right += judge.text(judge.generate(judge.encode(chat), tokens=24)).strip() == question.answer
    return f"demonstration prompts answered right: {right} of {len(asked)} ({len(judge.encode(facts))} tokens of facts)"


def _share(hits: Iterable[bool]) -> float:
    counted = list(hits)
    return sum(counted) / len(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--probes", type=int, default=100, help="questions for each cell of the tables")
    options = parser.parse_args()
    judge = Judge(options.checkpoint, options.probes)
    half = Judge(options.checkpoint, options.probes, torch.bfloat16)
    for part in (recall_table(judge), kinds_table(judge), fluency_table(judge), block_lines(judge)):
        for line in part:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        sys.stdout.write("\n")
    sys.stdout.write(precision_line(judge, half) + "\n" + prompts_line(judge) + "\n")


if __name__ == "__main__":
    main()
