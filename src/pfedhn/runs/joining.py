"""Clients that join a trained federation: only their own parameters are learned."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pfedhn import keys
from pfedhn.algorithms.find import method_of
from pfedhn.data.columns import new_client
from pfedhn.data.federation import Federation
from pfedhn.data.reading import ClientReading
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.network import check_model, refuse_single_rows
from pfedhn.engine.plan import Plan
from pfedhn.engine.rounds import rounds, scores_of_adapted
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import EVALUATED_SPLITS, Diverged, Memories, State, refuse_without_evaluation
from pfedhn.errors import UserError, closest, short, some
from pfedhn.model import Model
from pfedhn.params import Params, take
from pfedhn.runs.export import Card, Portable, write_model
from pfedhn.settings import check_seed, whole_number

TRIAL_ROUNDS = 10  # for which settings are tried before a client joins
SMALL_NETWORK = 100_000  # parameters of a target network, up to which a second thread costs more than it brings

Tried: TypeAlias = Sequence[tuple[Mapping[str, Any], float]]
"""Settings that were tried for a few rounds, each with its validation score; minus infinity where it diverged."""


@dataclass
class NewClient:
    """A client that joined a trained federation."""

    model: nn.Module  # of a table, it takes and gives what `Run.personal_model` says
    weights: Params
    row: Any  # the server's memory of it: for pFedHN its embedding
    private: Any
    splits: dict[str, SplitResult]
    round: int  # of joining, chosen on its validation examples
    card: Card  # what its model was trained on and how good it is, as plain values
    portable: Portable = field(repr=False)
    reading: ClientReading | None = None  # of a table: how its cells became inputs
    settings: dict[str, Any] = field(default_factory=dict)  # of the method while it joined: as given, or as chosen
    tried: Tried = field(default_factory=list)  # what they were chosen among

    def export(self, path: str | Path) -> Path:
        """Write its model to a file that runs without this package, as `Run.export` does.

        Args:
            path: As for `Run.export`.
        """
        return write_model(path, self.portable, self.model, self.card, self.reading)

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
        test = self.splits["test"]
        values: NDArray[numpy.float64] = (
            -test.loss / test.count if test.metric is None else test.client_metric
        ).numpy()
        return values

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


def network_of(plan: Plan, client: int, architecture: str | None) -> Model:
    """A client's target network, or another one of the run."""
    if architecture is None:
        return plan.model_of(client)
    models = plan.models
    if not isinstance(architecture, str) or architecture not in models:
        raise UserError(f"there is no architecture {short(architecture)}; {closest(architecture, models)}")
    return models[architecture]


def one_client(
    plan: Plan,
    model: Model,
    x: ArrayLike | Tensor,
    y: ArrayLike | Tensor,
    name: str | None,
    split: tuple[float, float, float],
    descriptor: ArrayLike | Tensor | None,
    seed: int,
    rounds: int = 1,
) -> tuple[Federation, ClientReading | None]:
    """A federation of one new client, and how its cells of a table became inputs. Arguments as `Run.add_client`."""
    seed, reading = check_seed(seed), plan.clients.reading
    data, own = new_client(x, y, name, split, seed, None if reading is None else reading.table)
    if rounds and not sum(int(data.splits[part].size.sum()) for part in EVALUATED_SPLITS):
        raise UserError(
            f"split = {split} of so few examples ({len(data.x)}) leaves none for validation or test; give more "
            "examples, a split that keeps some of them for these, or rounds = 0 for the model that a client gets "
            "before it learns."
        )
    if name is None:
        data = replace(data, identities=torch.tensor([_identity(data)]))
    if plan.clients.architectures is not None:
        data = data.with_architectures([model.name])
    if plan.descriptor_dim:
        data = data if descriptor is None else data.with_descriptors(torch.as_tensor(descriptor)[None])
        data = data.with_descriptors(plan.descriptors_of(data))
    return data, own


def join(
    plan: Plan,
    memories: Memories,
    federation: Federation,
    *,
    rounds: int,
    settings: Mapping[str, Any] | None,
    trial_rounds: int,
    seed: int,
    adapts: bool,
) -> NewClients:
    """Let clients join; arguments as `Run.add_clients`.

    Args:
        plan: Of the run that they join.
        memories: Of the round that they join at.
        adapts: Whether the clients that are there take the method's adaptation steps.
    """
    with _fitting_threads(plan):
        return _join_with_best(plan, memories, federation, rounds, settings, trial_rounds, seed, adapts)


