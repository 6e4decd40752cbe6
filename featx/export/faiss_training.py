"""Number of rows that faiss needs for the training of an index.

With fewer rows faiss raises an error in one of its threads, and that ends the process.
"""

from __future__ import annotations

from typing import Any

_OPQ_CENTROIDS = 256
"""Centroids of each part of the product quantizer that OPQ trains, whatever the index has."""


def least_training_rows(faiss: Any, index: Any) -> int:
    """Return the number of rows below which an index cannot be trained.

    k-means needs a row for each centroid: those of the lists of an inverted file, and those of each
    part of a product quantizer. PCA needs a row for each value that it keeps.

    Args:
        faiss: the module.
        index: index of `faiss.index_factory`.
    """
    index = faiss.downcast_index(index)
    least = [1]
    if hasattr(index, "pq"):
        least.append(index.pq.ksub)
    if isinstance(index, faiss.IndexPreTransform):
        chain = [index.chain.at(i) for i in range(index.chain.size())]
        least += [_least_of_transform(faiss, transform) for transform in chain]
    if isinstance(index, faiss.IndexIVF):
        quantizer = faiss.downcast_index(index.quantizer)
        least.append(least_training_rows(faiss, quantizer))
        if not isinstance(quantizer, faiss.MultiIndexQuantizer):  # lists are pairs of centroids
            least.append(index.nlist)
    inner = (getattr(index, name, None) for name in ("index", "base_index", "storage"))
    least += [least_training_rows(faiss, each) for each in inner if each is not None]
    return max(least)


def _least_of_transform(faiss: Any, transform: Any) -> int:
    """Return the number of rows that the training of a transform of vectors needs."""
    transform = faiss.downcast_VectorTransform(transform)
    if isinstance(transform, faiss.OPQMatrix):
        return _OPQ_CENTROIDS
    if isinstance(transform, faiss.PCAMatrix | faiss.ITQTransform):
        return int(transform.d_out)
    return 1
