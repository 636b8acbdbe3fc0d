"""What would be silently wrong is refused with a sentence."""

import functools
import inspect
import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import assert_same_bits
from torch import Tensor, nn

import pfedhn
from pfedhn import keys, models
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.combinators import innermost
from pfedhn.data import partition
from pfedhn.deploy.spec import read_spec, to_plan
from pfedhn.engine.state import Progress
from pfedhn.errors import UserError
from pfedhn.experiments.directory import Options
from pfedhn.experiments.spec import Cell
from pfedhn.runs import execute as execution
from pfedhn.runs.assemble import assemble, choose_device
from pfedhn.runs.execute import computing_on
from pfedhn.runs.train import USUAL


def a_network() -> nn.Module:
    return pfedhn.MLP(8, 5, 4)


def made_federation(**changes: object) -> pfedhn.Federation:
    generator = numpy.random.default_rng(0)
    x, y = generator.normal(size=(240, 8)), numpy.arange(240) % 4
    x, y = changes.get("x", x), changes.get("y", y)  # type: ignore[assignment]
    split = changes.get("split", (0.7, 0.15, 0.15))
    return pfedhn.Federation.from_arrays(x, y, pfedhn.by_classes(2, num_clients=6), split=split)  # type: ignore[arg-type]


def train(model: object, federation: pfedhn.Federation | None = None, **settings: object) -> pfedhn.Run:
    federation = federation or made_federation()
    return pfedhn.train("pfedhn", federation, model, steps=2, progress=False, **settings)  # type: ignore[arg-type]


def test_a_network_that_would_be_wrong() -> None:
    """All of them are in tests/engine/test_network.py."""
    with pytest.raises(UserError, match="depends on the other examples of its batch"):
        train(lambda: nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 4)))


def test_constant_buffers_pass_and_go_along_with_the_personal_model() -> None:
    class Masked(pfedhn.MLP):
        def __init__(self) -> None:
            super().__init__(8, 5, 4)
            self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1, 1, 0, 1, 1]))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.mask)

    run = train(Masked)
    assert torch.equal(run.personal_model(3).mask, Masked().mask)  # type: ignore[arg-type]


