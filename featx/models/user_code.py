"""What the modules that the user's code makes say about themselves, and the arguments of this code.

`model=custom` and `model=hub` share it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from featx.config import is_secret


def has_class_token(module: nn.Module) -> bool:
    """Whether a module has a class token, from its `has_class_token` or timm's `cls_token`.

    Without either attribute it is assumed to have one. The answer matters only if
    `num_prefix_tokens` is above 0.
    """
    said = getattr(module, "has_class_token", None)
    if isinstance(said, bool):
        return said
    return getattr(module, "cls_token", module) is not None


def args_of_values(args: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the entries of `model.args` that are part of the fingerprint.

    A scale or a threshold changes values and no weight; a pause or the path of a file does not. The
    store keeps the result, so secrets are left out, and texts and other objects, which may come
    from the environment, are hashed.

    Args:
        args: keyword arguments of the user's function.
        without: names of those that have no effect on values.
    """
    return {
        name: value if value is None or isinstance(value, bool | int | float) else _hash(value)
        for name, value in args.items()
        if name not in without and not is_secret(name)
    }


def _hash(value: Any) -> str:
    """Short hash of a value of a config."""
    text = json.dumps(value, sort_keys=True, default=str)
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]
