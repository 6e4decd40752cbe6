"""Codecs: sets of HDF5 filters, each registered under its name of the option `codec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from featx.base import Member, Registry
from featx.errors import MissingExtraError


@dataclass(frozen=True, kw_only=True)
class Codec(Member):
    """A codec as it is registered.

    Attributes:
        filters: makes the keyword arguments of h5py's `create_dataset`.
        is_streamed: whether large parts are written as their rows come, for which the filters have
            to be known without HDF5 (`filter_pipeline`).
    """

    filters: Callable[[], dict[str, Any]]
    is_streamed: bool = True


CODECS: Registry[Codec] = Registry("codec", "featx.store.codecs")
"""All codecs by their names."""


def filters(codec: str) -> dict[str, Any]:
    """Return the keyword arguments of h5py's `create_dataset` for a codec."""
    return CODECS.get(codec).filters()


def load_plugin() -> Any:
    """Import hdf5plugin, which registers its filters with h5py."""
    try:
        import hdf5plugin
    except ImportError as error:
        raise MissingExtraError(
            "this codec needs the package hdf5plugin: pip install hdf5plugin."
        ) from error
    return hdf5plugin


def load_plugin_for(filters: Iterable[int]) -> None:
    """Import hdf5plugin unless HDF5 has some filters already."""
    import h5py  # here, as the names of codecs are listed without h5py

    missing = [number for number in filters if not h5py.h5z.filter_avail(number)]
    if missing:
        try:
            import hdf5plugin  # noqa: F401 - registers its filters with h5py
        except ImportError as error:
            raise MissingExtraError(
                f"the data are compressed with the HDF5 filter {missing[0]}, which h5py does not "
                "have. The package hdf5plugin has more filters: pip install hdf5plugin."
            ) from error


def check_filters(filters: Iterable[int]) -> None:
    """Check that HDF5 can read what some filters have written; a missing one is no damage."""
    import h5py

    for number in filters:
        if not h5py.h5z.filter_avail(number):
            raise MissingExtraError(
                f"the data are compressed with the HDF5 filter {number}, which neither h5py nor "
                "the package hdf5plugin has. If you have a plugin with this filter, set "
                "HDF5_PLUGIN_PATH to its folder."
            )


def _zstd() -> dict[str, Any]:
    return dict(load_plugin().Zstd(clevel=1))


def _blosc2() -> dict[str, Any]:
    plugin = load_plugin()
    return dict(plugin.Blosc2(cname="zstd", clevel=1, filters=plugin.Blosc2.SHUFFLE))


# Only gzip and blosc2 shuffle bytes: sparse feature maps compress worse with it.
CODECS.register(Codec("none", "No compression.", filters=dict))
CODECS.register(
    Codec("lzf", "Fast and weak.", filters=lambda: {"compression": "lzf"}, is_streamed=False)
)
CODECS.register(
    Codec(
        "gzip",
        "Slow, read by every HDF5 library.",
        filters=lambda: {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    )
)
CODECS.register(Codec("zstd", "Strong and fast, read with hdf5plugin.", filters=_zstd))
CODECS.register(
    Codec(
        "blosc2",
        "Strong and fast on floating-point numbers, read with hdf5plugin.",
        filters=_blosc2,
    )
)
