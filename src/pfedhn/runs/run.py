"""A run: its chosen round, its clients' models, and the clients that join it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from pfedhn.data.arrays import Arrays
from pfedhn.data.columns import prepared
from pfedhn.data.description import Description
from pfedhn.data.federation import Federation
from pfedhn.data.files import read_inputs
from pfedhn.data.reading import ClientReading, Reading, TableReading
from pfedhn.engine.plan import NO_EXAMPLES, Plan
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Evaluation, Memories, State
from pfedhn.errors import UserError, short
from pfedhn.params import Params, take
from pfedhn.runs.export import Card, Portable, model_card, write_model, write_models
from pfedhn.runs.joining import TRIAL_ROUNDS, NewClient, NewClients, join, network_of, one_client
from pfedhn.storage.directory import Origin
from pfedhn.storage.schema import Moment, Result, Scores


class GivenExamples(NamedTuple):
    """Examples from a file, for a client's own model."""

    x: Tensor
    answers: NDArray[Any] | None  # the right ones, if they are known
    files: tuple[str, ...] | None  # of images: where each was


@dataclass(repr=False)
class Run:
    """A finished or interrupted run: its chosen round and every client's model; new clients can join it.

    Made by `pfedhn.train` and `pfedhn.load`. `run.accuracy` holds each client's test accuracy at the round chosen on
    validation.
    """

    plan: Plan  # with its clients' data, a simulation; of a run that was loaded, without
    state: State
    origin: Origin
    history: list[Moment] = field(default_factory=list)  # every evaluation
    seconds: float = 0.0
    result: Result | None = None  # what result.json says: scores, bytes, seconds; None while it is not finished
    joined: dict[str, NewClient] = field(default_factory=dict)  # those that `add_client` gave a name
    _portables: dict[str, Portable] = field(default_factory=dict, init=False)  # target networks, traced for files

    def __repr__(self) -> str:
        method, plan = self.plan.exchange.method_name, self.plan
        step = f"step {self.state.round * plan.clients_per_round:,}"
        score = f", {self.scores_so_far}" if self.history else ""
        clients = plan.federation if isinstance(plan, Simulation) else f"{plan.num_clients} clients"
        return f"Run({self.origin.name!r}: {method}, {clients}, {step}{score})"

    @property
    def scores_so_far(self) -> str:
        """The newest evaluation and the best one, short enough for a line."""
        validation, schedule = self.history[-1].validation, self.plan.schedule
        best = self.plan.loss_unit * schedule.score(self.chosen.splits["validation"])
        if not validation.has_accuracy or schedule.select == "loss":
            return f"validation loss {validation.loss:.4f}, best {-best:.4f}"
        return f"validation {100 * validation.score:.1f} %, best {100 * best:.1f} %"

    @property
    def simulation(self) -> Simulation:
        """The plan with its clients' data; a run that was loaded has none."""
        if not isinstance(self.plan, Simulation):
            raise UserError(NO_EXAMPLES)
        return self.plan

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
        test = self._test_scores
        sums = numpy.array(test.clients, dtype=float) * (1 if test.has_accuracy else -1)
        with numpy.errstate(invalid="ignore"):
            values: NDArray[numpy.float64] = sums / numpy.array(test.client_examples)
        return values

    @property
    def _test_scores(self) -> Scores:
        if self.result is not None:
            return self.result.test
        return Scores.of(self.chosen.splits["test"], loss_unit=self.plan.loss_unit)

    @property
    def adapts(self) -> bool:
        """Whether clients take the method's adaptation steps before they use their models.

        They do not if all of them together were worse on validation after these steps.
        """
        return self.plan.fine_tunes and (self.result is None or self.result.adapted is None)

    @property
    def epsilon(self) -> NDArray[numpy.float64]:
        """[clients]: the privacy that each has spent over all rounds; infinite without privacy."""
        plan, counts, privacy = self.plan, self.state.num_updates, self.plan.privacy
        if privacy is None:
            return numpy.full(plan.num_clients, numpy.inf)
        if not isinstance(plan, Simulation):
            raise UserError("what was spent depends on how many examples a client has, and a run's directory has none.")
        costs = [plan.privacy_cost(client) for client in range(plan.num_clients)]
        return numpy.array([privacy.spent(cost, counts[client]) for client, cost in enumerate(costs)])

    def to_frame(self) -> Any:
        """The history as a pandas table: a line per evaluation, its number of steps as the index."""
        import pandas  # here: most runs need no table

        table = [{"step": moment.step, **moment.numbers()} for moment in self.history]
        return pandas.DataFrame(table).set_index("step")

    def memories(self, last: bool = False) -> Memories:
        """The three memories at the chosen round, or after the last one."""
        if not isinstance(last, bool):
            raise UserError(f"last is {short(last)}; it must be True or False.")
        assert self.state.best is not None
        return self.state.memories if last else self.state.best.memories.to(self.plan.device)

    def embeddings(self, last: bool = False) -> Tensor:
        """[clients, D]: the embedding of each client at the chosen round, or after the last one.

        Args:
            last: After the last round instead of the chosen one.

        In double precision, on the CPU. Methods with a hypernetwork have embeddings; another method is refused.
        """
        embeddings = self.plan.embeddings(self.memories(last))
        if embeddings is None:
            raise UserError(f"{self.origin.method} has no embeddings of clients; methods with a hypernetwork have.")
        return embeddings.detach().double().cpu()

    def personal_weights(
        self, client: int | str, last: bool = False, architecture: str | None = None, data: Arrays | None = None
    ) -> Params:
        """The weights of a client's own model; arguments as `personal_model`."""
        place = self.plan.clients.number_of(client)
        model = network_of(self.plan, place, architecture)
        given = None if data is None else self._examples_of(data)
        number = self.state.round if last else self.chosen.round
        return self.plan.personal_weights(self.memories(last), model, place, number, self.adapts, given)

    def _examples_of(self, data: Arrays) -> Federation:
        """One client's training examples in the run's form."""
        plan, wanted = self.plan, self.plan.clients
        dtype = plan.dtype if getattr(torch, wanted.dtype).is_floating_point else None
        given = Federation.from_clients([{"train": data}]).to(plan.device, dtype)
        if tuple(given.x.shape[1:]) != wanted.shape:
            raise UserError(f"the examples have the shape {tuple(given.x.shape[1:])}; this run's have {wanted.shape}.")
        return given

    def personal_model(
        self, client: int | str, last: bool = False, architecture: str | None = None, data: Arrays | None = None
    ) -> nn.Module:
        """A plain module with this client's weights, in evaluation mode.

        Of a run on a table, it takes what `read` returns. Where numbers are predicted, its outputs are scaled:
        `run.description.reading.table.unscaled` brings them to the units of the label.

        Args:
            client: Its number or, if clients have names, its name; or the name it joined with.
            last: The weights after the last round instead of those of the chosen one.
            architecture: Another of the run's target networks; the client keeps its embedding.
            data: The client's training examples (x, y), for a method that adapts on them (Per-FedAvg) in a run that was
                loaded: a directory holds no examples. Of a table, x is what `read` returns, and labels that are numbers
                to predict are scaled (`run.description.reading.table.scaled`).
        """
        if isinstance(client, str) and client in self.joined and architecture is None and data is None:
            return copy.deepcopy(self.joined[client].model)
        weights = self.personal_weights(client, last, architecture, data)
        return network_of(self.plan, self.plan.clients.number_of(client), architecture).with_weights(weights)

    def read(self, path: str | Path, client: int | str) -> Tensor:
        """New examples from a file, as a client's own model takes them.

        A table's columns are found by name, in any order; texts and empty cells are treated as in training, numbers are
        scaled as there, and other columns are ignored. Images are brought to the size of the run's. A run that was
        trained on arrays knows no names: all columns are features, in the order of training.

        Args:
            path: A table, `x.npy`, an image, or a folder with `x.npy` or images.
            client: As `personal_model`; empty cells are filled in as this client's are.

        Examples:
            >>> import functools, pathlib, pfedhn, tempfile
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> visits = [f"{'lyon' if i % 3 else 'paris'},{40 + i % 9},{i % 7},{i % 2}" for i in range(60)]
            >>> _ = (folder / "visits.csv").write_text("\\n".join(["clinic,age,dose,outcome", *visits]))
            >>> clinics = pfedhn.datasets.read_federation(folder / "visits.csv", "clinic", "outcome", scale="none")
            >>> network = functools.partial(pfedhn.TabularMLP, 2, 4, 2)
            >>> run = pfedhn.train("pfedhn", clinics, network, steps=2, progress=False)
            >>> _ = (folder / "new.csv").write_text("dose,age\\n3,61\\n")
            >>> run.read(folder / "new.csv", "lyon")
            tensor([[61.,  3.]])
        """
        return self.read_examples(path, client).x

    def read_examples(
        self, path: str | Path, client: int | str, label: str | None = None, how: Reading | None = None
    ) -> "GivenExamples":
        """As `read`, with the right answers if they are known.

        Args:
            path: As `read`.
            client: As `read`.
            label: The column of a table that holds the right answers.
            how: How the run read its own examples, if it does not say so itself.
        """
        described = self.description
        how = how or described.reading
        columns = self.origin.cell.get("columns") or {}
        leave_out = (columns.get("client", ""), columns.get("label", ""))
        given, answers, files = read_inputs(path, label, leave_out, described.shape, how)
        table, shape = None if how is None else how.table, described.shape
        if table is not None:
            shape = (len(table.features),)
            is_joined = isinstance(client, str) and client in self.joined
            given = prepared(
                given, table, self.joined[str(client)].reading if is_joined else self._reading_of(client, table)
            )
        x = torch.from_numpy(described.prepared(given))
        if tuple(x.shape[1:]) != described.shape:
            raise UserError(
                f"{path} has examples of shape {tuple(x.shape[1:])}; this run's have {shape}: give the same "
                "features in the same order."
            )
        dtype: torch.dtype = getattr(torch, described.dtype)
        if x.is_floating_point() and not (is_finite := x.flatten(1).isfinite().all(1)).all():
            wrong = int((~is_finite).nonzero()[0])
            raise UserError(f"example {wrong} of {path} has a number that is not finite; fix it.")
        dtype = self.plan.dtype if dtype.is_floating_point else dtype
        return GivenExamples(x.to(self.plan.device, dtype), answers, files)

    def export(self, client: int | str, path: str | Path, *, last: bool = False, data: Arrays | None = None) -> Path:
        """Write a client's model to a file that runs without this package, and a model card next to it.

        Args:
            client: As `personal_model`.
            path: Its extension chooses the format: `.onnx` (batches of any size), `.pt2` (`torch.export`), or
                `.safetensors` (the weights, if you have the network's code). The card ends with `.md`. Of a run on a
                table, the first two take features that are neither filled in nor scaled and return probabilities, or
                numbers in the units of the label; a script beside an `.onnx` file predicts the rows of a CSV file.
            last: As `personal_model`.
            data: As `personal_model`.
        """
        if isinstance(client, str) and client in self.joined:
            return self.joined[client].export(path)
        architecture = self.plan.model_of(self.plan.clients.number_of(client)).name
        module, reading = self.personal_model(client, last, data=data), self.plan.clients.reading
        own = None if reading is None or reading.table is None else self._reading_of(client, reading.table)
        return write_model(path, self._portable(architecture), module, self.card(client), own)

    def _reading_of(self, client: int | str, table: TableReading) -> ClientReading:
        """How a client's cells become inputs."""
        return table.reading_of(self.plan.clients.name_of(self.plan.clients.number_of(client)))

    def export_all(self, folder: str | Path, ending: str = ".onnx", *, last: bool = False) -> dict[str, Path]:
        """Write the model of every client into a folder, with a README.md that lists them; the files by client.

        Args:
            folder: Created if it does not exist.
            ending: Which format, as in `export`.
            last: As `personal_model`.
        """
        clients = [self.plan.clients.name_of(number) for number in range(self.plan.num_clients)]

        def write(client: str, file: Path) -> Card:
            self.export(client, file, last=last)
            return self.card(client)

        return write_models(folder, ending, clients, write)

    def _portable(self, architecture: str) -> Portable:
        """A target network ready to be written; it is traced once, however many clients run it."""
        if architecture not in self._portables:
            self._portables[architecture] = Portable.of(self.plan.models[architecture], self.plan.clients)
        return self._portables[architecture]

    @property
    def description(self) -> Description:
        """Everything known of the clients and their examples, without the examples."""
        clients = self.plan.clients
        if not isinstance(self.plan, Simulation):
            return clients
        return replace(clients, name=self.origin.dataset, preprocessing=self.origin.preprocessing)

    def card(self, client: int | str) -> Card:
        """The model card of a client's model, as plain values: its training and its test score."""
        clients = self.plan.clients
        place = clients.number_of(client)
        table = None if clients.reading is None else clients.reading.table
        reading = None if table is None else self._reading_of(place, table)
        name, network = clients.name_of(place), self.plan.model_of(place).name
        return self._card(name, network, self._test_scores, place, reading, self._commonest(place))

    def _card(
        self,
        client: str,
        architecture: str,
        test: Scores,
        place: int,
        reading: ClientReading | None,
        commonest: float | None = None,
    ) -> Card:
        assert test.clients is not None
        assert test.client_examples is not None
        return model_card(
            client,
            self.plan.models[architecture],
            self.plan,
            (test.clients[place], test.client_examples[place]),
            run=self.origin.name,
            method=self.origin.method,
            chosen_step=self.chosen.step,
            steps=self.state.round * self.plan.clients_per_round,
            described=self.description,
            reading=reading,
            commonest=commonest,
        )

    def _commonest(self, place: int) -> float | None:
        """The share of a client's commonest class among its training examples; None if the run does not say it."""
        classes = None if self.result is None or self.result.clients is None else self.result.clients.classes
        counts = [] if classes is None else [*classes[place].values()]
        return max(counts) / sum(counts) if counts else None

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
    ) -> NewClient:
        """Let a client join that took no part in training; only what is its own is learned, the rest is frozen.

        For pFedHN that is the embedding and, for PC, the personal layers. Rounds are as in training, except that the
        server moves the client's row only (`move_row`).

        Args:
            x: The new client's examples; they are split, and the best round is chosen on its validation examples. Of a
                run on a table, they are the features before they are filled in and scaled, with NaN for empty cells.
            y: Their labels, in the label's own units.
            rounds: How many rounds it takes part in. With 0 it learns nothing, needs no held-out examples, and gets the
                model that any client gets first: the shared one, with an average embedding.
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
        model = network_of(self.plan, 0, architecture)
        data, reading = one_client(self.plan, model, x, y, name, split, descriptor, seed, rounds)
        joined = self.add_clients(data, rounds=rounds, settings=settings, seed=seed, last=last)
        weights, memories = joined.personal_weights(0), joined.memories
        kept = take(memories.private[model.name].take([0]), 0)
        scores = Scores.of(joined.splits["test"], loss_unit=self.plan.loss_unit)
        client = NewClient(
            model.with_weights(weights),
            weights,
            take(memories.rows, 0),
            kept.private,
            joined.splits,
            joined.round,
            self._card(name or "that joined", model.name, scores, 0, reading),
            self._portable(model.name),
            reading,
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
    ) -> NewClients:
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
        return join(
            self.plan,
            self.memories(last),
            federation,
            rounds=rounds,
            settings=settings,
            trial_rounds=trial_rounds,
            seed=seed,
            adapts=self.adapts,
        )
