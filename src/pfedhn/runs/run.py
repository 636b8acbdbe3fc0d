"""A run: assembled in one place, trained, stopped and gone on with, loaded again, and what it can be asked for."""

import copy
import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pfedhn import keys, models
from pfedhn.algorithm import Algorithm
from pfedhn.algorithms import ALGORITHMS, find_method
from pfedhn.data.absent import AbsentFederation, Description, with_examples
from pfedhn.data.arrays import Arrays
from pfedhn.data.columns import filled_with, new_client
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_inputs
from pfedhn.data.lazy import LazyFederation
from pfedhn.data.reading import Reading, reading_card
from pfedhn.engine.crew import Devices
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.gpu import COMPILER, computing_on_gpu
from pfedhn.engine.network import (
    build_model,
    check_factory,
    check_model,
    refuse_single_rows,
    with_frozen,
    with_num_outputs,
)
from pfedhn.engine.norms import norms as norms_of
from pfedhn.engine.room import refuse_too_large
from pfedhn.engine.rounds import rounds, scores_of_adapted
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Evaluation, Memories, Progress, Schedule, State
from pfedhn.engine.transform import Transform, find_transform
from pfedhn.errors import RunError, UserError, closest, short, some
from pfedhn.model import Factory, Model, PerExample
from pfedhn.params import Params, take
from pfedhn.privacy import Privacy
from pfedhn.runs.cluster import Workers, connection
from pfedhn.runs.portable import Card, Portable, check_ending, file_names, index, write_model
from pfedhn.runs.progress import Watch, bar, score_text
from pfedhn.runs.tracking import Callback, numbers
from pfedhn.settings import check_seed, checked_method, whole_number
from pfedhn.storage.checkpoint import load_state, remove_old, save_state
from pfedhn.storage.record import (
    DIVERGED,
    MendableError,
    Origin,
    Spec,
    append_moment,
    held,
    identity,
    method_name,
    open_directory,
    partition_digest,
    read_result,
    read_spec,
    settings_of,
    to_simulation,
    write_history,
    write_result,
)
from pfedhn.storage.schema import Clients, Moment, Result, Scores, SplitScores, from_json, to_json
from pfedhn.storage.seal import digest
from pfedhn.system.environment import environment
from pfedhn.system.files import flush, given_path, make_folder, write_atomically, writing
from pfedhn.system.process import advise_once
from pfedhn.system.reference import Code
from pfedhn.system.stopping import stop_on_signal

logger = logging.getLogger("pfedhn")

CHECKPOINT_SECONDS = 60.0  # between two checkpoints of a run, or more:
CHECKPOINT_SHARE = 0.05  # what they may take of a process's time, all runs in it together
TRIAL_ROUNDS = 10  # for which settings are tried before a client joins
NUM_CLIENTS_IN_METRICS = 1_000  # larger federations keep per-client scores of the chosen round only
NUM_CLIENTS_DESCRIBED = 2_000  # of more, a result does not say who holds what

AnyAlgorithm = Algorithm[Any, Any, Any]
Precision = Literal["tf32", "fp32"]

Tried: TypeAlias = Sequence[tuple[Mapping[str, Any], float]]
"""Settings that were tried for a few rounds, each with its validation score; minus infinity where it diverged."""

Value = TypeVar("Value")