def test_frozen_parameters_are_constants() -> None:
    def half_frozen() -> nn.Module:
        network = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 4))
        network[0].requires_grad_(False)
        return network

    run = train(half_frozen)
    assert set(run.personal_weights(0)) == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x": numpy.full((240, 8), numpy.nan)}, "example 0 of x holds NaN"),
        ({"y": numpy.arange(240) % 4 - 1}, "has the label -1; class labels start at 0"),
        ({"y": numpy.zeros(239, dtype=int)}, "240 examples and y has 239"),
        ({"split": (0.5, 0.5, 0.5)}, "sum to 1"),
        ({"split": (0.0, 0.5, 0.5)}, "no training examples"),
    ],
)
def test_data(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        made_federation(**changes)


def test_nothing_to_judge_by() -> None:
    with pytest.raises(ValueError, match="validation or test examples"):
        train(lambda: pfedhn.MLP(8, 4), made_federation(split=(1.0, 0.0, 0.0)))


def test_nothing_left_to_generate() -> None:
    with pytest.raises(ValueError, match="nothing is left to generate"):
        pfedhn.train(
            pfedhn.PFedHN(personal=("layers",)), made_federation(), lambda: pfedhn.MLP(8, 4), steps=1, progress=False
        )


def test_unknown_names() -> None:
    with pytest.raises(UserError, match="did you mean 'pfedhn'"):
        pfedhn.train("pfedhnn", made_federation(), lambda: pfedhn.MLP(8, 4), progress=False)
    with pytest.raises(ValueError, match=r"does not have; it has layers\.0"):
        pfedhn.train(
            pfedhn.PFedHN(personal=("fc3",)), made_federation(), lambda: pfedhn.MLP(8, 4), steps=1, progress=False
        )
    with pytest.raises(UserError, match="there is no client 6; they are numbered from 0 to 5"):
        train(lambda: pfedhn.MLP(8, 4)).personal_model(6)


@pytest.mark.slow
def test_averaging_refuses_several_architectures() -> None:
    federation = made_federation().with_architectures(["small", "large"] * 3)
    factories = {"small": lambda: pfedhn.MLP(8, 4), "large": lambda: pfedhn.MLP(8, 16, 4)}
    with pytest.raises(ValueError, match="cannot serve the architectures small, large together"):
        pfedhn.train("fedavg", federation, factories, steps=1, progress=False)
    run = pfedhn.train("pfedhn", federation, factories, steps=4, progress=False)
    assert sum(p.numel() for p in run.personal_model(0, architecture="large").parameters()) == 8 * 16 + 16 + 16 * 4 + 4


@pytest.mark.slow
def test_a_new_client_learns_only_what_is_its_own() -> None:
    federation = made_federation()
    run = pfedhn.train("pfedhn-pc", federation, lambda: pfedhn.MLP(8, 16, 4), steps=30, progress=False)
    before = [leaf.clone() for leaf in run.memories().shared.phi.values()]
    new = run.add_client(federation.x[:60], federation.y[:60], rounds=5)
    assert all(torch.equal(a, b) for a, b in zip(before, run.memories().shared.phi.values(), strict=True))
    assert new.round <= 5
    assert new.model(federation.x[:3]).shape == (3, 4)
    start = run.simulation.algorithm.join_row(run.memories().shared, run.memories().rows, None)
    assert new.round == 0 or not torch.equal(new.row.embedding, start.embedding)


def computing() -> tuple[object, ...]:
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_precision_holds_while_a_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = computing()
    with computing_on("cuda", "tf32", deterministic=True):
        assert computing() == ("high", True, True, ":4096:8")
        with computing_on("cuda", "fp32", deterministic=False):
            assert computing()[:2] == ("highest", False)
        assert computing() == ("high", True, True, ":4096:8")
    assert computing() == before
    with pytest.raises(KeyError), computing_on("cuda", "tf32", deterministic=True):
        raise KeyError
    assert computing() == before
    with computing_on("cpu", "tf32", deterministic=True):
        assert computing() == before


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (choose_device("auto"), choose_device(torch.device("cpu"))) == ("cpu", "cpu")
    with pytest.raises(UserError, match="PyTorch finds no GPU here; take the device 'cpu'"):
        train(lambda: pfedhn.MLP(8, 4), device="cuda:1")
    with pytest.raises(UserError, match="there is no device 'gpu'; did you mean 'cpu'"):
        choose_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (choose_device("auto"), choose_device("cuda:1")) == ("cuda", "cuda:1")


def test_both_roads_have_the_same_defaults() -> None:
    ours = {name: item.default for name, item in inspect.signature(pfedhn.train).parameters.items()}
    assert ours["device"] == "auto"
    options = Options()
    assert (ours["executor"], ours["precision"], ours["deterministic"]) == (
        options.executor,
        options.precision,
        options.deterministic,
    )
    cell = Cell()
    ours |= USUAL  # where a model is given
    for name in ("steps", "cohort_size", "batch_size", "evaluate_every", "select", "patience", "upload", "download"):
        assert ours[name] == getattr(cell, name), name


def test_clients_join_together_each_with_draws_of_its_own() -> None:
    x, y = numpy.random.default_rng(0).normal(size=(900, 8)).astype("float32"), numpy.arange(900) % 6
    rule = partition.dirichlet(1.0, num_clients=6, novel_clients=3)
    federation = pfedhn.Federation.from_arrays(x, y, partition=rule)
    run = pfedhn.train("pfedhn-pc", federation, lambda: pfedhn.MLP(8, 6, 6), steps=6, progress=False)
    assert federation.joining is not None
    joined = run.add_clients(federation.joining, rounds=2, settings={"embedding_lr": 0.1})
    assert joined.accuracy.shape == (3,)
    assert joined.simulation.algorithm.embeddings.lr == 0.1  # type: ignore[attr-defined]
    shared, kept = (memories.shared for memories in (run.memories(), joined.memories))
    assert all(one.equal(other) for one, other in zip(shared.phi.values(), kept.phi.values(), strict=True))
    start = run.add_clients(federation.joining, rounds=0)
    assert start.round == 0
    embeddings = start.memories.rows.embedding
    assert embeddings.equal(embeddings[:1].expand_as(embeddings))  # all begin at the mean of those that trained
    with pytest.raises(UserError, match="has no field 'embeding_lr'"):
        run.add_clients(federation.joining, settings={"embeding_lr": 0.1})


def test_a_client_that_joins_draws_by_its_name_or_its_examples() -> None:
    federation = made_federation()
    run = pfedhn.train(
        pfedhn.PFedHN(personal=("last",)), federation, lambda: pfedhn.MLP(8, 5, 4), steps=2, progress=False
    )

    def head(first: int, name: str | None = None) -> Tensor:
        joined = run.add_client(federation.x[first : first + 40], federation.y[first : first + 40], rounds=0, name=name)
        return next(iter(joined.private.head.values()))

    assert head(0).equal(head(0))
    assert not head(0).equal(head(1))  # two clients do not begin with the same head
    assert head(0, "lyon").equal(head(1, "lyon"))
    assert not head(0, "lyon").equal(head(0, "paris"))


def test_no_round_is_chosen_by_a_number_that_is_none() -> None:
    def metric(outputs: Tensor, y: Tensor) -> Tensor:
        return outputs[:, 0] * math.nan

    with pytest.raises(UserError, match="the metric is NaN on validation examples at step 0, so that no round can"):
        train(lambda: nn.Linear(8, 4), metric=metric)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


@pytest.mark.slow
def test_layers_that_are_frozen_stay_at_their_start_and_are_never_sent(tmp_path: Path) -> None:
    federation = made_federation()
    settings = {"generated": ("head",), "rest": "frozen", "local_steps": 3, "hidden_dim": 8}
    runs = [
        pfedhn.train(
            pfedhn.ALGORITHMS["pfedhn"](**settings),
            federation,
            Tower,
            steps=6,
            seed=seed,
            progress=False,
            directory=tmp_path / name,
        )
        for seed, name in ((0, "a"), (1, "b"))
    ]
    body = [run.personal_model(0).body.weight for run in runs]
    assert not torch.equal(*body)  # of each seed's own start
    assert torch.equal(runs[0].personal_model(1).body.weight, body[0])
    assert set(runs[0].personal_weights(0)) == {"head.weight", "head.bias"}
    assert runs[0].state.bytes_down == 6 * 4 * (5 * 4 + 4)
    again = pfedhn.load(tmp_path / "a").personal_model(2)
    assert torch.equal(again.body.weight, body[0])
    assert torch.equal(again.head.weight, runs[0].personal_model(2).head.weight)


def test_a_server_that_is_too_large_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 100_000, "SC_PAGE_SIZE": 20_000}.__getitem__)
    sentence = r"the server's model, .* would need \d\.\d GB .* has 2\.0 GB; .* head = 'low-rank' \(1\.0 GB\)"
    with pytest.raises(UserError, match=sentence):
        train(lambda: pfedhn.MLP(8, 30_000, 60, 4))
    for head in ("low-rank", "chunked"):  # they fit
        pfedhn.ALGORITHMS["pfedhn"](head=head).for_clients(6)
        with pytest.raises(UserError, match="goes with neither linear nor spectral_norm"):
            pfedhn.ALGORITHMS["pfedhn"](head=head, linear=True).for_clients(6)


