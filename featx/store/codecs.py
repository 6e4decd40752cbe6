"""HDF5 filters of the option `codec`."""

from __future__ import annotations

from typing import Any

from featx.errors import MissingExtraError


def filters(codec: str) -> dict[str, Any]:
    """Keyword arguments of h5py's create_dataset for a codec.

    Only gzip is combined with shuffle: sparse feature maps compress worse with it.
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
    """Import hdf5plugin, which registers its filters with h5py.

    Raises:
        MissingExtraError: hdf5plugin is not installed.
    """
    try:
        import hdf5plugin
    except ImportError as error:
        raise MissingExtraError(
            "this codec needs the package hdf5plugin: pip install hdf5plugin."
        ) from error
    return hdf5plugin