@contextmanager
def _fitting_threads(plan: Plan) -> Iterator[None]:
    """On a CPU, run a small network in one thread: two would mostly wait for each other."""
    models = plan.models.values()
    is_small = len(plan.clients.shape) == 1 and all(
        sum(shape.numel() for shape in model.shapes.values()) <= SMALL_NETWORK for model in models
    )
    before = torch.get_num_threads()
    if plan.device.type == "cpu" and is_small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _join_with_best(
    plan: Plan,
    memories: Memories,
    federation: Federation,
    rounds: int,
    settings: Mapping[str, Any] | None,
    trial_rounds: int,
    seed: int,
    adapts: bool,
) -> NewClients:
    rounds, trial_rounds = whole_number("rounds", rounds, least=0), whole_number("trial_rounds", trial_rounds)
    trial_rounds = min(trial_rounds, rounds)
    if settings is not None:
        _refuse_other_form(plan, memories, settings)
    choices = [] if settings is not None else method_of(plan.algorithm).choices_for_joining(plan.algorithm)
    can_choose = rounds > 0 and int(federation.splits["validation"].size.sum()) > 0

    def joined_with(choice: Mapping[str, Any], num_rounds: int) -> NewClients:
        return _join(plan, memories, federation, num_rounds, choice, seed, adapts)

    # With privacy, every trial would spend of the clients' budget.
    if len(choices) < 2 or not can_choose or plan.privacy is not None:
        return joined_with(settings or {}, rounds)

    def attempt(choice: Mapping[str, Any], num_rounds: int) -> NewClients | None:
        try:
            joined = joined_with(choice, num_rounds)
        except Diverged:
            return None
        # Outputs that are not numbers have an accuracy too.
        return joined if math.isfinite(joined.splits["validation"].mean_loss) else None

    trials = [attempt(choice, trial_rounds) for choice in choices]
    score = plan.schedule.score
    scores = [-math.inf if trial is None else score(trial.splits["validation"]) for trial in trials]
    scores = [-math.inf if math.isnan(score) else score for score in scores]
    tried = list(zip(choices, scores, strict=True))
    for number in sorted(range(len(choices)), key=lambda number: -scores[number]):  # of equal ones, the first
        joined = trials[number]
        if joined is not None and trial_rounds < rounds:
            joined = attempt(choices[number], rounds)
        if joined is not None:
            return replace(joined, tried=tried)
    return joined_with({}, rounds)  # which says how it diverges


def _join(
    plan: Plan,
    memories: Memories,
    federation: Federation,
    rounds: int,
    settings: Mapping[str, Any],
    seed: int,
    adapts: bool,
) -> NewClients:
    plan, seed = _with_settings(plan, settings), check_seed(seed)
    first = plan.model_of(0)
    if plan.clients.architectures is not None and federation.architectures is None:
        federation = federation.with_architectures([first.name] * (federation.num_clients + federation.num_joining))
    data = federation.to(plan.device, first.dtype if federation.dtype.is_floating_point else None)
    for name in dict.fromkeys(data.architectures or [first.name]):
        network = network_of(plan, 0, name)
        check_model(network, data)
        refuse_single_rows(network, data, plan.schedule.batch_size)
    if rounds:
        refuse_without_evaluation(data)
    key = int(keys.fold(plan.seed, "new client", seed))
    joining = Simulation.of(plan.joining(data.description, memories, max(rounds, 1), key), data)
    state = _joined_state(joining, rounds)
    assert state.best is not None
    chosen = state.best.evaluation
    if "adaptation_steps" in settings:
        adapts = plan.fine_tunes
    splits = scores_of_adapted(joining, state.best) if adapts else chosen.splits
    return NewClients(joining, state.best.memories, splits, chosen.round, dict(settings), adapts=adapts)


def _with_settings(plan: Plan, settings: Mapping[str, Any]) -> Plan:
    algorithm = plan.algorithm
    if not isinstance(settings, Mapping):
        raise UserError(f"settings is {short(settings)}; give names and values, such as {{'local_lr': 0.01}}.")
    changed = method_of(algorithm).changed(algorithm, settings)
    return plan if changed is algorithm else replace(plan, algorithm=changed)


def _refuse_other_form(plan: Plan, memories: Memories, settings: Mapping[str, Any]) -> None:
    """Refuse settings under which the server's memory would not be of the form that was trained."""
    changed = _with_settings(plan, settings)
    if changed is plan:
        return
    is_same = changed.algorithm.needs.descriptors == plan.algorithm.needs.descriptors
    if is_same:
        one = take(memories.rows, 0) if pytree.tree_leaves(memories.rows) else memories.rows
        trained, other = (memories.shared, one), (changed.form.shared, changed.form.row)
        (old, old_form), (new, new_form) = map(pytree.tree_flatten, (trained, other))
        is_same = old_form == new_form and [leaf.shape for leaf in old] == [leaf.shape for leaf in new]
    if not is_same:
        raise UserError(
            f"{some(list(settings))} cannot change while a client joins, since what was trained depends on it; "
            "settings of how a client learns can, such as learning rates."
        )


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
