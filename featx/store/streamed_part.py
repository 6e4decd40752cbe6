"""Part whose rows go to the disk as they come, so that its memory does not grow with its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.errors import RunError, require
from featx.storage import AtomicFolder, PositionedFile, UnfinishedFile, disk_mismatch_error
from featx.store import layout
from featx.store.chunk_table import chunks_of
from featx.store.dtypes import nan
from featx.store.hdf5_files import check_texts
from featx.store.manifest import Run
from featx.store.part_builder import PartBuilder, whole_chunk
from featx.types import LayerSpec, Listing, Part

_PAGE_BYTES = 1 << 16


class SparseImage(PositionedFile):
    """File object for h5py whose pages of zeros take no memory.

    The rows of a large part are written to it as zeros, so that HDF5 lays out the file, while the
    real rows are on the disk already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pages: dict[int, bytearray] = {}

    def writable(self) -> bool:
        return True

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        last, end = divmod(self.size, _PAGE_BYTES)
        for page in [page for page in self._pages if page > last or (page == last and not end)]:
            del self._pages[page]
        if last in self._pages:
            self._pages[last][end:] = bytes(
                _PAGE_BYTES - end
            )  # a file that grows again has zeros here
        return self.size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size - self._position))
        for offset, page, begin, length in _split_by_pages(self._position, count):
            content = self._pages.get(page)
            view[offset : offset + length] = (
                bytes(length) if content is None else memoryview(content)[begin : begin + length]
            )
        self._position += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for offset, page, begin, length in _split_by_pages(self._position, len(view)):
            piece = view[offset : offset + length]
            if page not in self._pages:
                if piece.tobytes() == _ZEROS[:length]:
                    continue
                self._pages[page] = bytearray(_PAGE_BYTES)
            self._pages[page][begin : begin + length] = piece
        self._position += len(view)
        self.size = max(self.size, self._position)
        return len(view)

    def pread(self, size: int, address: int) -> bytes:
        """Read bytes at an address; fewer at the end of the file."""
        self.seek(address)
        return self.read(size) or b""


_ZEROS = bytes(_PAGE_BYTES)


