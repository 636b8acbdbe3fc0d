"""A person's network as a target: what would be wrong or fail later is refused before the first round."""

import inspect
import logging
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pfedhn import keys
from pfedhn.algorithm import Algorithm
from pfedhn.data.federation import Federation
from pfedhn.data.lazy import LazyFederation
from pfedhn.engine.gpu import computing_on_gpu
from pfedhn.errors import UserError, first_line, short
from pfedhn.model import Factory, Model, PerExample
from pfedhn.models import IMAGE_SIDES, cross_entropy, is_correct, squared_error
from pfedhn.params import stack
from pfedhn.sgd import Batches
from pfedhn.statistics import normalizations
from pfedhn.system.process import WHOLE_PROCESS

logger = logging.getLogger("pfedhn")

NUM_TRIED = 4  # examples that a network is tried on


def build_model(
    name: str,
    factory: Factory,
    federation: Federation,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
) -> Model:
    """Make an architecture that fits the federation's data, or refuse it with a sentence that says why.

    Args:
        name: What the architecture is called.
        factory: A function without arguments that makes the network.
        federation: Whose clients will train it.
        loss: (outputs, y) -> one value per example. By default cross-entropy for class labels and squared error for
            numbers.
        metric: (outputs, y) -> one value per example, higher is better. By default accuracy for class labels.

    Raises:
        UserError: If the network would give wrong numbers or fail later.
    """
    check_factory(name, factory)
    for what, function in (("loss", loss), ("metric", metric)):
        if function is not None and not callable(function):
            raise UserError(f"the {what} is {short(function)}; give a function (outputs, y) -> one value per example.")
    is_classes = not federation.y.is_floating_point() and federation.y.ndim == 1
    loss = loss or (squared_error if federation.y.is_floating_point() else cross_entropy)
    dtype = federation.dtype if federation.dtype.is_floating_point else torch.get_default_dtype()
    model = Model(name, factory, loss, metric, federation.x.device, dtype)
    outputs = check_model(model, federation)
    is_classifier = is_classes and isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    return replace(model, per_example_metric=is_correct) if metric is None and is_classifier else model


def with_frozen(model: Model, algorithm: Algorithm[Any, Any, Any], seed: int) -> Model:
    """The network whose parameters that the method freezes are constants, with the initial values of this seed."""
    names = tuple(algorithm.frozen(model))
    return replace(model, frozen=names, frozen_key=int(keys.fold(seed, "init"))) if names else model


def check_model(model: Model, federation: Federation) -> Any:
    """Try a network on real examples, refuse what would be wrong or fail later, and return the outputs."""
    if not model.shapes:
        raise UserError(f"the network {model.name!r} has no trainable parameters; there is nothing to learn.")
    x, y = _first_examples(federation)
    module = model.with_weights(model.fresh(0)).train()
    # What tf32 rounds away looks like a batch that matters.
    with WHOLE_PROCESS, computing_on_gpu("fp32", is_deterministic=False) if x.is_cuda else nullcontext():
        outputs = _refuse_changes(model, module, x)
        _refuse_outputs(model, outputs, x, federation)
        _refuse_loss(model, outputs, y)
        _refuse_metric(model, outputs, y)
        _refuse_without_gradient(model, module, x, y)
        _refuse_random_draws(model, module, x)
        _refuse_batch_dependence(model, module, x, y)
    return outputs


