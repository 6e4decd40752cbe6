"""Pieces: the good rows of a part that had a damaged chunk, until the others are there again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from featx.store import layout
from featx.types import Part


class Pieces:
    """The pieces of a store by the names of their files.

    A piece is a file as a part is, with some of its rows. It counts as long as the part itself is
    not there.

    Args:
        names: of files below parts/; those of no piece are left out.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._pieces: dict[int, list[Part]] = {}
        found = [piece for piece in map(layout.piece_of, names) if piece is not None]
        # Of two that overlap, the longer one was damaged: a repair made the shorter one from it and
        # was killed before it set the longer one aside.
        for piece in sorted(found, key=lambda piece: (len(piece), piece.start)):
            others = self._pieces.setdefault(piece.index, [])
            overlaps = any(p.start < piece.stop and piece.start < p.stop for p in others)
            if len(piece) > 0 and not overlaps:
                others.append(piece)

    @classmethod
    def in_store(cls, root: Path) -> Pieces:
        """Those in a store's folder."""
        return cls(path.name for path in (root / layout.PARTS).glob(layout.PIECE_GLOB))

    def of(self, part: Part) -> list[Part]:
        """The pieces of a part, in order of their rows; none has rows of another one."""
        pieces = self._pieces.get(part.index, [])
        inside = [p for p in pieces if part.start <= p.start and p.stop <= part.stop]
        return sorted(inside, key=lambda piece: piece.start)

    def gaps(self, part: Part) -> Iterator[Part]:
        """The rows of a part that no piece holds, run by run; all of them where it has no piece."""
        start = part.start
        for piece in self.of(part):
            if piece.start > start:
                yield Part(part.index, start, piece.start)
            start = piece.stop
        if start < part.stop:
            yield Part(part.index, start, part.stop)


def piece_path(root: Path, piece: Part) -> Path:
    """Where a piece of a store lies."""
    return root / layout.PARTS / layout.piece_name(piece)
