"""Base class of the modes that observe the operations of a forward pass."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class ObservingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for passes that are not compiled.

    Subclasses implement `__torch_dispatch__`. Without this base class, torch would import
    torch._dynamo at the first operation, which takes about two seconds, only to exclude that method
    from compiling.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
