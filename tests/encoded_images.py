"""Images as the content of files."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The file that Pillow writes in this format, with these options of the format."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