def build_algorithm(method: str | AnyAlgorithm, settings: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """An algorithm from its name and settings, or one that is built already, its settings checked."""
    if isinstance(method, type):
        raise UserError(f"{method.__name__} is a class; give the method itself, {method.__name__}(...), or its name.")
    if not isinstance(method, str) and not (isinstance(method, Algorithm) and is_dataclass(method)):
        raise UserError(f"method is {short(method)}; give a name of pfedhn.ALGORITHMS, or a method such as PFedHN().")
    if not isinstance(method, str):
        values = {item.name: getattr(method, item.name) for item in fields(method)}
        checked_method(type(method), values, type(method).__name__)
        return method
    known = find_method(method)
    what = method if method in ALGORITHMS else known.name
    algorithm: AnyAlgorithm = known(**checked_method(known.algorithm, settings or {}, what))
    return algorithm


def choose_device(name: str | torch.device) -> str:
    """The device that is meant: "auto" is the GPU if PyTorch finds one, else the CPU."""
    if isinstance(name, str) and name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except (RuntimeError, TypeError, ValueError):
        raise UserError(f"there is no device {short(name)}; {closest(str(name), ['auto', 'cpu', 'cuda'])}") from None
    if kind not in ("cpu", "cuda"):
        raise UserError(f"runs need a CPU or a CUDA GPU, not the device {str(name)!r}; take 'auto'.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; take the device 'cpu', which works anywhere.")
    return str(name)


def _refuse_without_evaluation(federation: Federation) -> None:
    if not sum(int(federation.splits[split].size.sum()) for split in EVALUATED_SPLITS):
        raise UserError("no client has validation or test examples; leave some out of training to judge the models by.")


def assemble(
    method: str | AnyAlgorithm,
    federation: Federation,
    model: str | Factory | Mapping[str, Factory],
    *,
    steps: int = 5_000,
    cohort_size: int | None = None,
    batch_size: int = 64,
    evaluate_every: int = 30,
    seed: int = 0,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str | torch.device = "auto",
    executor: str = "auto",
    upload: str | Transform = "full",
    download: str | Transform = "full",
    starts: Mapping[str, Params] | None = None,
    resize_every: int | None = None,
    privacy: Privacy | None = None,
    in_flight: int | None = None,
) -> Simulation:
    """Data, network, method, schedule and seed become a run here and nowhere else. Arguments as `train`.

    Args:
        starts: Weights of each network that every client starts from, of a run before this one.
        resize_every: Communication steps after which every client goes on to the next of several target networks.
    """
    if not isinstance(federation, Federation):
        raise UserError(f"federation is {short(federation)}; make one with pfedhn.Federation.from_arrays, say.")
    steps, batch_size = whole_number("steps", steps), whole_number("batch_size", batch_size)
    evaluate_every, seed = whole_number("evaluate_every", evaluate_every), check_seed(seed)
    federation = federation.to(choose_device(device))
    if isinstance(model, str):
        shape = tuple(federation.x.shape[1:])
        if federation.num_classes is None and not federation.y.is_floating_point() and federation.y.ndim == 1:
            raise UserError(
                f"{short(model)} needs as many outputs as there are classes, which nobody knows of clients that are "
                "loaded when needed; give a function that makes the network, as lambda: pfedhn.MLP(8, 16, 6)."
            )
        model = {models.network_name(model): models.factory(model, federation.num_classes or 1, shape)}
    factories = dict(model) if isinstance(model, Mapping) else {"model": model}
    if not factories:
        raise UserError("model names no target network; give a function that makes one.")
    if any(isinstance(factory, nn.Module) for factory in factories.values()):
        raise UserError(
            "model is a network; give a function that makes it (its class, or lambda: MyNetwork(10)), so that every "
            "seed starts from weights of its own."
        )
    if federation.architectures is None and len(factories) > 1:
        raise UserError(
            "several target networks need federation.with_architectures(...) to say which client runs which."
        )
    unknown = set(federation.architectures or ()) - set(factories)
    if unknown:
        raise UserError(f"there is no target network {sorted(unknown)[0]!r}; {closest(sorted(unknown)[0], factories)}")
    _refuse_without_evaluation(federation)
    networks = {name: build_model(name, factory, federation, loss, metric) for name, factory in factories.items()}
    if isinstance(federation, LazyFederation):
        federation = with_num_outputs(federation, networks.values())
    algorithm = build_algorithm(method).for_clients(federation.num_clients, federation.descriptor_dim)
    if cohort_size is None:
        cohort_size = min(algorithm.usual_cohort_size, federation.num_clients)
    cohort_size = whole_number("cohort_size", cohort_size)
    networks = {name: with_frozen(network, algorithm, seed) for name, network in networks.items()}
    for network in networks.values():
        refuse_single_rows(network, federation, batch_size)
    schedule = Schedule(steps, cohort_size, batch_size, evaluate_every)
    if not isinstance(executor, str):
        raise UserError(f"executor is {short(executor)}; give its name, such as 'auto'.")
    wire = find_transform(upload), find_transform(download)
    if privacy is not None and not isinstance(privacy, Privacy):
        raise UserError(f"privacy is {short(privacy)}; give a pfedhn.Privacy(clip=..., noise=...).")
    simulation = Simulation(
        algorithm,
        networks,
        federation,
        schedule,
        seed,
        executor,
        starts,
        *wire,
        resize_every=resize_every,
        privacy=privacy,
        in_flight=None if in_flight is None else whole_number("in_flight", in_flight),
    )
    refuse_too_large(simulation)
    return simulation


@dataclass(repr=False)
class Run:
    """A finished or interrupted run: its chosen round and every client's model; new clients can join it.

    Made by `pfedhn.train` and `pfedhn.load`. `run.accuracy` holds each client's test accuracy at the round chosen on
    validation.
    """

    simulation: Simulation
    state: State
    origin: Origin
    history: list[Moment] = field(default_factory=list)  # every evaluation
    seconds: float = 0.0
    result: Result | None = None  # what result.json says: scores, bytes, seconds; None while it is not finished
    joined: dict[str, "NewClient"] = field(default_factory=dict)  # those that `add_client` gave a name

    def __repr__(self) -> str:
        method, state = self.simulation.algorithm, self.state
        step = f"step {state.round * self.simulation.clients_per_round:,}"
        score = f", {score_text(self)}" if self.history else ""
        return f"Run({self.origin.name!r}: {type(method).__name__}, {self.simulation.federation}, {step}{score})"

    @property
    def chosen(self) -> Evaluation:
        """The first evaluation with the strictly best validation score."""
        assert self.state.best is not None, "a run evaluates before its first round"
        return self.state.best.evaluation

    @property
    def accuracy(self) -> NDArray[numpy.float64]:
        """[clients]: test accuracy of each client's own model at the chosen round; NaN where it has no examples.

        If clients adapt their model before they use it, this is the accuracy after that, unless it is worse on
        validation: then they use it as it is.
        """
        test = scores_of(self.chosen.splits["test"]) if self.result is None else self.result.test
        sums = numpy.array(test.clients, dtype=float) * (1 if test.has_accuracy else -1)
        with numpy.errstate(invalid="ignore"):
            values: NDArray[numpy.float64] = sums / numpy.array(test.client_examples)
        return values

    @property
    def adapts(self) -> bool:
        """Whether clients take the method's adaptation steps before they use their models.

        They do not if all of them together were worse on validation after these steps.
        """
        return self.simulation.algorithm.adaptation_steps > 0 and (self.result is None or self.result.adapted is None)

    @property
    def epsilon(self) -> NDArray[numpy.float64]:
        """[clients]: the privacy that each has spent over all rounds; infinite without privacy."""
        simulation, counts = self.simulation, self.state.num_updates
        privacy, num_clients = simulation.privacy, simulation.federation.num_clients
        if privacy is None:
            return numpy.full(num_clients, numpy.inf)
        if isinstance(simulation.federation, AbsentFederation):
            raise UserError("what was spent depends on how many examples a client has, and a run's directory has none.")
        costs = [simulation.privacy_cost(client) for client in range(num_clients)]
        return numpy.array([privacy.spent(cost, counts[client]) for client, cost in enumerate(costs)])

    def to_frame(self) -> Any:
        """The history as a pandas table: a line per evaluation, its number of steps as the index."""
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_frame needs pandas; install it with: pip install pandas.") from error
        table = [{"step": moment.step, **numbers(moment)} for moment in self.history]
        return pandas.DataFrame(table).set_index("step")

    def memories(self, last: bool = False) -> Memories:
        """The three memories at the chosen round, or after the last one."""
        if not isinstance(last, bool):
            raise UserError(f"last is {short(last)}; it must be True or False.")
        assert self.state.best is not None
        return self.state.memories if last else self.state.best.memories.to(self.simulation.federation.x.device)

    def embeddings(self, last: bool = False) -> Tensor:
        """[clients, D]: the embedding of each client at the chosen round, or after the last one.

        Args:
            last: After the last round instead of the chosen one.

        In double precision, on the CPU. Methods with a hypernetwork have embeddings; another method is refused.
        """
        embeddings = self.simulation.embeddings(self.memories(last))
        if embeddings is None:
            raise UserError(f"{self.origin.method} has no embeddings of clients; methods with a hypernetwork have.")
        return embeddings.detach().double().cpu()

    def personal_weights(
        self, client: int | str, last: bool = False, architecture: str | None = None, data: Arrays | None = None
    ) -> Params:
        """The weights of a client's own model; arguments as `personal_model`."""
        simulation, memories = self.simulation, self.memories(last)
        place = self._place(client)
        model = simulation.model_of(place)
        if architecture is not None:
            model = self._network(architecture)
        if data is not None:
            simulation = replace(simulation, federation=with_examples(simulation.federation, place, data))
        number = self.state.round if last else self.chosen.round
        return simulation.personal_weights(memories, model, place, number, self.adapts)

    def personal_model(
        self, client: int | str, last: bool = False, architecture: str | None = None, data: Arrays | None = None
    ) -> nn.Module:
        """A plain module with this client's weights, in evaluation mode.

        Args:
            client: Its number or, if clients have names, its name; or the name it joined with.
            last: The weights after the last round instead of those of the chosen one.
            architecture: Another of the run's target networks; the client keeps its embedding.
            data: The client's training examples (x, y), for a method that adapts on them (Per-FedAvg) in a run that was
                loaded: a directory holds no examples.
        """
        if isinstance(client, str) and client in self.joined and architecture is None and data is None:
            return copy.deepcopy(self.joined[client].model)
        weights = self.personal_weights(client, last, architecture, data)
        model = self.simulation.model_of(self._place(client)) if architecture is None else self._network(architecture)
        return model.with_weights(weights)

    def read(self, path: str | Path, client: int | str) -> Tensor:
        """New examples from a file, as a client's own model takes them.

        A table's columns are found by name, in any order; text columns and empty cells are treated as in training, and
        other columns are ignored. Images are brought to the size of the run's. A run that was trained on arrays knows
        no names: all columns are features, in the order of training.

        Args:
            path: A table, `x.npy`, an image, or a folder with `x.npy` or images.
            client: As `personal_model`; empty cells are filled with this client's medians.

        Examples:
            >>> import functools, pathlib, pfedhn, tempfile
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> visits = [f"{'lyon' if i % 3 else 'paris'},{i},{i % 7},{i % 2}" for i in range(60)]
            >>> _ = (folder / "visits.csv").write_text("\\n".join(["clinic,age,dose,outcome", *visits]))
            >>> clinics = pfedhn.datasets.read_federation(folder / "visits.csv", "clinic", "outcome")
            >>> network = functools.partial(pfedhn.TabularMLP, 2, 4, 2)
            >>> run = pfedhn.train("pfedhn", clinics, network, steps=2, progress=False)
            >>> _ = (folder / "new.csv").write_text("dose,age\\n3,61\\n")
            >>> run.read(folder / "new.csv", "lyon")
            tensor([[61.,  3.]])
        """
        return read_examples(self, path, client).x

    def export(self, client: int | str, path: str | Path, *, last: bool = False, data: Arrays | None = None) -> Path:
        """Write a client's model to a file that runs without this package, and a model card next to it.

        Args:
            client: As `personal_model`.
            path: Its extension chooses the format: `.onnx` (batches of any size), `.pt2` (`torch.export`), or
                `.safetensors` (the weights, if you have the network's code). The card ends with `.md`.
            last: As `personal_model`.
            data: As `personal_model`.
        """
        file = given_path(path)
        ending = check_ending(file)
        if isinstance(client, str) and client in self.joined:
            return self.joined[client].export(file)
        model = self.personal_model(client, last, data=data)
        card = self.card(client)
        write_model(
            file, self._portable(self.simulation.model_of(self._place(client)).name).content(model, ending, card), card
        )
        return file

    def export_all(self, folder: str | Path, ending: str = ".onnx", *, last: bool = False) -> dict[str, Path]:
        """Write the model of every client into a folder, with a README.md that lists them; the files by client.

        Args:
            folder: Created if it does not exist.
            ending: Which format, as in `export`.
            last: As `personal_model`.
        """
        place = given_path(folder)
        check_ending(Path(f"model{ending}"))
        make_folder(place)
        federation = self.simulation.federation
        clients = [federation.name_of(number) for number in range(federation.num_clients)]
        files = {client: place / f"{name}{ending}" for client, name in zip(clients, file_names(clients), strict=True)}
        for client, file in files.items():
            self.export(client, file, last=last)
        cards = {files[client].name: self.card(client) for client in clients}
        write_atomically(place / "README.md", index(cards).encode())
        return files

    def _portable(self, architecture: str) -> Portable:
        """A target network ready to be written; it is traced once, however many clients run it."""
        if architecture not in self._portables:
            model, federation = self.simulation.models[architecture], self.simulation.federation
            dtype = model.dtype if federation.dtype.is_floating_point else federation.dtype
            self._portables[architecture] = Portable(
                copy.deepcopy(model.testing_module).cpu(), tuple(federation.x.shape[1:]), dtype
            )
        return self._portables[architecture]

    @cached_property
    def _portables(self) -> dict[str, Portable]:
        return {}

    @property
    def description(self) -> Description:
        """What is known of the clients and their examples without seeing one."""
        federation = self.simulation.federation
        if isinstance(federation, AbsentFederation):
            return federation.description
        described = Description.of(federation)
        return replace(described, name=self.origin.dataset, preprocessing=self.origin.preprocessing)

    def card(self, client: int | str) -> Card:
        """What a client's model was trained on and how good it is, as plain values."""
        place = self._place(client)
        test = scores_of(self.chosen.splits["test"]) if self.result is None else self.result.test
        assert test.clients is not None
        assert test.client_examples is not None
        total, count = test.clients[place], test.client_examples[place]
        mean = total / count if count else None
        reading = self.simulation.federation.reading
        table = None if reading is None else reading.table
        return self._card(
            self.simulation.federation.name_of(place),
            self.simulation.model_of(place),
            {
                "examples": count,
                "accuracy": mean if test.has_accuracy else None,
                "loss": None if test.has_accuracy else mean,
            },
            None if table is None else table.fill_of(self.simulation.federation.name_of(place)),
        )

    def _card(self, client: str, model: Model, test: Mapping[str, Any], fill: Sequence[float] | None) -> Card:
        described, made, code = self.description, environment("cpu"), Code.of(model.factory)
        state = self.state
        return {
            "client": client,
            "run": self.origin.name,
            "method": self.origin.method,
            "settings": to_json(settings_of(self.simulation.algorithm)),
            "data": described.name,
            "clients": described.clients,
            "input": {
                "shape": list(described.shape),
                "dtype": str(model.dtype).removeprefix("torch.")
                if getattr(torch, described.dtype).is_floating_point
                else described.dtype,
                "preprocessing": None if described.preprocessing is None else to_json(dict(described.preprocessing)),
                **reading_card(described.reading, described.shape, fill),
            },
            "classes": described.classes,
            "class_names": None if described.class_names is None else list(described.class_names),
            "network": {
                "name": model.name,
                "factory": code.name,
                "arguments": to_json(code.arguments),
                "keywords": to_json(code.keywords),
                "parameters": sum(shape.numel() for shape in model.shapes.values()),
                "layers": str(model.testing_module),
            },
            "test": dict(test),
            "chosen_step": self.chosen.step,
            "steps": state.round * self.simulation.clients_per_round,
            "seed": self.simulation.seed,
            "versions": {"pfedhn": made.pfedhn, "torch": made.torch},
        }

    def _network(self, architecture: str) -> Model:
        models = self.simulation.models
        if not isinstance(architecture, str) or architecture not in models:
            raise UserError(f"there is no architecture {short(architecture)}; {closest(architecture, models)}")
        return models[architecture]

    def _place(self, client: int | str) -> int:
        """Where a client stands in the tables."""
        return self.simulation.federation.number_of(client)

    def add_client(
        self,
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        *,
        rounds: int = 100,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        architecture: str | None = None,
        descriptor: ArrayLike | Tensor | None = None,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        last: bool = False,
    ) -> "NewClient":
        """Let a client join that took no part in training; only what is its own is learned, the rest is frozen.

        For pFedHN that is the embedding and, for PC, the personal layers. Rounds are as in training, except that the
        server moves the client's row only (`move_row`).

        Args:
            x: The new client's examples; they are split, and the best round is chosen on its validation examples.
            y: Their labels.
            rounds: How many rounds it takes part in.
            split: Fractions for training, validation and test.
            architecture: Which of several target networks it runs; that of the first client by default.
            descriptor: The new client's, for a run with fixed embeddings; its class shares by default.
            name: The client's name, on which its random draws depend; without one, they depend on its examples.
            settings: Settings of the method that differ while it joins, e.g. `{"embedding_lr": 1.0}`. By default, those
                that the method offers (pFedHN: larger rates of the embedding) are tried for 10 rounds each, and the
                best on its validation examples is used; the result's `settings` and `tried` say which.
            seed: Seed of its split and its random draws.
            last: Join the run as it was after its last round instead of the chosen one.
        """
        simulation = self.simulation
        seed = check_seed(seed)
        model = simulation.model_of(0) if architecture is None else self._network(architecture)
        reading = simulation.federation.reading
        data, fill = new_client(x, y, name, split, seed, None if reading is None else reading.table)
        if not sum(int(data.splits[part].size.sum()) for part in EVALUATED_SPLITS):
            raise UserError(
                f"split = {split} of so few examples ({len(data.x)}) leaves none for validation or test; give more "
                "examples, or a split that keeps some of them for these."
            )
        if name is None:
            data = replace(data, identities=torch.tensor([_identity(data)]))
        if simulation.federation.architectures is not None:
            data = data.with_architectures([model.name])
        if (described := self._descriptor(data, descriptor)) is not None:
            data = data.with_descriptors(described[None])
        joined = self.add_clients(data, rounds=rounds, settings=settings, seed=seed, last=last)
        weights, memories = joined.personal_weights(0), joined.memories
        kept = take(memories.private[model.name].take([0]), 0)
        test = joined.splits["test"]
        count = int(test.count.sum())
        score = test.score if count else None
        scores = {
            "examples": count,
            "accuracy": None if test.metric is None else score,
            "loss": -score if test.metric is None and score is not None else None,
        }
        client = NewClient(
            model.with_weights(weights),
            weights,
            take(memories.rows, 0),
            kept.private,
            joined.splits,
            joined.round,
            self._card(name or "that joined", model, scores, fill),
            self._portable(model.name),
            fill,
            joined.settings,
            joined.tried,
        )
        if name is not None:
            self.joined[name] = client
        return client

    def add_clients(
        self,
        federation: Federation,
        *,
        rounds: int = 100,
        settings: Mapping[str, Any] | None = None,
        trial_rounds: int = TRIAL_ROUNDS,
        seed: int = 0,
        last: bool = False,
    ) -> "NewClients":
        """Let clients join that took no part in training, as `add_client` does for one; all train in every round.

        Args:
            federation: The new clients, such as those that a partition holds back (`federation.joining`).
            rounds: How many rounds they take part in; the best one for all of them is chosen on validation.
            settings: Settings of the method that differ while they join, e.g. `{"embedding_lr": 1.0}`; by default, the
                best on validation of those that the method offers. Adaptation steps are taken if the run's clients use
                theirs, or as `adaptation_steps` here says.
            trial_rounds: For how many rounds each of these is tried.
            seed: Seed of their random draws.
            last: Join the run as it was after its last round instead of the chosen one.
        """
        rounds, trial_rounds = whole_number("rounds", rounds, least=0), whole_number("trial_rounds", trial_rounds)
        trial_rounds = min(trial_rounds, rounds)
        if settings is not None:
            self._refuse_other_form(settings)
        choices = [] if settings is not None else self.simulation.algorithm.choices_for_joining()
        can_choose = rounds > 0 and int(federation.splits["validation"].size.sum()) > 0
        # With privacy, every trial would spend of the clients' budget.
        if len(choices) < 2 or not can_choose or self.simulation.privacy is not None:
            return self._join(federation, rounds, settings or {}, seed, last)

        def attempt(choice: Mapping[str, Any], num_rounds: int) -> NewClients | None:
            try:
                joined = self._join(federation, num_rounds, choice, seed, last)
            except Diverged:
                return None
            # Outputs that are not numbers have an accuracy too.
            return joined if math.isfinite(joined.splits["validation"].mean_loss) else None

        trials = [attempt(choice, trial_rounds) for choice in choices]
        scores = [-math.inf if trial is None else trial.splits["validation"].score for trial in trials]
        scores = [-math.inf if math.isnan(score) else score for score in scores]
        tried = list(zip(choices, scores, strict=True))
        for number in sorted(range(len(choices)), key=lambda number: -scores[number]):  # of equal ones, the first
            joined = trials[number]
            if joined is not None and trial_rounds < rounds:
                joined = attempt(choices[number], rounds)
            if joined is not None:
                return replace(joined, tried=tried)
        return self._join(federation, rounds, {}, seed, last)  # which says how it diverges

    def _join(
        self, federation: Federation, rounds: int, settings: Mapping[str, Any], seed: int, last: bool
    ) -> "NewClients":
        simulation, seed = self._with_settings(settings), check_seed(seed)
        first = simulation.model_of(0)
        if simulation.federation.architectures is not None and federation.architectures is None:
            federation = federation.with_architectures([first.name] * (federation.num_clients + federation.num_joining))
        data = federation.to(
            simulation.federation.x.device, first.dtype if federation.dtype.is_floating_point else None
        )
        for name in dict.fromkeys(data.architectures or [first.name]):
            if name not in simulation.models:
                raise UserError(f"there is no architecture {name!r}; {closest(name, simulation.models)}")
            check_model(simulation.models[name], data)
            refuse_single_rows(simulation.models[name], data, simulation.schedule.batch_size)
        _refuse_without_evaluation(data)
        key = int(keys.fold(simulation.seed, "new client", seed))
        joining = simulation.joining(data, self.memories(last), max(rounds, 1), key)
        state = _joined_state(joining, rounds)
        assert state.best is not None
        chosen = state.best.evaluation
        adapts = self.adapts if "adaptation_steps" not in settings else simulation.algorithm.adaptation_steps > 0
        splits = scores_of_adapted(joining, state.best) if adapts else chosen.splits
        return NewClients(joining, state.best.memories, splits, chosen.round, dict(settings), adapts=adapts)

    def _with_settings(self, settings: Mapping[str, Any]) -> Simulation:
        algorithm: Any = self.simulation.algorithm
        if not isinstance(settings, Mapping):
            raise UserError(f"settings is {short(settings)}; give names and values, such as {{'local_lr': 0.01}}.")
        values = checked_method(type(algorithm), settings, method_name(algorithm))
        return replace(self.simulation, algorithm=replace(algorithm, **values)) if values else self.simulation

    def _refuse_other_form(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings under which the server's memory would not be of the form that was trained."""
        memories, changed = self.memories(), self._with_settings(settings)
        if changed is self.simulation:
            return
        key, needs_descriptors = keys.fold(changed.seed, "form"), changed.algorithm.needs_descriptors
        is_same = needs_descriptors == self.simulation.algorithm.needs_descriptors
        if is_same:
            shared = changed.exchange.init_shared(changed.models, changed.initial_models(), key)
            row = changed.algorithm.init_row(key, changed.descriptors()[0] if needs_descriptors else None)
            one = take(memories.rows, 0) if pytree.tree_leaves(memories.rows) else memories.rows
            (old, old_form), (new, new_form) = map(pytree.tree_flatten, ((memories.shared, one), (shared, row)))
            is_same = old_form == new_form and [leaf.shape for leaf in old] == [leaf.shape for leaf in new]
        if not is_same:
            raise UserError(
                f"{some(list(settings))} cannot change while a client joins, since what was trained depends on it; "
                "settings of how a client learns can, such as learning rates."
            )

    def _descriptor(self, data: Federation, given: ArrayLike | Tensor | None) -> Tensor | None:
        wanted = self.simulation.descriptors()
        if wanted.shape[1] == 0:
            return None
        if given is None:
            labels = data.y[data.splits["train"].of(0)]
            given = torch.bincount(labels, minlength=wanted.shape[1]) / len(labels)
        value = torch.as_tensor(given).to(wanted)
        if value.shape != wanted.shape[1:]:
            raise UserError(
                f"the descriptor has the shape {tuple(value.shape)}; this run's have {tuple(wanted.shape[1:])}."
            )
        return value


class GivenExamples(NamedTuple):
    """Examples from a file, for a client's own model."""

    x: Tensor
    answers: NDArray[Any] | None  # the right ones, where they are known
    files: tuple[str, ...] | None  # of images: where each was


def read_examples(
    run: Run, path: str | Path, client: int | str, label: str | None = None, how: Reading | None = None
) -> GivenExamples:
    """Examples from a file, read as the run read its own.

    Args:
        run: Whose model takes them.
        path: As for `Run.read`.
        client: As for `Run.read`.
        label: The column of a table that holds the right answers.
        how: How the run read its own, if it does not say so itself.
    """
    described = run.description
    how = how or described.reading
    columns = run.origin.cell.get("columns") or {}
    leave_out = (columns.get("client", ""), columns.get("label", ""))
    given, answers, files = read_inputs(path, label, leave_out, described.shape, how)
    if isinstance(client, str) and client in run.joined:
        given = filled_with(given, run.joined[client].fill)
    elif how is not None and how.table is not None:
        federation = run.simulation.federation
        given = filled_with(given, how.table.fill_of(federation.name_of(federation.number_of(client))))
    x = torch.from_numpy(described.prepared(given))
    if tuple(x.shape[1:]) != described.shape:
        raise UserError(
            f"{path} has examples of shape {tuple(x.shape[1:])}; this run's have {described.shape}: give the same "
            "features in the same order."
        )
    dtype: torch.dtype = getattr(torch, described.dtype)
    if x.is_floating_point() and not (is_finite := x.flatten(1).isfinite().all(1)).all():
        raise UserError(f"example {int((~is_finite).nonzero()[0])} of {path} has a number that is not finite; fix it.")
    return GivenExamples(
        x.to(
            run.simulation.federation.x.device, run.simulation.model_of(0).dtype if dtype.is_floating_point else dtype
        ),
        answers,
        files,
    )


@dataclass
class NewClient:
    """A client that joined a trained federation."""

    model: nn.Module
    weights: Params
    row: Any  # the server's memory of it: for pFedHN its embedding
    private: Any
    splits: dict[str, SplitResult]
    round: int  # of joining, chosen on its validation examples
    card: Card  # what its model was trained on and how good it is, as plain values
    portable: Portable = field(repr=False)
    fill: Sequence[float] | None = None  # what its empty cells are filled with, where the run fills them
    settings: dict[str, Any] = field(default_factory=dict)  # of the method while it joined: as given, or as chosen
    tried: Tried = field(default_factory=list)  # what they were chosen among

    def export(self, path: str | Path) -> Path:
        """Write its model to a file that runs without this package, as `Run.export` does.

        Args:
            path: As for `Run.export`.
        """
        file = given_path(path)
        write_model(file, self.portable.content(self.model, check_ending(file), self.card), self.card)
        return file

    @property
    def accuracy(self) -> float:
        """On the new client's test examples; minus the loss for a task without accuracy."""
        return self.splits["test"].score


@dataclass
class NewClients:
    """Clients that joined a trained federation together."""

    simulation: Simulation
    memories: Memories
    splits: dict[str, SplitResult]
    round: int  # of joining, chosen on the validation examples of all of them
    settings: dict[str, Any] = field(default_factory=dict)  # of the method while they joined: as given, or as chosen
    tried: Tried = field(default_factory=list)  # what they were chosen among
    adapts: bool = False  # whether they take the method's adaptation steps, as the clients that were there do

    @property
    def accuracy(self) -> NDArray[numpy.float64]:
        """[clients]: on each one's test examples; minus the loss for a task without accuracy, NaN without examples."""
        return _accuracy(self.splits["test"])

    def personal_weights(self, client: int | str) -> Params:
        """The weights of a client's own model."""
        place = self.simulation.federation.number_of(client)
        model = self.simulation.model_of(place)
        return self.simulation.personal_weights(self.memories, model, place, self.round, self.adapts)

    def personal_model(self, client: int | str) -> nn.Module:
        """A plain module with this client's weights, in evaluation mode.

        Args:
            client: By name or number.
        """
        place = self.simulation.federation.number_of(client)
        return self.simulation.model_of(place).with_weights(self.personal_weights(client))


def _joined_state(joining: Simulation, num_rounds: int) -> State:
    state = joining.initial_state()
    if num_rounds == 0:
        next(joining.rounds(state))  # the evaluation before the first round
        return state
    # One client, or a trial, is done before a round of its own would be compiled.
    is_short = joining.federation.num_clients == 1 or num_rounds <= TRIAL_ROUNDS
    progress = joining.rounds(state) if is_short else rounds(joining, state)
    for _ in progress:
        pass
    return state


def _identity(data: Federation) -> int:
    """What a client without a name draws by: its own examples."""
    digest = hashlib.sha256()
    for part in (data.x, data.y):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())  # of any dtype, on any device
    return keys.hash_text(digest.hexdigest())


def _accuracy(test: SplitResult) -> NDArray[numpy.float64]:
    values: NDArray[numpy.float64] = (-test.loss / test.count if test.metric is None else test.client_metric).numpy()
    return values


def scores_of(result: SplitResult, per_client: bool = True) -> Scores:
    """A split's scores as plain numbers; per client, the number of correct examples (or summed metric) and of all."""
    values = (result.loss if result.metric is None else result.metric).tolist()
    return Scores(
        result.mean_loss,
        int(result.count.sum()),
        None if result.metric is None else result.client_mean,
        None if result.metric is None else result.sample_mean,
        tuple(int(value) if float(value).is_integer() else float(value) for value in values) if per_client else None,
        tuple(result.count.tolist()) if per_client else None,
    )


def _moment(evaluation: Evaluation, state: State, seconds: float) -> Moment:
    splits = {}
    for name, result in evaluation.splits.items():
        scores = scores_of(result, len(result.count) <= NUM_CLIENTS_IN_METRICS)
        splits[name] = replace(scores, client_examples=None)  # the same in every line; the result has them
    return Moment(
        evaluation.step,
        evaluation.round,
        splits["validation"],
        splits["test"],
        state.bytes_down,
        state.bytes_up,
        round(seconds, 3),
    )


def _result(run: Run, digests: Mapping[str, str] | None = None, history: str | None = None) -> Result:
    simulation, origin, chosen, state = run.simulation, run.origin, run.chosen, run.state
    validation, test = (scores_of(chosen.splits[split]) for split in EVALUATED_SPLITS)
    unadapted = None
    if simulation.algorithm.adaptation_steps:
        assert state.best is not None
        unadapted, adapted = SplitScores(validation, test), scores_of_adapted(simulation, state.best)
        validation, test = (scores_of(adapted[split]) for split in EVALUATED_SPLITS)
    result = Result(
        origin.name,
        origin.experiment,
        to_json(origin.cell),
        to_json(settings_of(simulation.algorithm)),
        simulation.seed,
        chosen.step,
        state.round * simulation.clients_per_round,
        state.round,
        validation,
        test,
        state.bytes_down,
        state.bytes_up,
        round(run.seconds, 3),
        dict(simulation.federation.unused),
        partition_digest(simulation.federation),
        origin.command,
        environment(simulation.federation.x.device),
        origin.pretrain,
        unadapted,
        digests=digests,
        history=history,
        clients=_clients(run),
    )
    return result.as_validation_has_it()


def _clients(run: Run) -> Clients | None:
    """Who the clients are, what they hold, and where their embeddings lie; of very many clients nothing."""
    federation = run.simulation.federation
    if federation.num_clients > NUM_CLIENTS_DESCRIBED:
        return None
    classes = place = share = None
    if federation.num_classes is not None and len(federation.y):
        counts = federation.class_counts.tolist()
        classes = tuple({str(label): count for label, count in enumerate(row) if count} for row in counts)
    if hasattr(run.memories().rows, "embedding"):
        place, share = _plane(run.embeddings())
    return Clients(federation.names, federation.class_names, classes, place, share)


def _plane(embeddings: Tensor) -> tuple[tuple[tuple[float, ...], ...] | None, float | None]:
    """[N, D] in the plane in which they differ most (principal components), and the share of the variance there."""
    centered = nn.functional.pad(embeddings - embeddings.mean(0), (0, 1))  # one axis alone is a line in the plane
    total = float(centered.square().sum())
    if not 0 < total < math.inf:
        return None, None
    _, axes = torch.linalg.eigh(centered.T @ centered)  # rising: the last two are the widest
    axes = axes[:, -2:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()  # an axis has no direction of its own
    plane = centered @ axes
    return tuple(tuple(round(part, 5) for part in row) for row in plane.tolist()), float(plane.square().sum()) / total


def execute(
    simulation: Simulation,
    directory: Path | None = None,
    origin: Origin | None = None,
    *,
    stop: threading.Event | None = None,
    watch: Watch | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
    threads: int | None = None,
    callbacks: Sequence[Callback] = (),
    norms: bool = False,
) -> Generator[bool, None, Run]:
    """Run to the end, from the newest intact checkpoint in `directory` if there is one.

    It pauses after every round, so that several runs can take turns, and says whether it waits for another one's work.

    Args:
        directory: Where the run is kept (`pfedhn.storage.record`); nothing is written where None.
        origin: What the run is called and where it comes from.
        stop: Once it is set, the run writes a checkpoint and raises KeyboardInterrupt.
        watch: Called with the progress and the run after every round.
        say: Told of what a person should know, such as a damaged checkpoint.
        checkpoint_every: Communication steps between checkpoints; where None one a minute, less often where the runs of
            this process would spend more than a twentieth of their time on them.
        threads: Of PyTorch; a run that has begun keeps those that it began with, or its bits would change.
        callbacks: Called with the run and the evaluation after every one.
        norms: Whether every evaluation also notes the norms of the server's memories.
    """
    stop = stop or threading.Event()
    method = method_name(simulation.algorithm)
    run = Run(simulation, simulation.initial_state(), origin or Origin(directory.name if directory else method, method))
    with held(directory), _computing_with(directory, threads), _closing(callbacks), _PACE.shared():
        files = None if directory is None else _Files.open(directory, simulation, run, say)
        started = time.monotonic() - run.seconds
        saved_at, saved_step = time.monotonic(), run.state.round * simulation.clients_per_round
        try:
            for progress in itertools.chain(_missing_evaluation(run), rounds(simulation, run.state)):
                run.seconds = time.monotonic() - started
                if progress.is_waiting and stop.is_set():
                    if files is not None and run.state.best is not None:
                        files.save(run)
                    raise KeyboardInterrupt
                if progress.is_pause:
                    if not stop.is_set():
                        yield progress.is_waiting
                    continue
                if progress.evaluation is not None:
                    _refuse_blind_choice(progress.evaluation)
                    moment = _moment(progress.evaluation, run.state, run.seconds)
                    if norms:
                        moment = replace(moment, norms=norms_of(simulation, run.state.memories))
                    run.history.append(moment)
                    if files is not None:
                        files.append(run.history[-1])
                    for callback in callbacks:
                        callback(run, run.history[-1])
                if watch is not None and not stop.is_set():  # whoever watched may be gone
                    watch(progress, run)
                is_due = (
                    time.monotonic() - saved_at >= _PACE.seconds
                    if checkpoint_every is None
                    else progress.step - saved_step >= checkpoint_every
                )
                if files is not None and (is_due or stop.is_set()):
                    if simulation.federation.x.is_cuda:
                        torch.cuda.synchronize()  # rounds that are still queued are not its time
                    begun = time.monotonic()
                    files.save(run)
                    saved_at, saved_step = time.monotonic(), progress.step
                    _PACE.last = saved_at - begun
                if stop.is_set():
                    raise KeyboardInterrupt
                yield False
            run.result = _result(run) if files is None else files.finish(run, say)
        except Diverged as error:
            if files is not None:
                files.tell_divergence(str(error))
                files.save(run)  # as it was before that round: its last good one
            raise
    return run


class _Pace:
    """How often the runs of a process write checkpoints: 24 hypernetworks take half a minute to write."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.last = 0.0  # seconds that one took

    @property
    def seconds(self) -> float:
        """Between two checkpoints of a run."""
        return max(CHECKPOINT_SECONDS, self.num_runs * self.last / CHECKPOINT_SHARE)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One run more, inside the block."""
        self.num_runs += 1
        try:
            yield
        finally:
            self.num_runs -= 1


_PACE = _Pace()


def _missing_evaluation(run: Run) -> Iterator[Progress]:
    """The evaluation of the last round, if that was left in the middle."""
    simulation, step = run.simulation, run.state.round * run.simulation.clients_per_round
    is_evaluated = simulation.schedule.is_evaluated(step - simulation.clients_per_round, step)
    if run.history and run.history[-1].step < step and is_evaluated:
        yield Progress(step, simulation.choose(run.state, simulation.evaluate(run.state)))


def _refuse_blind_choice(evaluation: Evaluation) -> None:
    """No round is better than another by a number that is none."""
    validation = evaluation.splits["validation"]
    if int(validation.count.sum()) and validation.metric is not None and math.isnan(validation.score):
        raise RunError(
            f"the metric is NaN on validation examples at step {evaluation.step}, so that no round can be chosen by "
            "it; fix the metric."
        )


@dataclass
class _Files:
    """The files of a run that goes on."""

    directory: Path
    spec: Spec
    last: str  # the digest of the last line of metrics.jsonl

    @staticmethod
    def open(directory: Path, simulation: Simulation, run: Run, say: Callable[[str], None]) -> "_Files":
        """Claim a directory, and let the run stand where the newest intact checkpoint there left it."""
        spec = open_directory(directory, simulation, run.origin)
        with writing(directory / DIVERGED):
            (directory / DIVERGED).unlink(missing_ok=True)
        stored = load_state(directory, simulation, identity(spec))
        for sentence in stored.refused:
            say(sentence)
        if stored.state is not None:
            run.state = stored.state
        run.history = [from_json(Moment, table) for table in stored.history]
        run.seconds = run.history[-1].seconds if run.history else 0.0
        return _Files(directory, spec, write_history(directory, run.history, digest(identity(spec))))

    def append(self, moment: Moment) -> None:
        self.last = append_moment(self.directory, moment, self.last)

    def tell_divergence(self, sentence: str) -> None:
        write_atomically(self.directory / DIVERGED, f"{sentence}\n".encode())

    def save(self, run: Run) -> None:
        """Write a checkpoint, once everything that it vouches for is on the disk."""
        flush(self.directory / "metrics.jsonl")
        save_state(self.directory, run.state, run.simulation, identity(self.spec), to_json(run.history))

    def finish(self, run: Run, say: Callable[[str], None]) -> Result:
        """The result that is there, if it is sound and of this run, or else a new one."""
        try:
            result = read_result(self.directory, self.spec)
            if result is not None and result.history == self.last:
                return result
        except MendableError as error:
            say(f"{error} It was written anew from the last checkpoint.")
            result = None
        is_made_elsewhere = (self.directory / "result.json").exists()
        made = _result(run, identity(self.spec), self.last)
        if is_made_elsewhere:  # by an earlier process, of whose environment the spec tells
            made = replace(made, environment=replace(self.spec.environment, finished=made.environment.finished))
        self.save(run)
        write_result(self.directory, made)
        remove_old(self.directory, 1)  # nothing goes on from the one before any more
        return made


@contextmanager
def _closing(callbacks: Sequence[Callback]) -> Iterator[None]:
    try:
        yield
    finally:
        for callback in callbacks:
            getattr(callback, "close", lambda: None)()


@contextmanager
def _computing_with(directory: Path | None, threads: int | None) -> Iterator[None]:
    stored = None if directory is None else read_spec(directory)
    before = torch.get_num_threads()
    if stored is not None or threads is not None:
        torch.set_num_threads(threads if stored is None else stored.environment.threads)  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.set_num_threads(before)


def drain(work: Generator[Any, None, Value]) -> Value:
    """Run a generator to its end and take what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Value = end.value
            return result


def train(
    method: str | AnyAlgorithm,
    federation: Federation,
    model: str | Factory | Mapping[str, Factory],
    *,
    steps: int = 5_000,
    cohort_size: int | None = None,
    batch_size: int = 64,
    evaluate_every: int = 30,
    seed: int = 0,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    directory: str | Path | None = None,
    device: str | torch.device = "auto",
    executor: str = "auto",
    upload: str | Transform = "full",
    download: str | Transform = "full",
    privacy: Privacy | None = None,
    in_flight: int | None = None,
    precision: Precision = "tf32",
    deterministic: bool = False,
    progress: bool = True,
    checkpoint_every: int | None = None,
    on: str | None = None,
    callbacks: Sequence[Callback] = (),
    norms: bool = False,
) -> Run:
    """Train a personal model for every client of a federation.

    Args:
        method: One of `pfedhn.ALGORITHMS` ("pfedhn", "fedavg", ...) or an algorithm such as `pfedhn.PFedHN(lr=0.01)`.
        federation: The clients and their data.
        model: A function that makes the target network, e.g. the class of an `nn.Module`; one of the package's by its
            name in experiment files, as "tabular-32" or "lenet-s"; or several functions by name, for clients of
            different sizes (`federation.with_architectures` says who runs which). A hypernetwork's first weights are
            drawn by the network's name: for the numbers of `pfedhn run`, give the name.
        steps: Communication steps: one client taking part once. 5,000 rounds of one client, or 1,000 of five. The
            last round is complete: 6 steps with five clients per round are 10.
        cohort_size: Clients per round; 1 for pFedHN, 5 for the averaging methods by default.
        batch_size: Examples in a minibatch.
        evaluate_every: Communication steps between evaluations.
        seed: Seed of all random draws.
        loss: (outputs, y) -> one value per example; cross-entropy for class labels, squared error for numbers by
            default.
        metric: (outputs, y) -> one value per example, higher is better; accuracy for class labels by default.
        directory: Where to keep the run; the same call with the same directory resumes it, `pfedhn.load` loads it, and
            `pfedhn report` shows it.
        device: "auto" is the GPU if PyTorch finds one, else the CPU. Several devices, as in "cuda:0,cuda:1", share the
            clients of every round. That pays off for large cohorts only, since such rounds are not captured.
        executor: How a cohort is computed: "auto", "loop", "traced", "vectorized" or "captured".
        upload: How updates are encoded: "full" (as they are), "half" (16 bits), "8-bit", or a transform of your own.
        download: How the weights sent to a client are encoded.
        privacy: How clients protect their data from those who see their updates: `pfedhn.Privacy`.
        in_flight: How many clients train at the same time in an asynchronous run: the server steps whenever
            `cohort_size` of them have replied, on updates for weights that are some steps old. None runs synchronously.
        precision: Precision of matrix products and convolutions on a GPU: "tf32" rounds their inputs to 10 bits and is
            faster than "fp32".
        deterministic: Whether the same GPU and versions always give the same bits; slower.
        progress: Whether to show a progress bar.
        checkpoint_every: Communication steps between checkpoints. By default one is written every minute, or less
            often where writing them would take more than a twentieth of the time.
        on: A Ray cluster whose workers share the clients of every round: "ray" for a local one,
            "ray:ADDRESS" for a running one. It pays off for large cohorts, best with data that are loaded when needed.
        callbacks: Functions (run, moment) that are called after every evaluation; `moment` is also the last of
            `run.history`. `pfedhn.runs.tracking` has some: `TensorBoard("logs")`.
        norms: Whether every evaluation also notes norms of what the server keeps (`moment.norms`): "shared", what it
            trains for all; and means over clients: "embeddings", "served", the weights that a client is given, and
            "apart", how these differ from the mean over clients.

    Returns:
        The run. After Ctrl-C, which writes a checkpoint, there is a KeyboardInterrupt instead.

    Examples:
        >>> import numpy, pfedhn
        >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
        >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12))
        >>> run = pfedhn.train("pfedhn", federation, lambda: pfedhn.MLP(8, 16, 6), steps=10, progress=False)
        >>> run.accuracy.shape
        (12,)
    """
    devices = [choose_device(name) for name in device.split(",")] if isinstance(device, str) else [device]
    if len(devices) > 1 and on is not None:
        raise UserError(
            f"device is {device!r} and on is {on!r}; only one of them can share out the clients of a round."
        )
    simulation = assemble(
        method,
        federation,
        model,
        steps=steps,
        cohort_size=cohort_size,
        batch_size=batch_size,
        evaluate_every=evaluate_every,
        seed=seed,
        loss=loss,
        metric=metric,
        device=devices[0],
        executor=executor,
        upload=upload,
        download=download,
        privacy=privacy,
        in_flight=in_flight,
    )
    if checkpoint_every is not None:
        checkpoint_every = whole_number("checkpoint_every", checkpoint_every)
    if not isinstance(precision, str) or precision not in get_args(Precision):
        raise UserError(f"precision is {short(precision)}; it must be tf32 or fp32.")
    for name, switch in (("deterministic", deterministic), ("progress", progress), ("norms", norms)):
        if not isinstance(switch, bool):
            raise UserError(f"{name} is {short(switch)}; it must be True or False.")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise UserError(f"callbacks are {short(callbacks)}; give a list of functions (run, moment).")
    if directory is not None and not isinstance(directory, str | Path):
        raise UserError(f"directory is {short(directory)}; give a path.")
    advise_once(simulation.federation.x.device)
    path = None if directory is None else given_path(directory)
    name = method_name(method)
    origin = Origin(path.resolve().name if path else name, name)
    if len(devices) > 1:
        simulation = replace(simulation, make_crew=lambda run: Devices(run, [str(name) for name in devices]))
    elif on is not None:
        simulation = replace(simulation, make_crew=Workers)
    shown: AbstractContextManager[Any] = bar() if progress else nullcontext()
    with (
        connection(on),
        computing_on(simulation.device, precision, deterministic),
        stop_on_signal() as stop,
        shown as add,
    ):
        watch = add(name, simulation) if add else None
        work = execute(
            simulation,
            path,
            origin,
            stop=stop,
            watch=watch,
            checkpoint_every=checkpoint_every,
            callbacks=callbacks,
            norms=norms,
        )
        return drain(work)


@contextmanager
def computing_on(device: str | torch.device, precision: str, deterministic: bool, num_runs: int = 1) -> Iterator[None]:
    """How products are computed inside the block; on a CPU there is nothing to choose."""
    if torch.device(device).type != "cuda":
        yield
        return
    with computing_on_gpu(precision, deterministic, num_runs):
        try:
            yield
        finally:
            COMPILER.drop()  # nothing goes on behind a person's back


def load(
    directory: str | Path,
    *,
    run: str | None = None,
    model: Factory | Mapping[str, Factory] | None = None,
    method: type[Any] | None = None,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    device: str | torch.device = "auto",
) -> Run:
    """A run from its directory, whether `pfedhn.train` or `pfedhn run` made it, without its clients' data.

    It has the history and accuracies, every client's model (`personal_model`), and lets new clients join
    (`add_client`). It holds no examples; what needs some says so.

    Loading a directory imports the code that it names (the module of your network, say), so load only what you trust.
    Code of the standard library is refused.

    Args:
        directory: The directory of one run, or of an experiment.
        run: Which run of an experiment that has several, by the name of its folder or a beginning that no other has.
        model: The function that makes the network, if the directory cannot name it: a lambda, or a function inside
            another. Several by name if the run has several.
        method: The class of the algorithm, if the directory cannot name it.
        loss: The loss, if the directory cannot name it; needed only to train.
        metric: The metric, likewise.
        device: Where the weights go; "auto" is the GPU if PyTorch finds one, else the CPU.

    Examples:
        >>> import functools, numpy, pfedhn, tempfile, torch
        >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
        >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12))
        >>> network = functools.partial(pfedhn.MLP, 8, 16, 6)
        >>> folder = tempfile.mkdtemp()
        >>> run = pfedhn.train("pfedhn", federation, network, steps=10, progress=False, directory=folder)
        >>> model = pfedhn.load(folder).personal_model(7)
        >>> model(torch.zeros(1, 8)).shape
        torch.Size([1, 6])
    """
    path = _run_directory(given_path(directory), run)
    given = model if isinstance(model, Mapping) else {} if model is None else {"model": model}
    for name, factory in given.items():
        check_factory(name, factory)
    spec = read_spec(path)
    assert spec is not None
    simulation = to_simulation(
        path, spec, model=model, method=method, loss=loss, metric=metric, device=choose_device(device)
    )
    stored = load_state(path, simulation, identity(spec))
    for sentence in stored.refused:
        logger.warning(sentence)
    if stored.state is None or stored.state.best is None:
        if read_result(path, spec) is not None:
            raise UserError(
                f"{path} holds a result and no model, as every run of a tuning does; train it again in another folder."
            )
        raise UserError(f"{path} holds no checkpoint yet; wait until its run has written one.")
    history = [from_json(Moment, table) for table in stored.history]
    origin = Origin(spec.name, spec.method.name, cell=spec.cell or {}, dataset=spec.data.name)
    seconds = history[-1].seconds if history else 0.0
    return Run(simulation, stored.state, origin, history, seconds, read_result(path, spec))


def _run_directory(path: Path, name: str | None) -> Path:
    """The directory of the run that is meant."""
    if name is None and read_spec(path) is not None:
        return path
    names = sorted(file.parent.name for file in path.glob("*/spec.toml"))
    if name is None and len(names) == 1:
        return path / names[0]
    if not names:
        raise UserError(f"{path} holds no run; give the directory that `pfedhn.train` or `pfedhn run` wrote.")
    if name and name not in names:
        begun = [other for other in names if other.startswith(name)]
        if len(begun) > 1:
            raise UserError(f"{name!r} begins the names of several runs in {path}; say which: {some(begun, 20)}.")
        name = begun[0] if begun else name
    if name not in names:
        which = (
            f"there is no run {name!r} in {path}"
            if name
            else f"{path} holds several runs; say which by run=NAME (in a command, --run NAME)"
        )
        raise UserError(f"{which}; {closest(name or '', names)}")
    return path / name
