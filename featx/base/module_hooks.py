"""Hooks on modules and tensors, registered and removed here only; modes that observe operations."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import jit, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from featx.errors import LayerError, ModelError

Before = Callable[[nn.Module, Any, Any], object]
"""Function (module, args, kwargs) that is called before a module; it may return both anew."""

After = Callable[[nn.Module, Any, Any, Any], object]
"""Function (module, args, kwargs, output) that is called after a module; it may return another
output."""


class _Hook:
    """A hook that runs for one module only, and not for its copies.

    A copy of a model has the hooks of the original, which would capture the passes of the copy.
    """

    __slots__ = ("_function", "_hooked", "_num_arguments")

    def __init__(
        self, hooked: nn.Module, function: Callable[..., object], num_arguments: int
    ) -> None:
        self._hooked = hooked
        self._function = function
        self._num_arguments = num_arguments

    def __call__(self, module: nn.Module, *args: object) -> object:
        # torch leaves out kwargs while another thread registers or removes the hook: that it takes
        # them is recorded apart from the hook itself.
        is_whole = len(args) == self._num_arguments
        return self._function(module, *args) if module is self._hooked and is_whole else None

    def __reduce__(self) -> tuple[object, ...]:
        # In deep copies and pickles of the model stands a method that takes anything and does
        # nothing. It is one of Python, so that loading a pickled model does not need featx.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ModuleHooks(contextlib.ExitStack):
    """Hooks on modules; a context manager that removes them."""

    def add(
        self,
        module: nn.Module,
        before: Before | None = None,
        after: After | None = None,
        *,
        first: bool = False,
        always: bool = False,
    ) -> None:
        """Register hooks of one module.

        With `first` they run before the hooks that the module has; with `always`, `after` is called
        also if the call raises an exception.
        """
        if before is not None:
            handle = module.register_forward_pre_hook(
                _Hook(module, before, 2), prepend=first, with_kwargs=True
            )
            self.callback(handle.remove)
        if after is not None:
            handle = module.register_forward_hook(
                _Hook(module, after, 3), prepend=first, with_kwargs=True, always_call=always
            )
            self.callback(handle.remove)

    def add_all(
        self,
        modules: Mapping[str, nn.Module],
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        *,
        first: bool = False,
        always: bool = False,
    ) -> None:
        """Register hooks of several modules; their functions take the name as first argument."""
        for name, module in modules.items():
            named = [each and functools.partial(each, name) for each in (before, after)]
            self.add(module, *named, first=first, always=always)


_OF_CLASS = object()
"""Stands for the value of an attribute that a module has from its class."""


class ModuleSetting:
    """An attribute of modules that has another value while any block needs it.

    Blocks of several threads, or of generators, end in any order: the first one saves the value of
    a module, and the last one restores it.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._lock = threading.Lock()
        # Module -> its own value, or _OF_CLASS, and the number of blocks.
        self._saved: WeakKeyDictionary[nn.Module, tuple[object, int]] = WeakKeyDictionary()

    def __contains__(self, module: nn.Module) -> bool:
        """Return whether a block has changed a module."""
        return module in self._saved

    @contextlib.contextmanager
    def changed(self, values: Mapping[nn.Module, object]) -> Iterator[list[nn.Module]]:
        """Give modules other values inside the block; yields those that did not have them."""
        with self._lock:
            own = {module: getattr(module, self._attribute) for module in values}
            changed = [m for m, value in values.items() if m in self._saved or own[m] != value]
            for module in changed:
                before = vars(module).get(self._attribute, _OF_CLASS)
                value, num_blocks = self._saved.get(module, (before, 0))
                self._saved[module] = value, num_blocks + 1
                setattr(module, self._attribute, values[module])
        try:
            yield changed
        finally:
            with self._lock:
                for module in changed:
                    value, num_blocks = self._saved.pop(module)
                    if num_blocks > 1:
                        self._saved[module] = value, num_blocks - 1
                    elif value is _OF_CLASS:
                        delattr(module, self._attribute)
                    else:
                        setattr(module, self._attribute, value)


class TensorHooks:
    """Hooks on tensors, called with the gradient in each backward pass; all can be removed."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._prune_at = 1024
        self._lock = threading.Lock()

    def add(self, tensor: torch.Tensor, function: Callable[[torch.Tensor], object]) -> None:
        """Register a hook on a tensor that requires gradients."""
        # torch 2.14 crashes in register_hook on a view whose base was changed in place, unless
        # this attribute has renewed its node.
        _ = tensor.grad_fn

        def hook(gradient: torch.Tensor | None) -> object:
            # Autograd passes None for an output that nothing reads of a node with several, such as
            # the states of nn.LSTM, or a part of torch.chunk.
            return None if gradient is None else function(gradient)

        self._keep(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def add_to_written_view(
        self,
        node: torch.autograd.graph.Node | None,
        place: tuple[Sequence[int], Sequence[int], int],
        function: Callable[[torch.Tensor], object],
        base: torch.Tensor,
    ) -> None:
        """Register a hook for the gradient of a view as it was before a write in place.

        A hook on the view itself is lost: autograd rewrites the history of its base, by a node
        whose gradient holds that of the view. `node` is `grad_fn` of the base before the write;
        `place` holds size and strides of the view, and its offset in the base.
        """
        written: Any = base.grad_fn
        while written is not None and (inputs := written.next_functions):
            if inputs[0][0] is node:
                break
            written = inputs[0][0]
        if type(written).__name__ != "CopySlices":
            return

        def hook(gradients: Sequence[torch.Tensor | None], _: object) -> None:
            # The gradient that CopySlices passes on has the layout of the base, from its first
            # element.
            if gradients[0] is not None:
                function(gradients[0].as_strided(*place))

        self._keep(written.register_hook(hook))

    def _keep(self, handle: RemovableHandle) -> None:
        """Keep a handle, and forget those that can no longer fire."""
        with self._lock:
            self._handles.append(handle)
            if len(self._handles) >= self._prune_at:
                # A handle refers weakly to the hooks of its tensor, which exist as long as its
                # graph.
                self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]
                self._prune_at = 2 * len(self._handles) + 1024

    def remove(self) -> None:
        """Remove all hooks, also from graphs that still exist."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def check_is_module(model: object) -> None:
    """Raise ModelError if a model is no torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")


def refuse_scripted(modules: Mapping[str, nn.Module]) -> None:
    """Raise ModelError if one of the modules is TorchScript; the name of the model itself is ''."""
    for name, module in modules.items():
        if isinstance(module, jit.ScriptModule):
            raise ModelError(
                f"{repr(name) if name else 'the model'} is TorchScript (torch.jit.script or "
                "torch.jit.trace): its layers run outside Python, where hooks do not see their "
                "outputs. Give the torch.nn.Module that it was made from, and load the weights "
                "into that."
            )


def refuse_transformed(name: str, tensor: torch.Tensor | None = None) -> None:
    """Raise LayerError inside torch.func, or for a gradient of many backward passes at once."""
    is_batched = tensor is not None and torch._C._dispatch_keys(tensor).has("Batched")
    if is_batched or torch._C._functorch.peek_interpreter_stack() is not None:
        raise LayerError(
            f"{name or 'the model'}: it runs inside torch.func (vmap, grad, jacrev, ...), or with "
            "is_grads_batched or vectorize, whose tensors have no values outside of it. Do so "
            "outside of the block, or return what you need from the transformed function."
        )


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