@pytest.mark.slow
def test_what_is_needed_counts_the_cohort_the_head_and_what_clients_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 100_000, "SC_PAGE_SIZE": 1_000}.__getitem__)  # 0.1 GB
    network = functools.partial(pfedhn.MLP, 8, 1_000, 600, 4)  # of 2.4 MB

    def refuse(method: Any, num_clients: int, sentence: str | None, **changes: Any) -> None:
        x, y = numpy.zeros((4, 8)), numpy.arange(4)
        federation = pfedhn.Federation.from_clients([(x, y)] * num_clients)
        with nullcontext() if sentence is None else pytest.raises(UserError, match=sentence):
            assemble(method, federation, network, steps=6, batch_size=4, device="cpu", **changes)

    # Two copies of weights and momentum of each of 128 clients, for whom the table has room.
    keeping = r"what the clients keep for themselves, .* would need 1\.3 GB .* has 0\.1 GB; .* or take fewer clients"
    refuse(pfedhn.Local(local_steps=2), 100, keeping)
    refuse(pfedhn.FedAvg(local_steps=2), 100, None, cohort_size=1)
    refuse(pfedhn.FedAvg(local_steps=2), 100, r"the server's model, .* would need 0\.\d GB", cohort_size=50)
    chunked = pfedhn.ALGORITHMS["pfedhn"](local_steps=2, head="chunked")
    refuse(chunked, 4, None)
    large = replace(chunked, chunk_size=100_000)
    refuse(large, 4, r"would need 0\.\d GB .* has 0\.1 GB; .* or take chunk_size = (500|2000|10000) \(0\.0 GB\)")
    small = replace(chunked, chunk_size=10)
    refuse(small, 4, r"would need 0\.\d GB .* has 0\.1 GB; .* or take chunk_size = (500|2000|10000) \(0\.0 GB\)")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"rest": "frozen"}, "rest = 'frozen' has no effect without layers that are generated"),
        ({"shared_lr": 1.0}, "shared_lr = 1.0 has no effect without layers that are shared"),
        ({"shared_lr": 1.0, "generated": ("last",), "rest": "frozen"}, "or rest='shared'; give that too"),
        ({"rank": 2}, "rank = 2 has no effect without head='low-rank'; give that too, or leave it out"),
        ({"chunk_size": 9}, "chunk_size = 9 has no effect without head='chunked'"),
        ({"chunk_size": 9, "head": "low-rank"}, "chunk_size = 9 has no effect"),
        (
            {"local_start": "shared"},
            "local_start = 'shared' has no effect without head='added', 'low-rank' or 'chunked'",
        ),
        (
            {"generated": ("last",), "rest": "frozen", "fixed_layers": ("first",)},
            "fixed_layers = ('first',) has no effect without rest='shared'",
        ),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(pfedhn.UserError, match=re.escape(sentence)):
        pfedhn.ALGORITHMS["pfedhn"](**settings).for_clients(6)


