"""The HDF5 filters behind the key `codec`."""

from __future__ import annotations

from typing import Any

from featx.errors import MissingExtraError


def filters(codec: str) -> dict[str, Any]:
    """Keyword arguments of h5py's create_dataset for a codec.

    Shuffle goes with gzip only: sparse feature maps compress worse with it.
    """
    if codec == "none":
        return {}
    if codec == "lzf":
        return {"compression": "lzf"}
    if codec == "gzip":
        return {"compression": "gzip", "compression_opts": 1, "shuffle": True}
    plugin = load_plugin()
    if codec == "zstd":
        return dict(plugin.Zstd(clevel=1))
    return dict(plugin.Blosc2(cname="zstd", clevel=1, filters=plugin.Blosc2.SHUFFLE))


def load_plugin() -> Any:
    """hdf5plugin, which registers its filters with h5py when it is imported."""
    try:
        import hdf5plugin
    except ImportError as error:
        raise MissingExtraError(
            "this codec needs the package hdf5plugin: pip install hdf5plugin."
        ) from error
    return hdf5plugin
