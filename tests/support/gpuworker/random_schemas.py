"""Random JSON schemas, nested up to three deep: of every kind whose documents can be short, and few others.

The digits of a number without a multipleOf have no bound, nor have the names of free properties.
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
