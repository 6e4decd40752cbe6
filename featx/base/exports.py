"""Names of a package that are imported from its modules on first use (PEP 562).

The names are listed in the file `__init__.pyi` of the package, as in SPEC 1 of Scientific Python:
type checkers and editors read it, and `lazy_exports` reads it here. So
`from featx.engine import Engine` imports torch, and `import featx.engine` does not. A module whose
names read better with its own in front, as `layout.LISTING`, is exported itself:
`from . import layout as layout`.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path


def lazy_exports(
    package: str, file: str
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for the `__init__.py` of a package.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package; the stub is in the same folder.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    module_of = {
        alias.name: f"{package}.{node.module or alias.name}"
        for node in imports
        for alias in node.names
    }
    modules = {alias.name for node in imports if node.module is None for alias in node.names}
    names = sorted(module_of)

    def get(name: str) -> object:
        """Import an exported name."""
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(module_of[name])
        return module if name in modules else getattr(module, name)

    return get, lambda: names, names
