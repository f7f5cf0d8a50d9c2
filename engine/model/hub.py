"""Checkpoints by hub id: config and tokenizer first, so that a refusal costs no download."""

import re
from collections.abc import Callable
from pathlib import Path

from engine.errors import InvalidModel
from engine.model.json_file import read_json
from engine.model.spec import spec_from_hf_config

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NEEDED = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]


def looks_like_hub_id(model: str) -> bool:
    """Say whether `model` has the form `name` or `owner/name`."""
    return _HUB_ID.fullmatch(model) is not None


def fetch_from_hub(hub_id: str, *, progress: Callable[[str], None]) -> Path:
    """Return the local directory of a hub checkpoint, downloading what isn't in the cache.

    HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to huggingface_hub.
    Raises InvalidModel if the config names an unsupported model or the tokenizer is missing, before
    any weight is fetched, and for every reason why the hub doesn't give the files.
    """
    # Imported here because it is slow, and a local model has no use for it.
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
    )

    try:
        progress(f"asking the hub for {hub_id}")
        spec_from_hf_config(read_json(Path(hf_hub_download(hub_id, "config.json"))))
        hf_hub_download(hub_id, "tokenizer.json")
        progress(f"downloading {hub_id}")
        return Path(snapshot_download(hub_id, allow_patterns=_NEEDED))
    except LocalEntryNotFoundError as error:
        raise InvalidModel(
            f"{hub_id!r} is no local directory or file, it isn't in the local hub cache, and "
            "the hub can't be reached"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise InvalidModel(
            f"{hub_id!r} has no config.json or no tokenizer.json on the hub, and both are needed"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise InvalidModel(
            f"{hub_id!r} is no local directory or file, and the hub refused it: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    except OSError as error:
        raise InvalidModel(f"{hub_id!r} can't be fetched from the hub: {error}") from error