def check_factory(name: str, factory: Any) -> None:
    """Refuse what does not make a network, or not one that a seed decides."""
    if not callable(factory):
        raise UserError(
            f"the network {name!r} is given as {type(factory).__name__}; give a function that makes it, such as its "
            "class or lambda: MyNetwork(10)."
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UserError(
            f"the network {name!r} cannot be made without arguments ({error}); give a function that fills them in, "
            "such as lambda: MyNetwork(10)."
        ) from None
    except ValueError:
        pass  # written in C: it does not say what it takes
    module, again, other = (_made(name, factory, seed) for seed in (0, 0, 1))
    if not isinstance(module, nn.Module):
        raise UserError(f"the function that makes {name!r} returned {type(module).__name__}; it must return a network.")
    if again is module:
        raise UserError(
            f"the function that makes {name!r} returned the same network twice, so that every seed would start from "
            "the same weights; let it make a new one each time."
        )
    if lazy := _layers(name for name, value in module.named_parameters() if is_lazy(value)):
        raise UserError(
            f"the layers {lazy} of {name!r} learn their sizes from the first batch; write the sizes down, with "
            "nn.Linear for nn.LazyLinear."
        )
    _refuse_own_draws(name, module, again, other)


def _made(name: str, factory: Factory, seed: int) -> Any:
    with keys.seeded(seed):
        try:
            return factory()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the function that makes {name!r} fails: {first_line(error)}.") from error


def _refuse_own_draws(name: str, module: nn.Module, again: nn.Module, other: nn.Module) -> None:
    """What is drawn past PyTorch's generator is another network in every process, and a run could not go on.

    Weights that are the same for every seed may be meant (trained before, say), so that is only told.
    """
    weights, same, different = ([value.detach() for value in made.parameters()] for made in (module, again, other))
    if weights and _is_close(weights, different):
        logger.warning(
            "the function that makes %r gives the same weights for every seed; seeds then differ only in what is drawn "
            "of clients and examples.",
            name,
        )
    if not _is_close(weights, same):
        raise UserError(
            f"the function that makes {name!r} gives other weights for the same seed; draw them with PyTorch, which "
            "is seeded for it, and not from another generator."
        )


def _first_examples(federation: Federation) -> tuple[Tensor, Tensor]:
    """Several training examples, the first client's if it has so many; one that is alone stands there twice."""
    train = federation.splits["train"]
    numbers = train.of(0)[:NUM_TRIED]
    for client in range(1, len(train)):
        if len(numbers) == NUM_TRIED:
            break
        numbers = torch.cat([numbers, train.of(client)[: NUM_TRIED - len(numbers)]])
    return federation.examples(numbers if len(numbers) > 1 else numbers.repeat(2))


def _forward(model: Model, module: nn.Module, x: Tensor, seed: int = 0) -> Any:
    with keys.seeded(seed), torch.no_grad():
        try:
            return module(x)
        except Exception as error:
            way_out = ""
            if x.ndim == 4 and model.name in IMAGE_SIDES:
                side = IMAGE_SIDES[model.name]
                way_out = f"; it takes {side} x {side} pixels: read = {{resize = [{side}, {side}]}}, or another network"
            raise UserError(
                f"the network {model.name!r} does not take examples of shape {tuple(x.shape[1:])}: "
                f"{first_line(error)}{way_out}."
            ) from error


def _refuse_changes(model: Model, module: nn.Module, x: Tensor) -> Any:
    """A network computes the same for every client: its forward pass leaves it as it is."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    before = {name: value.detach().clone() for name, value in (parameters | buffers).items()}
    outputs = _forward(model, module, x)
    limited = [
        f"{name}.weight"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    ]
    if layers := _layers([*limited, *(name for name in parameters if not _is_close(parameters[name], before[name]))]):
        raise UserError(
            f"the forward pass of {model.name!r} changes the weights of the layers {layers}, which only training may "
            "change; take max_norm out of nn.Embedding."
        )
    changed = (name for name in buffers if not _is_close(buffers[name], before[name]))
    if layers := _layers(name for name in changed if name not in model.statistics):
        raise UserError(
            f"the forward pass of {model.name!r} changes buffers of the layers {layers}; a client's weights would then "
            "depend on who trained before it. Only BatchNorm layers may keep statistics; use one, or GroupNorm or "
            "LayerNorm."
        )
    return outputs


def _refuse_outputs(model: Model, outputs: Any, x: Tensor, federation: Federation) -> None:
    """Our own losses take one tensor, and cross-entropy a number for every class; a person's may take anything."""
    if model.per_example_loss not in (cross_entropy, squared_error):
        return
    if not isinstance(outputs, Tensor):
        raise UserError(
            f"the network {model.name!r} returns a {type(outputs).__name__}; let it return one tensor, or give a loss "
            "that takes what it returns: loss(outputs, y) -> one value per example."
        )
    if model.per_example_loss is squared_error:
        return
    if outputs.ndim < 2 or len(outputs) != len(x):
        raise UserError(
            f"the network {model.name!r} returns the shape {tuple(outputs.shape)} for {len(x)} examples; it must "
            "return a number for every example and class, or labels must be floating-point for a regression."
        )
    num_outputs, top = outputs.shape[-1], int(federation.y.max())
    if top >= num_outputs:
        example = int((federation.y == top).nonzero()[0][0])
        raise UserError(
            f"example {example} has the label {top}, but the network {model.name!r} has {num_outputs} outputs "
            f"(labels 0 to {num_outputs - 1}); give the network more outputs or fix the labels."
        )


def _refuse_loss(model: Model, outputs: Any, y: Tensor) -> None:
    try:
        values = model.per_example_loss(outputs, y)
    except UserError:  # it says by itself what to do
        raise
    except Exception as error:
        shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        raise UserError(
            f"the loss fails for outputs of shape {', '.join(map(str, shapes))} and labels of shape {tuple(y.shape)}: "
            f"{first_line(error)}."
        ) from error
    if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
        found = f"the shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise UserError(
            f"the loss returned {found} for {len(y)} examples; it must return one value per example, e.g. with "
            "reduction='none'."
        )


