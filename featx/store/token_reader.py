"""Reads single tokens of a layer, which are adjacent bytes at addresses that can be computed.

Chunks are whole rows. Without filters, token t of a row (T, C) lies t * C numbers behind the row's
first byte, so a token is read without its image. Other layers are read by rows or chunks: maps
(C, H, W), in which a token is spread over the row, and compressed layers.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from featx.base import free_memory
from featx.errors import StoreError
from featx.storage import RawFile, S3File, S3Path, SpanFile, is_local, reads_directly
from featx.store import layout
from featx.store.chunk_cache import process
from featx.store.chunk_check import Verify, check_verify, repair_hint
from featx.store.chunk_places import ChunkPlaces, file_state
from featx.store.dtypes import raw_dtype
from featx.store.row_gather import gather, gather_into, runs

if TYPE_CHECKING:
    from featx.store.reader import FeatureStore

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

_GAP_BYTES = 64 << 10
"""Largest gap between two tokens that are read as one range: as long to read as a call takes."""

_SPAN_BYTES = 4 << 20
"""Size of the aligned pieces of a file beyond which no range goes, but for the last token."""

_PIECE_BYTES = 16 << 20
"""Bytes of rows that are held at a time where tokens are not read at their addresses."""

_MAX_FILES = 128
_SHARE_OF_LIMIT = 8
"""Limits on the number of open files: _MAX_FILES, and 1/_SHARE_OF_LIMIT of that of the process."""


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
        self._files = _Files(places, self.way)

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

        def read(files: _Files) -> npt.NDArray[Any]:
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

    def _check_range(self, rows: Rows, positions: Rows) -> None:
        """Raise IndexError if a row or a position is out of range."""
        for what, values, stop in (
            ("row", rows, len(self._store)),
            ("position", positions, self.num_tokens),
        ):
            if values.min() < 0 or values.max() >= stop:
                wrong = values[(values < 0) | (values >= stop)][0]
                raise IndexError(f"{self._layer} has {stop} {what}s; {what} {wrong} was asked for")

    def _again_if_moved(self, work: Callable[[_Files], T]) -> T:
        """Call `work`, and once more if the parts of the store were packed meanwhile."""
        files = self._files
        try:
            return work(files)
        except FileNotFoundError:
            with self._lock:
                if self._files is files:
                    self._open()
            return work(self._files)

    def _gather(self, files: _Files, rows: Rows, positions: Rows) -> npt.NDArray[Any]:
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

    def _compare(self, files: _Files, chunks: Rows) -> None:
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

    def _read(self, files: _Files, rows: Rows, positions: Rows, out: Bytes, places: Rows) -> None:
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

    def _whole_rows(self, files: _Files, rows: Rows) -> Bytes:
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

    def _decoded(self, files: _Files, chunk: int) -> Bytes:
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
        self, files: _Files, rows: Rows, offsets: Rows, out: Bytes, places: Rows
    ) -> None:
        """Read pieces of ascending rows, as long as the rows of `out`.

        Args:
            files: open files.
            rows: (n,) rows.
            offsets: (n,) first byte of each piece in its row.
            out: (m, bytes) array.
            places: (n,) indices into `out`.
        """
        found, width = files.places, out.shape[1]
        number, chunk, within = found.locate(rows)
        at = found.address[chunk] + within * found.row_bytes + offsets
        target = out.reshape(-1).view(f"V{width}")
        if self.way == "map":
            self._compare(files, chunk)
            for some in _split(np.arange(len(rows)), number):
                items = files.mapped(int(number[some[0]])).items(width)
                gather_into(items, at[some], target, places[some])
            return
        far = (at[1:] - at[:-1] > width + _GAP_BYTES) | (at[1:] < at[:-1])
        far |= at[1:] // _SPAN_BYTES != at[:-1] // _SPAN_BYTES
        for low, high in runs(~far & (number[1:] == number[:-1])):
            self._read_span(files, chunk[low:high], at[low:high], target, places[low:high])

    def _read_span(
        self, files: _Files, chunk: Rows, at: Rows, target: npt.NDArray[Any], places: Rows
    ) -> None:
        """Read pieces that lie close to each other in one file, and the chunks that are due."""
        found, width = files.places, target.itemsize
        low, high = int(at[0]), int(at[-1]) + width
        chunks = np.unique(chunk)
        due = chunks[~found.compared[chunks]] if self._verify is not False else chunks[:0]
        spans = {int(one): files.place_of(int(one)) for one in due}
        for _, address, size in spans.values():
            low, high = min(low, address), max(high, address + size)
        data = files.span(files.place_of(int(chunk[0]))[0], low, high - low)
        for one, (_, address, size) in spans.items():
            files.compare(one, data[address - low : address - low + size])
        items = np.ndarray((len(data) - width + 1,), f"V{width}", data.data, strides=(1,))
        target[places] = items[at - low]


class _Files:
    """Open files of a layer; the least recently used ones are closed first.

    Args:
        places: addresses of the chunks.
        way: as for TokenReader.

    Attributes:
        places: as above.
    """

    def __init__(self, places: ChunkPlaces, way: str) -> None:
        self.places = places
        self._way = way
        self._lock = threading.Lock()
        self._open: OrderedDict[int, RawFile | SpanFile | S3File] = OrderedDict()
        self._most = most_files()

    def place_of(self, chunk: int) -> tuple[int, int, int]:
        """Number of the file, address and size of a chunk."""
        places = self.places
        return places.file_of(chunk), int(places.address[chunk]), int(places.size[chunk])

    def mapped(self, number: int) -> RawFile:
        """Mapped file."""
        file = self._file(number)
        assert isinstance(file, RawFile)
        if file.size_now() < file.size:
            path = self.places.files[number].segment.path
            raise StoreError(f"{path}: the file had {file.size} bytes when it was opened.")
        return file

    def all_mapped(self) -> tuple[Rows, list[RawFile]]:
        """Address of the map of each file, and the files, which must be kept while it is used."""
        mapped = [self.mapped(number) for number in range(len(self.places.files))]
        return np.array([file.address for file in mapped], np.int64), mapped

    def span(self, number: int, at: int, size: int) -> Bytes:
        """Read a range of a file; valid until the next call from this thread."""
        file = self._file(number)
        if isinstance(file, S3File):
            data = np.empty(size, np.uint8)
            file.read_into(data, at, str(self.places.files[number].segment.path))
            return data
        assert isinstance(file, SpanFile)
        return file.read(at, size)

    def compare(self, chunk: int, data: Bytes) -> None:
        """Compare a decoded chunk with its checksum; raises StoreError if it differs."""
        places = self.places
        start, count = places.rows_of(chunk)
        if layout.checksum(data[: count * places.row_bytes]) != int(places.sums[chunk]):
            path = places.files[places.file_of(chunk)].segment.path
            raise StoreError(
                f"{path}: /{places.path}, rows {start} to {start + count - 1} differ from their "
                f"checksum. {repair_hint(path)}"
            )
        places.compared[chunk] = True

    def _file(self, number: int) -> RawFile | SpanFile | S3File:
        """Open file, checked to be the one whose addresses are known."""
        with self._lock:
            if (file := self._open.get(number)) is not None:
                self._open.move_to_end(number)
                return file
        known = self.places.files[number]
        path = known.segment.path
        if isinstance(path, S3Path):
            opened: RawFile | SpanFile | S3File = S3File(path)
        else:
            spans = SpanFile(path, self._way == "direct")
            if file_state(spans.fileno()) != known.state:
                raise FileNotFoundError(errno.ENOENT, "replaced by another file", str(path))
            opened = RawFile(spans.fileno(), may_map=True) if self._way == "map" else spans
        with self._lock:
            self._open[number] = opened
            while len(self._open) > self._most:
                self._open.popitem(last=False)
        return opened


def most_files() -> int:
    """Number of files of a layer that a process keeps open."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(4, min(_MAX_FILES, allowed // _SHARE_OF_LIMIT))


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
