"""The HDF5 store: written part by part, verified, repaired, packed, read by rows or keys.

In: rows of features with their status and checksums. Out: a folder that plain h5py can read.
Reading needs numpy and h5py only; with xxhash, checksums are compared.
The way of a row: `row_file` and `chunk_file` write it, `part_files` commits it, `chunk_reader`
reads it, `file_checks` verifies it, and `sound_rows` finds it in a damaged file.
Names for others: those in `__init__.pyi`.
"""

from featx.base.exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