def _refuse_metric(model: Model, outputs: Any, y: Tensor) -> None:
    if model.per_example_metric is None:
        return
    try:
        values = model.per_example_metric(outputs, y)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the metric fails for labels of shape {tuple(y.shape)}: {first_line(error)}.") from error
    if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
        found = f"the shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise UserError(f"the metric returned {found} for {len(y)} examples; it must return one value per example.")


def _refuse_without_gradient(model: Model, module: nn.Module, x: Tensor, y: Tensor) -> None:
    """A loss that no weight reaches would train nothing, in silence."""
    with keys.seeded(0), torch.enable_grad():
        loss = model.per_example_loss(module(x), y)
        weights = [value for value in module.parameters() if value.requires_grad]
        reached = torch.autograd.grad(loss.sum(), weights, allow_unused=True) if loss.requires_grad else ()
    if all(gradient is None for gradient in reached):
        raise UserError(
            f"the loss of the network {model.name!r} has no gradient, so nothing would learn; leave out detach(), "
            "argmax, rounding and torch.no_grad() between the weights and the loss."
        )
    batch = Batches(x, y, torch.ones(len(y), dtype=torch.bool, device=y.device))
    try:
        with keys.seeded(0):
            torch.func.grad(model.loss)(model.fresh(0), batch)  # as clients take it, which some layers cannot
    except RuntimeError as error:
        raise UserError(
            f"the gradient of the network {model.name!r} fails ({first_line(error)}); give your autograd.Function "
            "a setup_context, and of PEFT's adapters take LoRA instead of LoHa."
        ) from error


def _refuse_random_draws(model: Model, module: nn.Module, x: Tensor) -> None:
    """Only the draws of dropout layers are keyed by client and round."""
    if not model.has_dropout and not _is_close(_forward(model, module, x, 0), _forward(model, module, x, 1)):
        raise UserError(
            f"the forward pass of {model.name!r} draws random numbers outside of a dropout layer, which cannot be "
            "keyed by client and round; use nn.Dropout instead of functional dropout, or take the noise out."
        )


