"""Random JSON schemas, nested up to three deep: of every kind whose documents can be short, and few others.

The digits of a number without a multipleOf have no bound, nor have the names of free properties. `StrangeSchemas` are
as people publish them: keywords that say nothing, bounds of 64 bits, patterns beside names, what cannot be enforced.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ["name", "age", "a b", "ünï", "items", "x", "id", 'q"uote', "0", "street", "zip"]
PATTERNS = ["^[a-z]{2,6}$", "^(ab|cd)+$", "^[A-Z][0-9]{3}$", r"^\d{2}:\d{2}$", "[xyz]{3}", "^é?[^a-z]{1,4}$"]
CONSTANTS = ["red", "", "ünïcode", 'a "word"', 0, -7, 2.5, True, None, [1, "b"], {"k": [None]}]


class SchemaMaker:
    """Makes random schemas from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def schema(self, depth: int = 0) -> Schema:
        """Return a schema; the outermost is an object or an array, mostly."""
        nested = [self._object, self._object, self._array, self._any_of]
        flat = [self._string, self._pattern, self._integer, self._number, self._enum, self._const, self._plain]
        if depth >= 3:
            return self._rng.choice(flat)()
        if depth == 0 and self._rng.random() < 0.8:
            return self._rng.choice(nested)(depth)
        choice = self._rng.randrange(len(nested) + len(flat))
        return nested[choice](depth) if choice < len(nested) else flat[choice - len(nested)]()

    def _object(self, depth: int) -> Schema:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 4))
        made: Schema = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        if rng.random() < 0.8:
            made["required"] = [name for name in names if rng.random() < 0.7]
        made["additionalProperties"] = False if rng.random() < 0.97 else {"type": "boolean"}
        if rng.random() < 0.05:
            made["patternProperties"] = {"^k[0-9]$": self.schema(depth + 1)}
        return made

    def _array(self, depth: int) -> Schema:
        fewest = self._rng.randint(0, 2)
        made: Schema = {"type": "array", "minItems": fewest, "maxItems": fewest + self._rng.randint(0, 2)}
        if self._rng.random() < 0.2:
            made["prefixItems"] = [self.schema(depth + 1) for _ in range(self._rng.randint(1, 2))]
        return made | {"items": self.schema(depth + 1)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth + 1) for _ in range(self._rng.randint(2, 3))]}

    def _string(self) -> Schema:
        fewest = self._rng.choice([0, 0, 1, 4])
        return {"type": "string", "minLength": fewest, "maxLength": fewest + self._rng.randint(0, 9)}

    def _pattern(self) -> Schema:
        return {"type": "string", "pattern": self._rng.choice(PATTERNS), "maxLength": 12}

    def _integer(self) -> Schema:
        low = self._rng.randint(-200, 200)
        made: Schema = {"type": "integer", "minimum": low, "maximum": low + self._rng.randint(10, 2000)}
        return made | ({"multipleOf": self._rng.choice([2, 5])} if self._rng.random() < 0.3 else {})

    def _number(self) -> Schema:
        low = self._rng.randint(-50, 50) / 4
        made: Schema = {"type": "number", "exclusiveMinimum": low, "maximum": low + self._rng.randint(8, 400) / 8}
        return made | ({"multipleOf": self._rng.choice([0.25, 0.5])} if self._rng.random() < 0.9 else {})

    def _enum(self) -> Schema:
        return {"enum": self._rng.sample(CONSTANTS, self._rng.randint(1, 4))}

    def _const(self) -> Schema:
        return {"const": self._rng.choice(CONSTANTS)}

    def _plain(self) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"]])}


NAME_PATTERNS = ["^name$", "^(name|age)$", "^x?$", "^[a-z]+$", "^S_", "e", "[0-9]", "^.{1,5}$", "^(?!x)"]
FORMATS = [
    "date", "date-time", "uri", "uuid", "ipv4", "password", "uri-reference", "regex", "zzz", "byte", "int32"
]  # fmt: skip


class StrangeSchemas(SchemaMaker):
    """Makes random schemas from a seed: some cannot be enforced, and some allow nothing."""

    def schema(self, depth: int = 0) -> Schema:
        made = super().schema(depth)
        if self._rng.random() < 0.1:
            made |= {"title": "T", "default": None, "readOnly": True, "x-order": 3}
        return made

    def _object(self, depth: int) -> Schema:
        rng, made = self._rng, super()._object(depth)
        if rng.random() < 0.3:
            some = rng.sample(NAME_PATTERNS, rng.choice([1, 1, 2]))
            made["patternProperties"] = {each: self.schema(depth + 1) for each in some}
        if rng.random() < 0.2:
            lists = [{"enum": rng.sample(NAMES, 3)}, {"const": "name"}, {"pattern": rng.choice(NAME_PATTERNS)}]
            made["propertyNames"] = rng.choice([True, {"type": "string"}, {"maxLength": 4}, *lists])
        if rng.random() < 0.2:
            made["required"] = [*made.get("required", ()), rng.choice(NAMES)]
        if rng.random() < 0.1:
            made[rng.choice(["minProperties", "maxProperties"])] = rng.randint(0, 3)
        if rng.random() < 0.03:
            made |= rng.choice([{"not": {"required": ["x"]}}, {"dependentRequired": {"x": ["id"]}}])
        return made

    def _array(self, depth: int) -> Schema:
        made = super()._array(depth)
        return made | ({"uniqueItems": self._rng.random() < 0.7} if self._rng.random() < 0.2 else {})

    def _any_of(self, depth: int) -> Schema:
        options = super()._any_of(depth)["anyOf"]
        return {self._rng.choice(["anyOf", "oneOf", "allOf"]): options}

    def _string(self) -> Schema:
        made = super()._string()
        return made | ({"format": self._rng.choice(FORMATS)} if self._rng.random() < 0.4 else {})

    def _integer(self) -> Schema:
        low = self._rng.choice([-(2**63), -1e30, -5, 0, 2.5])
        made: Schema = {"type": "integer", self._rng.choice(["minimum", "exclusiveMinimum"]): low}
        return made | {self._rng.choice(["maximum", "exclusiveMaximum"]): self._rng.choice([2**63 - 1, 2**64, 1e30, 7])}

    def _number(self) -> Schema:
        low = self._rng.choice(["minimum", "exclusiveMinimum"]), self._rng.choice([-1e300, 0])
        high = self._rng.choice(["maximum", "exclusiveMaximum"]), self._rng.choice([1e300, 3.4e38, 180.5])
        return {"type": "number", **dict([low, high])}
