"""Reads a Dockerfile as far as the tests need it: instructions by stage, and what the final image has of them."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

REPOSITORY = Path(__file__).resolve().parents[4]


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM with what follows it; `base` is an image or an earlier stage."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """All stages of a file, in order, and the one that an image is made of with the stages below it."""

    stages: list[Stage]
    image: list[Stage]

    @classmethod
    def read(cls, path: str, target: str | None = None) -> Self:
        """Return the file at `path` in the repository, with the image of `target`, the last stage without one."""
        stages: list[Stage] = []
        text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / path).read_text(), flags=re.MULTILINE)
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            instruction, _, rest = line.partition(" ")
            if instruction == "FROM":
                base, _, name = rest.partition(" AS ")
                stages.append(Stage(name, base))
            elif instruction and stages:
                stages[-1].instructions.append((instruction, rest.strip()))
        named = {stage.name: stage for stage in stages if stage.name}
        chain = [named[target] if target else stages[-1]]
        while chain[-1].base in named:
            chain.append(named[chain[-1].base])
        return cls(stages, chain[::-1])

    def of_image(self, instruction: str) -> list[str]:
        """Return the arguments of each such instruction in the image's own stages."""
        return [rest for stage in self.image for name, rest in stage.instructions if name == instruction]

    def of_all(self, instruction: str) -> list[str]:
        """Return the arguments of each such instruction in any stage."""
        return [rest for stage in self.stages for name, rest in stage.instructions if name == instruction]

    @property
    def environment(self) -> dict[str, str]:
        """The image's own variables."""
        pairs = (word.partition("=") for rest in self.of_image("ENV") for word in shlex.split(rest))
        return {key: value for key, _, value in pairs}

    @property
    def healthcheck(self) -> list[str]:
        """The command of the last HEALTHCHECK, which must be in exec form."""
        words: list[str] = json.loads(self.of_image("HEALTHCHECK")[-1].partition("CMD ")[2])
        return words
