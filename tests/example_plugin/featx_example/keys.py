"""export.format=keys: the keys of the rows as a text file."""

from pathlib import Path

from featx.export import ExportFolder, Format, FormatMember


class Keys(Format):
    """keys.txt with the key of each row on a line of its own."""

    def write(self, folder: ExportFolder) -> None:
        """Write the one file."""
        with folder.file("keys.txt") as file:
            file.writelines(bytes(key) + b"\n" for key in self.selection.keys)

    def opening(self, out: Path) -> str:
        """Return a line that reads the file."""
        return f"keys = open({str(out / 'keys.txt')!r}, 'rb').read().splitlines()"


FORMAT = FormatMember("keys", "The keys as a text file.", make=Keys)
