"""A run: train, watch, stop and go on, take out a client's model, let a new client join."""

import hashlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from pfedhn import keys
from pfedhn.algorithm import Algorithm, Group
from pfedhn.algorithms import ALGORITHMS
from pfedhn.data.federation import Federation, LazyFederation
from pfedhn.engine.checkpoint import load_state, save_state
from pfedhn.engine.evaluate import Chunk, SplitResult, evaluate, personal_weights, plan, to_splits
from pfedhn.engine.network import build_model, check_model, with_num_outputs
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Evaluation, Memories, Progress, Schedule, State
from pfedhn.errors import UserError, closest
from pfedhn.files import write_atomically
from pfedhn.model import Factory, PerExample
from pfedhn.params import Params, stack, take
from pfedhn.settings import build

logger = logging.getLogger("pfedhn")

CHECKPOINT_SECONDS = 60.0


NUM_CLIENTS_IN_METRICS = 1_000  # larger federations keep per-client scores of the chosen round only

AnyAlgorithm = Algorithm[Any, Any, Any]


Result = TypeVar("Result")


def build_algorithm(method: str | AnyAlgorithm, settings: Mapping[str, Any] | None = None) -> AnyAlgorithm:
    """An algorithm from its name and settings, or one that is built already, its settings checked."""
    if not isinstance(method, str):
        values = {item.name: getattr(method, item.name) for item in fields(method)}  # type: ignore[arg-type]
        build(type(method), values, type(method).__name__)
        return method
    if method not in ALGORITHMS:
        raise UserError(f"there is no method {method!r}; {closest(method, ALGORITHMS)}")
    usual: AnyAlgorithm = ALGORITHMS[method]()
    build(type(usual), settings or {}, method)
    ready = {name: tuple(value) if isinstance(value, list) else value for name, value in (settings or {}).items()}
    algorithm: AnyAlgorithm = ALGORITHMS[method](**ready)
    return algorithm


def _name_of(method: str | AnyAlgorithm) -> str:
    """What a method is called: the name it is registered by, or else its class."""
    if isinstance(method, str):
        return method
    return next(
        (name for name, made_by in ALGORITHMS.items() if made_by.algorithm is type(method)), type(method).__name__
    )


