"""The golden stores of the present format.

`PYTHONPATH=tests python tests/store/golden_stores.py` writes them again.

They are in git, so a change of the format shows as a test that fails. Write them again only if the
format is meant to change, and raise its number once 0.1.0 is released.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from made_store import MadeRun, make_run

from featx.types import TokenGeometry

GOLDEN = Path(__file__).parent / "golden"
CODECS = ("none", "gzip", "zstd")
DTYPES = ("float16", "float32", "bfloat16")
PARTS = "parts"
"""Folder of the store that is not packed; those that are packed are named for their codec."""
TOKENS = "tokens"
"""Folder of the store with places of tokens."""


def golden_run(codec: str) -> MadeRun:
    """Layers of all dtypes, and one whose chunks are long enough for checksums to fold words."""
    shapes = {"wide": (8192,), **dict.fromkeys(DTYPES, (5,))}
    run = make_run(11, 4, shapes, codec=codec, failed=(2, 9))
    rng = np.random.default_rng(11)
    specs, features = [], {}
    for spec in run.specs:
        # Small integers are exact in all dtypes, and repeated ones keep the files small.
        values = rng.integers(-3, 4, (11, 8)).astype(np.float32)
        values = np.resize(values, (11, *spec.shape))
        dtype = "float16" if spec.name == "wide" else spec.name
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        features[spec.name] = bits if dtype == "bfloat16" else values.astype(dtype)
        specs.append(replace(spec, dtype=dtype))
    return replace(run, specs=tuple(specs), features=features).identified()


def golden_tokens() -> MadeRun:
    """A layer of two prefix tokens and a grid of 2 x 3, and a map, with the places of both."""
    run = make_run(3, 2, {"map": (4, 2, 3), "tokens": (8, 2)}, "float16")
    numbers = {
        name: np.arange(rows.size).reshape(rows.shape) for name, rows in run.features.items()
    }
    places = {
        "map": TokenGeometry(0, False, (2, 3), (32, 48)),
        "tokens": TokenGeometry(2, True, (2, 3), (32, 48)),
    }
    features = {name: values.astype(np.float16) for name, values in numbers.items()}
    return replace(run, features=features, tokens=places).identified()


def main() -> None:
    """Write all golden stores."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for codec in CODECS:
        golden_run(codec).finish(GOLDEN / codec, packed=True)
    golden_run("gzip").finish(GOLDEN / PARTS)
    golden_tokens().finish(GOLDEN / TOKENS, packed=True)
    for path in [*GOLDEN.rglob("workers"), *GOLDEN.rglob("*.lock")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
