"""Models that a function of hubconf.py builds."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from featx.errors import FeatxError, ModelError, nearest
from featx.models.base import seeded
from featx.models.hub.checkout import Checkout

_OF_PACKAGE = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Name of an import -> package that pip installs, if it has another name."""


def call_entry(checkout: Checkout, entry: str, args: Mapping[str, Any], seed: int) -> nn.Module:
    """Build a model by a function of a checkout.

    The modules of the checkout are imported anew and removed from `sys.modules` afterwards, so that
    an edited file is seen, and so that two checkouts may have modules of the same name. Hence a
    forward pass can import nothing from its checkout.

    Args:
        checkout: folder with a hubconf.py.
        entry: name of the function.
        args: its keyword arguments.
        seed: seed of random weights.

    Raises:
        ModelError: the function does not exist, packages are missing, the arguments do not fit, it
            fails, or it returns no module.
    """
    where = f"{checkout.name}: {entry} of hubconf.py"
    with _importable(checkout), seeded(seed):
        _check_dependencies(checkout)
        try:
            hubconf = _import_hubconf(checkout)
            function = _function(hubconf, checkout, entry)
            _check_args(function, args, where)
            module = function(**args)
        except FeatxError:
            raise
        except ModuleNotFoundError as error:
            raise ModelError(
                f"{where} fails: {error}. {_install([str(error.name).partition('.')[0]])}"
            ) from error
        except Exception as error:  # of the user's code
            reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")[:300]
            raise ModelError(
                f"{where} fails with {type(error).__name__}: {reason}. It was called with "
                f"model.args={dict(args)}; FEATX_DEBUG=1 shows the traceback."
            ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{where} returned a {type(module).__name__}, expected a torch.nn.Module.")
    return module


def random_parameters(
    checkout: Checkout, entry: str, args: Mapping[str, Any], seed: int
) -> tuple[nn.Module, list[str]]:
    """Build a model, and find the parameters that are random, by building it with another seed.

    Args: as for `call_entry`.

    Returns:
        The model with the given seed, and the names of its parameters that depend on the seed.
    """
    other = call_entry(checkout, entry, args, seed + 1)
    # Digests, so that two models of some GB are not in memory together.
    digests = {name: _digest(x) for name, x in other.named_parameters()}
    del other
    module = call_entry(checkout, entry, args, seed)
    return module, [
        name for name, x in module.named_parameters() if _digest(x) != digests.get(name)
    ]


def trained_parameters(module: nn.Module, random: list[str]) -> list[str]:
    """Return the names of the parameters that are not random.

    Parameters of one repeated value, such as zeros and ones, do not depend on a seed in any
    untrained model and are left out.
    """
    return [
        name
        for name, x in module.named_parameters()
        if name not in random and _digest(x) and bool((x != x.flatten()[:1]).any())
    ]


def _digest(x: torch.Tensor) -> bytes:
    """SHA-256 of the bytes of a tensor; b'' if it has no values, which is refused later."""
    if is_lazy(x) or x.is_meta:
        return b""
    values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).digest()


@contextlib.contextmanager
def _importable(checkout: Checkout) -> Iterator[None]:
    """Let the modules of a checkout be imported inside the block, and forget them after it.

    What the code prints goes to stderr, because stdout is for the result of the command, and it
    finds nothing on stdin, where torch.hub would ask for a confirmation.

    Raises:
        ModelError: another module of the same name has been imported before.
    """
    _refuse_taken_names(checkout)
    modules_before = set(sys.modules)
    path, stdin, writes = list(sys.path), sys.stdin, sys.dont_write_bytecode
    sys.path.insert(0, str(checkout.folder))
    sys.stdin = io.StringIO()
    # A compiled file is recognised by time and size of its source, which an edit may not change.
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:], sys.stdin, sys.dont_write_bytecode = path, stdin, writes
        for name, module in list(sys.modules.items()):
            # Packages that were imported before may go on importing parts of themselves.
            if name.partition(".")[0] not in modules_before and _is_inside(module, checkout):
                del sys.modules[name]


def _refuse_taken_names(checkout: Checkout) -> None:
    """Check that no module of a checkout is hidden by an imported module of the same name.

    Raises:
        ModelError: one is, so that other code than that of the checkout would run.
    """
    for path in sorted(checkout.folder.iterdir()):
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        imported = sys.modules.get(path.stem) if is_module else None
        if imported is not None and not _is_inside(imported, checkout):
            raise ModelError(
                f"{checkout.name}: its module {path.stem} cannot be imported, because featx has "
                "already imported another one of this name "
                f"({getattr(imported, '__file__', None)}). Use the installed package "
                "(model=torchvision, model=timm, or model=custom with a factory of your own), or "
                "rename the module of the checkout."
            )


def _is_inside(module: ModuleType, checkout: Checkout) -> bool:
    """Return whether a module, or a package without a file, is part of a checkout."""
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any(place is not None and checkout.holds(Path(place)) for place in places)


def _check_dependencies(checkout: Checkout) -> None:
    """Check that the packages in the list `dependencies` of a hubconf.py are installed.

    The list is read without running the file, which may import them in its first lines.

    Raises:
        ModelError: packages are missing, or the file is no Python code.
    """
    try:
        tree = ast.parse(checkout.hubconf.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ModelError(f"{checkout.hubconf} is no Python code: {error}.") from error
    named: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "dependencies":
            with contextlib.suppress(ValueError):  # computed when the file runs
                value = ast.literal_eval(node.value)
                named = [str(name) for name in value] if isinstance(value, list | tuple) else []
    packages = {name: name.partition(".")[0] for name in named if name}
    missing = [name for name, top in packages.items() if importlib.util.find_spec(top) is None]
    if missing:
        raise ModelError(
            f"{checkout.name} needs {', '.join(missing)} (dependencies in its hubconf.py), which "
            f"{'is' if len(missing) == 1 else 'are'} not installed. {_install(missing)}"
        )


def _install(names: list[str]) -> str:
    """Sentence that says how to install what is imported under these names."""
    return f"To install: pip install {' '.join(_OF_PACKAGE.get(name, name) for name in names)}"


def _import_hubconf(checkout: Checkout) -> ModuleType:
    """Return hubconf.py as a module, which is not put into `sys.modules`."""
    spec = importlib.util.spec_from_file_location("hubconf", checkout.hubconf)
    if spec is None or spec.loader is None:
        raise ModelError(f"{checkout.hubconf} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _function(hubconf: ModuleType, checkout: Checkout, entry: str) -> Any:
    """Return a function of hubconf.py.

    Raises:
        ModelError: there is none of this name.
    """
    functions = {
        name: value
        for name, value in vars(hubconf).items()
        if callable(value) and not name.startswith("_")
    }
    if entry not in functions:
        listed = ", ".join(list(functions)[:20]) or "none"
        near = nearest(entry, functions) or f" Expected one of {listed}."
        raise ModelError(f"{checkout.name}: hubconf.py has no function {entry!r}.{near}")
    return functions[entry]


def _check_args(function: Any, args: Mapping[str, Any], where: str) -> None:
    """Check that a function takes the given keyword arguments.

    Raises:
        ModelError: it does not.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ModelError(
            f"{where} cannot be called with model.args={dict(args)}: {error}. It takes {signature}."
        ) from error