@dataclass
class Run:
    """A finished or interrupted run: its chosen round, every client's model, and room for new clients.

    Made by `pfedhn.train`. `run.accuracy` holds each client's test accuracy at the round chosen on validation.
    """

    simulation: Simulation
    state: State
    history: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def chosen(self) -> Evaluation:
        """The first evaluation with the strictly best validation score."""
        assert self.state.best is not None, "a run evaluates before its first round"
        return self.state.best.evaluation

    @property
    def accuracy(self) -> NDArray[numpy.float64]:
        """[clients]: test accuracy of each client's own model at the chosen round; NaN where it has no test rows."""
        test = self.chosen.splits["test"]
        values: NDArray[numpy.float64] = (
            -test.loss / test.count if test.metric is None else test.client_metric
        ).numpy()
        return values

    def memories(self, last: bool = False) -> Memories:
        """The three memories at the chosen round, or after the last one."""
        assert self.state.best is not None
        return self.state.memories if last else self.state.best.memories

    def personal_weights(self, client: int, last: bool = False, architecture: str | None = None) -> Params:
        simulation, memories = self.simulation, self.memories(last)
        num_clients = simulation.federation.num_clients
        if not 0 <= client < num_clients:
            raise UserError(f"there is no client {client}; this federation has the clients 0 to {num_clients - 1}.")
        model = simulation.model_of(client)
        if architecture is not None:
            if architecture not in simulation.models:
                raise UserError(
                    f"there is no architecture {architecture!r}; {closest(architecture, simulation.models)}"
                )
            model = simulation.models[architecture]
        number = self.state.round if last else self.chosen.round
        member = torch.tensor([client], device=simulation.federation.x.device)
        batches = simulation.federation.batches(
            member,
            simulation.personalize_key(number),
            simulation.algorithm.num_personalize_batches,
            simulation.schedule.batch_size,
        )
        private = take(memories.private[model.name].take([client]), 0)
        return personal_weights(
            simulation.algorithm, model, memories.shared, take(memories.rows, client), private, take(batches, 0)
        )

    def personal_model(self, client: int, last: bool = False, architecture: str | None = None) -> nn.Module:
        """A plain module with this client's weights, in evaluation mode.

        last: the weights after the last round instead of those of the chosen one.
        architecture: another of the run's target networks; the client keeps its embedding.
        """
        weights = self.personal_weights(client, last, architecture)
        model = self.simulation.models[architecture] if architecture else self.simulation.model_of(client)
        return model.with_weights(weights)

    def add_client(
        self,
        x: ArrayLike | Tensor,
        y: ArrayLike | Tensor,
        *,
        rounds: int = 100,
        split: tuple[float, float, float] = (0.7, 0.15, 0.15),
        architecture: str | None = None,
        descriptor: ArrayLike | Tensor | None = None,
        seed: int = 0,
        last: bool = False,
    ) -> "NewClient":
        """Let a client join that took no part in training: only what is its own learns, the server's model is frozen.

        For pFedHN that is the embedding (and the personal layers of PC). The functions are those of training; what
        `receive` would change for all is thrown away.

        x, y: the new client's rows; they are split like a client's, and the best round is chosen on its validation.
        descriptor: of the new client, for a run with fixed descriptors; its class shares by default.
        """
        simulation, memories = self.simulation, self.memories(last)
        algorithm = simulation.algorithm
        if architecture is not None and architecture not in simulation.models:
            raise UserError(f"there is no architecture {architecture!r}; {closest(architecture, simulation.models)}")
        model = simulation.models[architecture] if architecture else simulation.model_of(0)
        data = Federation.from_clients([(x, y)], split=split, seed=seed)
        data = data.to(simulation.federation.x.device, model.dtype if data.x.is_floating_point() else None)
        check_model(model, data)
        key = keys.fold(simulation.seed, "new client", seed)
        row = algorithm.join_row(memories.shared, memories.rows, self._descriptor(data, descriptor))
        private = algorithm.init_private(model, simulation.initial_models()[model.name], key)
        member = torch.zeros(1, dtype=torch.int64, device=data.x.device)
        best: NewClient | None = None

        chunks = plan(data, lambda client: model, EVALUATED_SPLITS, one_by_one=True)

        def private_of(value: Any) -> Callable[[Chunk], Any]:
            return lambda chunk: stack([value])

        for number in range(rounds + 1):
            look = keys.fold(key, "personalise", number)
            results = evaluate(
                algorithm,
                chunks,
                data,
                memories.shared,
                stack([row]),
                private_of(private),
                simulation.executor_for,
                look,
                simulation.schedule.batch_size,
            )
            splits = to_splits(results, data, EVALUATED_SPLITS, model.per_example_metric is not None)
            chosen_on = splits["validation"] if int(splits["validation"].count.sum()) else None
            if best is None or chosen_on is None or chosen_on.score > best.splits["validation"].score:
                batches = data.batches(member, look, algorithm.num_personalize_batches, simulation.schedule.batch_size)
                weights = personal_weights(algorithm, model, memories.shared, row, private, take(batches, 0))
                best = NewClient(model.with_weights(weights), weights, row, private, splits, number)
            if number == rounds:
                break
            batches = data.batches(
                member, keys.fold(key, "batches", number), algorithm.num_batches, simulation.schedule.batch_size
            )
            received = algorithm.send(model, memories.shared, row)
            with model.seeded(torch.as_tensor(keys.fold(key, "noise", number))):
                update, private = algorithm.train(model, received, private, take(batches, 0))
            group = Group(model, stack([row]), stack([update]), data.splits["train"].size)
            row = take(algorithm.receive(memories.shared, [group])[1][0], 0)
        assert best is not None
        return best

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

    def summary(self) -> dict[str, Any]:
        """What a result file says of the run: scores at the chosen round, its cost, each client's score."""
        chosen, state = self.chosen, self.state
        return {
            "chosen_step": chosen.step,
            "steps": state.round * self.simulation.clients_per_round,
            "rounds": state.round,
            "validation": split_record(chosen.splits["validation"]),
            "test": split_record(chosen.splits["test"]),
            "bytes_down": state.bytes_down,
            "bytes_up": state.bytes_up,
            "seconds": round(self.seconds, 3),
        }


@dataclass
class NewClient:
    """A client that joined a trained federation."""

    model: nn.Module
    weights: Params
    row: Any  # the server's memory of it: for pFedHN its embedding
    private: Any
    splits: dict[str, SplitResult]
    round: int  # of joining, chosen on its validation rows

    @property
    def accuracy(self) -> float:
        """On the new client's test rows; minus the loss for a task without accuracy."""
        return self.splits["test"].score


def split_record(result: SplitResult, per_client: bool = True) -> dict[str, Any]:
    """A split's scores as plain numbers; per client, the number of correct rows (or summed metric) and of rows."""
    record: dict[str, Any] = {"loss": result.mean_loss, "rows": int(result.count.sum())}
    if result.metric is not None:
        record |= {"client_mean": result.client_mean, "sample_mean": result.sample_mean}
    if per_client:
        values = result.loss if result.metric is None else result.metric
        record["clients"] = [int(value) if float(value).is_integer() else float(value) for value in values]
        record["client_rows"] = result.count.tolist()
    return record


