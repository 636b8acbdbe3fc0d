"""Embeddings of clients that were not chosen: dense decay and momentum at every step = the lazy closed form."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from support import NUM_CLIENTS, assert_close, assert_same_bits, finish, memories_of, simulate
from torch import nn

from pfedhn import keys
from pfedhn.algorithm import Group
from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.data.federation import Federation
from pfedhn.model import Model
from pfedhn.models import squared_error
from pfedhn.params import copy, put, take

NUM_STEPS = 1_000
DIM, NUM_ROWS = 2, 7
slow = pytest.mark.slow


def moved(lr: float, momentum: float, decay: float) -> torch.Tensor:
    """What one step without a gradient does to (velocity, value)."""
    return torch.tensor([[momentum, decay], [-lr * momentum, 1 - lr * decay]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("settings", "is_complex", "cohort"),
    [
        pytest.param({"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3}, False, 1, id="usual"),
        pytest.param({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2}, True, 1, id="complex", marks=slow),
        pytest.param(
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "embedding_lr": 2.0},
            *(False, 2),
            id="embedding-lr",
            marks=slow,
        ),
        pytest.param(
            {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.3, "embedding_lr": 3.0},
            *(True, 2),
            id="complex-embedding-lr",
            marks=slow,
        ),
        pytest.param({"lr": 0.05, "momentum": 0.0, "weight_decay": 0.1}, False, 1, id="no-momentum", marks=slow),
        pytest.param({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}, False, 2, id="no-decay", marks=slow),
    ],
)
@pytest.mark.slow
def test_dense_is_lazy(settings: dict[str, Any], is_complex: bool, cohort: int) -> None:
    """1,000 server steps with random clients and random updates; torch.optim moves every row of the table each time."""
    spec = ALGORITHMS["pfedhn"](**settings, embedding_dim=DIM, linear=True, clip=1.0, rule="sum")
    eigenvalues = torch.linalg.eigvals(moved(float(spec.rows.lr), spec.server.momentum, spec.server.weight_decay))
    assert bool((eigenvalues.imag != 0).any()) == is_complex

    model = Model("line", lambda: nn.Linear(3, 1, bias=False), squared_error, dtype=torch.float64)
    shared = spec.init_shared({"line": model}, {"line": model.fresh(0)}, 0)
    rows = torch.vmap(lambda key: spec.init_row(None, key, None))(keys.fold(4, torch.arange(NUM_ROWS)))
    rows = copy(rows)
    table = nn.Embedding.from_pretrained(rows.embedding.clone(), freeze=False)
    ((name, start),) = shared.phi.items()
    weight = nn.Parameter(start.clone())
    dense = torch.optim.SGD(
        [{"params": [weight]}, {"params": table.parameters(), "lr": spec.rows.lr}],
        spec.server.lr,
        spec.server.momentum,
        weight_decay=spec.server.weight_decay,
    )
    gaps = torch.zeros(NUM_ROWS)
    longest = 0
    for number in range(NUM_STEPS):
        # Client 0 is chosen only near the end: the longest wait of all.
        clients = keys.permutation_head(keys.fold(7, number), NUM_ROWS - 1, cohort) + 1
        if number == NUM_STEPS - 3:
            clients[0] = 0
        gaps += 1
        longest = max(longest, int(gaps[clients].max()))
        gaps[clients] = 0
        updates = keys.normal(keys.fold(8, number), cohort * 3).reshape(cohort, 1, 3) / 10

        group = Group(model, take(rows, clients), {"weight": updates}, torch.ones(cohort, dtype=torch.int64))
        shared, (changed,) = spec.receive(shared, [group])
        put(rows, clients, changed)

        dense.zero_grad()
        generated = table(clients) @ weight.T
        (generated * updates.flatten(1)).sum().backward()
        nn.utils.clip_grad_norm_([weight, table.weight], 1.0)
        dense.step()
    assert longest == NUM_STEPS - 2
    assert int(shared.step) == NUM_STEPS
    assert bool((rows.last_step < NUM_STEPS).any())
    now = spec.up_to_date(rows, shared)
    assert_close(shared.phi[name], weight.detach())
    assert_close(now.embedding, table.weight.detach())
    if spec.server.momentum:  # else torch keeps none
        assert_close(now.velocity, dense.state[table.weight]["momentum_buffer"])
    assert now.last_step.tolist() == [NUM_STEPS] * NUM_ROWS


@pytest.mark.parametrize("missed", [0, 1, 2, 3, 31, 1_000, 2**20 + 1])
def test_catching_up_is_a_power(missed: int) -> None:
    spec = ALGORITHMS["pfedhn"](embedding_dim=DIM, lr=0.01, weight_decay=0.05)
    model = Model("line", lambda: nn.Linear(3, 1), squared_error, dtype=torch.float64)
    shared = spec.init_shared({"line": model}, {"line": model.fresh(0)}, 0)
    row = spec.init_row(None, 3, None)._replace(velocity=torch.tensor([0.3, -2.0], dtype=torch.float64))
    now = spec.up_to_date(row, shared._replace(step=row.last_step + missed))
    step = moved(0.01, spec.server.momentum, 0.05)
    expected = torch.linalg.matrix_power(step, missed) @ torch.stack([row.velocity, row.embedding])
    assert_close(torch.stack([now.velocity, now.embedding]), expected, rtol=1e-9, atol=1e-15)


def test_single_precision_rows_keep_up() -> None:
    """5,000 missed steps, as long as a whole run of the paper: the error is that of the numbers themselves."""
    spec = ALGORITHMS["pfedhn"](embedding_dim=64)
    model = Model("line", lambda: nn.Linear(3, 1), squared_error)
    shared = spec.init_shared({"line": model}, {"line": model.fresh(0)}, 0)
    row = spec.init_row(None, 3, None)
    row = row._replace(embedding=row.embedding.float(), velocity=row.embedding.float().flip(0))
    now = spec.up_to_date(row, shared._replace(step=row.last_step + 5_000))
    value, velocity = row.embedding.double(), row.velocity.double()
    for _ in range(5_000):
        velocity = spec.server.momentum * velocity + spec.server.weight_decay * value
        value = value - float(spec.rows.lr) * velocity
    assert now.embedding.dtype == torch.float32
    assert_close(now.embedding.double(), value, rtol=1e-6)


def test_a_row_ahead_of_the_server_stays_where_it_is() -> None:
    """A new client learns its embedding against a frozen server, whose step count stands still."""
    spec = ALGORITHMS["pfedhn"](embedding_dim=DIM)
    model = Model("line", lambda: nn.Linear(3, 1), squared_error, dtype=torch.float64)
    shared = spec.init_shared({"line": model}, {"line": model.fresh(0)}, 0)
    row = spec.init_row(None, 3, None)
    ahead = row._replace(last_step=row.last_step + 10)
    assert_same_bits(spec.up_to_date(ahead, shared).embedding, row.embedding)


def test_sending_and_evaluating_do_not_store(federation: Federation) -> None:
    simulation = simulate(PFedHN(local_steps=2, hidden_dim=5), federation, rounds=5)
    state = finish(simulation)
    before = copy(memories_of(state))
    absent = [i for i in range(NUM_CLIENTS) if int(state.memories.rows.last_step[i]) < state.round]
    assert absent
    for client in absent:
        row = take(state.memories.rows, client)
        simulation.algorithm.send(simulation.model_of(client), state.memories.shared, row)
    simulation.evaluate(state)
    assert_same_bits(memories_of(state), before)


@pytest.mark.slow
def test_unchosen_rows_do_move(federation: Federation) -> None:
    """What the closed form is for: an embedding that was never chosen is not what it was at the start."""
    simulation = simulate(ALGORITHMS["pfedhn"](local_steps=2, hidden_dim=5, weight_decay=0.5), federation, rounds=3)
    state = finish(simulation)
    rows = state.memories.rows
    never = int((rows.last_step == 0).nonzero()[0])
    now = simulation.algorithm.up_to_date(take(rows, never), state.memories.shared)
    expected = torch.linalg.matrix_power(moved(0.01, 0.9, 0.5), 3)[1, 1] * rows.embedding[never]
    assert_close(now.embedding, expected)
    assert not torch.equal(now.embedding, rows.embedding[never])


def test_the_dense_adam_of_the_comparison_is_torchs() -> None:
    """Every row of a table under torch.optim.Adam, chosen or not = the steps that `tools/dense_adam.py` catches up."""
    spec = importlib.util.spec_from_file_location("dense_adam", Path(__file__).parents[2] / "tools" / "dense_adam.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    embeddings = module.DenseAdamRows(DIM, 0.1, 0.9, 0.0)
    rows = copy(torch.vmap(lambda key: embeddings.start(key, None))(keys.fold(4, torch.arange(NUM_ROWS))))
    table = nn.Parameter(rows.embedding.clone())
    dense = torch.optim.Adam([table], 0.1)
    for number in range(40):
        clients = keys.permutation_head(keys.fold(7, number), NUM_ROWS - 1, 2) + 1  # never client 0
        gradient = keys.normal(keys.fold(8, number), 2 * DIM).reshape(2, DIM)
        step = torch.tensor(number, dtype=torch.int32)
        current = embeddings.at(take(rows, clients), None, step)
        put(rows, clients, embeddings.moved(current, gradient, step + 1))
        table.grad = torch.zeros_like(table).index_put((clients,), gradient)
        dense.step()
    assert_close(embeddings.at(rows, None, torch.tensor(40, dtype=torch.int32)).embedding, table.detach())
