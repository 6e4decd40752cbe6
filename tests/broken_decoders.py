"""Decoders that really crash and hang, in every process of a test: a folder for PYTHONPATH.

GIF files become dangerous: one that holds a comment below does to its process what that says, when
its pixels are asked for, as a decoder written in C would.
"""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

CRASH, ABORT, HANG, KILL = b"!crash!", b"!abort!", b"!hang!", b"!kill!"

_SITE = """
import ctypes, os, signal, sys, time

def _spoil():
    from PIL import GifImagePlugin
    load = GifImagePlugin.GifImageFile.load_prepare
    libc = ctypes.CDLL(None)

    def dangerous(self):
        comment = self.info.get("comment", b"")
        if comment == b"!crash!":
            ctypes.string_at(0)
        elif comment == b"!abort!":
            os.abort()
        elif comment == b"!hang!":
            libc.sleep(10 ** 6)
        elif comment == b"!kill!":
            os.kill(os.getpid(), signal.SIGKILL)
        load(self)

    GifImagePlugin.GifImageFile.load_prepare = dangerous

class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "featx.images.decode":
            sys.meta_path.remove(self)
            _spoil()

sys.meta_path.insert(0, _Finder())
"""


def install(folder: Path) -> Path:
    """Write what spoils the decoder wherever featx is imported; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE)
    return folder


def gif(image: Image.Image, comment: bytes = b"") -> bytes:
    """A GIF file that does what its comment says."""
    file = io.BytesIO()
    image.convert("P").save(file, "GIF", comment=comment)
    return file.getvalue()
