"""What a step reads besides its arguments: every executor computes what the loop does, or refuses."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import assert_close, finish, memories_of, model, mostly_slow, simulate
from torch import Tensor, nn

from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.data.federation import Federation
from pfedhn.engine import executors, gpu
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.closures import Watch, lift
from pfedhn.engine.executors import TracedScan
from pfedhn.engine.simulate import Simulation
from pfedhn.errors import UserError
from pfedhn.model import Model
from pfedhn.params import Params, pack
from pfedhn.sgd import Batches, gradient, scan

Pull = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose steps are pulled towards what the client received, which they come by in some way of Python's."""

    local_steps: int = 3
    local_lr: float = 0.1
    pulled: Callable[[Params, Tensor], Pull] = field(kw_only=True)

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        start, unpack = pack(received)
        gradient_of = gradient(model.loss, unpack)
        pull = self.pulled(received, start)

        def step(weights: Tensor, batch: Batches, lr: Any) -> Tensor:
            return weights - lr * (gradient_of(weights, batch) + 0.5 * pull(weights))

        return unpack(start - scan(step, start, batches, self.local_lr)), private


def by_a_variable(received: Params, start: Tensor) -> Pull:
    return lambda weights: weights - start


def by_containers(received: Params, start: Tensor) -> Pull:
    held: Any = {"start": (received, [start.mean()])}

    def pull(weights: Tensor) -> Tensor:
        parts, (mean,) = held["start"]
        return weights - mean * torch.cat([part.reshape(-1) for part in parts.values()])

    return pull


def by_a_function_in_a_function(received: Params, start: Tensor) -> Pull:
    def origin() -> Tensor:
        return start

    def distance(weights: Tensor) -> Tensor:
        return weights - origin()

    return lambda weights: distance(weights)


def by_default_values(received: Params, start: Tensor) -> Pull:
    mean = start.mean()
    return lambda weights, start=start, *, mean=mean: weights - mean * start


def by_a_partial(received: Params, start: Tensor) -> Pull:
    return partial(torch.sub, other=start)


def end_of(simulation: Simulation) -> Any:
    """All memories after a run."""
    state = simulation.initial_state()
    if simulation.executor != "captured":
        return memories_of(finish(simulation, state))
    list(CapturedRun(simulation, state).rounds())
    return memories_of(state)


@pytest.mark.parametrize(
    ("target", "cohort"), mostly_slow([("mlp", 1), ("mlp", 3), ("conv", 1), ("conv", 3)], ("mlp", 3))
)
@pytest.mark.parametrize("executor", ["traced", "vectorized", "captured"])
def test_a_step_may_close_over_what_was_received(
    federation: Federation, target: str, cohort: int, executor: str
) -> None:
    """As everybody writes FedProx first; a graph is replayed for clients and rounds that received something else."""
    algorithm = FedProx(pulled=by_a_variable)
    settings: Any = {"rounds": 5, "cohort": cohort}
    expected = end_of(simulate(algorithm, federation, target, executor="loop", **settings))
    assert_close(end_of(simulate(algorithm, federation, target, executor=executor, **settings)), expected)


