"""A target network as a value: the shapes of its weights, its loss and how it is made."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.backends import cudnn
from torch.func import functional_call

from pfedhn.dropout import drawing, has_dropout, keyed
from pfedhn.errors import UserError
from pfedhn.keys import Key, seeded
from pfedhn.params import Params, take
from pfedhn.privacy import NO_GRADIENT, protected
from pfedhn.sgd import Batches
from pfedhn.statistics import collecting, copied, masked, statistics_of, training_pass

Factory: TypeAlias = Callable[[], nn.Module]

UNFUSED = "_pfedhn_unfused"  # on a class whose forward pass was rewritten: the class before that


PerExample: TypeAlias = Callable[[Any, Tensor], Tensor]
"""(outputs, y) -> one value per example."""


@dataclass(frozen=True)
class Model:
    """An architecture: the shapes of its weights, its loss and its factory. Holds no trained weights."""

    name: str
    factory: Factory
    per_example_loss: PerExample
    per_example_metric: PerExample | None = None
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    frozen: tuple[str, ...] = ()  # parameters that a method leaves at their start, besides those that the factory froze
    frozen_key: int = 0  # of that start

    def __post_init__(self) -> None:
        _ = self._evaluated_module  # made now: a module cannot be made inside a vmap, a gradient or a trace

    @cached_property
    def _module(self) -> nn.Module:
        return self._build(self.frozen_key).train()

    @cached_property
    def training_module(self) -> nn.Module:
        module = masked(self._module)
        return keyed(copied(module)) if self.has_dropout else module

    @cached_property
    def testing_module(self) -> nn.Module:
        return copied(self._module).eval()

    @cached_property
    def _evaluated_module(self) -> nn.Module:
        """As `testing_module`, which is what a person is given, in a form that can be mapped over clients."""
        return masked(self.testing_module)

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of the trainable parameters; frozen parameters and buffers are constants of the architecture."""
        return {name: value.shape for name, value in _trainable(self.training_module).items()}

    @cached_property
    def statistics(self) -> Params:
        """The running statistics of BatchNorm layers before anybody trains, by their names in a state dict."""
        return statistics_of(self._module)

    @cached_property
    def constants(self) -> Params:
        """Frozen parameters, and buffers that are no running statistics: what nobody trains and no checkpoint holds."""
        frozen = {name: value for name, value in self._module.named_parameters() if not value.requires_grad}
        return {
            name: value.detach()
            for name, value in (frozen | dict(self._module.named_buffers())).items()
            if name not in self.statistics
        }

    @cached_property
    def is_plain(self) -> bool:
        """Whether every parameter belongs to a linear layer, so that many clients batch into one product."""
        owners = [module for module in self.training_module.modules() if list(module.parameters(recurse=False))]
        return all(isinstance(module, nn.Linear) for module in owners)

    @cached_property
    def has_dropout(self) -> bool:
        return has_dropout(self._module)

    @contextmanager
    def seeded(self, noise: Tensor, is_alone: bool = True) -> Iterator[None]:
        """Key the random numbers that the forward pass draws by itself, if it draws any.

        Args:
            noise: The key of ONE client's work.
            is_alone: Whether the client is run by itself, operation by operation: then PyTorch's generator is seeded
                too, for what is drawn by other means than layers.
        """
        if not self.has_dropout:
            yield
        elif is_alone:
            with seeded(noise), drawing(noise):
                yield
        else:
            with drawing(noise):
                yield

    def draws_freely(self, batch: Batches) -> bool:
        """Whether training on a batch draws from PyTorch's generator, which only a client run by itself can seed."""
        if not self.has_dropout:
            return False
        device = torch.device(self.device)
        state = partial(torch.cuda.get_rng_state, device) if device.type == "cuda" else torch.get_rng_state
        weights, key = self.fresh(0), torch.zeros((), dtype=torch.int64, device=device)
        with seeded(0, device), torch.no_grad(), drawing(key):
            before = state()
            self.loss(weights, batch)
            return not torch.equal(before, state())

    def _build(self, key: Key) -> nn.Module:
        with seeded(key):
            module = self.factory().to(self.device, self.dtype)
        for name in self.frozen:
            module.get_parameter(name).requires_grad_(False)
        return module

    def fresh(self, key: Key) -> Params:
        """Newly initialized weights, a function of the key alone."""
        return {name: value.detach() for name, value in _trainable(self._build(key)).items()}

    def loss(self, weights: Params, batch: Batches) -> Tensor:
        """Mean loss over the examples of one batch [B, ...] that the mask keeps."""
        return self.mean_loss(self._training_outputs(self.training_module, weights, batch), batch)

    def mean_loss(self, outputs: Any, batch: Batches) -> Tensor:
        """`loss`, given the network's outputs."""
        values = self.per_example_loss(outputs, batch.y)
        return torch.where(batch.mask, values, 0.0).sum() / batch.mask.sum()

    def features(self, weights: Params, batch: Batches) -> tuple[Tensor, Any]:
        """The input of the last layer on one batch [B, ...], and the network's outputs, in one training pass."""
        noted: list[Tensor] = []
        token = _noted.set(noted)
        try:
            outputs = self._training_outputs(self._watched_module, weights, batch)
        finally:
            _noted.reset(token)
        if not noted:
            raise UserError(
                f"the forward pass of {self.name} does not call its last layer {self.last_layer!r} as a module, so its "
                "input is unknown; use another method, or call the layer in `forward`."
            )
        return noted[-1], outputs

    @property
    def last_layer(self) -> str:
        """The layer that holds the last parameter: the classifier of an ordinary network."""
        return list(self.shapes)[-1].rpartition(".")[0] or list(self.shapes)[-1]

    @cached_property
    def _watched_module(self) -> nn.Module:
        """As `training_module`, with a last layer that notes its input; tensors are shared, so a trace may make it."""
        module = self.training_module
        tensors = [*module.parameters(), *module.buffers()]
        module = copy.deepcopy(module, {id(value): value for value in tensors})
        module.__class__ = getattr(type(module), UNFUSED, type(module))
        layers = dict(module.named_modules())
        if self.last_layer in layers:
            layers[self.last_layer].register_forward_pre_hook(_note_input)
        return module

    def _training_outputs(self, module: nn.Module, weights: Params, batch: Batches) -> Any:
        if protected() is not None and batch.mask.shape[0] > 1:
            raise UserError(NO_GRADIENT)  # a method of one's own may differentiate it in its own way
        if self.statistics:
            with training_pass(self.statistics, batch.mask):
                return self._forward(module, weights, batch.x)
        return self._forward(module, weights, batch.x)

    def statistics_from(self, weights: Params, batches: Batches) -> Params:
        """The batch statistics of these weights on some minibatches [K, B, ...]: the mean over batches."""
        now = self.statistics
        for number in range(batches.mask.shape[0]):
            batch = take(batches, number)
            with collecting() as after, training_pass(now, batch.mask, share=1 / (number + 1)):
                self._forward(self.training_module, weights, batch.x)
            now = after
        return {name: value.detach() for name, value in now.items()}

    def outputs(self, weights: Params, x: Tensor) -> Any:
        """What a client's own model computes; its weights have its batch statistics among them."""
        return self._forward(self._evaluated_module, weights, x)

    def _forward(self, module: nn.Module, weights: Params, x: Tensor) -> Any:
        # cuDNN's recurrent layers ask where their weights lie in memory, and those of a gradient or a map lie nowhere.
        with without_cudnn() if self._is_recurrent and x.is_cuda else nullcontext():
            return functional_call(module, weights, (x,))

    @cached_property
    def _is_recurrent(self) -> bool:
        return any(isinstance(part, nn.RNNBase) for part in self._module.modules())

    def with_weights(self, weights: Params) -> nn.Module:
        """A plain module of this architecture that carries `weights`."""
        module = copy.deepcopy(self.testing_module)
        module.load_state_dict({name: value.detach() for name, value in weights.items()}, strict=False)
        return module


_noted: ContextVar[list[Tensor] | None] = ContextVar("noted", default=None)


def _note_input(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    noted = _noted.get()
    if noted is not None:
        noted.append(inputs[0])


_CUDNN = threading.RLock()


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Inside the block PyTorch's own kernels stand for cuDNN's. One thread at a time: the switch is the process's."""
    with _CUDNN:
        kept = {"benchmark": cudnn.benchmark, "deterministic": cudnn.deterministic, "allow_tf32": cudnn.allow_tf32}
        with cudnn.flags(enabled=False, **kept):
            yield


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in module.named_parameters() if value.requires_grad}
