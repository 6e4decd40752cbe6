"""model=custom: backbones from the user's code, model.factory=package.module:factory."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featx.base import is_own_process
from featx.config import CodeModelConfig, options
from featx.errors import ConfigError, ModelError, nearest
from featx.models.libraries.registry import LIBRARIES, LibraryFunctions, library_member

if TYPE_CHECKING:
    from torch import nn

    from featx.models.base import Backbone


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factory:
            raise ConfigError(
                "model=custom needs model.factory=package.module:factory, a function that returns "
                "your torch.nn.Module."
            )

    @property
    def code(self) -> str:
        """Options of the command that name the factory."""
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


def build(config: CustomOptions, seed: int) -> Backbone:
    """Call the factory, check the module that it returns, and load weights if a file is given.

    Args:
        config: `factory`, `args`, `weights` and `transform` of the model options.
        seed: seed during the call of the factory.

    Raises:
        ModelError: the factory cannot be imported or called, or returns no module.
        WeightsError: the weights cannot be read or loaded.
    """
    from featx.models.base import Backbone, random_id
    from featx.models.checkpoint import load_weights
    from featx.models.preprocessing import stated_preprocess
    from featx.models.user_code import args_of_values, has_class_token, read_own_weights

    factory = import_factory(str(config.factory))
    module, loading = _made(config, seed), {}
    if config.weights == "default":
        weights = "as the factory made them"
    elif config.weights is None:
        weights = random_id(seed)
    else:
        weights = config.weights
        state = read_own_weights(weights, config.checkpoint)
        loading = load_weights(module, state, weights, config.checkpoint.prefix)
    return Backbone(
        module=module,
        name=f"custom/{config.factory}",
        weights=weights,
        preprocess=stated_preprocess(config.transform),
        num_prefix_tokens=int(getattr(module, "num_prefix_tokens", 0)),
        has_class_token=has_class_token(module),
        is_users=True,
        args=args_of_values(config.args, getattr(factory, "args_without_effect", ())),
        checkpoint=loading,
    )


def untrained(config: CustomOptions, seed: int) -> nn.Module:
    """Build the untrained model, for model.init=reset.

    Args:
        config: model options.
        seed: seed during the call of the factory.

    Raises:
        ModelError: parameters do not depend on the seed, so the factory may load trained ones.
    """
    import torch

    module, other = _made(config, seed), _made(config, seed + 1)
    others = dict(other.named_parameters())
    # Parameters of one repeated value, such as zeros and ones, do not depend on a seed in any
    # untrained model.
    fixed = [
        name
        for name, x in module.named_parameters()
        if torch.equal(x, others[name]) and bool((x != x.flatten()[:1]).any())
    ]
    if module is other or fixed:
        values = f"{', '.join(fixed[:5])}{', ...' if fixed[5:] else ''} with the same values"
        raise ModelError(
            f"model.init=reset: model.factory={config.factory} gives "
            f"{'one module' if module is other else values} whatever the seed. It has to make an "
            "untrained model: the weights go into model.weights=FILE, constants into buffers."
        )
    return module


def _made(config: CustomOptions, seed: int) -> nn.Module:
    """The module that the factory returns with this seed."""
    from torch import nn

    from featx.models.base import seeded

    factory = import_factory(str(config.factory))
    with seeded(seed):
        try:
            module = factory(**config.args)
        except TypeError as error:
            raise ModelError(
                f"model.factory={config.factory} cannot be called with model.args={config.args}: "
                f"{error}."
            ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"model.factory={config.factory} returned a {type(module).__name__}, "
            "expected a torch.nn.Module."
        )
    return module


def import_factory(path: str) -> Callable[..., Any]:
    """Import a factory; modules in the current folder are found as well.

    Args:
        path: 'package.module:factory'.

    Raises:
        ModelError: there is no such module, or no such callable in it.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"model.factory={path}: expected package.module:factory.")
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
    library_member(
        "custom",
        "Your own torch.nn.Module, from model.factory.",
        CustomOptions,
        LibraryFunctions(build=build, untrained=untrained, names=tuple, knows=lambda name: True),
    )
)
