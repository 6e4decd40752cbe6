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
from featx.storage import S3Path, is_local, reads_directly
from featx.store.chunk_cache import process
from featx.store.chunk_check import Verify, check_verify, repair_hint
from featx.store.chunk_places import ChunkPlaces
from featx.store.dtypes import raw_dtype
from featx.store.row_gather import gather, gather_into
from featx.store.token_files import TokenFiles, most_files
from featx.store.token_ranges import SPAN_BYTES, TokenRanges, find_ranges

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
        way: how tokens are read: "map" (memory map), "direct" (past the page cache), "file"
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
            places = ChunkPlaces(self._store, self._layer)
        except FileNotFoundError:  # the parts were packed since the store was opened
            self._store.refresh()
            if self._store.attrs.get("fingerprint") != self._fingerprint:
                raise StoreError(
                    f"another run has changed {self._store.root}; open it again."
                ) from None
            places = ChunkPlaces(self._store, self._layer)
        self.dtype, self.chunk_rows = places.dtype, places.chunk_rows
        self._token_bytes = self.channels * raw_dtype(self.dtype).itemsize
        self.way = _way(places, self._direct, self._mapped)
        self._files = TokenFiles(places, self.way)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self._token_bytes

    @property
    def reads_whole_chunks(self) -> bool:
        """Whether a token costs the reading of its chunk, as in compressed layers."""
        return self.way in ("chunks", "hdf5")

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
            if self.way == "map" and not self._channels_first:
                return self._gather(files, rows, positions)
            out = np.empty((len(rows), self.token_bytes), np.uint8)
            order = np.lexsort((positions, rows))
            # The other ways share the work of a read among the threads of the process themselves.
            alone = self.way in ("map", "hdf5")
            parts = [order] if alone else np.array_split(order, min(16, -(-len(order) // 256)))
            process().each(lambda at: self._read(files, rows[at], positions[at], out, at), parts)
            return out

        return self._again_if_moved(read).view(raw_dtype(self.dtype)).reshape(len(rows), -1)

    def read_into(self, rows: Rows, positions: Rows, out: Bytes, places: Rows) -> None:
        """Read token (rows[i], positions[i]) into out[places[i]].

        Args:
            rows: (n,) int64 ascending rows of the store.
            positions: (n,) int64 positions, ascending within a row.
            out: (m, token_bytes) contiguous array.
            places: (n,) int64 distinct indices in [0, m).

        Raises:
            IndexError, StoreError, OSError: as `take`.
        """
        if len(rows):
            self._check_range(rows, positions)
            self._again_if_moved(lambda files: self._read(files, rows, positions, out, places))

    def jobs(
        self, rows: Rows, positions: Rows, out: Bytes, places: Rows, num_bytes: int
    ) -> list[Callable[[], None]]:
        """Divide what `read_into` does into jobs for threads, of about `num_bytes` each.

        A chunk that is due is compared in one job only.

        Args:
            rows, positions, out, places: as for `read_into`.
            num_bytes: bytes that a job reads.

        Raises:
            IndexError, StoreError: as `take`; the jobs raise StoreError and OSError, too.
        """
        if not len(rows):
            return []
        self._check_range(rows, positions)
        files = self._files
        if self.way == "map" or self.reads_whole_rows:
            parts = self._parts(rows, num_bytes)
            return [
                partial(self.read_into, rows[part], positions[part], out, places[part])
                for part in parts
            ]
        offsets = positions * self.token_bytes
        ranges = self._find_ranges(files, rows, offsets, self.token_bytes, SPAN_BYTES // 4)

        def read(group: slice) -> None:
            try:
                ranges.read(files, group, out, places)
            except FileNotFoundError:  # the parts of the store were packed meanwhile
                part = ranges.pieces(group)
                self._open_again(files)
                self.read_into(rows[part], positions[part], out, places[part])

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

    def _again_if_moved(self, work: Callable[[TokenFiles], T]) -> T:
        """Call `work`, and once more if the parts of the store were packed meanwhile."""
        files = self._files
        try:
            return work(files)
        except FileNotFoundError:
            self._open_again(files)
            return work(self._files)

    def _open_again(self, files: TokenFiles) -> None:
        """Find the chunks anew, unless another thread has replaced `files` by now."""
        with self._lock:
            if self._files is files:
                self._open()

    def _gather(self, files: TokenFiles, rows: Rows, positions: Rows) -> npt.NDArray[Any]:
        """Gather tokens of mapped files, (n,) void."""
        places, width = files.places, self.token_bytes
        number, chunk, within = places.locate(rows)
        self._compare(files, chunk)
        at = places.address[chunk] + within * places.row_bytes + positions * width
        if len(places.files) == 1:
            return gather(files.mapped(0), at, width)
        addresses, mapped = files.all_mapped()
        lowest = int(addresses.min())
        # One gather over all files, at addresses of memory: file by file it would take half as long
        # again. The array spans the maps and all that lies between them, of which no byte is read:
        # `locate` has checked the rows, and each chunk lies in its file.
        stop = max(file.address + file.size for file in mapped)
        span = (ctypes.c_ubyte * (stop - lowest)).from_address(lowest)
        memory: Bytes = np.ctypeslib.as_array(span)
        items = np.ndarray((len(memory) - width + 1,), f"V{width}", memory.data, strides=(1,))
        taken: npt.NDArray[Any] = items[at + (addresses[number] - lowest)]
        return taken

    def _compare(self, files: TokenFiles, chunks: Rows) -> None:
        """Compare chunks of mapped files, unless that was done before."""
        if self._verify is False:
            return
        due = np.unique(chunks[~files.places.compared[chunks]])
        if not len(due):
            return

        def compare(chunk: int) -> None:
            number, address, size = files.place_of(chunk)
            mapped = files.mapped(number).mapped
            assert mapped is not None
            files.compare(chunk, mapped[address : address + size])

        process().each(compare, due.tolist())

    def _read(
        self, files: TokenFiles, rows: Rows, positions: Rows, out: Bytes, places: Rows
    ) -> None:
        """Read ascending tokens to their places, by the way of this layer."""
        if not self.reads_whole_rows:
            self._read_items(files, rows, positions * self.token_bytes, out, places)
            return
        unique, inverse = np.unique(rows, return_inverse=True)
        step = max(1, _PIECE_BYTES // files.places.row_bytes)
        for i in range(0, len(unique), step):
            some = np.flatnonzero((inverse >= i) & (inverse < i + step))
            whole = self._whole_rows(files, unique[i : i + step])
            values = whole.view(raw_dtype(self.dtype)).reshape(len(whole), *self._token_axes)
            if self._channels_first:
                tokens = values[inverse[some] - i, :, positions[some]]
            else:
                tokens = values[inverse[some] - i, positions[some]]
            out[places[some]] = np.ascontiguousarray(tokens).view(np.uint8).reshape(len(some), -1)

    @property
    def _token_axes(self) -> tuple[int, int]:
        """Shape of a row with one axis of tokens."""
        axes = (self.num_tokens, self.channels)
        return axes[::-1] if self._channels_first else axes

    def _whole_rows(self, files: TokenFiles, rows: Rows) -> Bytes:
        """Read distinct ascending rows, (n, row bytes)."""
        out = np.empty((len(rows), files.places.row_bytes), np.uint8)
        if self.way == "hdf5":
            values = self._store[self._layer][rows]
            if self.dtype == "bfloat16":  # widened to float32 by the reader, which is exact
                values = (values.view(np.uint32) >> 16).astype(np.uint16)
            return np.ascontiguousarray(values).view(np.uint8).reshape(len(rows), -1)
        if self.way == "chunks":
            _, chunk, within = files.places.locate(rows)
            for some in _split(np.arange(len(rows)), chunk):
                decoded = self._decoded(files, int(chunk[some[0]]))
                out[some] = decoded.reshape(-1, files.places.row_bytes)[within[some]]
            return out
        self._read_items(files, rows, np.zeros(len(rows), np.int64), out, np.arange(len(rows)))
        return out

    def _decoded(self, files: TokenFiles, chunk: int) -> Bytes:
        """Read and decode one chunk, and compare it unless that was done before."""
        number, address, size = files.place_of(chunk)
        segment = files.places.files[number].segment
        try:
            data = files.places.files[number].pipeline.decode(
                files.span(number, address, size), int(files.places.mask[chunk])
            )
        except StoreError as error:
            raise StoreError(f"{segment.path}: {error}. {repair_hint(segment.path)}") from error
        if self._verify is not False:
            files.compare(chunk, data)
        return data

    def _read_items(
        self, files: TokenFiles, rows: Rows, offsets: Rows, out: Bytes, places: Rows
    ) -> None:
        """Read pieces of ascending rows, as long as the rows of `out`.

        Args:
            files: open files.
            rows: (n,) rows.
            offsets: (n,) first byte of each piece in its row.
            out: (m, bytes) array.
            places: (n,) indices into `out`.
        """
        width = out.shape[1]
        if self.way == "map":
            found = files.places
            number, chunk, within = found.locate(rows)
            at = found.address[chunk] + within * found.row_bytes + offsets
            target = out.reshape(-1).view(f"V{width}")
            self._compare(files, chunk)
            for some in _split(np.arange(len(rows)), number):
                items = files.mapped(int(number[some[0]])).items(width)
                gather_into(items, at[some], target, places[some])
            return
        ranges = self._find_ranges(files, rows, offsets, width, SPAN_BYTES)
        for group in ranges.groups(SPAN_BYTES):
            ranges.read(files, group, out, places)

    def _find_ranges(
        self, files: TokenFiles, rows: Rows, offsets: Rows, width: int, span: int
    ) -> TokenRanges:
        """Ranges of files that hold pieces of ascending rows; see `find_ranges`."""
        compares = self._verify is not False
        return find_ranges(files.places, rows, offsets, width, span, compares)


def _way(places: ChunkPlaces, direct: bool | None, may_map: bool) -> str:
    """How the tokens of a layer are read; see TokenReader."""
    paths = [file.segment.path for file in places.files]
    if not places.is_supported():
        return "hdf5"
    if not places.is_stored_plainly():
        return "chunks"
    if isinstance(paths[0], S3Path):
        return "file"
    if direct is None:
        free = free_memory()
        direct = free is not None and int(places.size.sum()) > free // 2
    if direct and reads_directly(paths[0]):
        return "direct"
    few = len(paths) <= most_files()
    return "map" if may_map and few and is_local(paths[0].stat().st_dev) else "file"


def _shape_of_tokens(store: FeatureStore, layer: str) -> tuple[int, int, bool]:
    """Tokens of a row, numbers of a token, and whether the channels come first."""
    array = store[layer]
    shape = array.shape[1:]
    if len(shape) == 2:
        return shape[0], shape[1], False
    places = array.tokens
    if len(shape) == 3 and places is not None and places.grid in (shape[1:], shape[:2]):
        first = places.grid == shape[1:]
        channels = shape[0] if first else shape[2]
        return places.grid[0] * places.grid[1], channels, first
    raise StoreError(
        f"{store.root}: rows of {layer} have shape {shape}; expected tokens (T, C), or a map whose "
        "channels are known (the store records this when it is made). Extract the layer with "
        "reduce=none."
    )


def _split(order: Rows, groups: Rows) -> list[Rows]:
    """Split `order` where the sorted `groups` change."""
    return np.split(order, np.flatnonzero(groups[1:] != groups[:-1]) + 1)
