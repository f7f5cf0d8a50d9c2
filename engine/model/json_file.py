"""Small JSON files of a checkpoint; torch-free."""

import json
from pathlib import Path
from typing import Any

from engine.errors import InvalidModel


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raises InvalidModel in words."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidModel(f"the checkpoint has no {path.name}") from error
    except (ValueError, OSError) as error:
        raise InvalidModel(f"{path.name} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidModel(f"{path.name} isn't a JSON object")
    return content
