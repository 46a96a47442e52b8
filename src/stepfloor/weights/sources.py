"""From what the user typed to a checkpoint directory: a path, the Hugging Face cache, or a download.

The cache is looked at before the network: a release is 100 GB and more, and a wrong owner in the id must not
fetch it a second time. Source: huggingface_hub's cache layout (models--owner--name/{refs,snapshots}).
"""

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from stepfloor.errors import UserError

log = logging.getLogger(__name__)

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True, slots=True)
class Hub:
    """How to reach the Hugging Face hub; the command line fills it from the environment.

    cache     directory that holds models--owner--name
    offline   never touch the network (HF_HUB_OFFLINE)
    token     for gated repositories; None for the one huggingface_hub has stored
    endpoint  of a mirror; None for the hub itself
    """

    cache: Path
    offline: bool = False
    token: str | None = None
    endpoint: str | None = None


def hub_cache(hf_home: str | None, hf_hub_cache: str | None, xdg_cache_home: str | None = None) -> Path:
    """The cache directory huggingface_hub would use with these variables: HF_HUB_CACHE, else HF_HOME/hub."""
    if hf_hub_cache:
        return Path(hf_hub_cache).expanduser()
    if hf_home:
        return Path(hf_home).expanduser() / "hub"
    return Path(xdg_cache_home or "~/.cache").expanduser() / "huggingface" / "hub"


def resolve_source(source: str | Path, hub: Hub, *, revision: str | None = None, download: bool = False) -> Path:
    """The directory of a checkpoint given as a path or a hub id (owner/name).

    revision  branch, tag or snapshot name; main without it
    download  fetch the id even where the cache has the same model of another owner
    Raises UserError where nothing is found, naming what is there.
    """
    if (local := find_local(source, hub, revision=revision)) is not None:
        return local
    name = str(source)
    found = _cached(name, hub.cache, revision)
    if found is None and not download and (others := _same_model(name, hub.cache)):
        raise UserError(
            f"{name} is not in {hub.cache}, but {' and '.join(others)} is; pass that id, or add --download to fetch "
            f"{name} as well"
        )
    if hub.offline:
        if found is not None:
            absent = _absent(found)
            raise UserError(
                f"{name}: {len(absent)} files are not in {found} ({', '.join(absent[:3])}) and HF_HUB_OFFLINE forbids "
                "fetching them; unset it, or complete the snapshot"
            )
        raise UserError(
            f"{name} is not in {hub.cache} and HF_HUB_OFFLINE forbids fetching it; unset it, or pass a path"
        )
    return _download(name, hub, revision)


def find_local(source: str | Path, hub: Hub, *, revision: str | None = None) -> Path | None:
    """The directory, or the complete snapshot in the cache; None for a hub id that the cache lacks or has in part.

    Raises UserError for what is neither a directory nor a hub id.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError(f"--revision {revision} chooses among a hub id's; {source} is a directory: leave it out")
        return path
    name = str(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", "~")) or path.exists():
        raise UserError(f"wanted a checkpoint directory or a hub id (owner/name); {name} is neither")
    found = _cached(name, hub.cache, revision)
    return found if found is not None and not _absent(found) else None


def _cached(name: str, cache: Path, revision: str | None) -> Path | None:
    """The snapshot a revision points to. Its directory name is taken from refs/ as it stands: it need not be hex."""
    repository = cache / _folder(name)
    wanted = revision or "main"
    ref = repository / "refs" / wanted
    snapshot = repository / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted)
    return snapshot if snapshot.is_dir() else None


def _absent(snapshot: Path) -> list[str]:
    """Files a complete snapshot would have; a link to a blob that is gone counts as absent."""
    wanted = ["config.json"]
    index = snapshot / "model.safetensors.index.json"
    if index.exists():
        try:
            wanted += sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            wanted.append(index.name + " (broken)")
    elif not any(snapshot.glob("*.safetensors")):
        wanted.append("model.safetensors")
    return [name for name in wanted if not (snapshot / name).exists()]


def _same_model(name: str, cache: Path) -> list[str]:
    """Ids in the cache with the same model name and another owner."""
    model = name.partition("/")[2].lower()
    ids = [p.name.removeprefix("models--").replace("--", "/", 1) for p in sorted(cache.glob("models--*"))]
    return [i for i in ids if i.partition("/")[2].lower() == model and any((cache / _folder(i)).glob("snapshots/*"))]


def _folder(name: str) -> str:
    return f"models--{name.replace('/', '--')}"


def _download(name: str, hub: Hub, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    log.info("fetching %s into %s", name, hub.cache)
    try:
        fetched = snapshot_download(
            name, revision=revision, cache_dir=hub.cache, token=hub.token, allow_patterns=_FILES
        )
    except GatedRepoError:
        raise UserError(f"{name} is gated; accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model {name}, or it is private; check the id and HF_TOKEN") from None
    except RevisionNotFoundError:
        raise UserError(f"{name} has no revision {revision!r}; leave --revision out for main") from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name} could not be fetched ({reason}); check the network, or pass a directory") from None
    return Path(fetched)
