"""Models that other programs name, and which libraries have them: the table known_models.tsv.

tests/models/test_known_names.py compares the table with the tables of the libraries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("known_models.tsv")


@dataclass(frozen=True)
class KnownModel:
    """A model that other programs name, a row of the table.

    Attributes:
        original: name in the code of its authors, or ''.
        code: that code, such as 'torch.hub'.
        hugging_face: owner/model of the Hugging Face Hub for transformers, or ''.
        options: library -> what one types after `model=`.
        evidence: text in the library's own table of weights (URL or file) that shows that all
            `options` are the weights of `original`; '' if only the architecture is known to be the
            same.
    """

    original: str
    code: str
    hugging_face: str
    options: tuple[tuple[str, str], ...]
    evidence: str

    @property
    def names(self) -> tuple[str, ...]:
        """All names, also those of the hub without their owner."""
        return tuple(
            filter(None, (self.original, self.hugging_face, self.hugging_face.partition("/")[2]))
        )


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return the rows of the table."""
    rows = _FILE.read_text(encoding="utf-8").splitlines()
    return tuple(_row(line) for line in rows if not line.startswith("#"))


def _row(line: str) -> KnownModel:
    """Return the model of a line, in which an empty column is a name that does not exist."""
    original, code, hugging_face, open_clip, timm, torchvision, evidence = line.split("\t")
    name, _, tag = open_clip.partition(" ")
    options = (
        ("open_clip", open_clip and f"open_clip model.name={name} model.weights={tag}"),
        ("timm", timm),
        ("torchvision", torchvision),
    )
    existing = tuple((library, option) for library, option in options if option)
    return KnownModel(original, code, hugging_face, existing, evidence)
