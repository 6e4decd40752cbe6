"""model=hub model.name=FOLDER model.factory=FUNCTION: models of a hubconf.py.

The code of the folder runs with the permissions of the user, who names it in the command.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from featx.base import log_message
from featx.config import CodeModelConfig, options
from featx.errors import FeatxError, ModelError, nearest
from featx.models.catalogue import hint_elsewhere
from featx.models.libraries.registry import LIBRARIES, ModelLibrary

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone

_REPOSITORY = re.compile(r"([A-Za-z0-9-]+/[\w.-]+)(?:[@:](.+))?", re.ASCII)
"""owner/repo of GitHub with a commit, a branch or a tag, as torch.hub takes it."""

_OF_PACKAGE = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Name of an import -> package that pip installs, if it has another name."""


@options("model")
class HubOptions(CodeModelConfig):
    """Options of model=hub."""

    name: str = ""
    library: str = "hub"
    factory: str | None = None
    """Function of hubconf.py that returns the torch.nn.Module."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function. A resume refuses other values."""

    required = ("name", "factory")
    needs = "model.name=FOLDER, a clone with a hubconf.py, and model.factory=FUNCTION of this file"

    @property
    def code(self) -> str:
        """Options of the command that name folder and function."""
        return f"model=hub model.name={self.name} model.factory={self.factory}"

    def code_sha256(self) -> str | None:
        """SHA-256 of the .py files of the folder; None if it is not on this machine."""
        try:
            return _sha256(_find_folder(self.name))
        except (ModelError, OSError):
            return None


class Hub(ModelLibrary[HubOptions]):
    """Models of torch.hub."""

    def build(self, config: HubOptions, seed: int) -> Backbone:
        """Build a model by a function of hubconf.py, and load weights if a file is given."""
        from featx.models.base import Backbone, random_id
        from featx.models.preprocessing import stated_preprocess
        from featx.models.user_code import (
            args_of_values,
            build_twice,
            has_class_token,
            load_own_weights,
            names_text,
        )

        folder, entry, loading = _find_folder(config.name), str(config.factory), {}
        preprocess = stated_preprocess(config.transform)
        log_message(f"running {entry} of {folder / 'hubconf.py'}")
        code = _sha256(folder)
        if config.weights is None:
            module, weights = _build_untrained(config, seed, "model.weights=null"), random_id(seed)
        elif config.weights == "default":
            module, random, _ = build_twice(lambda number: _call_entry(config, number), seed)
            weights = f"as {entry} loads them"
            if random:
                raise ModelError(
                    f"{entry} of {config.name} leaves {names_text(random)} at random values, and "
                    "model.weights=default promises the weights that it loads. See its arguments, "
                    "such as 'model.args={pretrained: true}'; or give model.weights=FILE, or "
                    "model.weights=null for an untrained model."
                )
        else:
            module, weights = _call_entry(config, seed), config.weights
            loading = load_own_weights(module, weights, config.checkpoint)
        return Backbone(
            module=module,
            name=f"hub/{config.name}:{entry}",
            weights=weights,
            preprocess=preprocess,
            num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
            has_class_token=has_class_token(module),
            args=args_of_values(config.args),
            checkpoint=loading,
            provenance={"entry": entry, "code_sha256": code},
        )

    def untrained(self, config: HubOptions, seed: int) -> nn.Module:
        """Build the untrained model, for model.init=reset."""
        return _build_untrained(config, seed, "model.init=reset")


def _build_untrained(config: HubOptions, seed: int, option: str) -> nn.Module:
    """Return the model with random parameters, which `option` asks for."""
    from featx.models.user_code import build_untrained

    what = f"{option}: {config.factory} of {config.name}"
    advice = "see its arguments, such as 'model.args={pretrained: false}'."
    return build_untrained(lambda number: _call_entry(config, number), seed, what, advice)


