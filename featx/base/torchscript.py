"""Refusal of TorchScript modules, on which hooks do not work."""

from __future__ import annotations

from collections.abc import Iterable

from torch import jit, nn

from featx.errors import ModelError


def refuse_scripted(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Check that none of the modules is TorchScript.

    Args:
        modules: pairs (dotted name, module); the name of the model itself is ''.

    Raises:
        ModelError: one of them is TorchScript.
    """
    for name, module in modules:
        if isinstance(module, jit.ScriptModule):
            raise ModelError(
                f"{repr(name) if name else 'the model'} is TorchScript (torch.jit.script or "
                "torch.jit.trace): its layers run outside Python, where hooks do not see their "
                "outputs. Give the torch.nn.Module that it was made from, and load the weights "
                "into that."
            )
