"""Limit cases in which one method must be another, or plain mathematics."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    NUM_CLIENTS,
    TRAIN_SIZES,
    assert_close,
    assert_same_bits,
    finish,
    memories_of,
    model,
    mostly_slow,
    personal,
    pictures,
    simulate,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithm import Group
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.apfl import APFL
from pfedhn.algorithms.ditto import Ditto
from pfedhn.algorithms.fedala import FedALA
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.fedbabu import FedBABU
from pfedhn.algorithms.fedper import FedPer
from pfedhn.algorithms.fedrep import FedRep
from pfedhn.algorithms.lg_fedavg import LGFedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.per_fedavg import PerFedAvg
from pfedhn.algorithms.pfedme import PFedMe
from pfedhn.combinators import innermost
from pfedhn.data.federation import Federation
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.model import Model
from pfedhn.models import squared_error
from pfedhn.params import Params, subtract, take

EVERY_ROW = max(TRAIN_SIZES)  # a batch this large holds all of any client's rows
PLAIN_SERVER = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip": None, "linear": True, "embedding": "fixed"}


def start_at(simulation: Simulation, start: Params) -> State:
    """A linear hypernetwork's first state, with every column of W the same initial model."""
    state = simulation.initial_state()
    ((name, weight),) = state.memories.shared.phi.items()
    column = torch.cat([value.flatten() for value in start.values()])
    state.memories.shared.phi[name] = column[:, None].expand_as(weight).clone()
    return state


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
def test_lookup_table_is_local(federation: Federation, target: str) -> None:
    """With one-hot descriptors W v_i is column i of W: every client has a model of its own."""
    local = {"local_lr": 0.1, "local_steps": 3, "local_momentum": 0.0, "local_weight_decay": 0.01, "local_clip": None}
    table = ALGORITHMS["pfedhn"](**PLAIN_SERVER, **local, embedding_dim=NUM_CLIENTS, rule="sum")
    with_descriptors = federation.with_descriptors(torch.eye(NUM_CLIENTS)).to("cpu", torch.float64)
    alone = simulate(Local(**local), federation, target, rounds=4)
    ours = simulate(table, with_descriptors, target, rounds=4, cohort=NUM_CLIENTS)
    state = start_at(ours, alone.initial_models()[target])
    assert_close(personal(ours, finish(ours, state)), personal(alone, finish(alone)))


@pytest.mark.parametrize("rule", ["mean", "size"])
def test_constant_hypernetwork_is_fedavg(federation: Federation, rule: Any) -> None:
    """With the descriptor 1 for everybody W v_i is one shared model."""
    local = {"local_lr": 0.1, "local_steps": 3, "local_momentum": 0.9, "local_weight_decay": 0.01, "local_clip": 0.7}
    constant = ALGORITHMS["pfedhn"](**PLAIN_SERVER, **local, embedding_dim=1, rule=rule)
    with_descriptors = federation.with_descriptors(torch.ones(NUM_CLIENTS, 1)).to("cpu", torch.float64)
    average = simulate(FedAvg(**local, rule=rule), federation, cohort=3)
    ours = simulate(constant, with_descriptors, cohort=3)
    state = start_at(ours, average.initial_models()["mlp"])
    assert_close(personal(ours, finish(ours, state)), personal(average, finish(average)))


@pytest.mark.slow
def test_mean_is_size_where_sizes_are_equal() -> None:
    equal = Federation.from_clients([{"train": uniform_rows(i), "validation": uniform_rows(i)} for i in range(4)])
    equal = equal.to("cpu", torch.float64)
    results = [personal(s, finish(s)) for s in (simulate(FedAvg(rule=r), equal, cohort=3) for r in ("mean", "size"))]
    assert_close(*results)


