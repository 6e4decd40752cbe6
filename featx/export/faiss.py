"""export.format=faiss: an index of faiss for each layer, whose ids are the rows of the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from featx.base import free_memory, import_extra, size_text
from featx.config import Config, ExportConfig, options
from featx.errors import ConfigError, RunError, counted
from featx.export import arrow
from featx.export.base import FORMATS, ExportFolder, Format, FormatMember, literal, refuse_maps
from featx.export.selection import ExportSelection, unit_rows
from featx.types import Array

if TYPE_CHECKING:
    import faiss

_LISTING = ("row", "key", "label", "class")

_TRAINING_ROWS = 1 << 16
"""Least number of rows to train on, if there are as many."""

_ROWS_OF_A_LIST = 64
"""Rows to train on for each list of an inverted file; faiss warns below 39."""

_ID_BYTES = 8

_OPQ_CENTROIDS = 256
"""Centroids of each part of the product quantizer that OPQ trains, whatever the index has."""


@options("export")
class FaissOptions(ExportConfig):
    """Options of export.format=faiss."""

    format: str = "faiss"
    index: str = "Flat"
    """Index as a text of faiss.index_factory, such as Flat, SQfp16, HNSW32 or IVF4096,PQ64."""


class Faiss(Format):
    """<layer>.index for each layer, and keys.parquet, which has a line for each id.

    With neighbors.metric=cosine an index holds unit vectors and searches by the inner product, with
    euclidean by the squared distance.

    faiss holds a whole index in memory, here as in every program that reads it. Indices that are
    trained see evenly spaced rows of the store, so that the same store gives the same index.
    """

    def __init__(self, selection: ExportSelection, config: Config) -> None:
        super().__init__(selection, config)
        option = "export.format=faiss"
        self._options, self._metric = self.own_options(FaissOptions), config.neighbors.metric
        refuse_maps(self.selection, "an index of faiss holds vectors")
        self._faiss = import_extra("faiss", option, "the package faiss", "faiss")
        import_extra("pyarrow.parquet", option, "the package pyarrow", "export")
        self._columns = self.selection.named_columns(_LISTING)
        for layer in self.selection.layers:
            self._check_training(self._empty_index(layer), layer)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint, "metric": self._metric}

    def write(self, folder: ExportFolder) -> None:
        """Write one index per layer, and the map of keys."""
        selection = self.selection
        for layer in selection.layers:
            with folder.file(f"{layer}.index") as file:
                self._write_index(layer, file)
        tables = (
            arrow.table(
                selection,
                arrow.listing(selection, start, stop, _LISTING, self._columns),
                metric=self._metric,
            )
            for start, stop in selection.spans(0, len(selection))
        )
        with folder.file("keys.parquet") as file:
            arrow.write_parquet(file, tables)

    def _empty_index(self, layer: str) -> Any:
        """Make the index of a layer, without vectors."""
        faiss, width = self._faiss, self.selection.row_shape(layer)[0]
        cosine = self._metric == "cosine"
        kind = faiss.METRIC_INNER_PRODUCT if cosine else faiss.METRIC_L2
        try:
            return faiss.index_factory(width, self._options.index, kind)
        except RuntimeError as error:
            raise ConfigError(
                f"export.index={self._options.index} is no index of faiss for the {width} values "
                f"of {layer}: {_reason(error)}. Expected a text of faiss.index_factory, such as "
                "Flat."
            ) from error

    def _check_training(self, index: faiss.Index, layer: str) -> None:
        """Check that there are enough rows to train the index of a layer."""
        rows, min_rows = len(self.selection), _min_training_rows(self._faiss, index)
        if not index.is_trained and rows < min_rows:
            raise ConfigError(
                f"export.index={self._options.index} of {layer} is trained on {min_rows} rows or "
                f"more, and {counted(rows, 'row is', 'rows are')} selected. Choose an index with "
                "fewer lists or shorter codes, or one without training, such as export.index=Flat "
                "or HNSW32."
            )

    def _vectors(self, rows: Array) -> npt.NDArray[np.float32]:
        """Return (n, D) float32 rows as the index holds them."""
        if self._metric == "cosine":
            return unit_rows(rows)
        return np.ascontiguousarray(rows, np.float32)

    def _write_index(self, layer: str, file: BinaryIO) -> None:
        faiss, selection = self._faiss, self.selection
        index = self._empty_index(layer)
        self._check_memory(index, layer)
        try:
            if not index.is_trained:
                index.train(self._training_rows(index, layer))
            if not self._holds_ids(index):
                index = faiss.IndexIDMap2(index)
            for start, stop, values in selection.blocks(0, len(selection), [layer]):
                index.add_with_ids(self._vectors(values[layer]), selection.rows[start:stop])
        except RuntimeError as error:
            raise RunError(
                f"faiss cannot build export.index={self._options.index} of the {len(selection)} "
                f"rows of {layer}: {_reason(error)}. Choose another index with overwrite=true, for "
                "few rows export.index=Flat."
            ) from error
        self._check_complete(index, layer)
        # An error of `file.write` must not pass through C++, so it is raised afterwards.
        failures: list[OSError] = []

        def write(data: bytes) -> int:
            try:
                if not failures:
                    file.write(data)
            except OSError as error:
                failures.append(error)
            return len(data)

        faiss.write_index(index, faiss.PyCallbackIOWriter(write))
        if failures:
            raise failures[0]

    def _check_complete(self, index: faiss.Index, layer: str) -> None:
        """Check that an index holds every row.

        An inverted file leaves out, without an error, a vector that is near to none of its lists:
        all of them if it has no list, and one whose squares overflow float32.
        """
        num_found, num_rows = index.ntotal, len(self.selection)
        if (lists := self._faiss.try_extract_index_ivf(index)) is not None:
            num_found = min(num_found, lists.invlists.compute_ntotal())
        if num_found != num_rows:
            raise RunError(
                f"export.index={self._options.index} took {num_found} of the {num_rows} rows of "
                f"{layer}, because the others are near to none of its lists. Choose another index "
                "with overwrite=true, such as export.index=Flat."
            )

    def _holds_ids(self, index: faiss.Index) -> bool:
        """Return whether an index holds ids itself; others number their vectors."""
        faiss = self._faiss
        if isinstance(index, faiss.IndexPreTransform):
            index = faiss.downcast_index(index.index)
        return isinstance(index, faiss.IndexIVF | faiss.IndexIDMap)

    def _training_rows(self, index: faiss.Index, layer: str) -> npt.NDArray[np.float32]:
        """Return evenly spaced vectors of a layer, as many as the training uses."""
        lists = self._faiss.try_extract_index_ivf(index)
        num_wanted = max(
            _TRAINING_ROWS, _ROWS_OF_A_LIST * (lists.nlist if lists is not None else 0)
        )
        n = len(self.selection)
        places = np.unique(np.linspace(0, n - 1, min(n, num_wanted)).astype(np.int64))
        sample = replace(self.selection, rows=self.selection.rows[places], on_bytes=lambda _: None)
        blocks = sample.blocks(0, len(sample), [layer])
        return np.concatenate([self._vectors(values[layer]) for _, _, values in blocks])

    def _check_memory(self, index: faiss.Index, layer: str) -> None:
        """Check that the memory holds the index, as far as its size is known."""
        free = free_memory()
        try:
            code_bytes = index.sa_code_size()
        except RuntimeError:  # not known to graphs such as HNSW, which hold the vectors as they are
            code_bytes = 4 * index.d
        needed = len(self.selection) * (code_bytes + _ID_BYTES)
        if free is not None and needed > free:
            raise RunError(
                f"the index of {layer} takes about {size_text(needed)}, and {size_text(free)} of "
                "memory are free. Choose a smaller one, such as export.index=IVF4096,PQ64 or "
                "SQfp16."
            )

    def opening(self, out: Path) -> str:
        layer = self.selection.layers[0]
        return (
            "import faiss, pandas as pd\n"
            f"index = faiss.read_index({literal(f'{out}/{layer}.index')}, faiss.IO_FLAG_MMAP)\n"
            f"keys = pd.read_parquet({literal(f'{out}/keys.parquet')}).set_index('row')['key']"
        )


def _min_training_rows(faiss: ModuleType, index: faiss.Index) -> int:
    """Return the number of rows below which an index cannot be trained.

    With fewer rows faiss raises an error in one of its threads, and that ends the process.

    k-means needs a row for each centroid: those of the lists of an inverted file, and those of each
    part of a product quantizer. PCA needs a row for each value that it keeps.
    """
    index = faiss.downcast_index(index)
    counts = [1]
    if hasattr(index, "pq"):
        counts.append(index.pq.ksub)
    if isinstance(index, faiss.IndexPreTransform):
        chain = [index.chain.at(i) for i in range(index.chain.size())]
        counts += [_min_rows_of_transform(faiss, transform) for transform in chain]
    if isinstance(index, faiss.IndexIVF):
        quantizer = faiss.downcast_index(index.quantizer)
        counts.append(_min_training_rows(faiss, quantizer))
        if not isinstance(quantizer, faiss.MultiIndexQuantizer):  # lists are pairs of centroids
            counts.append(index.nlist)
    inner = (getattr(index, name, None) for name in ("index", "base_index", "storage"))
    counts += [_min_training_rows(faiss, each) for each in inner if each is not None]
    return max(counts)


def _min_rows_of_transform(faiss: ModuleType, transform: faiss.VectorTransform) -> int:
    """Return the number of rows that the training of a transform of vectors needs."""
    transform = faiss.downcast_VectorTransform(transform)
    if isinstance(transform, faiss.OPQMatrix):
        return _OPQ_CENTROIDS
    if isinstance(transform, faiss.PCAMatrix | faiss.ITQTransform):
        return int(transform.d_out)
    return 1


def _reason(error: RuntimeError) -> str:
    """Return the end of a message of faiss, which begins with the places in its source."""
    return str(error).rpartition(": ")[2].strip()


FORMATS.register(
    FormatMember(
        "faiss",
        "An index of faiss per layer, with a map from its ids to keys.",
        FaissOptions,
        extra="export,faiss",
        make=Faiss,
        holds_failed_rows=False,
    )
)
