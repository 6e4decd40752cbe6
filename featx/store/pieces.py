"""Pieces: files with the good rows of a damaged part, used until the other rows are recomputed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from featx.store import layout
from featx.store.part_files import names_in
from featx.types import Part


class Pieces:
    """Pieces of a store, found by the names of their files.

    A piece has the format of a part, with some of its rows. It counts as long as the part itself
    does not exist.

    Args:
        names: file names in parts/; names of other files are ignored.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._pieces: dict[int, list[Part]] = {}
        found = [piece for piece in map(layout.parse_piece_name, names) if piece is not None]
        # A repair writes a shorter piece from a damaged one, and then moves the damaged one to
        # quarantine. If it is killed in between, both exist, and the shorter one is sound.
        for piece in sorted(found, key=lambda piece: (len(piece), piece.start)):
            others = self._pieces.setdefault(piece.index, [])
            overlaps = any(p.start < piece.stop and piece.start < p.stop for p in others)
            if len(piece) > 0 and not overlaps:
                others.append(piece)

    @classmethod
    def in_store(cls, root: Path) -> Pieces:
        """Pieces in the folder of a store."""
        return cls(names_in(root, layout.PIECE_GLOB))

    def of(self, part: Part) -> list[Part]:
        """Pieces of a part in ascending order; they do not overlap."""
        pieces = self._pieces.get(part.index, [])
        inside = [p for p in pieces if part.start <= p.start and p.stop <= part.stop]
        return sorted(inside, key=lambda piece: piece.start)

    def gaps(self, part: Part) -> Iterator[Part]:
        """Ranges of rows of a part that no piece holds; the whole part if it has no piece."""
        start = part.start
        for piece in self.of(part):
            if piece.start > start:
                yield Part(part.index, start, piece.start)
            start = piece.stop
        if start < part.stop:
            yield Part(part.index, start, part.stop)


def piece_path(root: Path, piece: Part) -> Path:
    """Path of a piece in a store."""
    return root / layout.PARTS / layout.piece_name(piece)
