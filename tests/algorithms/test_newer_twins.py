"""The methods that people compare with, against plain versions of them, as in test_twins.py.

Beside each twin stand tests for the faults that other implementations of the method have had (docs/baselines.md).
"""

from typing import Any

import pytest
import torch
from support import (
    assert_close,
    finish,
    model,
    mostly_slow,
    personal,
    simulate,
)
from test_twins import (
    CLIENTS,
    LOCAL,
    TWINS,
    average,
    cohorts,
    network,
    optimizer,
    row,
    training_batches,
    weights_of,
)
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.fedprox import FedProx
from pfedhn.data.federation import Federation
from pfedhn.params import Params, take
from pfedhn.sgd import Batches

EXACT = {"rtol": 1e-12, "atol": 1e-13}
every_target = pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))


def descend_pulled(
    spec: Any, net: torch.nn.Module, center: Params, batches: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """SGD on the loss plus mu/2 times the squared distance; a clip bounds the gradient of the loss alone."""
    steps = optimizer(spec, net.parameters())
    for x, y in batches:
        steps.zero_grad()
        cross_entropy(net(x), y).backward()
        if spec.local_clip is not None:
            clip_grad_norm_(net.parameters(), spec.local_clip)
        distance = sum((value - center[name]).square().sum() for name, value in net.named_parameters())
        (spec.strength / 2 * distance).backward()
        steps.step()


# FedProx


@every_target
@pytest.mark.parametrize(
    "spec", [row("fedprox", **LOCAL, strength=0.7), row("fedprox", **LOCAL, strength=2.0, local_clip=0.5)], ids=str
)
def test_fedprox(federation: Federation, target: str, spec: FedProx) -> None:
    simulation = simulate(spec, federation, target, cohort=3)
    (w,) = simulation.initial_models().values()
    for number, clients in enumerate(cohorts(simulation)):
        trained = {}
        for client in clients:
            net = network(model(target), w)
            descend_pulled(spec, net, w, training_batches(simulation, number, client))
            trained[client] = weights_of(net)
        w = average("size", trained)

    state = finish(simulation)
    assert_close(state.memories.shared, w, **EXACT)
    assert_close(personal(simulation, state), [w for _ in CLIENTS], **EXACT)


def test_the_proximal_term_has_the_gradient_of_half_a_squared_distance(federation: Federation) -> None:
    """Not that of the distance itself, and not none: two steps with a strength of s differ by lr s (w_1 - w)."""
    batches = Batches(*take(federation.batches(torch.tensor([2]), 1, 2, 5), 0))
    w, private = model().fresh(1), {}
    plain = {"local_lr": 0.1, "local_steps": 2, "local_momentum": 0.0, "local_weight_decay": 0.0}
    free, held = (
        ALGORITHMS["fedprox"](**plain, strength=strength).train(model(), w, private, batches)[0]
        for strength in (0.0, 3.0)
    )
    first, _ = ALGORITHMS["fedavg"](**(plain | {"local_steps": 1})).train(model(), w, private, take(batches, slice(1)))
    for name in w:  # an update is received minus trained, so that after one step w_1 - w is minus the first update
        assert_close(held[name], free[name] + 0.1 * 3.0 * -first[name], **EXACT)
        assert (held[name] - free[name]).abs().max() > 1e-4


def test_every_method_has_a_twin() -> None:
    assert set(ALGORITHMS) == TWINS