def _refuse_batch_dependence(model: Model, module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Batches are filled up, and splits are evaluated together: what is computed for an example must not notice."""
    rounding = torch.finfo(model.dtype).eps ** 0.5
    for is_training in (True, False):
        if is_training and model.statistics:
            _refuse_use_of_padding(model, x, y)
            continue
        module.train(is_training)
        outputs = _forward(model, module, x)
        losses = model.per_example_loss(outputs, y)
        for kept in (0, -1):
            changed = _forward(model, module, x[kept].expand_as(x).contiguous())
            if isinstance(outputs, Tensor) and not _is_close(outputs[kept], changed[kept], rounding):
                norms = _layers(f"{name}." for name, part in module.named_modules() if isinstance(part, _BatchNorm))
                where = f" (BatchNorm in the layers {norms})" if norms else ""
                raise UserError(
                    f"what {model.name!r} computes for an example depends on the other examples of its batch{where}, "
                    "which differ between training, evaluation and use; use BatchNorm only with its running "
                    "statistics (track_running_stats=True), or GroupNorm or LayerNorm, and batch_first=True in "
                    "recurrent and attention layers."
                )
            if not _is_close(losses[kept], model.per_example_loss(changed, y)[kept], rounding):
                raise UserError(
                    f"the loss of an example depends on the other examples of its batch, in the network {model.name!r} "
                    "or in the loss itself; compute it for each example alone."
                )


def _refuse_use_of_padding(model: Model, x: Tensor, y: Tensor) -> None:
    """A network with batch statistics may look at the other rows of its batch, but not at those that fill it up."""
    mask = torch.arange(len(x), device=x.device) < (len(x) + 1) // 2
    weights, rounding = model.fresh(0), torch.finfo(model.dtype).eps ** 0.5
    losses = []
    for filling in (x, torch.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, x.flip(0))):
        with keys.seeded(0), torch.no_grad():
            losses.append(model.loss(weights, Batches(filling, y, mask)))
    if not _is_close(losses[0], losses[1], rounding):
        raise UserError(
            f"the loss of {model.name!r} depends on the rows that fill a batch up; use GroupNorm or LayerNorm instead "
            "of BatchNorm, and batch_first=True in recurrent and attention layers."
        )


def refuse_single_rows(model: Model, federation: Federation, batch_size: int) -> None:
    """A variance needs two values: a batch of one row has them only where a layer sees several of each channel."""
    if not model.statistics:
        return
    sizes: list[int] = federation.splits["train"].size.tolist()
    owners = federation.architectures or [model.name] * len(sizes)
    smallest = min((i for i, name in enumerate(owners) if name == model.name), key=sizes.__getitem__, default=0)
    if min(sizes[smallest], batch_size) > 1:
        return
    x, single = _first_examples(federation)[0], list[str]()
    module = model.with_weights(model.fresh(0)).train()
    for name, part in normalizations(module).items():
        # Bound now: the loop goes on.
        part.register_forward_pre_hook(
            lambda part, given, name=name: single.append(name) if given[0][0, 0].numel() == 1 else None
        )
    _forward(model, module, x)
    if single:
        who = "the client" if len(sizes) == 1 else f"client {federation.name_of(smallest)}"
        one, more = (
            ("batch_size is 1", "let it be 2 at least")
            if batch_size == 1
            else (f"{who} has 1 training example", "give it two at least")
        )
        raise UserError(
            f"{one}, of which the network {model.name!r} cannot make a variance (in its BatchNorm layers "
            f"{', '.join(single)}); {more}, or use a network with GroupNorm or LayerNorm, or with neither."
        )


def _is_close(found: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Whether the tensors of two trees are equal, up to a part of the largest number."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(
        torch.allclose(a.double(), b.double(), rtol=0.0, atol=tolerance * _largest(b), equal_nan=True)
        for a, b in pairs
        if isinstance(a, Tensor) and a.numel()
    )


def _largest(value: Tensor) -> float:
    return float(value.double().abs().nan_to_num().max())


def _layers(names: Iterable[str]) -> str:
    """The layers that own these parameters or buffers, as a person would list them."""
    return ", ".join(sorted({name.rpartition(".")[0] or name for name in names}))


def batching_error(model: Model, federation: Federation) -> str | None:
    """Why `torch.vmap` cannot train and test several copies of a network at once; None if it can."""
    x, y = _first_examples(federation)
    batch = Batches(x, y, torch.ones(len(x), dtype=torch.bool, device=x.device))

    def one_client(weights: Any, batch: Batches) -> Any:
        outputs = model.outputs(weights, batch.x)
        scores = [model.per_example_loss(outputs, batch.y)]
        if model.per_example_metric is not None:
            scores.append(model.per_example_metric(outputs, batch.y))
        return torch.func.grad(model.loss)(weights, batch), scores

    try:
        torch.vmap(one_client)(stack([model.fresh(0), model.fresh(1)]), stack([batch, batch]))
    except Exception as error:  # of `torch.vmap`, and of whatever the network makes of the tensors that it gets from it
        return first_line(error)
    return None


def draws_freely(model: Model, federation: Federation) -> bool:
    """Whether a network draws by other means than dropout layers, which only the loop can key."""
    if not model.has_dropout:
        return False
    x, y = _first_examples(federation)
    return model.draws_freely(Batches(x, y, torch.ones(len(x), dtype=torch.bool, device=x.device)))


class _Convolutions(TorchDispatchMode):
    """Notices convolutions of PyTorch's own, not those of the package's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: bool = False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.found |= function is torch.ops.aten.convolution.default
        return function(*arguments, **(options or {}))


def convolves(model: Model, federation: Federation) -> bool:
    """Whether a network takes PyTorch's convolutions: on a GPU, those of many clients at once are slow."""
    convolutions = _Convolutions()
    with torch.no_grad(), convolutions:
        model.outputs(model.fresh(0), federation.first(2))
    return convolutions.found


def choose_executor(asked: str, model: Model, federation: Federation, clients_per_round: int) -> str:
    """The name of the executor that runs a network, or a refusal if the one that was asked for cannot.

    "auto" batches clients where every layer is linear, so that they share products; elsewhere batching is no gain.
    """
    if (is_free := draws_freely(model, federation)) and asked in ("vectorized", "traced"):
        raise UserError(
            f"the executor {asked!r} cannot run the network {model.name!r}: it draws in ways of its own, which cannot "
            "be keyed by client; use 'loop', or nn.Dropout layers."
        )
    if asked == "vectorized" and (reason := batching_error(model, federation)):
        raise UserError(
            f"the executor 'vectorized' cannot run the network {model.name!r}: {reason}; use 'traced' or 'loop'."
        )
    if asked not in ("auto", "captured"):
        return asked
    if is_free:
        return "loop"
    if clients_per_round > 1 and model.is_plain and batching_error(model, federation) is None:
        return "vectorized"
    return "traced"


def with_num_outputs(federation: Federation, models: Iterable[Model]) -> Federation:
    """Note how many classes the networks tell apart: the labels of clients that are loaded later are checked then."""
    if not isinstance(federation, LazyFederation):
        return federation
    x, _ = _first_examples(federation)
    classifiers = [model for model in models if model.per_example_loss is cross_entropy]
    found = [model.outputs(model.fresh(0), x).shape[-1] for model in classifiers]
    return replace(federation, num_outputs=min(found, default=None))