def metrics_record(evaluation: Evaluation, state: State, seconds: float) -> dict[str, Any]:
    record: dict[str, Any] = {"step": evaluation.step, "round": evaluation.round}
    for split, result in evaluation.splits.items():
        record[split] = split_record(result, len(result.count) <= NUM_CLIENTS_IN_METRICS)
        record[split].pop("client_rows", None)
    return record | {"bytes_down": state.bytes_down, "bytes_up": state.bytes_up, "seconds": round(seconds, 3)}


def execute(
    simulation: Simulation,
    directory: Path | None = None,
    watch: Callable[[Progress, "Run"], None] | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
) -> Run:
    """Run to the end, from the newest sound checkpoint in `directory` if there is one.

    checkpoint_every: communication steps between checkpoints; by default one a minute. Ctrl-C writes one and stops.
    """
    with stop_on_signal() as stop:
        return drain(executing(simulation, directory, stop, watch, say, checkpoint_every))


def drain(work: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and take what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def executing(
    simulation: Simulation,
    directory: Path | None,
    stop: threading.Event,
    watch: Callable[[Progress, "Run"], None] | None = None,
    say: Callable[[str], None] = print,
    checkpoint_every: int | None = None,
) -> Generator[None, None, Run]:
    """`execute`, pausing after every round so that several runs can take turns; `stop` ends it at a checkpoint."""
    run = Run(simulation, simulation.initial_state())
    metrics = _Metrics(None)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        state, refused = load_state(directory, simulation)
        for sentence in refused:
            say(sentence)
        step = -1
        if state is not None:
            run.state = state
            step = state.round * simulation.clients_per_round
        metrics = _Metrics(directory / "metrics.jsonl")
        run.history = metrics.cut_after(step)
        run.seconds = run.history[-1]["seconds"] if run.history else 0.0
    started = time.monotonic() - run.seconds
    saved_at, saved_step = time.monotonic(), run.state.round * simulation.clients_per_round
    for progress in _saved_if_diverged(rounds(simulation, run.state), run.state, simulation, directory):
        run.seconds = time.monotonic() - started
        if progress.is_pause:
            if not stop.is_set():
                yield
            continue
        if progress.evaluation is not None:
            run.history.append(metrics_record(progress.evaluation, run.state, run.seconds))
            metrics.append(run.history[-1])
        if watch is not None:
            watch(progress, run)
        is_due = directory is not None and (
            time.monotonic() - saved_at >= CHECKPOINT_SECONDS
            if checkpoint_every is None
            else progress.step - saved_step >= checkpoint_every
        )
        if directory is not None and (is_due or stop.is_set()):
            save_state(directory, run.state, simulation)
            saved_at, saved_step = time.monotonic(), progress.step
        if stop.is_set():
            raise KeyboardInterrupt
        yield
    if directory is not None:
        save_state(directory, run.state, simulation)
    return run


def _saved_if_diverged(
    progress: Iterator[Progress], state: State, simulation: Simulation, directory: Path | None
) -> Iterator[Progress]:
    """Write the state before a round that diverged: it is the last good one."""
    try:
        yield from progress
    except Diverged:
        if directory is not None:
            save_state(directory, state, simulation)
        raise


def rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    """A run's progress, by the executor that was asked for; on a GPU `auto` means the captured round."""
    is_cuda = simulation.federation.x.is_cuda
    if any(model.is_random for model in simulation.models.values()):
        if is_cuda or simulation.executor == "captured":
            logger.warning("a network with dropout runs step by step, slower: a captured round cannot key its draws.")
    elif simulation.executor == "captured" or (simulation.executor == "auto" and is_cuda):
        if isinstance(simulation.federation, LazyFederation):
            logger.warning("data that are loaded when needed cannot be captured; rounds run one operation at a time.")
            return simulation.rounds(state)
        return _captured_rounds(simulation, state)
    return simulation.rounds(state)


def _captured_rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    """Captured where that is possible; where a network or method cannot be, it is said once and the round is run."""
    from pfedhn.engine.capture import CapturedRun

    run = None
    try:
        run = CapturedRun(simulation, state)
        run.prepare()
    except (torch.OutOfMemoryError, Diverged):
        raise
    except Exception as error:  # the compiler's and CUDA's errors have no common kind
        reason = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("this run cannot be captured and goes operation by operation, slower: %s", reason[0][:200])
        run = None
    # Out here nothing holds the error, whose frames hold the memory of the attempt.
    yield from simulation.rounds(state) if run is None else run.rounds()


def _claim(directory: Path, simulation: Simulation) -> None:
    """Note what a directory holds, or refuse one that holds another run."""
    shapes = {name: {n: list(s) for n, s in model.shapes.items()} for name, model in simulation.models.items()}
    schedule = asdict(simulation.schedule)
    identity = {
        "algorithm": repr(simulation.algorithm),
        "seed": simulation.seed,
        "schedule": schedule,
        "shapes": shapes,
        "partition_sha256": partition_digest(simulation.federation),
    }
    file = directory / "run.json"
    if file.exists():
        try:
            stored = json.loads(file.read_text())
        except ValueError:
            stored = {}
        if different := [name for name in identity if stored.get(name) != identity[name]]:
            raise UserError(
                f"{directory} holds another run (its {', '.join(different)} differ); give another directory, or the "
                "settings it was made with."
            )
        return
    if directory.exists() and any(directory.glob("checkpoint-*")):
        raise UserError(f"{directory} holds checkpoints of a run that is not known; give another directory.")
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(identity, indent=1).encode())


