"""Names of the models that a library registers, read from its source files."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path


@cache
def registered_names(library: str) -> frozenset[str]:
    """Names of the models that a library registers, read from its source files.

    Importing torchvision or timm takes seconds. Their registries are decorators above functions
    (`@register_model`), which are found in milliseconds. A test compares the result with the
    registry.

    Args:
        library: package whose folder `models` has such files, 'torchvision' or 'timm'.

    Returns:
        The names; empty if the library is not installed.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return frozenset()
    names: set[str] = set()
    for path in (Path(spec.origin).parent / "models").rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "register_model" not in text:
            continue
        for decorator, function in re.findall(
            r"^@register_model(\(.*\))?\s*\n(?:@.*\n|[ )].*\n)*def (\w+)\(", text, re.MULTILINE
        ):
            given = re.search(r"name=[\"'](\w+)[\"']", decorator)
            names.add(given.group(1) if given else function)
        if "register_model_deprecations" in text:
            names.update(re.findall(r"^    ['\"](\w+)['\"] ?: ['\"]", text, re.MULTILINE))
    return frozenset(names)
