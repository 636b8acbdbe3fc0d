"""Networks that nobody here wrote: what would be wrong or fail later is refused with a sentence, the rest runs."""

import threading
import time
from typing import Any

import pytest
import torch
from support import CHANNELS, NUM_CLASSES, SIDE, assert_close, finish, memories_of, mostly_slow, simulate
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional

from pfedhn import keys, models
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.data.federation import Federation
from pfedhn.engine import network
from pfedhn.engine.network import build_model
from pfedhn.engine.rounds import rounds
from pfedhn.errors import UserError
from pfedhn.model import Model, without_cudnn
from pfedhn.models import MLP, cross_entropy, is_correct
from pfedhn.system.process import WHOLE_PROCESS


def numbers(*sizes: int) -> Federation:
    """Clients with so many training examples of eight numbers, and one example to be tested with."""
    clients = []
    for client, size in enumerate(sizes):
        x = keys.normal(keys.fold(7, client), (size + 1) * 8).reshape(size + 1, 8)
        y = (torch.arange(size + 1) + client) % 4
        clients.append({"train": (x[:size], y[:size]), "test": (x[size:], y[size:])})
    return Federation.from_clients(clients)


def tokens() -> Federation:
    """Four clients with sentences of seven words out of eleven, and labels 0 to 2."""
    words = (keys.uniform(3, 40 * 7) * 11).long().reshape(40, 7)
    return Federation.from_clients([(words[i::4], words[i::4, 0] % 3) for i in range(4)])


class Functional(nn.Module):
    """Linear layers around a function of what is between them."""

    def __init__(self, function: Any = lambda h: h) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Words(nn.Module):
    """A classifier of sentences: an embedding, a layer over the words, the last word's output."""

    def __init__(self, embed: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.out = embed, layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.layer(self.embed(x))
        return self.out((states[0] if isinstance(states, tuple) else states)[:, -1])


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 6), norm, nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


class FrozenStatistics(Normed):
    """Batch statistics that were learned elsewhere and stay: an example is computed by itself."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(6))

    def train(self, mode: bool = True) -> "FrozenStatistics":
        super().train(mode)
        self.norm.eval()
        return self


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.ones(11, 6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(functional.embedding(x, self.table, max_norm=1.0).mean(1))


class InUse(Functional):
    """Mixes examples in evaluation mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = super().forward(x)
        return outputs if self.training else outputs - outputs.mean(0)


class Dictionaries(Functional):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x["values"])


class Doubled(torch.autograd.Function):
    """Written as `torch.func` does not take it, like those in PEFT's LoHa."""

    @staticmethod
    def forward(context: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class TwoOutputs(Functional):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Named(Functional):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


NUMBERS: dict[str, tuple[Any, str]] = {
    "instance norm that keeps statistics": (
        lambda: Normed(
            nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())
        ),
        r"changes buffers of the layers norm\.1; .*GroupNorm",
    ),
    "batch statistics": (
        lambda: Normed(nn.BatchNorm1d(6, track_running_stats=False)),
        r"other examples of its batch \(BatchNorm in the layers norm\).*track_running_stats=True.*or GroupNorm",
    ),
    "functional batch norm": (
        lambda: Functional(lambda h: functional.batch_norm(h, None, None, training=True)),
        "depends on the other examples of its batch, which",
    ),
    "mean over the batch": (lambda: Functional(lambda h: h - h.mean(0)), "depends on the other examples"),
    "running over the batch": (lambda: Functional(lambda h: h.cumsum(0)), "depends on the other examples"),
    "mean in evaluation mode": (InUse, "depends on the other examples"),
    "spectral norm": (
        lambda: Normed(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))),
        r"changes buffers of the layers norm\.parametrizations\.weight\.0;",
    ),
    "noise": (lambda: Functional(lambda h: functional.dropout(h, 0.5)), "outside of a dropout layer"),
    "a gradient of its own": (
        lambda: Functional(Doubled.apply),
        r"gradient of the network 'net' fails \(.*setup_context",
    ),
    "other inputs": (lambda: MLP(9, 4), r"does not take examples of shape \(8,\): RuntimeError"),
    "dictionaries": (Dictionaries, r"does not take examples of shape \(8,\)"),
    "few outputs": (lambda: MLP(8, 3), r"has the label 3, but the network 'net' has 3 outputs \(labels 0 to 2\)"),
    "one output": (
        lambda: nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)),
        r"returns the shape \(4,\) for 4 examples; .*every example and class",
    ),
    "no parameters": (nn.ReLU, "no trainable parameters"),
    "lazy layers": (
        lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(4)),
        "the layers 0, 2 of 'net' learn their sizes",
    ),
    "two outputs": (TwoOutputs, "'net' returns a tuple; let it return one tensor, or give a loss"),
    "named outputs": (Named, "'net' returns a dict; let it return one tensor, or give a loss"),
    "no function": (8, r"is given as int; give a function.*lambda: MyNetwork\(10\)"),
    "missing arguments": (nn.Linear, r"cannot be made without arguments \(missing .*'in_features'\).*lambda: MyNet"),
    "no module": (lambda: torch.zeros(3), "returned Tensor; it must return a network"),
}


