"""Reads single tokens of a layer, which are adjacent bytes at addresses that can be computed.

Chunks are whole rows. Without filters, token t of a row (T, C) lies t * C numbers behind the row's
first byte, so a token is read without its image. Other layers are read by rows or chunks: maps
(C, H, W), in which a token is spread over the row, and compressed layers.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import free_memory
from featx.errors import ConfigError, StoreError
from featx.storage import S3Path, is_local, supports_direct_io
from featx.store.chunk_cache import decode_pool
from featx.store.chunk_check import Verify, check_verify, repair_hint
from featx.store.dtypes import raw_dtype
from featx.store.hdf5_files import max_open_files
from featx.store.layer_chunks import LayerChunks
from featx.store.row_gather import gather, gather_into
from featx.store.token_files import TokenFiles
from featx.store.token_ranges import RANGE_BYTES, TokenRanges, find_ranges

if TYPE_CHECKING:
    from featx.store.reader import FeatureStore

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

_PIECE_BYTES = 16 << 20
"""Bytes of rows that are held at a time where tokens are not read at their addresses."""


class TokenReader:
    """Tokens of one layer, for any number of threads of the process that created it.

    A row has `num_tokens` tokens of `channels` numbers: those of (T, C) in order, or the positions
    of a map in row-major order. Each chunk is compared with its checksum when a token of it is read
    first, which reads the whole chunk; `verify=False` compares nothing.

    Args:
        store: open store.
        layer: name of the layer.
        verify: as for `featx.open`, but 'chunks' and 'rows' are the same.
        direct: read past the page cache; None does so for layers of more than half of the free
            memory, if the file system allows it.
        mapped: map local files into memory, which is the fastest way to single tokens; pages that
            were read count as memory of the process.

    Attributes:
        num_tokens: tokens of a row.
        channels: numbers of a token.
        dtype: name of the number type: 'float16', 'float32' or 'bfloat16'.
        read_method: how tokens are read: "map" (memory map), "direct" (past the page cache), "file"
            (system calls, or requests to an object store), "chunks" (decoded chunks) or "hdf5".
        chunk_rows: rows of a chunk, which are compared together.

    Raises:
        ConfigError: `verify` or `direct` has no value of these.
        LayerError: there is no such layer.
        StoreError: its rows are no tokens, or its files are damaged.
    """

    def __init__(
        self,
        store: FeatureStore,
        layer: str,
        verify: Verify = "chunks",
        direct: bool | None = None,
        mapped: bool = True,
    ) -> None:
        check_verify(verify)
        if direct not in (None, True, False):
            raise ConfigError(
                f"direct={direct!r}: expected True, False, or None for what suits the layer."
            )
        self._store, self._layer, self._verify = store, layer, verify
        self._fingerprint = store.attrs.get("fingerprint")
        self.num_tokens, self.channels, self._channels_first = _shape_of_tokens(store, layer)
        self._direct, self._mapped = direct, mapped
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        """Find the chunks of the layer and decide how they are read."""
        try:
            chunks = LayerChunks(self._store, self._layer)
        except FileNotFoundError:  # the parts were packed since the store was opened
            self._store.refresh()
            if self._store.attrs.get("fingerprint") != self._fingerprint:
                raise StoreError(
                    f"another run has changed {self._store.root}; open it again."
                ) from None
            chunks = LayerChunks(self._store, self._layer)
        self.dtype, self.chunk_rows = chunks.dtype, chunks.chunk_rows
        self._token_bytes = self.channels * raw_dtype(self.dtype).itemsize
        self.read_method = _choose_read_method(chunks, self._direct, self._mapped)
        self._files = TokenFiles(chunks, self.read_method)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self._token_bytes

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether a token costs the reading of its chunk, as in compressed layers."""
        return self.read_method in ("chunks", "hdf5")

    @property
    def reads_whole_rows(self) -> bool:
        """Whether a token costs the reading of its row, as in maps (C, H, W)."""
        return self._channels_first or self.reads_whole_chunks

    def take(self, rows: Rows, positions: Rows) -> npt.NDArray[Any]:
        """Read tokens in any order, with repeats.

        Args:
            rows: (n,) int64 rows of the store.
            positions: (n,) int64 positions on the token axis.

        Returns:
            (n, channels) array as stored; uint16 bits for bfloat16.

        Raises:
            IndexError: a row or a position is out of range.
            StoreError: a row is not in the store, a chunk differs from its checksum, or another run
                has changed the store.
            OSError: a file cannot be read now.
        """
        if not len(rows):
            return np.empty((0, self.channels), raw_dtype(self.dtype))
        self._check_range(rows, positions)

        def read(files: TokenFiles) -> npt.NDArray[Any]:
            if self.read_method == "map" and not self._channels_first:
                return self._gather(files, rows, positions)
            out = np.empty((len(rows), self.token_bytes), np.uint8)
            order = np.lexsort((positions, rows))
            # These two methods divide a read among the threads of the pool themselves.
            is_serial = self.read_method in ("map", "hdf5")
            parts = [order] if is_serial else np.array_split(order, min(16, -(-len(order) // 256)))
            decode_pool().for_each(
                lambda part: self._read(files, rows[part], positions[part], out, part), parts
            )
            return out

        return self._retry_if_packed(read).view(raw_dtype(self.dtype)).reshape(len(rows), -1)

    def read_into(self, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows) -> None:
        """Read token (rows[i], positions[i]) into out[out_indices[i]].

        Args:
            rows: (n,) int64 ascending rows of the store.
            positions: (n,) int64 positions, ascending within a row.
            out: (m, token_bytes) contiguous array.
            out_indices: (n,) int64 distinct indices in [0, m).

        Raises:
            IndexError, StoreError, OSError: as `take`.
        """
        if len(rows):
            self._check_range(rows, positions)
            self._retry_if_packed(
                lambda files: self._read(files, rows, positions, out, out_indices)
            )

    def read_tasks(
        self, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows, num_bytes: int
    ) -> list[Callable[[], None]]:
        """Divide what `read_into` does into tasks for threads, of about `num_bytes` each.

        A chunk that is due is compared in one task only.

        Args:
            rows, positions, out, out_indices: as for `read_into`.
            num_bytes: bytes that a task reads.

        Raises:
            IndexError, StoreError: as `take`; the tasks raise StoreError and OSError, too.
        """
        if not len(rows):
            return []
        self._check_range(rows, positions)
        files = self._files
        if self.read_method == "map" or self.reads_whole_rows:
            parts = self._parts(rows, num_bytes)
            return [
                partial(self.read_into, rows[part], positions[part], out, out_indices[part])
                for part in parts
            ]
        offsets = positions * self.token_bytes
        ranges = self._find_ranges(files, rows, offsets, self.token_bytes, RANGE_BYTES // 4)

        def read(group: slice) -> None:
            try:
                ranges.read(files, group, out, out_indices)
            except FileNotFoundError:  # the parts of the store were packed meanwhile
                part = ranges.pieces(group)
                self._reopen(files)
                self.read_into(rows[part], positions[part], out, out_indices[part])

        return [partial(read, group) for group in ranges.groups(num_bytes)]

    def _parts(self, rows: Rows, num_bytes: int) -> list[slice]:
        """Divide ascending rows into reads, between chunks: so each chunk is compared once."""
        step = max(1, num_bytes // self.token_bytes)
        starts = np.flatnonzero(np.diff(rows // self.chunk_rows)) + 1
        wanted = np.searchsorted(starts, np.arange(step, len(rows), step))
        cuts = np.unique(starts[wanted[wanted < len(starts)]]).tolist()
        edges = [0, *cuts, len(rows)]
        return [slice(low, high) for low, high in itertools.pairwise(edges) if high > low]

    def _check_range(self, rows: Rows, positions: Rows) -> None:
        """Raise IndexError if a row or a position is out of range."""
        for what, values, stop in (
            ("row", rows, len(self._store)),
            ("position", positions, self.num_tokens),
        ):
            if values.min() < 0 or values.max() >= stop:
                wrong = values[(values < 0) | (values >= stop)][0]
                raise IndexError(f"{self._layer} has {stop} {what}s; {what} {wrong} was asked for")

    def _retry_if_packed(self, work: Callable[[TokenFiles], T]) -> T:
        """Call `work`, and once more if the parts of the store were packed meanwhile."""
        files = self._files
        try:
            return work(files)
        except FileNotFoundError:
            self._reopen(files)
            return work(self._files)

    def _reopen(self, files: TokenFiles) -> None:
        """Find the chunks anew, unless another thread has replaced `files` by now."""
        with self._lock:
            if self._files is files:
                self._open()

    def _gather(self, files: TokenFiles, rows: Rows, positions: Rows) -> npt.NDArray[Any]:
        """Gather tokens of mapped files, (n,) void."""
        chunks, width = files.chunks, self.token_bytes
        number, chunk, within = chunks.locate(rows)
        self._compare(files, chunk)
        addresses = chunks.address[chunk] + within * chunks.row_bytes + positions * width
        if len(chunks.files) == 1:
            return gather(files.mapped_file(0), addresses, width)
        starts, mapped = files.all_mapped()
        lowest = int(starts.min())
        # One gather over all files, at addresses of memory: file by file it would take half as long
        # again. The array spans the maps and all that lies between them, of which no byte is read:
        # `locate` has checked the rows, and each chunk lies in its file.
        stop = max(file.address + file.size for file in mapped)
        memory: Bytes = np.ctypeslib.as_array(
            (ctypes.c_ubyte * (stop - lowest)).from_address(lowest)
        )
        items = np.ndarray((len(memory) - width + 1,), f"V{width}", memory.data, strides=(1,))
        taken: npt.NDArray[Any] = items[addresses + (starts[number] - lowest)]
        return taken

    def _compare(self, files: TokenFiles, numbers: Rows) -> None:
        """Compare chunks of mapped files, unless that was done before."""
        if self._verify is False:
            return
        due = np.unique(numbers[~files.chunks.is_compared[numbers]])
        if not len(due):
            return

        def compare(chunk: int) -> None:
            number, address, size = files.locate(chunk)
            mapped = files.mapped_file(number).mapped
            assert mapped is not None
            files.compare(chunk, mapped[address : address + size])

        decode_pool().for_each(compare, due.tolist())

    def _read(
        self, files: TokenFiles, rows: Rows, positions: Rows, out: Bytes, out_indices: Rows
    ) -> None:
        """Read ascending tokens into out[out_indices], by the read method of this layer."""
        if not self.reads_whole_rows:
            self._read_items(files, rows, positions * self.token_bytes, out, out_indices)
            return
        unique, inverse = np.unique(rows, return_inverse=True)
        step = max(1, _PIECE_BYTES // files.chunks.row_bytes)
        for i in range(0, len(unique), step):
            some = np.flatnonzero((inverse >= i) & (inverse < i + step))
            whole = self._whole_rows(files, unique[i : i + step])
            values = whole.view(raw_dtype(self.dtype)).reshape(len(whole), *self._token_axes)
            if self._channels_first:
                tokens = values[inverse[some] - i, :, positions[some]]
            else:
                tokens = values[inverse[some] - i, positions[some]]
            out[out_indices[some]] = (
                np.ascontiguousarray(tokens).view(np.uint8).reshape(len(some), -1)
            )

    @property
    def _token_axes(self) -> tuple[int, int]:
        """Shape of a row with one axis of tokens."""
        axes = (self.num_tokens, self.channels)
        return axes[::-1] if self._channels_first else axes

    def _whole_rows(self, files: TokenFiles, rows: Rows) -> Bytes:
        """Read distinct ascending rows, (n, row bytes)."""
        out = np.empty((len(rows), files.chunks.row_bytes), np.uint8)
        if self.read_method == "hdf5":
            values = self._store[self._layer][rows]
            if self.dtype == "bfloat16":  # widened to float32 by the reader, which is exact
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
            return np.ascontiguousarray(values).view(np.uint8).reshape(len(rows), -1)
        if self.read_method == "chunks":
            _, chunk, within = files.chunks.locate(rows)
            for some in _split(np.arange(len(rows)), chunk):
                decoded = self._decode(files, int(chunk[some[0]]))
                out[some] = decoded.reshape(-1, files.chunks.row_bytes)[within[some]]
            return out
        self._read_items(files, rows, np.zeros(len(rows), np.int64), out, np.arange(len(rows)))
        return out

    def _decode(self, files: TokenFiles, chunk: int) -> Bytes:
        """Read and decode one chunk, and compare it unless that was done before."""
        number, address, size = files.locate(chunk)
        segment = files.chunks.files[number].segment
        try:
            data = files.chunks.files[number].pipeline.decode(
                files.read_range(number, address, size), int(files.chunks.mask[chunk])
            )
        except StoreError as error:
            raise StoreError(f"{segment.path}: {error}. {repair_hint(segment.path)}") from error
        if self._verify is not False:
            files.compare(chunk, data)
        return data

    def _read_items(
        self, files: TokenFiles, rows: Rows, offsets: Rows, out: Bytes, out_indices: Rows
    ) -> None:
        """Read pieces of ascending rows, as long as the rows of `out`.

        Args:
            files: open files.
            rows: (n,) rows.
            offsets: (n,) first byte of each piece in its row.
            out: (m, bytes) array.
            out_indices: (n,) indices into `out`.
        """
        width = out.shape[1]
        if self.read_method == "map":
            chunks = files.chunks
            number, chunk, within = chunks.locate(rows)
            addresses = chunks.address[chunk] + within * chunks.row_bytes + offsets
            target = out.reshape(-1).view(f"V{width}")
            self._compare(files, chunk)
            for some in _split(np.arange(len(rows)), number):
                items = files.mapped_file(int(number[some[0]])).items(width)
                gather_into(items, addresses[some], target, out_indices[some])
            return
        ranges = self._find_ranges(files, rows, offsets, width, RANGE_BYTES)
        for group in ranges.groups(RANGE_BYTES):
            ranges.read(files, group, out, out_indices)

    def _find_ranges(
        self, files: TokenFiles, rows: Rows, offsets: Rows, width: int, range_bytes: int
    ) -> TokenRanges:
        """Ranges of files that hold pieces of ascending rows; see `find_ranges`."""
        compares = self._verify is not False
        return find_ranges(files.chunks, rows, offsets, width, range_bytes, compares)


def _choose_read_method(chunks: LayerChunks, direct: bool | None, may_map: bool) -> str:
    """Read method for the tokens of a layer; see TokenReader."""
    paths = [file.segment.path for file in chunks.files]
    if not chunks.is_supported():
        return "hdf5"
    if not chunks.is_stored_plainly():
        return "chunks"
    if isinstance(paths[0], S3Path):
        return "file"
    if direct is None:
        free = free_memory()
        direct = free is not None and int(chunks.size.sum()) > free // 2
    if direct and supports_direct_io(paths[0]):
        return "direct"
    may_map = may_map and len(paths) <= max_open_files()
    return "map" if may_map and is_local(paths[0].stat().st_dev) else "file"


def _shape_of_tokens(store: FeatureStore, layer: str) -> tuple[int, int, bool]:
    """Tokens of a row, numbers of a token, and whether the channels come first."""
    array = store[layer]
    shape = array.shape[1:]
    if len(shape) == 2:
        return shape[0], shape[1], False
    geometry = array.tokens
    if len(shape) == 3 and geometry is not None and geometry.grid in (shape[1:], shape[:2]):
        first = geometry.grid == shape[1:]
        channels = shape[0] if first else shape[2]
        return geometry.grid[0] * geometry.grid[1], channels, first
    raise StoreError(
        f"{store.root}: rows of {layer} have shape {shape}; expected tokens (T, C), or a map whose "
        "channels are known (the store records this when it is made). Extract the layer with "
        "reduce=none."
    )


def _split(order: Rows, groups: Rows) -> list[Rows]:
    """Split `order` where the sorted `groups` change."""
    return np.split(order, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
