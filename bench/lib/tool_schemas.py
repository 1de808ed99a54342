"""Random tools, as agents offer them: objects of texts, numbers, choices, lists and objects, nested up to three deep.

Texts and lists have bounds, except a share of the texts that the caller chooses. No grammar can bound those without
cutting what somebody wants to write, and a model that never learned JSON does not end them.
"""

from __future__ import annotations

import random
from typing import Any, Final

Schema = dict[str, Any]

_NAMES: Final = (
    "city country date unit limit offset query path title tags amount price owner email status kind size id count "
    "street zip language user_id max_results include_closed start_time end_time items weight colour due note x y"
).split()
_VERBS: Final = "get set find list create update delete move send book".split()
_PATTERNS: Final = ("^[a-z]{2,8}$", "^[A-Z]{2}[0-9]{3}$", r"^\d{2}:\d{2}$", "^#[0-9a-f]{6}$", "^(ab|cd)+$")
_FORMATS: Final = ("date", "time", "date-time", "uuid", "ipv4")
_WORDS: Final = ("red", "green", "open", "closed", "celsius", "kilometre", "asc", "desc", 'a "word"', "ünï", "")
_DEEPEST: Final = 2


class ToolMaker:
    """Makes random tools from a seed; `free` is the share of the texts without any bound."""

    def __init__(self, seed: int, free: float = 0.0) -> None:
        self._rng, self._free = random.Random(seed), free

    def tool(self) -> Schema:
        """Return a tool in OpenAI's form; one in three is strict."""
        name = f"{self._rng.choice(_VERBS)}_{self._rng.choice(_NAMES)}"
        parameters = self._object(0)
        if self._rng.random() < 0.2:
            parameters["$defs"] = {"Point": self._object(_DEEPEST)}
            parameters["properties"]["point"] = {"$ref": "#/$defs/Point"}
        function: Schema = {"name": name, "description": f"Does {name}.", "parameters": parameters}
        if self._rng.random() < 1 / 3:
            function["strict"] = True
        return {"type": "function", "function": function}

    def _schema(self, depth: int) -> Schema:
        flat = [self._text, self._text, self._choice, self._integer, self._number, self._flag]
        nested = [self._object, self._list, self._either]
        if depth >= _DEEPEST or self._rng.random() < 0.75:
            return self._rng.choice(flat)()
        return self._rng.choice(nested)(depth)

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(_NAMES, rng.randint(0 if depth == 0 else 1, 6 - 2 * depth))
        made: Schema = {"type": "object", "properties": {name: self._schema(depth + 1) for name in names}}
        made["required"] = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.3:
            made["additionalProperties"] = False
        return made

    def _list(self, depth: int) -> Schema:
        fewest = self._rng.randint(0, 2)
        most = fewest + self._rng.randint(0, 3)
        return {"type": "array", "items": self._schema(depth + 1), "minItems": fewest, "maxItems": most}

    def _either(self, depth: int) -> Schema:
        other = {"type": "null"} if self._rng.random() < 0.6 else self._schema(depth + 1)
        return {"anyOf": [self._schema(depth + 1), other]}

    def _text(self) -> Schema:
        rng = self._rng
        if rng.random() < self._free:
            return {"type": "string"}
        limits: tuple[Schema, ...] = (
            {"maxLength": rng.randint(4, 60)},
            {"minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 30)},
            {"pattern": rng.choice(_PATTERNS), "maxLength": 12},
            {"format": rng.choice(_FORMATS)},
        )
        return {"type": "string", **rng.choice(limits)}

    def _choice(self) -> Schema:
        values = self._rng.sample(_WORDS, self._rng.randint(1, 4))
        return {"const": values[0]} if len(values) == 1 else {"type": "string", "enum": values}

    def _integer(self) -> Schema:
        low = self._rng.randint(-200, 200)
        within = {"minimum": low, "maximum": low + self._rng.randint(1, 2000)}
        limits: tuple[Schema, ...] = ({}, {"minimum": 0}, within)
        return {"type": "integer", **self._rng.choice(limits)}

    def _number(self) -> Schema:
        low = self._rng.randint(-50, 50) / 4
        limits: tuple[Schema, ...] = ({}, {"exclusiveMinimum": 0}, {"minimum": low, "maximum": low + 10.5})
        return {"type": "number", **self._rng.choice(limits)}

    def _flag(self) -> Schema:
        return {"type": "boolean", "description": "yes or no", "default": False}
