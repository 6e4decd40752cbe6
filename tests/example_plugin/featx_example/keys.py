"""export.format=keys: the keys of the rows as a text file."""

from pathlib import Path
from typing import BinaryIO

from featx.export import File, Format, FormatMember


class Keys(Format):
    """keys.txt with the key of each row on a line of its own."""

    def files(self) -> list[File]:
        """Return the one file."""

        def write(file: BinaryIO) -> None:
            file.writelines(bytes(key) + b"\n" for key in self.selection.keys)

        return [File("keys.txt", write, 0, len(self.selection))]

    def opening(self, out: Path) -> str:
        """Return a line that reads the file."""
        return f"keys = open({str(out / 'keys.txt')!r}, 'rb').read().splitlines()"


FORMAT = FormatMember("keys", "The keys as a text file.", make=Keys)