def test_images_of_another_size_are_refused_with_the_size_that_fits() -> None:
    x, y = torch.zeros(30, 3, 16, 16), torch.arange(30) % 2
    federation = Federation.from_clients([(x.numpy(), y.numpy())] * 2)
    with pytest.raises(
        UserError, match=r"shape \(3, 16, 16\): .*; it takes 32 x 32 pixels: read = .resize = \[32, 32\]"
    ):
        build_model("lenet", models.factory("lenet", 2, (3, 16, 16)), federation)


@pytest.mark.parametrize(("factory", "sentence"), NUMBERS.values(), ids=NUMBERS)
def test_refused(factory: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_model("net", factory, numbers(5, 6))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: Words(nn.Embedding(11, 6), nn.LSTM(6, 6)), "batch_first=True"),
        (lambda: Words(nn.Embedding(11, 6), nn.TransformerEncoderLayer(6, 2, 8, 0.0)), "batch_first=True"),
        (lambda: Words(nn.Embedding(11, 6, max_norm=100.0), nn.Identity()), "weights of the layers embed,.*max_norm"),
        (Renormed, "weights of the layers table,.*max_norm"),
    ],
    ids=["lstm", "transformer", "embedding", "functional embedding"],
)
def test_refused_for_sentences(factory: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_model("net", factory, tokens())


@pytest.mark.parametrize(
    "factory",
    [
        Functional,
        FrozenStatistics,
        lambda: Normed(nn.GroupNorm(2, 6)),
        lambda: Normed(nn.LayerNorm(6)),
        lambda: Normed(nn.Dropout(0.5)),
    ],
)
def test_accepted(factory: Any) -> None:
    assert build_model("net", factory, numbers(5, 6)).per_example_metric is is_correct


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(6, 6, batch_first=True),
        lambda: nn.GRU(6, 3, batch_first=True, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.1, batch_first=True),
    ],
    ids=["lstm", "gru", "transformer"],
)
def test_accepted_for_sentences(layer: Any) -> None:
    build_model("net", lambda: Words(nn.Embedding(11, 6), layer()), tokens())


def test_a_loss_of_ones_own_takes_what_the_network_returns() -> None:
    """Also what has no axis of examples in front, as the states of an LSTM."""

    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(11, 6), nn.LSTM(6, 6, 4, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            outputs, (states, _) = self.lstm(self.embed(x))
            return self.out(outputs[:, -1]), states

    def loss(outputs: Any, y: Tensor) -> Tensor:
        return cross_entropy(outputs[0], y)

    federation = tokens()
    target = build_model("net", States, federation, loss)
    assert target.per_example_metric is None
    finish(simulate(FedAvg(local_steps=1), federation, {"net": target}, rounds=1, cohort=2, executor="loop"))


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (functional.cross_entropy, r"returned the shape \(\) for 4 examples; it must return one value per example"),
        (lambda outputs, y: 1.0, "returned a float for 4 examples"),
        (lambda outputs, y: cross_entropy(outputs, y) - outputs.mean(), "the loss of an example depends on the other"),
        (lambda outputs, y: outputs["logits"], r"fails for outputs of shape \(4, 4\) and labels of shape \(4,\)"),
    ],
    ids=["mean", "number", "of the batch", "of something else"],
)
def test_losses(loss: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_model("net", Functional, numbers(5, 6), loss)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 9), (3,)])
def test_a_client_with_few_examples_is_no_reason_to_refuse(sizes: tuple[int, ...]) -> None:
    build_model("net", Functional, numbers(*sizes))
    build_model("net", lambda: Normed(nn.BatchNorm1d(6)), numbers(*sizes))
    with pytest.raises(UserError, match="GroupNorm"):
        build_model("net", lambda: Normed(nn.BatchNorm1d(6, track_running_stats=False)), numbers(*sizes))


def test_a_single_example_is_enough_to_try_a_network() -> None:
    build_model("net", Functional, numbers(1))


def clamped(h: Tensor) -> Tensor:
    h = h.clone()
    h[h > 1] = 1.0
    return h


def scaled(h: Tensor) -> Tensor:
    return h / max(1.0, h.detach()[0, 0].item())


def turned(h: Tensor) -> Tensor:
    return h if h.detach()[0, 0] > 0 else -h


