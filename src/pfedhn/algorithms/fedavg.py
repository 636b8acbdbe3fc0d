"""FedAvg (McMahan et al., AISTATS 2017): one shared model; clients train it, the server averages.

    server   send w                                                    send
    client   w_i <- K steps of SGD from w; return w - w_i              train
    server   w <- w - sum_i |T_i| (w - w_i) / sum_i |T_i|              receive

FedPer and LG-FedAvg are this with some layers kept by the clients (`kept`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pfedhn.algorithm import Group, Rule, client_weights, only_group, several_architectures
from pfedhn.errors import UserError
from pfedhn.keys import Key
from pfedhn.model import Model
from pfedhn.params import Params, pick, subtract, weighted_sum
from pfedhn.sgd import SGD, Batches, Rate


@dataclass(frozen=True)
class FedAvg:
    """FedAvg; the personal model of every client is the shared one."""

    local_lr: Rate = 1e-2
    local_steps: int = 50
    local_momentum: float = 0.9  # starts at rest in every round
    local_weight_decay: float = 5e-5
    local_clip: float | None = None
    rule: Rule = "size"

    usual_cohort_size = 5
    communicates = True
    num_personalize_batches = 0

    @property
    def num_batches(self) -> int:
        return self.local_steps

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> "FedAvg":
        return self

    def kept(self, model: Model) -> frozenset[str]:
        """Parameters that stay with the client: none in FedAvg itself."""
        return frozenset()

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: Key) -> Params:
        return shared_model(type(self).__name__, models, starts, self.kept)

    def init_row(self, key: Key, descriptor: Tensor | None) -> tuple[()]:
        return ()

    def join_row(self, shared: Params, rows: tuple[()], descriptor: Tensor | None) -> tuple[()]:
        return ()

    def init_private(self, model: Model, start: Params, key: Key) -> Params:
        return pick(start, self.kept(model))

    def send(self, model: Model, shared: Params, row: tuple[()]) -> Params:
        return shared

    def train(self, model: Model, received: Params, private: Params, batches: Batches) -> tuple[Params, Params]:
        sgd = SGD(self.local_lr, self.local_momentum, self.local_weight_decay, self.local_clip)
        weights, _ = sgd.run(model.loss, received | private, batches)
        return subtract(received, weights), pick(weights, private)

    def receive(self, shared: Params, groups: Sequence[Group]) -> tuple[Params, list[tuple[()]]]:
        group = only_group(groups, type(self).__name__)
        return subtract(shared, weighted_sum(group.updates, client_weights(self.rule, group.sizes))), [group.rows]

    def personalize(self, model: Model, received: Params, private: Params, batches: Batches) -> Params:
        return received | private


def shared_model(
    method: str, models: Mapping[str, Model], starts: Mapping[str, Params], kept: Callable[[Model], frozenset[str]]
) -> Params:
    """The one model that an averaging method shares, less what clients keep; several architectures are refused."""
    if len(models) != 1:
        raise UserError(several_architectures(method, ", ".join(models)))
    ((name, model),) = models.items()
    shared = {key: value for key, value in starts[name].items() if key not in kept(model)}
    if not shared:
        raise UserError(f"{method} has no layer left to share: its settings keep all of them with the client.")
    return shared
