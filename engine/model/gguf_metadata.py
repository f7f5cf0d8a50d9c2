"""The key-value part of a GGUF file, with every read checked."""

from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidModel


class GgufMetadata:
    """Typed access to a GGUF file's keys; keys under the architecture are given without it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str, *, default: str | None = None) -> str:
        """Return a string; raises InvalidModel if it is absent and has no default."""
        value: str = self._typed(key, str, default)
        return value

    def whole(self, key: str, *, default: int | None = None) -> int:
        """Return an integer; raises InvalidModel if it is absent and has no default."""
        value: int = self._typed(key, int, default)
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Return a number; raises InvalidModel if it is absent and has no default."""
        return float(self._typed(key, int | float, default))

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean."""
        value: bool = self._typed(key, bool, default)
        return value

    def items(self, key: str) -> list[Any]:
        """Return an array; raises InvalidModel if it is absent."""
        value: list[Any] = self._typed(key, list, None)
        return value

    def of_architecture(self, key: str) -> str:
        """Return the full name of a key that stands under the architecture's name."""
        return f"{self.architecture}.{key}"

    def _typed(self, key: str, kind: Any, default: Any) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise InvalidModel(f"the GGUF file doesn't say {key}")
        if not isinstance(value, kind):
            raise InvalidModel(f"the GGUF file's {key} is {value!r}, of the wrong type")
        return value
