"""TorchScript modules, which take no hooks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import jit, nn

from featx.errors import ModelError


def refuse_scripted(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse modules on which no hook can be registered.

    Args:
        modules: (dotted name, '' of the model itself; module).

    Raises:
        ModelError: one of them is TorchScript.
    """
    for name, module in modules:
        if isinstance(module, jit.ScriptModule):
            raise ModelError(
                f"{repr(name) if name else 'the model'} is TorchScript (torch.jit.script or "
                "torch.jit.trace): its layers run outside Python, where no hook sees what they "
                "give. Give the torch.nn.Module that it was made from, and load the weights there."
            )
