"""What a run is at one moment, and how long it is: values that are written, read and moved along.

Axes: [N] clients.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pfedhn.algorithm import Algorithm
from pfedhn.algorithms.find import method_of
from pfedhn.data.describe import large_labels
from pfedhn.data.federation import Federation
from pfedhn.engine.evaluate import SplitResult
from pfedhn.engine.robust import Past
from pfedhn.engine.round import Kept, Reply
from pfedhn.errors import RunError, UserError
from pfedhn.params import copy, put, stack, take
from pfedhn.settings import values_in_short

Select: TypeAlias = Literal["metric", "loss"]
"""What chooses a round on validation: the task's metric, such as accuracy, if it has one; or the loss."""

EVALUATED_SPLITS = ("validation", "test")
LARGE_RATE, USUAL_RATE = 1.0, 0.01  # of learning rates


def refuse_without_evaluation(federation: Federation) -> None:
    if not sum(int(federation.splits[split].size.sum()) for split in EVALUATED_SPLITS):
        raise UserError("no client has validation or test examples; leave some out of training to judge the models by.")


class Diverged(RunError):
    """A client's local training left the finite numbers. The state is that of the round before."""

    @staticmethod
    def at(number: int, client: str, algorithm: object, federation: Federation) -> "Diverged":
        scale = large_labels(federation)
        labels = "" if scale is None else f"scale the labels, whose mean is {scale[0]:.4g}, or "
        return Diverged(
            f"training diverged in round {number} at client {client}: its weights are no longer finite; "
            f"{labels}{lower_rates(algorithm)}. The run stands as it was before that round."
        )


def lower_rates(algorithm: object) -> str:
    """What to do about training that diverged, by the names that the method has for its learning rates."""
    settings = values_in_short(algorithm) if is_dataclass(algorithm) else {}
    rates = {name: float(rate) for name, rate in settings.items() if name.endswith("lr") and rate is not None}
    if not rates:
        return "lower the learning rates"
    largest = max(rates, key=lambda name: rates[name])
    usual = "local_lr" if "local_lr" in rates else next(iter(rates))
    first = largest if rates[largest] > LARGE_RATE else usual
    listed = ", ".join(f"{name} = {rates[name]:g}" for name in sorted(rates, key=lambda name: name != first))
    return f"lower the learning rates ({listed}), for example with --set {first}={min(rates[first] / 10, USUAL_RATE):g}"


