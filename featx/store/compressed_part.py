"""Part with a codec whose rows go to the disk as they come, compressed."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from featx.base import num_cpus
from featx.errors import StoreError
from featx.storage import UnfinishedFile
from featx.store import layout
from featx.store.filter_pipeline import Pipeline
from featx.store.manifest import Run
from featx.store.part_builder import Extent, create_layer
from featx.store.sparse_image import SparseImage
from featx.store.streamed_part import ChunkWriter, StreamedPart
from featx.types import LayerSpec, Listing, Part


class CompressedPart(StreamedPart):
    """Streamed part of layers with a codec.

    The address of a compressed chunk depends on the sizes of all chunks before it. So the chunks go
    to a second temporary file as they come; at the end HDF5 lays out the file for chunks of these
    sizes, and they are copied to their addresses. The file has the bytes of one that is built in
    memory.

    Args:
        part: rows of the part.
        specs: datasets of the part.
        file: temporary file of the part.
        spool: temporary file for the chunks, which is never published.
        pipelines: dataset name -> filters of the codec, from `codec_pipelines`.
        run: run that the part belongs to.
        listing: listing of the whole store.
        manifest: content of featx.json.
    """

    def __init__(
        self,
        part: Part,
        specs: Sequence[LayerSpec],
        file: UnfinishedFile,
        spool: UnfinishedFile,
        pipelines: dict[str, Pipeline],
        run: Run,
        listing: Listing,
        manifest: bytes,
    ) -> None:
        self._spool = _Spool(spool)
        self._pipelines = pipelines
        self._compressed: dict[str, _CompressedChunkWriter] = {}
        super().__init__(part, specs, file, run, listing, manifest)

    def discard(self) -> None:
        """Delete the temporary files, unless the part was published."""
        self._spool.discard()
        super().discard()

    def _prepare(self, run: Run, listing: Listing, manifest: bytes) -> None:
        self._compressed = {
            name: _CompressedChunkWriter(
                spec, len(self.part), _chunk_rows(run, spec), self._pipelines[name], self._spool
            )
            for name, spec in self._specs.items()
        }
        self._layers = {**self._compressed}

    def _lay_out_complete(self, run: Run, listing: Listing, manifest: bytes) -> SparseImage:
        for chunks in self._compressed.values():
            chunks.finish()
        image = self._lay_out(run, listing, manifest)
        for chunks in self._compressed.values():
            for (address, size), start in zip(chunks.extents(), chunks.starts, strict=True):
                self._file.write(self._spool.read(start, size), address)
        self._spool.discard()
        return image

    def _write_layer(self, dataset: h5py.Dataset, name: str) -> npt.NDArray[np.uint32]:
        chunks = self._compressed[name]
        rest = (0,) * (dataset.ndim - 1)
        for number, size in enumerate(chunks.sizes):
            dataset.id.write_direct_chunk((number * chunks.step, *rest), bytes(size))
        return np.array([chunks.sums[i] for i in range(len(chunks.sizes))], np.uint32)


class _Spool:
    """Temporary file to which chunks are appended."""

    def __init__(self, file: UnfinishedFile) -> None:
        self.file = file
        self._stop = 0

    def append(self, data: bytes) -> int:
        """Write bytes behind the others; return their address."""
        start = self._stop
        self.file.write(data, start)
        self._stop += len(data)
        return start

    def read(self, start: int, size: int) -> memoryview:
        """Bytes from an address; short if the disk has lost some, which the check finds."""
        buffer = memoryview(bytearray(size))
        return buffer[: self.file.read_into(buffer, start)]

    def discard(self) -> None:
        """Delete the file."""
        self.file.discard()


class _CompressedChunkWriter(ChunkWriter):
    """Compresses the rows of one layer in several threads and spools them."""

    def __init__(
        self, spec: LayerSpec, num_rows: int, step: int, pipeline: Pipeline, spool: _Spool
    ) -> None:
        super().__init__(spec, num_rows, spool.file)
        self.step = step
        self.sizes: list[int] = []
        self.starts: list[int] = []
        self._pipeline = pipeline
        self._spool = spool
        self._futures: deque[Future[bytes]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def extents(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of each chunk."""
        yield from zip(self.addresses, self.sizes, strict=True)

    def is_intact(self, number: int, found: bytes | bytearray) -> bool:
        """Return whether the bytes of a chunk, read back and decoded, are those of its rows."""
        try:
            data = self._pipeline.decode(found)
        except StoreError:
            return False
        return layout.checksum(data[: self._num_bytes(number)]) == self.sums[number]

    def finish(self) -> None:
        """Spool the last chunks."""
        self._spool_finished(0)
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _store(self, number: int, chunk: npt.NDArray[Any]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(num_cpus())
        # HDF5 stores whole chunks; the padding of the last one is never read. The copy is needed,
        # as the caller may use its rows again.
        data = np.zeros(self._pipeline.chunk_bytes, np.uint8)
        data[: self._num_bytes(number)] = chunk.reshape(-1).view(np.uint8)
        self._futures.append(self._threads.submit(self._pipeline.encode, data))
        self._spool_finished(2 * num_cpus())

    def _spool_finished(self, max_pending: int) -> None:
        """Spool chunks in their order, until at most `max_pending` are in the threads."""
        while len(self._futures) > max_pending:
            data = self._futures.popleft().result()
            self.starts.append(self._spool.append(data))
            self.sizes.append(len(data))

    def _num_bytes(self, number: int) -> int:
        """Bytes of the rows of a chunk, without padding."""
        rows = min(self.step, self._num_rows - number * self.step)
        return rows * self._spec.row_bytes


def codec_pipelines(run: Run, specs: Sequence[LayerSpec]) -> dict[str, Pipeline] | None:
    """Filters of each dataset of a run; None if one of them is known to HDF5 only."""
    found = {}
    with h5py.File(io.BytesIO(), "w", libver=layout.LIBVER) as file:
        for spec in specs:
            step = _chunk_rows(run, spec)
            create_layer(file, spec, Extent(step, step, step), run.codec)
            found[spec.name] = Pipeline.of(file[f"{layout.FEATURES}/{spec.name}"])
    return found if all(pipeline.is_supported for pipeline in found.values()) else None


def _chunk_rows(run: Run, spec: LayerSpec) -> int:
    """Rows per chunk of a dataset."""
    return run.grid.chunk_rows(spec.row_bytes, run.codec != "none")