@pytest.mark.parametrize(
    "pulled", [by_containers, by_a_function_in_a_function, by_default_values, by_a_partial], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(("executor", "cohort"), mostly_slow([("traced", 1), ("captured", 3)], ("traced", 1)))
def test_wherever_a_function_keeps_it(federation: Federation, pulled: Any, executor: str, cohort: int) -> None:
    algorithm = FedProx(pulled=pulled)
    expected = end_of(simulate(algorithm, federation, rounds=4, cohort=cohort, executor="loop"))
    assert_close(end_of(simulate(algorithm, federation, rounds=4, cohort=cohort, executor=executor)), expected)


def by_a_number(received: Params, start: Tensor) -> Pull:
    size = float(start.norm())
    return lambda weights: size * weights


def by_another_function(received: Params, start: Tensor) -> Pull:
    return (lambda weights: weights) if float(start.mean()) * 1e6 % 2 < 1 else (lambda weights: weights.sin())


def by_other_names(received: Params, start: Tensor) -> Pull:
    """The mean of one tensor or another, in one place."""
    chosen = {"a" if float(start.mean()) * 1e6 % 2 < 1 else "b": start}
    return lambda weights: weights - (chosen["a"] if "a" in chosen else 2 * chosen["b"])


@pytest.mark.parametrize("pulled", [by_a_number, by_another_function, by_other_names], ids=lambda f: f.__name__)
def test_a_step_that_is_another_one_is_traced_anew(federation: Federation, pulled: Any) -> None:
    """What is no tensor is written into a graph, which then serves only steps that hold the same."""
    runs = [simulate(FedProx(pulled=pulled), federation, rounds=12, executor=name) for name in ("loop", "traced")]
    expected, found = map(end_of, runs)
    assert_close(found, expected)


def test_a_step_that_is_another_one_every_time_is_not_traced_forever(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executors, "MAX_GRAPHS", 3)
    simulation = simulate(FedProx(pulled=by_a_number), federation, rounds=12, executor="traced")
    found = end_of(simulation)
    assert_close(found, end_of(replace(simulation, executor="loop")))
    assert len(simulation.executor_for(simulation.model_of(0)).scans["mlp", "train"].graphs) == 3
    assert caplog.text.count("other numbers in every call") == 1


HELD = SimpleNamespace(start=None)


def by_an_attribute(received: Params, start: Tensor) -> Pull:
    holder = SimpleNamespace(inner={"start": start})
    return lambda weights: weights - holder.inner["start"]


def by_a_view_of_what_was_received(received: Params, start: Tensor) -> Pull:
    holder = SimpleNamespace(first=next(iter(received.values())).reshape(-1)[0])
    return lambda weights: weights - holder.first


def by_a_global(received: Params, start: Tensor) -> Pull:
    HELD.start = start
    return lambda weights: weights - HELD.start


def by_an_objects_call(received: Params, start: Tensor) -> Pull:
    class Distance:
        def __init__(self) -> None:
            self.origin = start.clone()

        def __call__(self, weights: Tensor) -> Tensor:
            return weights - self.origin

    return Distance()


def by_a_number_of_an_attribute(received: Params, start: Tensor) -> Pull:
    holder = SimpleNamespace(mean=start.mean())
    return lambda weights: weights * float(holder.mean)


@pytest.mark.parametrize(
    ("pulled", "name", "cohort"),
    [
        *((by_an_attribute, r"holder\.inner\['start'\]", cohort) for cohort in (1, 3)),
        *((by_a_view_of_what_was_received, r"holder\.first", cohort) for cohort in (1, 3)),
        (by_a_global, r"HELD\.start", 1),
        (by_an_objects_call, r"pull\.origin", 1),
        (by_a_number_of_an_attribute, r"holder\.mean", 1),  # no number can be read of clients that run together
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("executor", mostly_slow(["traced", "captured"], "traced"))
def test_what_cannot_be_given_to_a_step_is_refused(
    federation: Federation, pulled: Any, name: str, cohort: int, executor: str
) -> None:
    simulation = simulate(FedProx(pulled=pulled), federation, rounds=2, cohort=cohort, executor=executor)
    with pytest.raises(UserError, match=name):
        end_of(simulation)


def by_counting(received: Params, start: Tensor) -> Pull:
    count = 0.0

    def pull(weights: Tensor) -> Tensor:
        nonlocal count
        count += 1.0
        return count * weights

    return pull


def by_noting(received: Params, start: Tensor) -> Pull:
    count = [start]

    def pull(weights: Tensor) -> Tensor:
        count.append(weights)
        return weights - count[-2]

    return pull


@pytest.mark.parametrize("pulled", [by_counting, by_noting], ids=lambda f: f.__name__)
def test_a_step_that_changes_its_surroundings_is_refused(federation: Federation, pulled: Any) -> None:
    with pytest.raises(UserError, match=r"changes 'count', a variable.*'loop'"):
        end_of(simulate(FedProx(pulled=pulled), federation, executor="traced"))


@pytest.mark.parametrize(
    ("executor", "cohort"), mostly_slow([("traced", 1), ("captured", 1), ("captured", 3)], ("captured", 3))
)
def test_what_was_there_before_is_a_constant(federation: Federation, executor: str, cohort: int) -> None:
    """Class weights in a loss, a frozen layer, a buffer, a setting that is a tensor, a tensor written out in a step."""
    class_weights = torch.tensor([1.0, 0.5, 2.0, 0.1], dtype=torch.float64)
    scale = SimpleNamespace(of_step=torch.tensor(0.5, dtype=torch.float64))

    class Partly(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(72, 5).requires_grad_(False), nn.Linear(5, 4))
            self.register_buffer("shift", torch.full((4,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    def weighted(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, y, class_weights, reduction="none")

    def pulled(received: Params, start: Tensor) -> Pull:
        assert scale.of_step.reshape(1) == 0.5  # a view of it is nothing that the call has made
        return lambda weights: scale.of_step * torch.tensor(2.0, dtype=torch.float64) * (weights - start)

    target = {"mlp": replace(model(), factory=Partly, per_example_loss=weighted)}
    runs = [
        simulate(FedProx(pulled=pulled), federation, target, rounds=4, cohort=cohort, executor=name)
        for name in ("loop", executor)
    ]
    expected, found = map(end_of, runs)
    assert_close(found, expected)


@pytest.mark.parametrize("frozen", mostly_slow(["conv", "out"], "conv"))
@pytest.mark.parametrize("cohort", mostly_slow([1, 3], 3))
def test_frozen_layers_are_captured(federation: Federation, frozen: str, cohort: int) -> None:
    """What clients share is not folded in among them as their own weights are, and reshapes their images instead."""
    plain = model("conv")

    def factory() -> nn.Module:
        network = plain.factory()
        getattr(network, frozen).requires_grad_(False)
        return network

    target = {"conv": replace(plain, factory=factory)}
    runs = [
        simulate(FedAvg(local_steps=3), federation, target, rounds=4, cohort=cohort, executor=name)
        for name in ("loop", "captured")
    ]
    expected, found = map(end_of, runs)
    assert_close(found, expected)


def selected(h: Tensor) -> Tensor:
    return h * h[h > 0].numel()


def counted(h: Tensor) -> Tensor:
    return h * len((h > 0).nonzero())


def averaged(h: Tensor) -> Tensor:
    return h - h[h > 0].mean()


@pytest.mark.parametrize("function", [selected, counted, averaged])
def test_shapes_that_depend_on_values_are_not_traced(
    federation: Federation, function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A graph keeps the shapes that it was traced with, which would be those of one batch."""

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(72, 4)

        def forward(self, x: Tensor) -> Tensor:
            return function(super().forward(x.flatten(1)))

    target = {"mlp": replace(model(), factory=Net)}
    runs = [simulate(FedAvg(local_steps=3), federation, target, executor=name) for name in ("loop", "traced")]
    expected, found = map(end_of, runs)
    assert_close(found, expected)
    assert caplog.text.count("depends on values") == 1


@pytest.mark.slow
def test_rates_that_a_step_closes_over_are_arguments(federation: Federation) -> None:
    """The captured round passes rates as tensors: no rate of one run is a constant of another's graph."""

    @dataclass(frozen=True)
    class Closing(FedAvg):
        def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
            start, unpack = pack(received)
            gradient_of = gradient(model.loss, unpack)
            lr = self.local_lr

            def step(weights: Tensor, batch: Batches, constants: Any) -> Tensor:
                return weights - lr * gradient_of(weights, batch)

            return unpack(start - scan(step, start, batches)), private

    @dataclass(frozen=True)
    class Reading(FedAvg):
        def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
            start, unpack = pack(received)
            gradient_of = gradient(model.loss, unpack)

            def step(weights: Tensor, batch: Batches, constants: Any) -> Tensor:
                return weights - self.local_lr * gradient_of(weights, batch)

            return unpack(start - scan(step, start, batches)), private

    target = {"mlp": model()}
    for kind in (Closing, Reading):
        for lr in (0.1, 0.4):
            runs = [
                simulate(kind(local_steps=3, local_lr=lr), federation, target, rounds=3, executor=name)
                for name in ("loop", "captured")
            ]
            expected, found = map(end_of, runs)
            assert_close(found, expected)


def test_lifting_leaves_a_step_as_it_was() -> None:
    start, held = torch.tensor(2.0), {"scale": torch.tensor(3.0)}

    def step(carry: Tensor, batch: Tensor, constants: Tensor) -> Tensor:
        return held["scale"] * (carry - start) + batch + constants

    lifted = lift(step)
    assert {id(tensor) for tensor in lifted.tensors} == {id(start), id(held["scale"])}
    values = [10 * tensor for tensor in lifted.tensors]
    one = torch.tensor(1.0)
    assert lifted.step(one, one, (one, values)) == 30 * (1 - 20) + 1 + 1
    assert step(one, one, one) == 3 * (1 - 2) + 1 + 1
    with pytest.raises(TypeError):
        lifted.step(one, None, (one, values))
    assert step(one, one, one) == 3 * (1 - 2) + 1 + 1


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many calls were watched, and how many steps were traced."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> None:
        function = getattr(executors, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **options)

        monkeypatch.setattr(executors, name, counted)

    counting("Watch")
    counting("make_fx")
    return counts


@pytest.mark.parametrize(
    ("is_always_watched", "expected"),
    [
        (False, [(1, 1), (1, 1), (1, 1), (2, 1), (3, 2), (3, 2)]),
        (True, [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]),
    ],
)
def test_only_calls_that_are_watched_trace(
    is_always_watched: bool, expected: list[tuple[int, int]], counts: Counter[str]
) -> None:
    """A step that is met while nobody watches runs as it is written, and is traced when it is met again."""
    traced = TracedScan(is_always_watched=is_always_watched)
    found = []
    for width in (2, 2, 3, 2, 3, 3):
        with traced.running(()):
            end = scan(lambda carry, batch, constants: carry + batch, torch.zeros(width), torch.ones(4, width))
        assert torch.equal(end, torch.full((width,), 4.0))
        found.append((counts["Watch"], counts["make_fx"]))
    assert found == expected


def test_a_new_tensor_does_not_pass_for_one_that_is_gone() -> None:
    """Numbers of a step itself often lie where the call kept some before; whoever confuses them refuses at random."""
    with Watch(()) as watch:
        seen = {(torch.ones(3) * number).untyped_storage()._cdata for number in range(200)}
        with watch.suspended():
            new = [torch.tensor(1.0) for _ in range(200)]
    assert seen.isdisjoint(tensor.untyped_storage()._cdata for tensor in new)
    watch.refuse(new, lambda carry, batch, constants: carry)


@pytest.mark.parametrize("num_steps", [None, 0])
def test_a_function_without_steps_is_watched_once(num_steps: int | None, counts: Counter[str]) -> None:
    traced = TracedScan()
    for _ in range(3):
        with traced.running(()):
            if num_steps is not None:
                scan(lambda carry, batch, constants: carry, torch.zeros(2), torch.ones(num_steps, 2))
    assert counts == {"Watch": 1}


@pytest.mark.parametrize("cohort", [1, 3])
def test_a_captured_round_traces_before_it_is_recorded(
    federation: Federation, cohort: int, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs share is traced anew for other shapes, and it is the second call that a GPU records."""
    target = {"mlp": model()}
    monkeypatch.setattr(gpu, "_traced", {})
    for batch_size in (5, 4):
        simulation = simulate(FedAvg(local_steps=2), federation, target, cohort=cohort, batch_size=batch_size)
        run = CapturedRun(simulation, simulation.initial_state())
        run.graph_of(run.signatures[0]).replay()
        before = counts["make_fx"]
        run.graph_of(run.signatures[0]).replay()
        assert counts["make_fx"] == before
