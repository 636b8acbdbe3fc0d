"""Target networks of our own."""

import functools
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import pfedhn
from pfedhn.model import Model
from pfedhn.models import TabularMLP, squared_error
from pfedhn.params import stack


def scaled(network: nn.Module, x: Tensor) -> Tensor:
    """What the first linear layer of a network is given."""
    given: list[Any] = []
    handle = network.get_submodule("layers.0").register_forward_pre_hook(lambda part, inputs: given.extend(inputs))
    network(x)
    handle.remove()
    (found,) = given
    return found


def test_columns_of_a_table_are_scaled_and_those_without_spread_only_centered() -> None:
    network = TabularMLP(4, 8, 2).eval()
    network.scale.running_mean.copy_(torch.tensor([50.0, 0.0, 1000.0, 0.01]))  # type: ignore[union-attr, operator]
    network.scale.running_var.copy_(torch.tensor([225.0, 0.0, 1e-8, 1e-6]))  # type: ignore[union-attr, operator]
    x = torch.tensor([[80.0, 1.0, 1001.0, 0.012], [50.0, 0.0, 1000.0, 0.01]])
    expected = torch.tensor([[2.0, 1.0, 1.0, 0.002 / (1e-6 + 1e-5) ** 0.5], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(scaled(network, x), expected, rtol=1e-5, atol=1e-6)


def test_a_rare_value_does_not_outweigh_all_other_columns() -> None:
    network = TabularMLP(2, 8, 2).eval()
    network.scale.running_var.copy_(torch.tensor([1e-4, 1.0]))  # type: ignore[union-attr, operator]
    found = scaled(network, torch.tensor([[1.0, -3.0], [-1.0, 9.0]]))
    torch.testing.assert_close(found, torch.tensor([[10.0, -3.0], [-10.0, 9.0]]), rtol=1e-4, atol=0)


def test_the_bound_is_further_out_than_any_value_of_an_ordinary_minibatch() -> None:
    x = torch.zeros(100, 1)
    x[0] = 1e4
    network = TabularMLP(1, 4, 2).train()
    torch.testing.assert_close(scaled(network, x), nn.BatchNorm1d(1, affine=False).train()(x), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "traced", "vectorized"])
def test_a_new_value_in_a_clients_constant_column_counts_as_it_is(executor: str) -> None:
    random = numpy.random.default_rng(0)
    clients = {}
    for number, name in enumerate(("Berlin", "Görlitz")):
        x = random.normal(50, 20, size=(60, 3)).astype("float32")
        x[:, 2] = random.integers(0, 2, 60) if number == 0 else 0
        clients[name] = (x, (x[:, 0] > 50).astype("int64"))
    network = functools.partial(TabularMLP, 3, 8, 2)
    run = pfedhn.train(
        pfedhn.Local(local_steps=60),
        pfedhn.Federation.from_clients(clients),
        network,
        steps=10,
        progress=False,
        device="cpu",
        executor=executor,
    )
    model = run.personal_model("Görlitz")
    rows = torch.tensor([[50.0, 50.0, 0.0], [50.0, 50.0, 1.0]])
    first, second = scaled(model, rows)[:, 2].tolist()
    assert (first, second) == pytest.approx((0.0, 1.0), abs=1e-6)


def test_a_stack_of_models_scales_as_each_of_them() -> None:
    model = Model("tabular-8", functools.partial(TabularMLP, 2, 8, 1), squared_error)
    statistics = {"scale.running_mean": torch.zeros(2), "scale.num_batches_tracked": torch.tensor(9)}
    each = [
        {**model.fresh(key), **statistics, "scale.running_var": torch.tensor(variances)}
        for key, variances in enumerate(([0.0, 4.0], [4.0, 0.0]))
    ]
    x = torch.tensor([[1.0, 1.0], [3.0, -2.0]])
    together = torch.vmap(model.outputs, (0, None))(stack(each), x)
    torch.testing.assert_close(together, torch.stack([model.outputs(weights, x) for weights in each]))
