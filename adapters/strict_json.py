"""JSON from strangers: no duplicate keys, no NaN, no surprises; one error with words."""

import json
from typing import Any, NoReturn

from adapters.limits import MAX_JSON_DEPTH


class NotStrictJson(ValueError):
    """The bytes aren't JSON in the strict sense; the text says where or why."""


def parse_strict_json(raw: bytes) -> Any:
    """Parse UTF-8 JSON; a byte-order mark is tolerated, duplicate keys and NaN aren't."""
    try:
        value = json.loads(
            raw.decode("utf-8-sig"),
            object_pairs_hook=_object_without_duplicates,
            parse_constant=_refuse_constant,
        )
        _check_depth(value)
        if rb"\u" in raw:
            # Escapes can spell half a character, which nothing could encode again.
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise NotStrictJson(f"byte {error.start} isn't UTF-8") from error
    except UnicodeEncodeError as error:
        raise NotStrictJson("a text in it holds half a character") from error
    except json.JSONDecodeError as error:
        raise NotStrictJson(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise NotStrictJson(f"it is nested deeper than {MAX_JSON_DEPTH} levels") from error
    except ValueError as error:
        raise NotStrictJson(str(error)) from error
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:60]!r} stands twice in one object")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't a JSON number")
