"""A run's rounds by the executor that was asked for: captured where that is meant and possible, else one by one."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from pfedhn.algorithm import Algorithm
from pfedhn.data.lazy import LazyFederation
from pfedhn.engine.capture import CapturedRun
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.executors import Executor, TogetherScan, together
from pfedhn.engine.network import convolves
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import Best, Progress, State
from pfedhn.errors import UserError, first_line
from pfedhn.kernels.launch import dot_precision

logger = logging.getLogger("pfedhn")


def rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    """A run's progress, by the executor that was asked for; on a GPU `auto` means the captured round."""
    return _rounds(simulation, state) if simulation.resize_every is None else _resized_rounds(simulation, state)


def _resized_rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    """Stages of one run on the same state: in each stage, every client has the next network."""
    every, size, names = simulation.resize_every, simulation.clients_per_round, list(simulation.models)
    federation = simulation.federation
    assert every is not None
    assert federation.architectures is not None
    places = [names.index(name) for name in federation.architectures]
    while state.round < simulation.num_rounds:
        stage = state.round * size // every
        runs = [names[(place + stage) % len(names)] for place in places]
        until = min((stage + 1) * every, simulation.schedule.steps)
        yield from _rounds(
            replace(
                simulation,
                federation=replace(federation, architectures=tuple(runs)),
                schedule=replace(simulation.schedule, steps=until),
                resize_every=None,
            ),
            state,
        )


def _rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    if is_spoilt(simulation.algorithm, simulation.device):
        logger.warning(
            "%s divides a difference that tf32 rounds away; give --precision fp32, or precision='fp32' in Python.",
            simulation.exchange.method_name,
        )
    if simulation.draws_freely:
        if simulation.federation.x.is_cuda or simulation.executor == "captured":
            logger.warning(
                "a network whose dropout is not a layer (nn.Dropout) runs step by step, slower: a captured "
                "round cannot key its draws."
            )
    elif is_captured(simulation):
        if isinstance(simulation.federation, LazyFederation):
            logger.warning("data that are loaded when needed cannot be captured; rounds run one operation at a time.")
            return simulation.rounds(state)
        return _captured_rounds(simulation, state)
    return simulation.rounds(state)


def is_spoilt(algorithm: Algorithm[Any, Any, Any], device: torch.device) -> bool:
    """Whether a GPU is about to compute a method in a precision that is too low for it."""
    return algorithm.needs.float32 and device.type == "cuda" and dot_precision() == "tf32"


def is_captured(simulation: Simulation) -> bool:
    """Whether a captured round is meant.

    One whose clients are shared out, protected, hostile or not waited for is run operation by operation, and so is one
    with a defense, which looks at updates on the host.
    """
    apart = (simulation.make_crew, simulation.privacy, simulation.in_flight, simulation.robust, simulation.attack)
    if any(part is not None for part in apart):
        return False
    return simulation.executor == "captured" or (simulation.executor == "auto" and simulation.federation.x.is_cuda)


def scores_of_adapted(simulation: Simulation, best: Best) -> dict[str, SplitResult]:
    """What every client's model of the chosen round scores after the client's own adaptation steps."""
    executor = None
    if (
        is_captured(simulation)
        and not simulation.draws_freely
        and not isinstance(simulation.federation, LazyFederation)
        and not any(convolves(model, simulation.federation) for model in simulation.models.values())
    ):
        executor = Executor("together", together, is_traced=True, make_scan=TogetherScan)
    memories = best.memories.to(simulation.federation.x.device)
    return simulation.scores(memories, best.evaluation.round, is_adapted=True, executor=executor)


def _captured_rounds(simulation: Simulation, state: State) -> Iterator[Progress]:
    """Capture rounds if possible; a network or method that cannot be captured runs round by round, with one warning."""
    run = None
    try:
        run = CapturedRun(simulation, state)
        yield from run.turns_for_others()
        run.prepare()
    except (torch.OutOfMemoryError, UserError):  # of the second kind is training that diverged
        raise
    except Exception as error:  # the compiler's and CUDA's errors have no common kind
        logger.warning("this run cannot be captured and goes operation by operation, slower: %s", first_line(error))
        run = None
    # Out here nothing holds the error, whose frames hold the memory of the attempt.
    yield from simulation.rounds(state) if run is None else run.rounds()