def _find_folder(name: str) -> Path:
    """Return the absolute path of the folder with a hubconf.py that model.name names."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        repository = _REPOSITORY.fullmatch(name)
        advice = hint_elsewhere(name)
        if repository is not None and not advice:
            checkout = f" && git -C clone checkout {repository[2]}" if repository[2] else ""
            advice = (
                f" featx fetches no code: git clone https://github.com/{repository[1]} clone"
                f"{checkout}; then model.name=clone."
            )
        raise ModelError(
            f"model.name={name}: no such folder (looked in {Path.cwd()}). Expected a clone with a "
            f"hubconf.py.{advice}"
        )
    if not (folder / "hubconf.py").is_file():
        raise ModelError(
            f"model.name={name}: {folder} has no hubconf.py, the file in which a repository for "
            "torch.hub defines its models. Name the top folder of the clone; other code is "
            "loaded with model=custom."
        )
    return folder.absolute()


def _sha256(root: Path) -> str:
    """SHA-256 over paths and contents of all .py files; links to folders are not followed."""
    sha = hashlib.sha256()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _is_foreign(name))
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                data = path.read_bytes()
                sha.update(f"{path.relative_to(root).as_posix()} {len(data)};".encode())
                sha.update(data)
    return sha.hexdigest()


def _is_foreign(name: str) -> bool:
    """Return whether a folder below the code is no part of it, such as .git or an environment."""
    return name.startswith(".") or name == "site-packages"


def _call_entry(config: HubOptions, seed: int) -> nn.Module:
    """Build a model by the function of hubconf.py.

    The modules of the folder are imported anew and removed from `sys.modules` afterwards, so that
    an edited file is seen, and so that two folders may have modules of the same name. Hence a
    forward pass can import nothing from its folder.
    """
    from featx.models.base import seeded
    from featx.models.user_code import refuse_other_objects

    folder, args = _find_folder(config.name), dict(config.args)
    where = f"{config.name}: {config.factory} of hubconf.py"
    # The block of `seeded` comes first: threads wait there, so that no two change sys.path at once.
    with seeded(seed), _importable(folder, config.name):
        try:
            module = _function(folder, config)(**args)
        except FeatxError:
            raise
        except ModuleNotFoundError as error:
            name = str(error.name).partition(".")[0]
            raise ModelError(f"{where} fails: {error}. {_install([name])}") from error
        except Exception as error:  # of the user's code
            reason = (str(error).strip() or "no message").splitlines()[0].rstrip(".")[:300]
            raise ModelError(
                f"{where} fails with {type(error).__name__}: {reason}. It was called with "
                f"model.args={args}; FEATX_DEBUG=1 shows the traceback."
            ) from error
    refuse_other_objects(module, where)
    return module  # type: ignore[no-any-return]  # the type was checked


def _function(folder: Path, config: HubOptions) -> Any:
    """Run hubconf.py, and return its function after checks of packages and arguments."""
    spec = importlib.util.spec_from_file_location("hubconf", folder / "hubconf.py")
    if spec is None or spec.loader is None:
        raise ModelError(f"{folder / 'hubconf.py'} cannot be imported.")
    hubconf = importlib.util.module_from_spec(spec)  # which is not put into sys.modules
    spec.loader.exec_module(hubconf)
    needed = [str(name) for name in getattr(hubconf, "dependencies", ())]
    missing = [n for n in needed if importlib.util.find_spec(n.partition(".")[0]) is None]
    if missing:
        raise ModelError(
            f"{config.name} needs {', '.join(missing)} (dependencies in its hubconf.py), which "
            f"{'is' if len(missing) == 1 else 'are'} not installed. {_install(missing)}"
        )
    functions = {
        name: value
        for name, value in vars(hubconf).items()
        if callable(value) and not name.startswith("_")
    }
    entry = str(config.factory)
    if entry not in functions:
        listed = ", ".join(list(functions)[:20]) or "none"
        near = nearest(entry, functions) or f" Expected one of {listed}."
        raise ModelError(f"{config.name}: hubconf.py has no function {entry!r}.{near}")
    try:
        signature = inspect.signature(functions[entry])
    except (TypeError, ValueError):  # builtins
        return functions[entry]
    try:
        signature.bind(**config.args)
    except TypeError as error:
        raise ModelError(
            f"{config.name}: {entry} of hubconf.py cannot be called with "
            f"model.args={dict(config.args)}: {error}. It takes {signature}."
        ) from error
    return functions[entry]


def _install(names: list[str]) -> str:
    """Return a sentence that says how to install what is imported under these names."""
    return f"To install: pip install {' '.join(_OF_PACKAGE.get(name, name) for name in names)}"


@contextlib.contextmanager
def _importable(folder: Path, name: str) -> Iterator[None]:
    """Let the modules of a folder be imported inside the block, and forget them after it.

    What the code prints goes to stderr, because stdout is for the result of the command, and it
    finds nothing on stdin, where torch.hub would ask for a confirmation.
    """
    _refuse_taken_names(folder, name)
    modules_before = set(sys.modules)
    path, stdin, writes = list(sys.path), sys.stdin, sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.stdin = io.StringIO()
    # A compiled file is recognised by time and size of its source, which an edit may not change.
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.path[:], sys.stdin, sys.dont_write_bytecode = path, stdin, writes
        for imported, module in list(sys.modules.items()):
            # Packages that were imported before may go on importing parts of themselves.
            if imported.partition(".")[0] not in modules_before and _is_inside(module, folder):
                del sys.modules[imported]


def _refuse_taken_names(folder: Path, name: str) -> None:
    """Refuse a module that an imported one of the same name would hide: other code would run."""
    for path in sorted(folder.iterdir()):
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        imported = sys.modules.get(path.stem) if is_module else None
        if imported is not None and not _is_inside(imported, folder):
            raise ModelError(
                f"{name}: its module {path.stem} cannot be imported, because featx has already "
                f"imported another one of this name ({getattr(imported, '__file__', None)}). Use "
                "the installed package (model=torchvision, model=timm, or model=custom with a "
                "factory of your own), or rename the module of the clone."
            )


def _is_inside(module: ModuleType, folder: Path) -> bool:
    """Return whether a module, or a package without a file, is code of a folder."""
    root = folder.resolve()
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    resolved = [Path(place).resolve() for place in places if place is not None]
    return any(
        place.is_relative_to(root) and not any(map(_is_foreign, place.relative_to(root).parts))
        for place in resolved
    )


LIBRARIES.register(
    Hub("hub", "Models of torch.hub: a clone with hubconf.py.", HubOptions, takes_any_name=True)
)