def test_clients_that_are_described_need_embeddings_of_that_length() -> None:
    """A variant comes with a length of its own, which who describes clients did not choose."""
    with pytest.raises(pfedhn.UserError, match="set embedding_dim to None"):
        pfedhn.ALGORITHMS["pfedhn-shared"](embedding="fixed").for_clients(20, 5)
    described: Any = pfedhn.ALGORITHMS["pfedhn-shared"](embedding="fixed", embedding_dim=None)
    assert innermost(described.for_clients(20, 5)).embeddings.dim == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"rest": "frozen", "generated": ("last",)},
        {"shared_lr": 1.0, "generated": ("last",)},
        {"shared_lr": 1.0, "head": "chunked", "chunk_size": 9},
        {"shared_lr": 1.0, "head": "low-rank", "rank": 2, "generated": ("last",), "rest": "frozen"},
        {"head": "added", "local_start": "shared", "fixed_layers": ("last",)},
    ],
)
def test_settings_with_effect_are_taken(settings: dict[str, Any]) -> None:
    assert pfedhn.ALGORITHMS["pfedhn"](**settings).for_clients(6).embeddings.dim == 2


def test_a_result_says_who_the_clients_are() -> None:
    x, y = numpy.random.default_rng(0).normal(size=(40, 3)), numpy.arange(40) % 4
    halves = {name: (x[y // 2 == number], y[y // 2 == number]) for number, name in enumerate(("Berlin", "Lyon"))}
    clients = {**halves, "Rome": (x, y)}
    federation = pfedhn.Federation.from_clients(clients, class_names=("cat", "dog", "cow", "hen"))
    run = pfedhn.train(
        pfedhn.ALGORITHMS["pfedhn"](embedding_dim=5),
        federation,
        lambda: pfedhn.MLP(3, 4),
        steps=6,
        progress=False,
        device="cpu",
    )
    assert run.result is not None
    found = run.result.clients
    assert found is not None
    assert found.names == ("Berlin", "Lyon", "Rome")
    assert found.class_names == ("cat", "dog", "cow", "hen")
    assert found.classes is not None
    assert [set(held) for held in found.classes] == [{"0", "1"}, {"2", "3"}, {"0", "1", "2", "3"}]
    assert [sum(held.values()) for held in found.classes] == federation.splits["train"].size.tolist()

    # The plane keeps as much of the distances as any plane can: with three points, all of them.
    embeddings, place = run.embeddings(), torch.tensor(found.map, dtype=torch.float64)
    assert embeddings.shape[0] == 3
    assert torch.allclose(torch.cdist(place, place), torch.cdist(embeddings, embeddings), atol=1e-4)
    assert found.map_variance == pytest.approx(1.0)


def test_a_method_without_embeddings_says_so() -> None:
    x, y = numpy.zeros((40, 3)), numpy.arange(40) % 2
    federation = pfedhn.Federation.from_arrays(x, y, pfedhn.by_classes(1, num_clients=2))
    run = pfedhn.train("fedavg", federation, lambda: pfedhn.MLP(3, 2), steps=2, progress=False, device="cpu")
    with pytest.raises(UserError, match="fedavg has no embeddings of clients"):
        run.embeddings()
    assert run.result is not None
    assert run.result.clients is not None
    assert run.result.clients.map is None


def test_checkpoints_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many large runs are in one process, writing them once a minute would take half of it."""
    now, saved = [0.0], []

    def tick() -> float:
        now[0] += 1.0
        return now[0]

    def written(seconds: float) -> int:
        def save(*given: object) -> None:
            saved.append(now[0])
            now[0] += seconds

        saved.clear()
        with monkeypatch.context() as patch:
            patch.setattr(execution.time, "monotonic", tick)
            patch.setattr(execution.RunDirectory, "save", save)
            patch.setattr(execution._PACE, "last", 0.0)
            patch.setattr(execution, "CHECKPOINT_SECONDS", 4.0)
            settings = {
                "steps": 200,
                "evaluate_every": 100,
                "directory": tmp_path / str(len(list(tmp_path.iterdir()))),
                "progress": False,
            }
            pfedhn.train(FedAvg(local_steps=1), made_federation(), lambda: pfedhn.MLP(8, 5, 4), **settings)
        return len(saved)

    alone = written(0.1)
    assert alone > written(1.0) > 1
    monkeypatch.setattr(execution._PACE, "num_runs", 10)
    assert alone > written(0.1)


def test_ctrl_c_does_not_wait_for_another_run_s_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits has nothing under way."""

    def waits(simulation: object, state: object) -> Iterator[Progress]:
        while True:
            yield Progress(0, None, is_pause=True, is_waiting=True)

    simulation = train(lambda: pfedhn.MLP(8, 5, 4)).simulation
    monkeypatch.setattr(execution, "rounds", waits)
    stop = threading.Event()
    work = execution.execute(simulation, tmp_path / "run", stop=stop)
    assert [next(work), next(work)] == [True, True]
    stop.set()
    with pytest.raises(KeyboardInterrupt):
        next(work)


def test_an_unnamed_network_starts_as_the_same_network_in_a_federation_file() -> None:
    """A hypernetwork draws its head by the network's name, so a network has one name wherever it is given."""
    text = 'method = "pfedhn"\nmodel = "mlp-5"\nclients = 6\n[data]\nshape = [8]\nclasses = 4\n'
    plan = to_plan(read_spec(text, Path("federation.toml")))
    expected = plan.exchange.init_shared(plan.models, plan.initial_models(), keys.fold(plan.seed, "shared"))
    for model in ("mlp-5", lambda: pfedhn.MLP(8, 5, 4), functools.partial(pfedhn.MLP, 8, 5, 4)):
        simulation = assemble("pfedhn", made_federation(), model, steps=2, device="cpu")
        assert_same_bits(simulation.initial_state().memories.shared, expected)


@pytest.mark.parametrize(
    ("factory", "name"),
    [
        (lambda: 1 / 0, "model"),  # refused elsewhere, under this name
        (lambda: pfedhn.MLP(8, 5, 6, 4), "mlp-5-6"),
        (lambda: models.TabularMLP(8, 4), "tabular"),
        (functools.partial(models.build, "mlp-4", 3, (5,)), "mlp-4"),
        (lambda: pfedhn.LeNet(100, 8), "lenet-s"),
        (pfedhn.LeNet, "lenet"),
        (models.ResNet, "resnet18"),
        (lambda: models.ResNet(100, norm="group", in_channels=1), "resnet18-gn"),
        (lambda: models.ResNet(width=4), "ResNet"),
        (lambda: models.LinearModel(3), "linear"),
        (models.OmniglotNet, "omniglot"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "Sequential"),
        (a_network, "a_network"),
    ],
)
def test_the_name_of_an_unnamed_network(factory: Any, name: str) -> None:
    assert models.name_of(factory) == name


def test_a_run_of_an_older_version_goes_on_under_its_name(tmp_path: Path) -> None:
    network = functools.partial(pfedhn.MLP, 8, 5, 4)
    before = train({"model": network}, directory=tmp_path)
    again = train(network, directory=tmp_path)
    assert list(again.simulation.models) == ["model"]
    assert_same_bits(again.personal_weights(0), before.personal_weights(0))
