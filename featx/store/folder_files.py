"""Files in the folder of a store that are its own: the manifest, and the summary of its runs.

Next to a store that is given as a single file there may be those of another store.
"""

from __future__ import annotations

import errno
from typing import Any

from featx.store import layout
from featx.store.manifest import Manifest, load_manifest
from featx.store.reader import FeatureStore
from featx.store.result_files import read_result


def manifest_of(store: FeatureStore) -> Manifest | None:
    """Return the featx.json of a store, or None without its own."""
    manifest, _ = load_manifest(store.folder)
    has_own = manifest is not None and manifest.digest == store.attrs["fingerprint"]
    return manifest if has_own else None


def read_summary(store: FeatureStore) -> dict[str, Any]:
    """Read the summary.json of a store, also of one that is given by its features.h5.

    Raises StoreError if the file is damaged, and an OSError if it is missing or cannot be read, or
    if it is that of another store than the file.
    """
    if store.root != store.folder and manifest_of(store) is None:
        raise FileNotFoundError(errno.ENOENT, "no folder of this store", str(store.root))
    return read_result(store.folder / layout.SUMMARY)