def _split_by_pages(start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide `count` bytes from `start` on by pages."""
    offset = 0
    while offset < count:
        page, begin = divmod(start + offset, _PAGE_BYTES)
        length = min(_PAGE_BYTES - begin, count - offset)
        yield offset, page, begin, length
        offset += length


class StreamedPart(PartBuilder):
    """Part whose chunks are written to their final addresses in a temporary file.

    HDF5 writes the file twice into a `SparseImage`, with zeros for the rows: at the start, which
    gives the address of each chunk, and at the end with all columns and checksums. What the image
    holds then is written around the rows. So the file has the bytes of one that is built in memory,
    HDF5 holds no handle on a real file, and a failing disk never meets HDF5.

    Rows have to arrive in order. Layers with a codec are built in memory.

    Args:
        part: rows of the part.
        specs: datasets of the part.
        file: temporary file of the part.
        run: run that the part belongs to.
        listing: listing of the whole store.
        manifest: content of featx.json.
    """

    def __init__(
        self,
        part: Part,
        specs: Sequence[LayerSpec],
        file: UnfinishedFile,
        run: Run,
        listing: Listing,
        manifest: bytes,
    ) -> None:
        super().__init__(part, specs)
        self._file = file
        self._buffer = bytearray()
        self._layers: dict[str, ChunkWriter] = {
            spec.name: ChunkWriter(spec, len(part), file) for spec in specs
        }
        try:
            self._lay_out(run, listing, manifest)
        except BaseException:
            self.discard()
            raise

    def publish(
        self, disk: AtomicFolder, path: Path, run: Run, listing: Listing, manifest: bytes
    ) -> bool:
        """Commit the part under its final name; see `PartBuilder.publish`."""
        self._require_all_rows()
        require(path == self._file.path, "the part was started under another name")
        before = {name: chunks.addresses for name, chunks in self._layers.items()}
        image = self._lay_out(run, listing, manifest)
        for name, chunks in self._layers.items():
            require(chunks.addresses == before[name], f"the chunks of {name} have moved")
        for start, stop in self._gaps(image):
            self._file.write(image.pread(stop - start, start), start)
        return self._file.publish(lambda: self._compare(image))

    def discard(self) -> None:
        """Delete the temporary file, unless the part was published."""
        self._file.discard()

    def _empty_features(self) -> dict[str, npt.NDArray[Any]]:
        return {}  # the rows lie on the disk

    def _put(self, name: str, first: int, rows: npt.NDArray[Any], failed: list[int]) -> None:
        if failed:
            rows = rows.copy()
            rows[failed] = nan(self._specs[name].dtype)
        self._layers[name].put(first, rows)

    def _lay_out(self, run: Run, listing: Listing, manifest: bytes) -> SparseImage:
        """Let HDF5 write the file with zeros for rows; check it, and set the chunks' addresses."""
        image, columns = SparseImage(), self._columns(listing)
        self._fill(image, columns, run, listing, manifest)
        with h5py.File(image, "r") as file:
            check_texts(file, image.pread)
            for path, values in columns.items():
                self._check_chunks(file, path, values)
            for name, chunks in self._layers.items():
                dataset = file[f"{layout.FEATURES}/{name}"]
                chunks.step = dataset.chunks[0]
                chunks.addresses = chunks_of(dataset)["address"].tolist()
        return image

    def _write_layer(self, dataset: h5py.Dataset, name: str) -> npt.NDArray[np.uint64]:
        chunks, rest = self._layers[name], (0,) * (dataset.ndim - 1)
        starts = range(0, len(dataset), dataset.chunks[0])
        zeros = bytes(dataset.chunks[0] * self._specs[name].row_bytes)
        for start in starts:
            dataset.id.write_direct_chunk((start, *rest), zeros)
        return np.array([chunks.sums.get(i, 0) for i in range(len(starts))], np.uint64)

    def _gaps(self, image: SparseImage) -> Iterator[tuple[int, int]]:
        """Areas of the file without rows, in order: address and end."""
        extents = sorted(extent for chunks in self._layers.values() for extent in chunks.extents())
        stop = 0
        for address, size in extents:
            if address > stop:
                yield stop, address
            stop = address + size
        if image.size > stop:
            yield stop, image.size

    def _compare(self, image: SparseImage) -> None:
        """Read the temporary file, and compare it with the image and the checksums."""
        for start, stop in self._gaps(image):
            if self._read_back(start, stop - start) != image.pread(stop - start, start):
                raise self._mismatch_error("the description of its datasets")
        for name, chunks in self._layers.items():
            for number, (address, size) in enumerate(chunks.extents()):
                if layout.checksum(self._read_back(address, size)) != chunks.sums[number]:
                    raise self._mismatch_error(f"/{layout.FEATURES}/{name}")

    def _read_back(self, address: int, size: int) -> bytearray:
        """Bytes of the temporary file, in a buffer that the next call uses again."""
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        count = self._file.read_into(memoryview(self._buffer), address)
        return self._buffer if count == size else bytearray()

    def _mismatch_error(self, what: str) -> RunError:
        return disk_mismatch_error(self._file.path, what)


class ChunkWriter:
    """Writes the rows of one layer chunk by chunk to their final addresses.

    Args:
        spec: dataset.
        num_rows: number of rows.
        file: file that they are written to.

    Attributes:
        step: rows per chunk.
        addresses: address of each chunk in the file.
        sums: chunk -> checksum, of the chunks that are written.
    """

    def __init__(self, spec: LayerSpec, num_rows: int, file: UnfinishedFile) -> None:
        self.step = 1
        self.addresses: list[int] = []
        self.sums: dict[int, int] = {}
        self._spec = spec
        self._num_rows = num_rows
        self._file = file
        self._stop = 0  # row after the last one that arrived
        self._incomplete: list[npt.NDArray[Any]] = []  # rows of a chunk that is not complete

    def extents(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each chunk."""
        return ((address, self.step * self._spec.row_bytes) for address in self.addresses)

    def put(self, first: int, rows: npt.NDArray[Any]) -> None:
        """Add the next rows; those of an incomplete chunk are copied."""
        require(first == self._stop, "the rows of a streamed part have to arrive in order")
        while len(rows):
            number, num_incomplete = divmod(self._stop, self.step)
            stop = min((number + 1) * self.step, self._num_rows)
            some, rows = rows[: stop - self._stop], rows[stop - self._stop :]
            self._stop += len(some)
            if self._stop < stop:
                self._incomplete.append(some.copy())
                continue
            rows_of_chunk = np.concatenate([*self._incomplete, some]) if num_incomplete else some
            chunk = whole_chunk(rows_of_chunk, self.step)
            self._incomplete = []
            self.sums[number] = layout.checksum(chunk)
            self._file.write(chunk.reshape(-1).view(np.uint8).data, self.addresses[number])
