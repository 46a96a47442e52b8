"""What the environment says, and the models that it leads to. The only reader of the environment."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepfloor.errors import UserError

if TYPE_CHECKING:
    from stepfloor.weights.checkpoint import Checkpoint
    from stepfloor.weights.sources import Hub


def variables() -> dict[str, str]:
    """All of them, for the servers that a comparison starts."""
    return dict(os.environ)


def server_key() -> str | None:
    """The key that requests must bring, where no --api-key is given."""
    return os.environ.get("VLLM_API_KEY")


def hub() -> "Hub":
    """The hub as the Hugging Face variables of the environment describe it."""
    from stepfloor.weights.sources import Hub, hub_cache

    env = os.environ
    return Hub(
        cache=hub_cache(env.get("HF_HOME"), env.get("HF_HUB_CACHE"), env.get("XDG_CACHE_HOME")),
        offline=env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        token=env.get("HF_TOKEN"),
        endpoint=env.get("HF_ENDPOINT"),
    )


def open_model(
    model: str, revision: str | None = None, download: bool = False, overrides: dict[str, Any] | None = None
) -> "Checkpoint":
    """Resolve a model with the Hugging Face variables of the environment, and open it."""
    from stepfloor.weights.checkpoint import open_checkpoint
    from stepfloor.weights.sources import resolve_source

    directory = resolve_source(model, hub(), revision=revision, download=download)
    return open_checkpoint(directory, hf_overrides=overrides)


def open_headers(model: str, revision: str | None, download: bool = False) -> "Checkpoint":
    """What a model consists of, by headers alone: a layout, what is here already, or ranges of the hub's files."""
    from stepfloor.weights.releases import is_layout, open_layout
    from stepfloor.weights.sources import find_local

    if is_layout(model):
        return open_layout(model)
    source = hub()
    if download or source.offline or find_local(model, source, revision=revision) is not None:
        return open_model(model, revision, download)
    from stepfloor.weights.remote import open_remote

    return open_remote(model, source, revision=revision)


def local(model: str, revision: str | None) -> Path:
    """The directory of a model that is on this disk. Raises UserError for one that would have to be fetched."""
    from stepfloor.weights.sources import find_local

    source = hub()
    directory = find_local(model, source, revision=revision)
    if directory is None:
        raise UserError(
            f"{model} is not whole in {source.cache}; fetch it first (`hf download {model}`), or pass a path"
        )
    return directory


def shipped() -> str:
    """The small model inside the package."""
    return str(package_file(""))


def package_file(name: str) -> Path:
    """A file that ships beside the small model."""
    return Path(__file__).parents[1] / "shipped" / name
