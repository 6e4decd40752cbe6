"""The Backbone, and hashing and replacing of its weights."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from featx.base import refuse_scripted
from featx.errors import ModelError
from featx.images import Preprocess

_GENERATOR = threading.RLock()

_modules_in_use: WeakSet[nn.Module] = WeakSet()
"""Modules of the user that belong to a backbone now."""


@dataclass(frozen=True)
class LibraryEmbedding:
    """The vector before the classifier, as defined by the library of a model.

    Attributes:
        compute: function from (B, 3, H, W) to (B, D) that uses the library's own methods.
        expose: function that makes the vector the output of a new module, for models whose forward
            pass has no tensor that equals it.
    """

    compute: Callable[[torch.Tensor], torch.Tensor]
    expose: Callable[[], None]


def expose_embedding(module: nn.Module, embedding: Callable[[Any], torch.Tensor]) -> None:
    """Add a module `pooled` to a model; each forward pass calls it with the embedding.

    The class of the model becomes a subclass, instead of a method of the object being replaced, so
    that deep copies of the model work.
    """
    base: Any = type(module)

    class WithPooled(base):  # type: ignore[misc]
        def forward(self, *args: Any, **keywords: Any) -> Any:
            output = super().forward(*args, **keywords)
            self.pooled(embedding(output))
            return output

    WithPooled.__name__, WithPooled.__qualname__ = base.__name__, base.__qualname__
    module.add_module("pooled", nn.Identity())
    module.__class__ = WithPooled


@dataclass
class Backbone:
    """A frozen module in eval mode with the preprocessing and the identity of its weights.

    Before a run, rows are compared with the path of the model's own library, which a backbone
    provides as `preprocess.reference`, its transform; `module`, its forward pass; and
    `embedding.compute`, the embedding by its own functions.

    Attributes:
        module: module that takes (B, 3, H, W) normalised float32 images with (H, W) =
            preprocess.crop.
        name: library and model, such as 'torchvision/resnet50'.
        weights: description of the parameters: a tag, a file, or 'random (seed 0)'.
        preprocess: transform that belongs to the weights.
        num_prefix_tokens: number of class and register tokens before the patch tokens; 0 without
            any.
        has_class_token: whether the first of these is a class token.
        classifier: name of the module whose input is the embedding; None for the last linear layer.
        embedding: the library's own embedding, which takes precedence over `classifier`; None if
            the library defines none.
        stages: names of the stages if the library gives them; None to find them from shapes.
        classes: names of the logits in their order, if the library gives them.
        class_ids: identifiers of the logits in their order (WordNet's for ImageNet, n01440764), if
            the library gives them.
        is_users: whether the module was made by the user's code and may be used after the run.
        reentrant: whether a forward pass stores nothing in the module, so that several threads may
            run one at the same time.
        args: arguments of the user's factory or of the library that may change values without
            changing weights.
        checkpoint: how the tensors of a file were found, as `load_weights` returns it.
        missing_heads: names of the classifiers that the weights lack. The module has none in their
            place, and what would be logits is refused.
        packages: packages besides torch, torchvision and timm whose versions may change values.
        provenance: name -> what else decides values, in words, such as the class of an image
            processor; part of the fingerprint.
        weights_sha256: hex digest of the parameters and buffers as they were given.
        choices: option name -> a choice made here and its reason, as printed before the run.
    """

    module: nn.Module
    name: str
    weights: str
    preprocess: Preprocess
    num_prefix_tokens: int = 0
    has_class_token: bool = True
    classifier: str | None = None
    embedding: LibraryEmbedding | None = None
    stages: tuple[str, ...] | None = None
    classes: tuple[str, ...] = ()
    class_ids: tuple[str, ...] = ()
    is_users: bool = False
    reentrant: bool = False
    args: Mapping[str, object] = field(default_factory=dict)
    checkpoint: Mapping[str, object] = field(default_factory=dict)
    missing_heads: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    provenance: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kind in {"module": nn.Module, "weights": str, "preprocess": Preprocess}.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ModelError(
                    f"{name} of the Backbone is a {type(value).__name__}; expected a "
                    f"{kind.__name__}."
                )
        _check_module(self.module, self.name)
        self.choices: dict[str, str] = {}
        if self.is_users:
            if self.module in _modules_in_use:
                raise ModelError(
                    f"{self.name}: another run or embedder uses this module, with its own captures "
                    "and precision. Close that first, or give a copy of the module, or a function "
                    "that builds one."
                )
            _modules_in_use.add(self.module)
            self._modes = [(module, module.training) for module in self.module.modules()]
            self._parameters = [
                (x, x.data, x.grad, x.requires_grad) for x in self.module.parameters()
            ]
            self._buffers = _buffers_of(self.module)
            self._device = next((x.device for x, *_ in self._parameters), torch.device("cpu"))
        try:
            self.weights_sha256 = state_sha256(self.module)
            for x in self.module.parameters() if self.is_users else ():
                x.grad = None  # otherwise converted and moved with its parameter
            try:
                self.module.eval()
            except NotImplementedError as error:  # modules of torch.export have no modes
                raise ModelError(
                    f"{self.name}: the module cannot be put in eval mode: {error} The mode of a "
                    "module that torch.export has made is fixed. Give the module that was "
                    "exported, or save the program: model=export model.name=FILE.pt2."
                ) from error
            self.module.requires_grad_(False)

            # Images are float32, and the option `precision` decides in which dtype a run computes.
            # The conversion of float16 and bfloat16 is exact. A module with several dtypes converts
            # between them itself and is left as it is.
            dtypes = {x.dtype for x in self.module.parameters() if x.is_floating_point()}
            if len(dtypes) == 1 and dtypes != {torch.float32}:
                dtype = str(dtypes.pop()).removeprefix("torch.")
                self.module.float()
                self.choices["parameters"] = f"{dtype} in the module, float32 in the run"
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Restore parameters, gradients, buffers and modes of a user's module.

        The original tensors come back, and with them dtype, device, memory format, and memory that
        is shared with other tensors. Modules that featx has built are left as they are.
        """
        if not self.is_users:
            return
        _modules_in_use.discard(self.module)
        if any(type(data) is not torch.Tensor for _, data, _, _ in self._parameters):
            self.module.to(self._device)  # tensor subclasses, whose data cannot be replaced
        for x, data, gradient, requires_grad in self._parameters:
            if type(data) is torch.Tensor:
                x.data = data
            x.requires_grad_(requires_grad)
            x.grad = gradient
        for module, name, buffer, values in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None and not torch.equal(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)
        for module, training in self._modes:
            module.training = training


def _check_module(module: nn.Module, name: str) -> None:
    refuse_scripted(dict(module.named_modules()))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    lazy = [key for key, x in tensors.items() if is_lazy(x)]
    if lazy:
        raise ModelError(
            f"{name}: {', '.join(lazy[:5])} have no values yet (LazyLinear and its like take their "
            "shape from the first batch, and random weights). Pass a batch through the model in "
            "the factory, then load its weights there."
        )
    empty = [key for key, x in tensors.items() if x.is_meta]
    if empty:
        raise ModelError(
            f"{name}: {', '.join(empty[:5])} are on the meta device, which holds no values. Build "
            "the model on the CPU, or load its weights with assign=True."
        )


def _buffers_of(module: nn.Module) -> list[tuple[nn.Module, str, Any, Any]]:
    """(module, name, buffer, copy of its values) for every buffer; a buffer may be None."""
    return [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]


def state_sha256(module: nn.Module) -> str:
    """SHA-256 over name, dtype, shape and bytes of every parameter and buffer, in order."""
    sha = hashlib.sha256()
    for name, value in module.state_dict().items():
        for part, tensor in _plain_tensors(name, value):
            data = tensor.detach().cpu().contiguous()
            sha.update(f"{part} {data.dtype} {tuple(data.shape)};".encode())
            sha.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def config_sha256(config: Mapping[str, object]) -> str:
    """SHA-256 of the config that a library builds a model from, which decides more than names and
    shapes of the weights."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def tensor_digest(x: torch.Tensor) -> bytes:
    """Digest of the bytes of a tensor; b'' if it has no values, which `Backbone` refuses."""
    if is_lazy(x) or x.is_meta:
        return b""
    values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data).digest()


def _plain_tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """The dense tensors of which a value of a state dict consists, each with a name.

    Quantised modules of torch.ao have tuples of quantised tensors in their state dict; tensor
    subclasses of torchao consist of other tensors.
    """
    if isinstance(value, tuple | list):
        for number, part in enumerate(value):
            yield from _plain_tensors(f"{name}[{number}]", part)
    elif isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        for part in names:
            yield from _plain_tensors(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, torch.Tensor) and value.is_quantized:
        yield f"{name}.int_repr", value.int_repr()
        if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale, zero = torch.tensor(value.q_scale()), torch.tensor(value.q_zero_point())
        else:
            scale, zero = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        yield f"{name}.scale", scale
        yield f"{name}.zero_point", zero
    elif isinstance(value, torch.Tensor):
        yield name, value if value.layout == torch.strided else value.to_dense()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU inside the block, and restore them after it.

    Blocks of other threads wait: all threads draw from one generator.
    """
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the CUDA devices, which fork_rng(devices=[]) does not
        # restore.
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put all modules in eval mode inside the block, and restore the mode of each after it."""
    # A frozen BatchNorm is in eval mode within a model that trains.
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def random_id(seed: int) -> str:
    """Description of random weights in the store."""
    return f"random (seed {seed})"


def reset_weights(backbone: Backbone, fresh: nn.Module, seed: int) -> None:
    """Replace the loaded parameters and buffers by those of an untrained model.

    Preprocessing and names stay. `fresh` is the same architecture as its library makes it with this
    seed; it may have more tensors.
    """
    state, fresh_state = backbone.module.state_dict(), fresh.state_dict()
    different = [
        name
        for name, x in state.items()
        if name not in fresh_state or fresh_state[name].shape != x.shape
    ]
    if different:
        raise ModelError(
            f"model.init=reset: {backbone.name} has other tensors with these weights than without "
            f"any: {', '.join(different[:5])}{', ...' if different[5:] else ''}. "
            "model.weights=null gives the untrained model."
        )
    if all(torch.equal(x, fresh_state[name]) for name, x in state.items()):
        raise ModelError(
            f"model.init=reset has no effect: the weights of {backbone.name} ({backbone.weights}) "
            "are its own random ones. Leave it out, or name trained weights in model.weights."
        )
    backbone.module.load_state_dict({name: fresh_state[name] for name in state})
    backbone.weights = f"{random_id(seed)}, reset from {backbone.weights}"
    backbone.weights_sha256 = state_sha256(backbone.module)
