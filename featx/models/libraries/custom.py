"""model=custom: backbones from the user's code, model.factory=package.module:factory."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from featx.base import is_own_process
from featx.config import CodeModelConfig, options
from featx.errors import ConfigError, ModelError, nearest
from featx.models.libraries.registry import LIBRARIES, ModelLibrary

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone


_Model = TypeVar("_Model")

_PYTHON_OBJECT = "python object"
"""Stands in model.factory for the module of an object that a Python program passes."""

_given: ContextVar[Mapping[str, object]] = ContextVar("given", default=MappingProxyType({}))
"""Value of model.factory -> module, or function that returns one, of the running call."""


@contextlib.contextmanager
def given_factory(model: object) -> Iterator[str | None]:
    """Let model.factory name a module, or a function that returns one, inside the block.

    Args:
        model: such an object; a text, 'package.module:factory', is taken as it is, and None is
            none.

    Yields:
        value of model.factory.
    """
    if model is None or isinstance(model, str):
        yield model
        return
    if not callable(model):
        raise ConfigError(
            f"model is a {type(model).__name__}; expected a name, a torch.nn.Module, a function "
            "that returns one, or a mapping of options."
        )
    name = f"{_PYTHON_OBJECT}:{getattr(model, '__name__', type(model).__name__)}"
    token = _given.set({**_given.get(), name: model})
    try:
        yield name
    finally:
        _given.reset(token)


@options("model")
class CustomOptions(CodeModelConfig):
    """Options of model=custom."""

    name: str = "custom"
    library: str = "custom"
    factory: str | None = None
    """Import path of a function that returns the torch.nn.Module, such as
    package.module:function."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory. A resume refuses other values, except for arguments that
    the factory names in its attribute `args_without_effect`."""

    required = ("name", "factory")
    needs = "model.factory=package.module:factory, a function that returns your torch.nn.Module"

    @property
    def code(self) -> str:
        """Options of the command that name the factory, or the argument that gives it in Python."""
        module, _, name = str(self.factory).partition(":")
        if module == _PYTHON_OBJECT:
            return f"model_factory={name} of a Python program"
        return f"model=custom model.factory={self.factory}"

    def code_sha256(self) -> str | None:
        """SHA-256 of the file behind package.module:factory; None if it is not found."""
        name = str(self.factory).partition(":")[0].replace(".", os.sep)
        for folder in (*sys.path, ""):
            for ending in (".py", f"{os.sep}__init__.py"):
                path = Path(folder, name + ending)
                if path.is_file():
                    return hashlib.sha256(path.read_bytes()).hexdigest()
        return None


class Custom(ModelLibrary[CustomOptions]):
    """Models of the user's code."""

    def build(self, config: CustomOptions, seed: int) -> Backbone:
        """Call the factory, check what it returns, and load weights if a file is given."""
        from featx.models.base import Backbone, random_id
        from featx.models.preprocessing import stated_preprocess
        from featx.models.user_code import args_of_values, has_class_token, load_own_weights

        without_effect = getattr(_import_factory(str(config.factory)), "args_without_effect", ())
        module, weights, loading = _call_factory(config, seed), random_id(seed), {}
        is_given = any(module is each for each in _given.get().values())
        if config.weights == "default":
            weights = "as the factory made them"
        elif config.weights is None and is_given:
            raise ConfigError(
                "model.weights=null asks for random weights, and the given module has weights of "
                "its own. Leave model.weights out, or give a function that builds the module."
            )
        elif config.weights is not None:
            module = copy_model(module) if is_given else module  # the user's own keeps its weights
            weights = config.weights
            loading = load_own_weights(module, weights, config.checkpoint)
        return Backbone(
            module=module,
            name=f"custom/{config.factory}",
            weights=weights,
            preprocess=stated_preprocess(config.transform),
            num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
            has_class_token=has_class_token(module),
            is_users=True,
            args=args_of_values(config.args, without_effect),
            checkpoint=loading,
            provenance={"modules_sha256": _modules_digest(module)},
        )

    def untrained(self, config: CustomOptions, seed: int) -> nn.Module:
        """Build the untrained model, for model.init=reset."""
        from featx.models.user_code import build_untrained

        what = f"model.init=reset: model.factory={config.factory}"
        advice = "the weights go into model.weights=FILE, constants into buffers."
        return build_untrained(lambda number: _call_factory(config, number), seed, what, advice)


def _call_factory(config: CustomOptions, seed: int) -> nn.Module:
    from featx.models.base import seeded
    from featx.models.user_code import refuse_other_objects

    factory = _import_factory(str(config.factory))
    with seeded(seed):
        try:
            module = factory(**config.args)
        except TypeError as error:
            raise ModelError(
                f"model.factory={config.factory} cannot be called with model.args={config.args}: "
                f"{error}."
            ) from error
    refuse_other_objects(module, f"model.factory={config.factory}")
    return module  # type: ignore[no-any-return]  # the type was checked


def _modules_digest(module: nn.Module) -> str:
    """Return the SHA-256 of the module as it is printed: its layers and their arguments.

    Code of the user can change while the weights stay, such as by a ReLU more. Addresses of
    functions in the text differ between processes.
    """
    return hashlib.sha256(re.sub(" at 0x[0-9a-f]+", "", repr(module)).encode()).hexdigest()


def copy_model(model: _Model) -> _Model:
    """Return a copy of a given module, or of an object that builds one; functions and texts are
    returned as they are.
    """
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the given {type(model).__name__} cannot be copied: {error}. A copy is needed if "
            "model.weights goes into it, if the layers of the store are of several runs, and for "
            "featx.embedder and predictor. Give a function that builds the module."
        ) from error


def _import_factory(path: str) -> Callable[..., Any]:
    """Import package.module:factory; modules in the current folder are found as well."""
    if path in _given.get():
        from torch import nn

        model = _given.get()[path]
        return (lambda: model) if isinstance(model, nn.Module) else model  # type: ignore[return-value]
    module_name, _, attribute = path.partition(":")
    if module_name == _PYTHON_OBJECT:
        raise ModelError(
            f"model.factory={path} stands for a model that a Python program has passed, so only "
            "featx.extract(model=...) of such a program, and model_factory=... of other functions, "
            "can give it."
        )
    if not module_name or not attribute or module_name.endswith(".py") or "/" in module_name:
        raise ModelError(
            f"model.factory={path}: expected package.module:factory, such as my_model:make for the "
            "function make of my_model.py, in the folder of the command or one on PYTHONPATH."
        )
    folder = str(Path.cwd())
    added = [] if folder in sys.path else [folder]
    sys.path += added
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise ModelError(
            f"model.factory={path}: {error}. Run the command where {module_name} can be "
            "imported: its folder, or a folder on PYTHONPATH."
        ) from error
    finally:
        # The command also finds what the module imports later; a process of a user keeps its path.
        if added and not is_own_process():
            sys.path.remove(folder)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ModelError(
            f"model.factory={path}: {module_name} has no callable {attribute!r}."
            f"{nearest(attribute, dir(module))}"
        )
    return factory  # type: ignore[no-any-return]  # callable() was checked


LIBRARIES.register(
    Custom(
        "custom",
        "Your own torch.nn.Module, from model.factory.",
        CustomOptions,
        takes_any_name=True,
    )
)
