"""A person's network as a target: what would be silently wrong later is refused before the first round."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.data.federation import Federation
from pfedhn.data.lazy import LazyFederation
from pfedhn.errors import UserError
from pfedhn.model import Factory, Model, PerExample
from pfedhn.models import cross_entropy, is_correct, squared_error


def build_model(
    name: str,
    factory: Factory,
    federation: Federation,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
) -> Model:
    """An architecture that fits the federation's data, or a sentence that says why it does not."""
    is_classes = not federation.y.is_floating_point() and federation.y.ndim == 1
    loss = loss or (squared_error if federation.y.is_floating_point() else cross_entropy)
    dtype = federation.x.dtype if federation.x.is_floating_point() else torch.get_default_dtype()
    model = Model(name, factory, loss, metric, federation.x.device, dtype)
    outputs = check_model(model, federation)
    is_classifier = is_classes and isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] > 1
    return replace(model, per_example_metric=is_correct) if metric is None and is_classifier else model


def check_model(model: Model, federation: Federation) -> Any:
    """Run the network once on real rows: what would be silently wrong later is refused now."""
    if not model.shapes:
        raise UserError(f"the network {model.name!r} has no trainable parameters; there is nothing to learn.")
    x, y = federation.examples(federation.splits["train"].of(0)[:4])
    module = model.with_weights(model.fresh(0)).train()
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            outputs = module(x)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"the network {model.name!r} does not take rows of shape {tuple(x.shape[1:])}: {reason}"
            ) from error
        changed = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name])]
        if changed:
            layers = sorted({name.rpartition(".")[0] or name for name in changed})
            raise UserError(
                f"the forward pass of {model.name!r} changes buffers of the layers {', '.join(layers)}; a client's "
                "weights would then depend on who trained before it. Use GroupNorm or LayerNorm instead of BatchNorm, "
                "or track_running_stats=False."
            )
        if model.per_example_loss is cross_entropy:
            num_outputs, top = outputs.shape[-1], int(federation.y.max())
            if top >= num_outputs:
                row = int((federation.y == top).nonzero()[0][0])
                raise UserError(
                    f"row {row} has the label {top}, but the network {model.name!r} has {num_outputs} outputs "
                    f"(labels 0 to {num_outputs - 1}); give the network more outputs or mend the labels."
                )
        torch.manual_seed(1)
        again = module(x)
        if not model.is_random and any(
            not torch.equal(a, b) for a, b in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(again), strict=True)
        ):
            raise UserError(
                f"the forward pass of {model.name!r} draws random numbers outside of a dropout layer, which cannot be "
                "keyed by client and round; use nn.Dropout instead of functional dropout, or take the noise out."
            )
        values = model.per_example_loss(outputs, y)
    if values.shape != y.shape[:1]:
        raise UserError(
            f"the loss returned the shape {tuple(values.shape)} for {len(y)} rows; it must return one value per row, "
            "e.g. with reduction='none'."
        )
    return outputs


def with_num_outputs(federation: LazyFederation, models: Iterable[Model]) -> LazyFederation:
    """Labels of clients that are loaded later can only be checked then."""
    x, _ = federation.examples(federation.splits["train"].of(0)[:4])
    classifiers = [model for model in models if model.per_example_loss is cross_entropy]
    found = [model.outputs(model.fresh(0), x).shape[-1] for model in classifiers]
    return replace(federation, num_outputs=min(found, default=None))