class Flat(Functional):
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self.first = nn.Linear(72, 5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


@pytest.mark.parametrize("function", [clamped, scaled, turned])
@pytest.mark.parametrize("executor", mostly_slow(["auto", "captured", "traced"], "auto"))
def test_what_cannot_be_batched_runs_one_by_one(federation: Federation, function: Any, executor: str) -> None:
    """All layers are linear and several clients take part, so that `auto` would like to run them together."""
    target = {"flat": Model("flat", lambda: Flat(function), cross_entropy, is_correct, dtype=torch.float64)}
    runs = [
        simulate(FedAvg(local_steps=2), federation, target, rounds=3, cohort=3, executor=name)
        for name in ("loop", executor)
    ]
    states = [run.initial_state() for run in runs]
    for run, state in zip(runs, states, strict=True):
        list(rounds(run, state))
    assert_close(memories_of(states[1]), memories_of(states[0]))


def test_vectorized_says_who_can_run_what_it_cannot(federation: Federation) -> None:
    flat = Model("flat", lambda: Flat(clamped), cross_entropy, is_correct, dtype=torch.float64)
    gru = Model("gru", lambda: Words(nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True)), cross_entropy, is_correct)
    for target, data in ((flat, federation), (gru, tokens())):
        simulation = simulate(FedAvg(local_steps=1), data, {target.name: target}, cohort=2, executor="vectorized")
        with pytest.raises(UserError, match=f"cannot run the network '{target.name}': .*; use 'traced' or 'loop'"):
            finish(simulation)


def test_batching_is_tried_once(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Model] = []
    try_it = network.batching_error
    monkeypatch.setattr(network, "batching_error", lambda *given: tried.append(given[0]) or try_it(*given))
    simulation = simulate(FedAvg(local_steps=1), federation, rounds=3, cohort=2, evaluate_every=1)
    finish(simulation)
    assert simulation.executor_for(simulation.model_of(0)).name == "vectorized"
    assert tried == [simulation.model_of(0)]
    alone = simulate(FedAvg(local_steps=1), federation, rounds=3, cohort=1)
    assert alone.executor_for(alone.model_of(0)).name == "traced"
    assert len(tried) == 1


def test_what_is_frozen_is_in_memory_once_and_a_personal_model_has_its_own() -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))

    def made() -> nn.Module:
        network = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        network[0].requires_grad_(False)
        return network

    model = build_model("net", made, numbers(5, 6))
    training, testing = model.training_module, model.testing_module
    assert training[0].weight is testing[0].weight
    assert training[2].weight is not testing[2].weight
    own = model.with_weights(model.fresh(0))
    assert torch.equal(own[0].weight, testing[0].weight)
    assert own[0].weight.data_ptr() != testing[0].weight.data_ptr()
    assert set(model.shapes) == {name for name, _ in module.named_parameters() if not name.startswith("0.")}


def test_without_cudnn_in_several_threads_leaves_the_process_as_it_was() -> None:
    """Recurrent layers do without it on a GPU, where it asks for the addresses of weights that have none."""
    before = (cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic)
    seen = []

    def work() -> None:
        for _ in range(50):
            with without_cudnn():
                seen.append((cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic))
                time.sleep(0.0005)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {(False, *before[1:])}
    assert (cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic) == before


def test_threads_that_share_the_global_generator_do_not_disturb_each_other() -> None:
    is_over, drawn = threading.Event(), []

    def reseed() -> None:
        """As the compiler's thread does."""
        while not is_over.is_set():
            with WHOLE_PROCESS:
                torch.manual_seed(3)
                numbers = []
                for _ in range(3):
                    time.sleep(0.0005)
                    numbers.append(float(torch.rand(())))
                drawn.append(tuple(numbers))
            time.sleep(0.001)

    def slow(value: Tensor) -> Tensor:
        time.sleep(0.005)  # in every forward pass, also a traced one
        return value

    def factory() -> nn.Module:
        first = nn.Linear(8, 5)
        time.sleep(0.005)
        return nn.Sequential(first, Functional(slow).last)

    federation = numbers(6, 6)
    expected = Model("net", factory, cross_entropy).fresh(7)
    outside = torch.get_rng_state()
    thread = threading.Thread(target=reseed)
    thread.start()
    try:
        for _ in range(5):
            model = build_model("net", factory, federation)
            assert_close(model.fresh(7), expected)
        model = build_model("slow", lambda: Functional(slow), federation)
        for _ in range(5):  # each traces anew
            finish(simulate(FedAvg(local_steps=2), federation, {"slow": model}, rounds=1, executor="traced"))
    finally:
        is_over.set()
        thread.join()
        torch.set_rng_state(outside)
    assert len(set(drawn)) == 1


def test_weights_that_are_no_numbers_get_a_sentence(federation: Federation) -> None:
    def factory() -> nn.Module:
        network = nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, NUM_CLASSES))
        nn.init.constant_(network[1].weight, float("nan"))
        return network

    with pytest.raises(UserError):
        finish(simulate(FedAvg(local_steps=2), federation, {"net": build_model("net", factory, federation)}, rounds=2))