@dataclass(frozen=True)
class Schedule:
    """How long a run is and how often it is looked at, counted in communication steps (one client, once)."""

    steps: int = 5_000
    cohort_size: int = 1
    batch_size: int = 64
    evaluate_every: int = 30
    select: Select = "metric"
    patience: int | None = None  # steps without a better validation score after which training stops

    def score(self, result: SplitResult) -> float:
        """The score of validation examples that chooses a round."""
        return -result.mean_loss if self.select == "loss" else result.score

    @staticmethod
    def default_cohort_size(algorithm: Algorithm[Any, Any, Any], num_clients: int) -> int:
        """Clients per round if nobody says how many."""
        return min(method_of(algorithm).cohort_size, num_clients)

    def num_rounds(self, num_clients: int, communicates: bool) -> int:
        size = self.clients_per_round(num_clients, communicates)
        return -(-self.steps // size)

    def clients_per_round(self, num_clients: int, communicates: bool) -> int:
        """A method that sends nothing trains everybody in every round."""
        return self.cohort_size if communicates else num_clients

    def is_evaluated(self, steps_before: int, steps_after: int) -> bool:
        return steps_after // self.evaluate_every > steps_before // self.evaluate_every or steps_after >= self.steps


class Evaluation(NamedTuple):
    step: int
    round: int
    splits: dict[str, SplitResult]


class Memories(NamedTuple):
    """The three memories of a federation."""

    shared: Any
    rows: Any  # [N, ...]
    private: dict[str, "PrivateTable"]  # by architecture: what its clients keep

    def kept(self, older: "Memories | None" = None) -> "Memories":
        """A copy in the host's memory, where it costs a GPU nothing; an older one lends its place."""
        return Memories(
            copy(self.shared, older and older.shared, on_host=True),
            copy(self.rows, older and older.rows, on_host=True),
            {name: table.kept(older and older.private[name]) for name, table in self.private.items()},
        )

    def to(self, device: torch.device) -> "Memories":
        """The same memories where a run computes."""
        shared, rows = pytree.tree_map(lambda leaf: leaf.to(device).contiguous(), (self.shared, self.rows))
        return Memories(shared, rows, {name: table.to(device) for name, table in self.private.items()})


@dataclass
class PrivateTable:
    """The private memories of the clients of one architecture, made at first contact: absent clients cost nothing."""

    make: Callable[[int], Any]
    slots: dict[int, int] = field(default_factory=dict)
    tree: Any = None  # [slots, ...], with room to grow

    def take(self, clients: Sequence[int]) -> Any:
        places = self._places(clients)  # first: it may make the tree
        return take(self.tree, places)

    def put(self, clients: Sequence[int], values: Any) -> None:
        places = self._places(clients)
        put(self.tree, places, values)

    def kept(self, older: "PrivateTable | None" = None) -> "PrivateTable":
        tree = None if self.tree is None else copy(self.tree, older and older.tree, on_host=True)
        return PrivateTable(self.make, dict(self.slots), tree)

    def to(self, device: torch.device) -> "PrivateTable":
        tree = pytree.tree_map(lambda leaf: leaf.to(device), self.tree)
        return PrivateTable(self.make, dict(self.slots), tree)

    def _places(self, clients: Sequence[int]) -> Tensor:
        for client in clients:
            if client not in self.slots:
                self._add(client, self.make(client))
        leaves = pytree.tree_leaves(self.tree)
        return torch.tensor([self.slots[client] for client in clients], device=leaves[0].device if leaves else None)

    def _add(self, client: int, value: Any) -> None:
        if self.tree is None:
            self.tree = copy(stack([value]))  # a copy: `value` may be the initial model itself
        leaves = pytree.tree_leaves(self.tree)
        slot = len(self.slots)
        if leaves and slot == leaves[0].shape[0]:
            self.tree = pytree.tree_map(lambda leaf: torch.cat([leaf, torch.zeros_like(leaf)]), self.tree)
        self.slots[client] = slot
        put(self.tree, slot, value)


class Best:
    """The first evaluation with the strictly best validation score, and the memories of that round, on the host."""

    def __init__(self, evaluation: Evaluation, memories: Memories) -> None:
        self.evaluation = evaluation
        self._memories = memories
        self._copied: torch.cuda.Event | None = None

    @classmethod
    def of(cls, evaluation: Evaluation, memories: Memories, older: "Best | None") -> "Best":
        """Copies of memories that a run goes on with; an older best lends its place.

        A GPU copies while other runs compute, and nobody waits for it until the copies are read.
        """
        best = cls(evaluation, memories.kept(None if older is None else older._memories))
        private = [table.tree for table in memories.private.values() if table.tree is not None]
        leaves = pytree.tree_leaves((memories.shared, memories.rows, private))
        if devices := {leaf.device for leaf in leaves if leaf.is_cuda}:
            (device,) = devices
            with torch.cuda.device(device):
                best._copied = torch.cuda.Event()
                best._copied.record(torch.cuda.current_stream(device))
        return best

    @property
    def memories(self) -> Memories:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._memories


class Work(NamedTuple):
    """A client at work on weights that the server sent it; what it will reply is known here already."""

    client: int
    number: int  # of the message
    version: int  # steps that the server had taken when it sent the weights
    due: float  # when the reply comes
    bytes_down: int
    reply: Reply  # [1, ...]
    kept: Kept  # [1, ...]


@dataclass
class Flight:
    """Who is at work in a run that does not wait for cohorts."""

    num_sent: int = 0  # messages so far
    now: float = 0.0  # the clock, in the mean time that a client takes
    working: list[Work] = field(default_factory=list)
    replies: list[Work] = field(default_factory=list)  # that came, and are not in a step yet
    max_staleness: int = 0  # steps that the server took while a client was at work
    sum_staleness: int = 0


@dataclass
class State:
    """Everything a run is at one moment: write it and read it back, and the run goes on with the same bits."""

    round: int
    memories: Memories
    best: Best | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    num_updates: Counter[int] = field(default_factory=Counter)  # of each client, where they cost privacy
    flight: Flight = field(default_factory=Flight)  # of a run that does not wait
    robust: Past = field(default_factory=dict)  # what a defense against hostile updates remembers
    bad: Tensor | None = (
        None  # [2] of a captured run: the round and client at which it diverged unnoticed so far, or -1
    )


class Progress(NamedTuple):
    step: int
    evaluation: Evaluation | None
    is_pause: bool = False  # a round is done and its evaluation is not: no moment to stop or to be written
    is_waiting: bool = False  # nothing is done until another has done its work: a moment to stop
