"""`pfedhn.train`: train a personal model for every client."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, ParamSpec, get_args

import torch

from pfedhn.algorithms import ALGORITHMS
from pfedhn.algorithms.find import AnyAlgorithm, find_method
from pfedhn.data.federation import Federation
from pfedhn.engine.attack import Attack
from pfedhn.engine.robust import Robust
from pfedhn.engine.state import Select
from pfedhn.engine.transform import Transform
from pfedhn.errors import SYNONYMS, UserError, closest_setting, short
from pfedhn.model import Factory, PerExample
from pfedhn.privacy import Privacy
from pfedhn.runs.assemble import assemble, choose_device
from pfedhn.runs.cluster import connection, shared_out
from pfedhn.runs.execute import computing_on, drain, execute
from pfedhn.runs.progress import Display, watch_run
from pfedhn.runs.run import Run
from pfedhn.runs.tables import TABLE_MODEL, usual_schedule, with_usual_settings
from pfedhn.runs.tracking import Callback
from pfedhn.settings import names_to_set
from pfedhn.storage.directory import Origin, read_spec
from pfedhn.system.files import given_path
from pfedhn.system.process import advise_once, stop_on_signal

Precision = Literal["tf32", "fp32"]
USUAL = {"steps": 5_000, "evaluate_every": 30, "select": "metric"}


P = ParamSpec("P")


def _names_checked(function: Callable[P, Run]) -> Callable[P, Run]:
    """`train`, with a sentence for a keyword that it does not take, such as a setting of the method."""
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*arguments: P.args, **named: P.kwargs) -> Run:
        if foreign := [name for name in named if name not in names]:
            method: Any = arguments[0] if arguments else named.get("method")
            _refuse_foreign(foreign[0], named[foreign[0]], method, names)
        return function(*arguments, **named)

    return checked


def _refuse_foreign(name: str, value: Any, method: Any, names: Sequence[str]) -> None:
    settings = names_to_set(find_method(method).kinds) if isinstance(method, str) and method in ALGORITHMS else {}
    found = next((other for other in (name, *SYNONYMS.get(name, ())) if other in settings), None)
    if found is not None and not any(other in names for other in SYNONYMS.get(name, ())):
        raise UserError(
            f"train takes no {name!r}, which is a setting of the method; instead of {method!r}, give "
            f"pfedhn.ALGORITHMS[{method!r}]({found}={short(value)})."
        )
    raise UserError(f"train takes no {name!r}; {closest_setting(name, names, 'docs/api.md')}")


@_names_checked
def train(
    method: str | AnyAlgorithm,
    federation: Federation,
    model: str | Factory | Mapping[str, Factory] | None = None,
    *,
    steps: int | None = None,
    cohort_size: int | None = None,
    batch_size: int = 64,
    evaluate_every: int | None = None,
    select: Select | None = None,
    patience: int | None = None,
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
    robust: str | Mapping[str, Any] | Robust | None = None,
    attack: Attack | None = None,
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
        method: One of `pfedhn.ALGORITHMS` ("pfedhn", "fedavg", ...) or one such as `pfedhn.PFedHN(local_lr=0.01)`.
        federation: The clients and their data.
        model: A function that makes the target network, e.g. the class of an `nn.Module`; one of the package's by its
            name in experiment files, as "tabular-32" or "lenet-s"; or several functions by name, for clients of
            different sizes (`federation.with_architectures` says who runs which). A hypernetwork's first weights
            depend on the network's name. A network without one gets the name that a file would give it. For a table,
            it may be left out: then all that is left out is chosen as for an experiment file of that table, also
            the settings of a method that is given by name (docs/experiments.md).
        steps: Communication steps: one client taking part once. 5,000 rounds of one client, or 1,000 of five, by
            default. The last round is complete: 6 steps with five clients per round are 10.
        cohort_size: Clients per round; 1 for pFedHN, 5 for the averaging methods by default.
        batch_size: Examples in a minibatch.
        evaluate_every: Communication steps between evaluations; 30 by default.
        select: What chooses the round on validation: the "metric" (accuracy for class labels), which is the default, or
            the "loss".
        patience: Communication steps without a better validation score after which training stops. By default, all
            steps are taken.
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
        robust: The server's defense against hostile updates: "adaptive-norm", "per-party", "trimmed-mean", "median",
            one such as `pfedhn.AdaptiveNorm(factor=3.0)`, or one of your own.
        attack: What hostile clients send, to measure a defense: `pfedhn.Attack("flip", clients=(0,))`.
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
    algorithm, usual = method, dict[str, Any](USUAL)
    if model is None and isinstance(federation, Federation):
        algorithm, model = with_usual_settings(method, federation), TABLE_MODEL
        usual |= usual_schedule(federation.num_clients, steps)
    given = {"steps": steps, "evaluate_every": evaluate_every, "select": select, "patience": patience}
    schedule = usual | {name: value for name, value in given.items() if value is not None}
    simulation = assemble(
        algorithm,
        federation,
        _as_stored(model, directory),
        **schedule,
        cohort_size=cohort_size,
        batch_size=batch_size,
        seed=seed,
        loss=loss,
        metric=metric,
        device=devices[0],
        executor=executor,
        upload=upload,
        download=download,
        privacy=privacy,
        in_flight=in_flight,
        robust=robust,
        attack=attack,
    )
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
    origin = Origin.of(method, path)
    simulation = shared_out(simulation, devices, on)
    with ExitStack() as stack:
        stack.enter_context(connection(on))
        stack.enter_context(computing_on(simulation.device, precision, deterministic))
        stop = stack.enter_context(stop_on_signal())
        watch = None
        if progress:
            watch = watch_run(origin.method, simulation, stack.enter_context(Display(1, keeps=True)))
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


def _as_stored(model: Any, directory: Any) -> Any:
    """Name an unnamed network "model" if an older version made the run of the directory with that name."""
    if isinstance(model, str | Mapping) or not isinstance(directory, str | Path):
        return model
    if not (given_path(directory) / "spec.toml").exists():
        return model
    spec = read_spec(given_path(directory))
    return {"model": model} if spec is not None and list(spec.networks) == ["model"] else model