def partition_digest(federation: Federation) -> str:
    """A name for who owns which rows."""
    digest = hashlib.sha256()
    for rows in federation.splits.values():
        for part in (rows.index, rows.offset, rows.size):
            digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class _Metrics:
    path: Path | None

    def append(self, record: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def cut_after(self, step: int) -> list[dict[str, Any]]:
        """Forget what was written after the checkpoint at `step`: the run will write it again."""
        if self.path is None or not self.path.exists():
            return []
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was killed while writing
                break
            if record["step"] > step:
                break
            kept.append(record)
        write_atomically(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        return kept


@contextmanager
def stop_requests(handle: Callable[[int], None]) -> Iterator[None]:
    """Inside the block Ctrl-C and SIGTERM call `handle` instead of ending the process."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread alone
        yield
        return

    def call(number: int, frame: FrameType | None) -> None:
        handle(number)

    before = {number: signal.signal(number, call) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Let Ctrl-C and SIGTERM wait for the end of a round, so that a checkpoint can be written."""
    stop = threading.Event()

    def handle(number: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # asked twice: at once
        stop.set()

    with stop_requests(handle):
        yield stop


def train(
    method: str | AnyAlgorithm,
    federation: Federation,
    model: Factory | Mapping[str, Factory],
    *,
    steps: int = 5_000,
    cohort_size: int | None = None,
    batch_size: int = 64,
    evaluate_every: int = 30,
    seed: int = 0,
    loss: PerExample | None = None,
    metric: PerExample | None = None,
    directory: str | Path | None = None,
    device: str | torch.device = "cpu",
    executor: str = "auto",
    progress: bool = True,
    checkpoint_every: int | None = None,
) -> Run:
    """Train a personal model for every client of a federation.

    method: one of `pfedhn.ALGORITHMS` ("pfedhn", "fedavg", ...) or an algorithm such as `pfedhn.PFedHN(lr=0.01)`.
    model: a function that makes the target network, e.g. the class of an `nn.Module`; or several by name, for
        clients of different sizes (`federation.with_architectures` says who runs which).
    steps: communication steps: one client taking part once. 5,000 rounds of one client, or 1,000 of five.
    cohort_size: clients per round; 1 for pFedHN, 5 for the averaging methods by default.
    loss: (outputs, y) -> one value per row; cross-entropy for class labels, squared error for numbers by default.
    metric: (outputs, y) -> one value per row, higher is better; accuracy for class labels by default.
    directory: where to keep metrics and checkpoints; the same call on the same directory goes on where it stopped.

    >>> import numpy, pfedhn
    >>> x, y = numpy.random.default_rng(0).normal(size=(600, 8)), numpy.arange(600) % 6
    >>> federation = pfedhn.Federation.from_arrays(x, y, partition=pfedhn.by_classes(2, num_clients=12))
    >>> run = pfedhn.train("pfedhn", federation, lambda: pfedhn.MLP(8, 16, 6), steps=10, progress=False)
    >>> run.accuracy.shape
    (12,)
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError("PyTorch finds no GPU here; use device='cpu'.")
    federation = federation.to(device)
    factories = dict(model) if isinstance(model, Mapping) else {"model": model}
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
    models = {name: build_model(name, factory, federation, loss, metric) for name, factory in factories.items()}
    if isinstance(federation, LazyFederation):
        federation = with_num_outputs(federation, models.values())
    algorithm = build_algorithm(method).for_clients(federation.num_clients, federation.descriptor_dim)
    if cohort_size is None:
        cohort_size = min(algorithm.usual_cohort_size, federation.num_clients)
    schedule = Schedule(steps, cohort_size, batch_size, evaluate_every)
    simulation = Simulation(algorithm, models, federation, schedule, seed, executor)
    path = None if directory is None else Path(directory)
    if path is not None:
        _claim(path, simulation)
    if not progress:
        return execute(simulation, path, checkpoint_every=checkpoint_every)
    from pfedhn.progress import bar

    with bar() as watch_run:
        return execute(simulation, path, watch_run(_name_of(method), simulation), checkpoint_every=checkpoint_every)