def uniform_rows(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, y = pictures(client, "equal", 8)
    return images.permute(0, 3, 1, 2).float() / 255, y


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
def test_sharing_everything_is_fedavg(federation: Federation, target: str) -> None:
    settings = {"local_steps": 3, "local_lr": 0.1, "local_clip": 0.9}
    layers = tuple(dict.fromkeys(name.partition(".")[0] for name in model(target).shapes))
    average = memories_of(finish(simulate(FedAvg(**settings), federation, target, cohort=3)))
    for same in (FedPer(**settings, personal=()), LGFedAvg(**settings, global_layers=layers, rule="size")):
        assert_same_bits(memories_of(finish(simulate(same, federation, target, cohort=3))), average)


def test_fedavg_with_one_full_step_is_pooled_gradient_descent(federation: Federation) -> None:
    lr, decay = 0.3, 0.02
    spec = FedAvg(local_lr=lr, local_steps=1, local_momentum=0.0, local_weight_decay=decay)
    simulation = simulate(spec, federation, rounds=6, cohort=NUM_CLIENTS, batch_size=EVERY_ROW)
    net = model().with_weights(simulation.initial_models()["mlp"])
    rows = federation.splits["train"].index
    pooled = torch.optim.SGD(net.parameters(), lr, weight_decay=decay)
    for _ in range(6):
        pooled.zero_grad()
        cross_entropy(net(federation.x[rows]), federation.y[rows]).backward()
        pooled.step()
    expected = {name: value.detach() for name, value in net.named_parameters()}
    assert_close(finish(simulation).memories.shared, expected)


def test_local_does_not_notice_how_it_is_cut_into_rounds(federation: Federation) -> None:
    """On full batches the draws do not matter, so 6 rounds of 2 steps are 2 rounds of 6: momentum carries over."""
    spec = Local(local_lr=0.1, local_momentum=0.9)
    short, long = (
        simulate(replace(spec, local_steps=steps), federation, rounds=rounds, batch_size=EVERY_ROW)
        for steps, rounds in ((2, 6), (6, 2))
    )
    assert_close(personal(short, finish(short)), personal(long, finish(long)))


def test_per_fedavg_without_adaptation_is_fedavg(federation: Federation) -> None:
    meta = PerFedAvg(local_lr=0.2, personal_lr=0.0, local_steps=3, form="hessian-free")
    average = FedAvg(local_lr=0.2, local_steps=3, local_momentum=0.0, local_weight_decay=0.0, rule="mean")
    runs = [simulate(spec, federation, cohort=3, batch_size=EVERY_ROW) for spec in (meta, average)]
    assert_close(*(personal(run, finish(run)) for run in runs))


def regression(num_clients: int, num_rows: int, dim: int) -> Federation:
    """Clients with orthonormal columns X_i^T X_i = I and targets of their own."""
    clients = []
    for client in range(num_clients):
        x = torch.linalg.qr(keys.normal(keys.fold(1, "x", client), num_rows * dim).reshape(num_rows, dim)).Q
        y = keys.normal(keys.fold(1, "y", client), num_rows).reshape(num_rows, 1)
        clients.append({"train": (x, y), "validation": (x, y)})
    made = Federation.from_clients(clients).to("cpu", torch.float64)
    xs = torch.cat([arrays[0] for client in clients for arrays in client.values()])
    ys = torch.cat([arrays[1] for client in clients for arrays in client.values()])
    return replace(made, x=xs, y=ys)  # from_clients keeps the default precision


def linear_model(dim: int) -> Model:
    return Model("line", lambda: nn.Linear(dim, 1, bias=False), squared_error, dtype=torch.float64)


def test_hessian_free_is_exact_on_a_quadratic() -> None:
    """A central difference of a linear gradient has no error, so each step is one of MAML's, differentiated through."""
    alpha, beta, dim = 2.0, 1.5, 3
    federation = regression(1, 8, dim)
    spec = PerFedAvg(local_lr=beta, personal_lr=alpha, local_steps=4, form="hessian-free")
    simulation = simulate(spec, federation, {"line": linear_model(dim)}, rounds=3, batch_size=8)
    x, y = (values[federation.splits["train"].of(0)] for values in (federation.x, federation.y))

    def loss(w: torch.Tensor) -> torch.Tensor:
        return ((x @ w.T - y) ** 2).mean()

    w = simulation.initial_models()["line"]["weight"].requires_grad_()
    for _ in range(3 * 4):
        (slope,) = torch.autograd.grad(loss(w), w, create_graph=True)
        (outer,) = torch.autograd.grad(loss(w - alpha * slope), w)
        w = (w - beta * outer).detach().requires_grad_()
    assert_close(finish(simulation).memories.shared["weight"], w.detach())


def test_pfedme_without_envelope_is_sgd(federation: Federation) -> None:
    """With lambda = mu = 0 and one inner step theta is plain SGD from w, and x, so w too, never moves."""
    spec = PFedMe(personal_lr=0.1, strength=0.0, decay=0.0, inner_steps=1, outer_steps=5)
    simulation = simulate(spec, federation, rounds=1, cohort=NUM_CLIENTS)
    sgd = simulate(Local(local_lr=0.1, local_momentum=0.0, local_weight_decay=0.0, local_steps=5), federation, rounds=1)
    state = finish(simulation)
    assert_same_bits(state.memories.shared, simulation.initial_models()["mlp"])
    assert_close(personal(simulation, state), personal(sgd, finish(sgd)))


def test_pfedme_with_no_mixing_never_moves_w(federation: Federation) -> None:
    simulation = simulate(PFedMe(mixing=0.0, outer_steps=2), federation, cohort=3)
    assert_same_bits(finish(simulation).memories.shared, simulation.initial_models()["mlp"])


ALONE = {"local_lr": 0.1, "local_steps": 3, "local_momentum": 0.0, "local_weight_decay": 0.01}


@pytest.mark.parametrize(
    "spec", [Ditto(**ALONE, strength=0.0), APFL(**ALONE, alpha=1.0, adaptive=False)], ids=["ditto", "apfl"]
)
def test_a_model_that_nothing_holds_to_the_shared_one_is_local(federation: Federation, spec: Any) -> None:
    """Without momentum, which starts at rest in every round here and survives in Local."""
    together = simulate(spec, federation, rounds=4, cohort=NUM_CLIENTS)
    alone = simulate(Local(**ALONE), federation, rounds=4)
    assert_close(personal(together, finish(together)), personal(alone, finish(alone)))


@pytest.mark.parametrize("spec", [Ditto(local_steps=3), APFL(local_steps=3, rule="size")], ids=["ditto", "apfl"])
def test_the_shared_model_beside_personal_ones_is_fedavgs(federation: Federation, spec: Any) -> None:
    average = finish(simulate(FedAvg(local_steps=3), federation, cohort=3))
    assert_close(finish(simulate(spec, federation, cohort=3)).memories.shared, average.memories.shared)


def test_apfl_without_a_model_of_its_own_is_fedavg(federation: Federation) -> None:
    spec = APFL(local_steps=3, alpha=0.0, adaptive=False, tested="newest")
    ours = simulate(spec, federation, cohort=3)
    average = simulate(FedAvg(local_steps=3, rule="mean"), federation, cohort=3)
    assert_close(personal(ours, finish(ours)), personal(average, finish(average)))


def test_fedala_that_takes_everything_over_is_fedavg(federation: Federation) -> None:
    """With a rate of 0 the mixture stays at one; on full batches it does not matter which of them it used up."""
    ours = simulate(FedALA(local_steps=3, mixture_steps=2, mixture_lr=0.0), federation, cohort=3, batch_size=EVERY_ROW)
    average = simulate(FedAvg(local_steps=3), federation, cohort=3, batch_size=EVERY_ROW)
    assert_close(personal(ours, finish(ours)), personal(average, finish(average)))


@pytest.mark.parametrize("target", mostly_slow(["mlp", "conv"], "mlp"))
def test_fedrep_without_steps_for_the_head_is_fedbabu(federation: Federation, target: str) -> None:
    settings = {"local_steps": 3, "local_lr": 0.1, "local_clip": 0.9}
    runs = [
        simulate(spec, federation, target, cohort=3)
        for spec in (FedRep(**settings, head_share=0.0, rule="size"), FedBABU(**settings))
    ]
    assert_same_bits(*(memories_of(finish(run)) for run in runs))


def test_fedrep_with_steps_for_the_head_alone_never_moves_the_body(federation: Federation) -> None:
    simulation = simulate(FedRep(local_steps=3, head_share=1.0), federation, cohort=3)
    state, start = finish(simulation), simulation.initial_models()["mlp"]
    assert_same_bits(state.memories.shared, {name: start[name] for name in state.memories.shared})
    assert any(not torch.equal(weights["3.weight"], start["3.weight"]) for weights in personal(simulation, state))


@pytest.mark.slow
def test_proposition_1_linear_hypernetwork_is_uncentered_pca() -> None:
    """For X_i^T X_i = I, h(v; W) = W v trained to the end is the best rank-D fit of the clients' own solutions."""
    num_clients, num_rows, dim, rank = 5, 6, 4, 2
    federation = regression(num_clients, num_rows, dim)
    solutions = torch.stack(
        [
            (federation.x[rows].T @ federation.y[rows]).flatten()
            for rows in map(federation.splits["train"].of, range(num_clients))
        ]
    )
    tail = torch.linalg.svdvals(solutions)[rank:].square().sum()
    assert tail > 0.01 * solutions.square().sum()  # not a perfect fit, or any method would pass

    # One full step of size n/2 lands on the client's own solution, so the update is theta_i - solution_i.
    spec = ALGORITHMS["pfedhn"](
        lr=0.03,
        weight_decay=0.0,
        clip=None,
        linear=True,
        embedding_dim=rank,
        local_lr=num_rows / 2,
        local_steps=1,
        local_momentum=0.0,
        local_weight_decay=0.0,
        local_clip=None,
        rule="sum",
    )
    models = {"line": linear_model(dim)}
    simulation = simulate(spec, federation, models, rounds=400, cohort=num_clients, batch_size=num_rows)
    state = finish(simulation)
    fitted = torch.stack([weights["weight"].flatten() for weights in personal(simulation, state)])
    assert_close((fitted - solutions).square().sum(), tail, rtol=1e-6)
    u, s, v = torch.linalg.svd(solutions, full_matrices=False)
    assert_close(fitted, u[:, :rank] @ torch.diag(s[:rank]) @ v[:rank], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("head", ["added", "low-rank", "chunked"])
@pytest.mark.parametrize("local_start", ["personal", "shared"])
@pytest.mark.parametrize("target", mostly_slow(["mlp", "batchnorm"], "mlp"))
def test_a_head_that_adds_nothing_is_fedavg(federation: Federation, head: Any, local_start: Any, target: str) -> None:
    """Such heads write zeros at first; where phi and the embeddings stand still, the layers for all are FedAvg's."""
    local = {"local_steps": 3, "local_lr": 0.1, "local_clip": None, "rule": "size"}
    still = {"lr": 0.0, "shared_lr": 1.0, "hidden_dim": 4}
    own = {"added": {}, "low-rank": {"rank": 1}, "chunked": {"chunk_size": 7}}[head]
    spec = ALGORITHMS["pfedhn"](**local, **still, head=head, local_start=local_start, **own)
    simulations = [simulate(one, federation, target, rounds=6, cohort=3) for one in (spec, FedAvg(**local))]
    states = [finish(simulation) for simulation in simulations]
    assert_close(*(personal(simulation, state) for simulation, state in zip(simulations, states, strict=True)))
    assert states[0].bytes_up == states[1].bytes_up


@pytest.mark.parametrize("cohort", [1, 3])
def test_clients_that_start_from_the_shared_model_teach_the_hypernetwork_where_they_end(
    federation: Federation, cohort: int
) -> None:
    """One server step is a gradient step on half the squared distance of what is served from where clients ended."""
    local = {"local_steps": 3, "local_lr": 0.1, "local_clip": None}
    server = {"lr": 0.2, "momentum": 0.0, "weight_decay": 0.0, "shared_lr": 0.3, "hidden_dim": 4, "clip": None}
    spec = ALGORITHMS["pfedhn"](**local, **server, head="added", local_start="shared")
    simulation = simulate(spec, federation, "mlp", rounds=1, cohort=cohort)
    state = simulation.initial_state()
    shared = state.memories.shared
    for name, value in shared.phi.items():  # so that what is added is not zero
        shared.phi[name] = value + 0.1 * keys.normal(keys.fold(3, name), value.numel()).reshape(value.shape).to(value)
    algorithm, base = simulation.algorithm, {name.split("/")[1]: value for name, value in shared.common.items()}
    clients, ends = simulation.cohort(0), []
    for client in clients:
        batches = federation.batches(torch.tensor([client]), keys.fold(simulation.seed, "batches", 0), 3, 5)
        ends.append(algorithm.local_sgd.run(model("mlp").loss, base, take(batches, 0))[0])
    phi = {name: value.clone().requires_grad_() for name, value in shared.phi.items()}
    rows = state.memories.rows.embedding[clients].clone().requires_grad_()
    made = algorithm.generate(phi, shared, model("mlp"), rows)
    squares = [(base[name] + made[name][i] - end[name]).square().sum() for i, end in enumerate(ends) for name in base]
    (torch.stack(squares).sum() / (2 * cohort)).backward()
    after = finish(simulation, state).memories
    assert_close(after.shared.phi, {name: value.detach() - 0.2 * value.grad for name, value in phi.items()})
    assert_close(after.rows.embedding[clients], rows.detach() - 0.2 * rows.grad)
    means = {name: torch.stack([end[name] for end in ends]).mean(0) for name in base}
    expected = {f"mlp/{name}": base[name] + 0.3 * (mean - base[name]) for name, mean in means.items()}
    assert_close(after.shared.common, expected)


@pytest.mark.parametrize("head", ["dense", "added"])
def test_fixed_layers_are_what_is_neither_generated_nor_trained(federation: Federation, head: Any) -> None:
    """The last layer of the whole network, and not the last one of what is left of it too."""
    settings = {"local_steps": 3, "local_lr": 0.1, "hidden_dim": 4, "head": head, "adaptation_steps": 2}
    rest = [name for name in model("conv").shapes if not name.startswith("out.")]
    named = tuple(dict.fromkeys(name.partition(".")[0] for name in rest))
    specs = (
        ALGORITHMS["pfedhn"](**settings, fixed_layers=("last",)),
        ALGORITHMS["pfedhn"](**settings, generated=named, rest="frozen"),
    )
    simulations = [simulate(spec, federation, "conv", rounds=6, cohort=2) for spec in specs]
    roles = [innermost(simulation.algorithm).roles(simulation.models["conv"]) for simulation in simulations]
    assert roles[0] == roles[1]
    assert list(roles[0].generated) == rest
    states = [finish(simulation) for simulation in simulations]
    assert_same_bits(*(personal(simulation, state) for simulation, state in zip(simulations, states, strict=True)))


@pytest.mark.parametrize("local_start", ["personal", "shared"])
def test_an_update_that_counts_in_part_moves_the_server_by_that_part(federation: Federation, local_start: Any) -> None:
    server = {"lr": 0.2, "momentum": 0.0, "weight_decay": 0.0, "hidden_dim": 4, "clip": None}
    simulation = simulate(
        ALGORITHMS["pfedhn"](**server, head="added", local_start=local_start), federation, "mlp", rounds=1
    )
    state, algorithm, network = simulation.initial_state(), simulation.algorithm, simulation.models["mlp"]
    shared, row = state.memories.shared, take(state.memories.rows, slice(0, 1))
    drawn = {name: keys.normal(keys.fold(3, name), value.numel()) for name, value in shared.phi.items()}
    shared = shared._replace(
        phi={name: x.reshape(shared.phi[name].shape).to(shared.phi[name]) for name, x in drawn.items()}
    )
    update = {
        name: keys.normal(keys.fold(4, name), shape.numel()).reshape(1, *shape)
        for name, shape in network.shapes.items()
    }
    moved = []
    for part in (1.0, 0.25):
        late = None if part == 1.0 else torch.tensor([part])
        group = Group(network, row, {name: part * value for name, value in update.items()}, torch.ones(1), late)
        after, (rows,) = algorithm.receive(shared, [group])
        moved.append(
            (subtract(shared.phi, after.phi), subtract(shared.common, after.common), row.embedding - rows.embedding)
        )
    assert any(bool(value.abs().max() > 0.01) for value in moved[0][0].values())
    assert_close(pytree.tree_map(lambda value: 0.25 * value, moved[0]), moved[1])


def test_layers_that_are_one_for_all_move_as_fedavgs(federation: Federation) -> None:
    """With nothing generated but a layer whose writer stands still, and stays with what it wrote."""
    local = {"local_steps": 3, "local_lr": 0.1, "local_clip": None}
    spec = ALGORITHMS["pfedhn"](**local, lr=0.0, shared_lr=0.3, generated=("out",), hidden_dim=4)
    simulation = simulate(spec, federation, "conv", rounds=1, cohort=3)
    state = simulation.initial_state()
    before = personal(simulation, state)
    assert not torch.equal(before[0]["out.weight"], before[1]["out.weight"])
    assert torch.equal(before[0]["conv.weight"], before[1]["conv.weight"])
    trained = []
    for client in simulation.cohort(0):
        one = torch.tensor([client])
        batches = federation.batches(one, keys.fold(simulation.seed, "batches", 0), 3, 5)
        weights, _ = spec.local_sgd.run(model("conv").loss, before[client], take(batches, 0))
        trained.append(weights["conv.weight"])
    after = personal(simulation, finish(simulation, state))
    mean = torch.stack(trained).mean(0)
    assert_close(after[0]["conv.weight"], before[0]["conv.weight"] + 0.3 * (mean - before[0]["conv.weight"]))
    assert_close(after[0]["out.weight"], before[0]["out.weight"])
