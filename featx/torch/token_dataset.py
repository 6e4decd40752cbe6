"""Single tokens of a store as batches for training, in an order that mixes images and resumes."""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from featx.base import num_cpus
from featx.errors import StoreError
from featx.store import FeatureStore, TokenReader, Verify
from featx.torch.keyed_delay import (
    EpochOrder,
    EpochSizes,
    block_tokens,
    choose_blocks,
    effective_images,
    read_ahead_tokens,
    segment_tokens,
)
from featx.torch.token_pool import TokenPool
from featx.torch.token_selection import (
    Ints,
    check_whole_number,
    check_whole_numbers,
    select_positions,
    select_tokens,
    token_geometry,
)
from featx.types import UNKNOWN_SIZE, Array, with_features

Batch = dict[str, torch.Tensor]


class TokenDataset(IterableDataset[Batch]):
    """Tokens of one layer of a store, as whole batches in a mixed order.

    An item is a batch, a dict of tensors: `features` (B, C) in the dtype of the store, `row` (B,)
    int64 row of the store, `position` (B,) int32 index on the token axis, `yx` (B, 2) int32 row and
    column of the patch, -1 for class and register tokens, and `label` (B,) int64 class index of the
    image, -1 without one. Positions of maps are tokens too. Failed rows never appear. Every chunk
    is compared with its checksum when it is read first.

    Use it as it is, or as `DataLoader(dataset, batch_size=None)`; it reads ahead in threads of its
    own, so worker processes are of no use, and more than one is refused.

    With order="shuffled" each token comes once an epoch. Blocks of adjacent tokens are read in a
    random order, and each token waits a random time in a memory of fixed size (see
    `featx.torch.keyed_delay`); `mixing` says how well that mixes. The order depends on the
    arguments and the epoch alone. Each iteration uses the next epoch; `set_epoch` chooses it.

    Args:
        path: folder of the store, its features.h5, or an open store.
        layer: name of the layer.
        tokens: 'all', 'patches', 'cls', 'registers', or positions on the token axis, as a list or
            as a mask.
        per_image: number of tokens that are chosen of each image, by its key and `seed` alone;
            None takes all of them.
        rows: rows of the store to use, such as those of a split, as numbers or as a mask of all
            rows; None takes all that are ok.
        batch_size: tokens of a batch.
        order: 'shuffled', or 'stored' for the order of the store.
        memory: bytes that may be held, besides an eighth of it, at most 8 MiB, that is read ahead;
            more memory mixes better.
        block: tokens that are read together; None takes as many as leave 0.8 of the tokens of a
            batch of distinct images, at most a chunk of the store and at least 64 KiB.
        seed: seed of the order and of `per_image`, 0 or above.
        rank: number of this process in a distributed training, from 0.
        world_size: number of processes, each of which gets other tokens.
        drop_last: leave out the last batch of an epoch if it has fewer tokens.
        prefix: number of class and register tokens, for stores that do not record it.
        verify: as for `featx.open`; False compares nothing.
        threads: number of threads that read; None for the number of CPUs.

    Attributes:
        store: the store.
        layer: name of the layer.
        grid: (rows, columns) of the patch tokens, or None if unknown.

    Raises:
        StoreError: the store is damaged, or rows of the layer are no tokens.
        ValueError: an argument does not fit the layer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layer: str,
        tokens: str | Sequence[int] = "patches",
        per_image: int | None = None,
        rows: Sequence[int] | Array | None = None,
        batch_size: int = 4096,
        order: Literal["shuffled", "stored"] = "shuffled",
        memory: int = 2 << 30,
        block: int | None = None,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
        prefix: int | None = None,
        verify: Verify = "chunks",
        threads: int | None = None,
    ) -> None:
        check_whole_numbers(
            1,
            batch_size=batch_size,
            memory=memory,
            world_size=world_size,
            block=block,
            threads=threads,
        )
        check_whole_number("seed", seed, 0)
        check_whole_numbers(0, rank=rank, prefix=prefix, per_image=per_image)
        if order not in ("shuffled", "stored"):
            raise ValueError(f"order={order!r}: expected 'shuffled' or 'stored'.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}: expected 0 to {world_size - 1}, as world_size says.")
        self.store = FeatureStore(path, verify)
        self.layer = layer
        self.batch_size, self.seed, self.rank, self.drop_last = batch_size, seed, rank, drop_last
        self._order, self._memory, self._threads = order, memory, threads
        self._open: tuple[int, TokenReader] | None = None
        reader = self._reader()
        self._geometry = token_geometry(self.store, layer, tokens, prefix, reader.num_tokens)
        self.grid = None if self._geometry is None else self._geometry.grid
        chosen = select_positions(tokens, reader.num_tokens, self._geometry)
        self._selection = select_tokens(self.store, rows, chosen, per_image, seed)
        if world_size > len(self._selection):
            raise ValueError(
                f"world_size={world_size}: expected at most {len(self._selection)}, the number of "
                "tokens, so that every rank has one."
            )
        needed = math.ceil(len(self._selection) / world_size)
        self._sizes = EpochSizes(
            len(self._selection),
            segment_tokens(memory, reader.token_bytes, needed),
            world_size,
            batch_size,
            drop_last,
        )
        self._blocks, self._group = choose_blocks(self._selection, self._sizes, reader, block)
        # A segment is at least a block, where whole chunks or a given block exceed the memory.
        size = max(self._sizes.segment_tokens, block_tokens(self._blocks))
        self._sizes = replace(self._sizes, segment_tokens=size)
        if order == "shuffled" and block is None:
            self._warn_of_little_mixing()
        # Shared with a worker process of a DataLoader, which may live longer than an iteration:
        # where the next one starts (epoch, batches, output segment, tokens taken of it), and the
        # process that has begun one since, or 0.
        self._shared = torch.zeros(5, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        self._position = (0, 0, 0, 0)  # of the latest iteration in this process

    @property
    def keys(self) -> npt.NDArray[np.str_]:
        """(N,) str: key of each row of the store."""
        return self.store.keys

    @property
    def num_tokens(self) -> int:
        """Number of tokens of an epoch, of all ranks."""
        return len(self._selection)

    @property
    def left_out(self) -> int:
        """Tokens of the next epoch, of all ranks, that come in no batch.

        Ranks give equally many batches, and with `drop_last` only whole ones.
        """
        return self._epoch_order(int(self._shared[0])).num_left_out

    @cached_property
    def mixing(self) -> dict[str, float]:
        """Measures of the mixing of batches, known before anything is read.

        `effective_images` is 1 / P(two tokens of a batch are of one image),
        `distinct_images_in_batch` what follows for a batch, `held_bytes` the tokens that are held,
        and `block_bytes` the size of a read.
        """
        held, tokens = self._held_tokens, len(self._selection)
        width, group = self._reader().token_bytes, self._group
        sizes = {"held_bytes": held * width, "block_bytes": block_tokens(self._blocks) * width}
        size = min(self.batch_size, tokens)
        if self._order == "stored":
            images = max(1.0, size / self._selection.per_row)
            return {"effective_images": images, "distinct_images_in_batch": images, **sizes}
        images = effective_images(self._selection, self._sizes, group[1])
        return {
            "effective_images": images,
            "distinct_images_in_batch": images * -math.expm1(-size / images),
            **sizes,
        }

    def patch_box(self, row: int, position: int) -> tuple[float, float, float, float]:
        """Rectangle x0, y0, x1, y1 of a patch in the network's input, in pixels.

        Args:
            row: row of the store; all rows have the same patches.
            position: position on the token axis.

        Raises:
            ValueError: the token is a class or register token, or its place is unknown.
            IndexError: there is no such row or position.
        """
        reader = self._reader()
        if not 0 <= row < len(self.store) or not 0 <= position < reader.num_tokens:
            raise IndexError(
                f"row {row}, position {position}: {self.layer} has {len(self.store)} rows of "
                f"{reader.num_tokens} tokens."
            )
        places = self._geometry
        if places is None or places.input_size == UNKNOWN_SIZE or position < places.prefix_tokens:
            raise ValueError(f"position {position} of {self.layer} has no known place.")
        y, x = divmod(position - places.prefix_tokens, places.grid[1])
        height, width = (n / m for n, m in zip(places.input_size, places.grid, strict=True))
        return x * width, y * height, (x + 1) * width, (y + 1) * height

    def take(self, row: Sequence[int] | Array, position: Sequence[int] | Array) -> torch.Tensor:
        """Read tokens in any order, (n, C) in the dtype of the store.

        Args:
            row: (n,) rows of the store; failed ones are refused.
            position: (n,) positions on the token axis, or one for all rows.

        Raises:
            IndexError: there is no such row or position.
            StoreError: a row failed or is damaged, or another run has changed the store.
        """
        for name, values in (("row", row), ("position", position)):
            array = np.asarray(values)
            if array.size and array.dtype.kind not in "iu":
                raise IndexError(f"{name}: expected integers, and got values of {array.dtype}.")
        rows, positions = np.broadcast_arrays(
            np.asarray(row, np.int64), np.asarray(position, np.int64)
        )
        if rows.ndim != 1:
            raise IndexError(f"rows and positions are lists, not arrays of shape {rows.shape}.")
        reader = self._reader()
        tokens = reader.take(rows, positions)
        if (failed := ~with_features(self.store.status[rows])).any():
            raise StoreError(f"{self.store.root}: row {int(rows[failed][0])} is not ok.")
        return _as_tensor(tokens, reader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, counted from 0, and start at its first batch."""
        check_whole_number("epoch", epoch, 0)
        self._start_at(epoch, 0, 0, 0)

    def __len__(self) -> int:
        """Number of batches of the next epoch for this rank."""
        return self._epoch_order(int(self._shared[0])).num_batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of an epoch, or the rest of it after `load_state_dict`."""
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"num_workers={worker.num_workers}: TokenDataset takes 0 or 1. It reads in threads "
                "of its own; each worker would need a memory of its own, would give all tokens "
                "again, and sending a batch to the training process costs more than reading it."
            )
        # As a generator, this runs with the first `next`: an iterator that is never used must not
        # advance the epoch.
        epoch, batches, segment, offset, _ = self._shared.tolist()
        self._shared[:] = torch.tensor([epoch + 1, 0, 0, 0, os.getpid()])
        yield from self._batches(epoch, batches, segment, offset)

    def state_dict(self) -> dict[str, object]:
        """State after the batches so far, for `load_state_dict`: the rest of the epoch follows.

        Raises ValueError if a worker process reads, whose state this process does not know.
        """
        reader = int(self._shared[4])
        is_reader = reader == os.getpid()
        if reader and not is_reader and get_worker_info() is None:
            raise ValueError(
                "the batches are read by a worker process of the DataLoader, and only it knows the "
                "state. Use num_workers=0 (the dataset reads ahead in threads), or "
                "torchdata's StatefulDataLoader."
            )
        # A worker process that has not begun yet is asked by StatefulDataLoader.
        position = self._position if is_reader else self._shared[:4].tolist()
        epoch, batches, segment, offset = position
        return {
            "epoch": epoch,
            "batches": batches,
            "segment": segment,
            "offset": offset,
            "arguments": dict(self._arguments),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the batches that were given when the state was taken.

        Raises ValueError if the state is of another store or of other arguments. At the start of an
        epoch, `rank`, `world_size`, `memory` and `block` may differ.
        """
        names = ("epoch", "batches", "segment", "offset")
        if not isinstance(state, Mapping) or not {"arguments", *names} <= {*state}:
            raise ValueError("the state is not one that state_dict of a TokenDataset returned.")
        now = self._arguments
        before = {name: state["arguments"].get(name) for name in now}
        ignored = set() if state["batches"] else {"rank", "world_size", "segments", "blocks"}
        # A state may come from JSON, which has lists only.
        before["blocks"] = tuple(before["blocks"] or ())
        changed = [
            f"{name} {before[name]!r}, now {now[name]!r}"
            for name in now
            if before[name] != now[name] and name not in ignored
        ]
        if changed:
            raise ValueError(
                f"the state is of another order: {'; '.join(changed)}. Give the arguments with "
                "which it was taken, or start an epoch anew by set_epoch."
            )
        self._start_at(*(int(state[name]) for name in names))

    def _start_at(self, *position: int) -> None:
        """Choose where the next iteration starts."""
        self._shared[:] = torch.tensor([*position, 0])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": None}

    @property
    def _read_ahead_tokens(self) -> int:
        """Number of tokens that are read ahead in addition to those of the order."""
        if self._sizes.num_segments == 1:
            return 0
        return read_ahead_tokens(self._memory, self._reader().token_bytes)

    @property
    def _held_tokens(self) -> int:
        return self._sizes.held_tokens + self._read_ahead_tokens

    @cached_property
    def _arguments(self) -> dict[str, object]:
        """Arguments that determine the batches of an epoch; a state fits no others."""
        chosen = hashlib.sha256(self._selection.rows.tobytes())
        chosen.update(self._selection.positions.tobytes())
        return {
            "fingerprint": str(self.store.attrs.get("fingerprint", "")),
            "layer": self.layer,
            "tokens": chosen.hexdigest(),
            "batch_size": self.batch_size,
            "order": self._order,
            "seed": self.seed,
            "blocks": self._group,
            "segments": self._sizes.num_segments,
            "drop_last": self.drop_last,
            "rank": self.rank,
            "world_size": self._sizes.world_size,
        }

    def _reader(self) -> TokenReader:
        """Reader of this process."""
        if self._open is None or self._open[0] != os.getpid():
            self._open = os.getpid(), TokenReader(self.store, self.layer, self.store.verify)
        return self._open[1]

    def _epoch_order(self, epoch: int) -> EpochOrder:
        shuffled = self._order == "shuffled"
        return EpochOrder(self._blocks, self._sizes, (self.seed, epoch), self.rank, shuffled)

    def _batches(self, epoch: int, batches: int, segment: int, offset: int) -> Iterator[Batch]:
        """Yield the batches of an epoch after the first `batches`."""
        order, reader = self._epoch_order(epoch), self._reader()
        left, size = order.num_batches - batches, self.batch_size
        if not order.num_batches:
            raise ValueError(
                f"{min(order.rank_tokens)} tokens of a rank are fewer than a batch of {size}, and "
                "drop_last leaves such a batch out. Give a smaller batch_size, or drop_last=False."
            )
        self._position = (epoch, batches, segment, offset)
        with ThreadPoolExecutor(self._threads or max(2, num_cpus()), "featx-tokens") as threads:
            # Large batches give back more tokens at once than those that are added for this.
            num_ahead = 2 * self._read_ahead_tokens
            pool = TokenPool(reader, self._selection, order, self._held_tokens, num_ahead, threads)
            try:
                incomplete = np.zeros((2, 0), np.int64)
                for number, output in enumerate(pool.outputs(segment), segment):
                    # Tokens that a state has passed over are read, as others of their segments are
                    # needed, and dropped here.
                    given = offset if number == segment else 0
                    pool.release(output[1][:given])
                    rest = np.concatenate([incomplete, np.stack(output)[:, given:]], axis=1)
                    consumed = given - incomplete.shape[1]
                    last = number == order.num_segments - 1
                    while left and (rest.shape[1] >= size or (last and rest.shape[1])):
                        now, rest = rest[:, :size], rest[:, size:]
                        batch = self._batch(now[0], pool.copy(now[1]), reader)
                        pool.release(now[1])
                        consumed += now.shape[1]
                        left -= 1
                        batches += 1
                        self._position = (epoch, batches, number, consumed)
                        if not left:
                            self._position = (epoch + 1, 0, 0, 0)
                        yield batch
                    incomplete = rest
                    if not left:
                        return
            finally:
                pool.close()

    def _batch(self, tokens: Ints, values: npt.NDArray[np.uint8], reader: TokenReader) -> Batch:
        rows, positions = self._selection.locate(tokens)
        yx = np.full((len(rows), 2), -1, np.int32)
        if self._geometry is not None:
            patch = positions - self._geometry.prefix_tokens
            yx[:, 0], yx[:, 1] = np.divmod(patch, self._geometry.grid[1])
            yx[patch < 0] = -1
        return {
            "features": _as_tensor(values, reader),
            "row": torch.from_numpy(rows),
            "position": torch.from_numpy(positions.astype(np.int32)),
            "yx": torch.from_numpy(yx),
            "label": torch.from_numpy(self.store.labels[rows]),
        }

    def _warn_of_little_mixing(self) -> None:
        """Warn if too few images come together in a batch."""
        found, wanted = self.mixing["distinct_images_in_batch"], 0.8 * self.batch_size
        possible = min(wanted, 0.8 * len(self._selection.rows))
        if found < possible and self._sizes.num_segments > 1:
            warnings.warn(
                f"a batch of {self.batch_size} tokens has tokens of about {found:.0f} images. More "
                f"memory mixes better: memory={self._memory} is given.",
                stacklevel=3,
            )


def _as_tensor(values: Array, reader: TokenReader) -> torch.Tensor:
    """Tokens as a tensor in the dtype of the store, (n, C)."""
    bits = {"float16": np.float16, "float32": np.float32, "bfloat16": np.int16}[reader.dtype]
    tensor = torch.from_numpy(values.view(bits).reshape(len(values), reader.channels))
    return tensor.view(torch.bfloat16) if reader.dtype == "bfloat16" else tensor
