"""Codecs: sets of HDF5 filters, each registered under its name of the option `codec`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from featx.base import Member, Registry
from featx.errors import MissingExtraError


@dataclass(frozen=True, kw_only=True)
class Codec(Member):
    """A codec as it is registered; `filters` makes keyword arguments of h5py's `create_dataset`."""

    filters: Callable[[], dict[str, object]]


CODECS: Registry[Codec] = Registry("codec", "featx.store.codecs")
"""All codecs by their names."""


def filters(codec: str) -> dict[str, object]:
    return CODECS.get(codec).filters()


def require_filters(numbers: Iterable[int]) -> None:
    """Load the filters of a dataset; a missing one (MissingExtraError) is no damage."""
    import h5py  # here, as the names of codecs are listed without h5py

    missing = [number for number in numbers if not h5py.h5z.filter_avail(number)]
    if not missing:
        return
    try:
        import hdf5plugin  # noqa: F401 - registers its filters with h5py
    except ImportError as error:
        raise MissingExtraError(
            f"the data are compressed with the HDF5 filter {missing[0]}, which h5py does not "
            "have. The package hdf5plugin has more filters: pip install hdf5plugin."
        ) from error
    for number in missing:
        if not h5py.h5z.filter_avail(number):
            raise MissingExtraError(
                f"the data are compressed with the HDF5 filter {number}, which neither h5py nor "
                "the package hdf5plugin has. If you have a plugin with this filter, set "
                "HDF5_PLUGIN_PATH to its folder."
            )


def _zstd() -> dict[str, object]:
    try:
        import hdf5plugin
    except ImportError as error:
        raise MissingExtraError(
            "codec=zstd needs the package hdf5plugin: pip install hdf5plugin."
        ) from error
    return dict(hdf5plugin.Zstd(clevel=1))


# Only gzip shuffles bytes: sparse feature maps compress worse with it.
CODECS.register(Codec("none", "No compression.", filters=dict))
CODECS.register(
    Codec(
        "gzip",
        "Slow, read by every HDF5 library.",
        filters=lambda: {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    )
)
CODECS.register(Codec("zstd", "Strong and fast, read with hdf5plugin.", filters=_zstd))
