"""pFedHN on a shared model: a hypernetwork generates some layers, or additions to weights that all clients share.

    server   theta_i  = w + h(v_i; phi)                                              publish
    client   theta~_i = K steps of SGD from theta_i, or from w                       send, train
    server   (phi, v_i) -= lr * (d theta_i / d(phi, v_i))^T (theta_i - theta~_i)     receive
             w -= shared_lr * mean of the clients' updates                           receive

Heads other than the dense one write h as an addition to every layer of w; the low-rank and the chunked one do so for
large targets. With the dense head `generated` names the layers that h writes, and w is the others (`rest`): shared, or
frozen. An update is where a client started minus where it ended. With `local_start = "shared"` clients start from w: w
learns as FedAvg's model does (`shared_lr` = 1 is FedAvg), and h learns what takes w to each client's end (pFedHN-S).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor

from pfedhn import keys
from pfedhn.algorithm import Group, Uses, weighted_updates
from pfedhn.algorithms.embeddings import Row
from pfedhn.algorithms.hypernetwork import Head, Hypernetwork
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.errors import UserError
from pfedhn.layers import Role, Roles, Shapes, assign_roles
from pfedhn.model import Model
from pfedhn.params import Params, weighted
from pfedhn.sgd import Rate


class OnShared(NamedTuple):
    """The server's memory for all clients: pFedHN's, and w."""

    phi: Params
    velocity: Params
    square: Params
    spectral: Params
    powers: Tensor
    step: Tensor
    common: Params  # w, by "network/parameter"


@dataclass(frozen=True)
class PFedHNShared(PFedHN):
    """pFedHN on top of layers that all clients share."""

    head: Head = "dense"  # the others generate additions to shared layers, "low-rank" and "chunked" for large targets
    rank: int = 4  # rank of what a low-rank head adds to a matrix
    chunk_size: int = 2_000  # weights that a chunked head generates at a time
    local_start: Literal["personal", "shared"] = "personal"  # where local steps start: h(v_i), or what that is added to
    shared_lr: Rate = 0.5  # learning rate of the server's steps on shared layers; 1 is FedAvg
    generated: tuple[str, ...] = ()  # layers that the hypernetwork generates; all that are not personal by default
    rest: Literal["shared", "frozen"] = "shared"  # what the other layers are, if some are named as generated
    fixed_layers: tuple[str, ...] = ()  # layers that stay at their random start, the same for all, also in adaptation

    def for_clients(self, num_clients: int, descriptor_dim: int | None = None) -> Self:
        if self.head != "dense" and (self.linear or self.spectral_norm):
            raise UserError(f"head = {self.head!r} goes with neither linear nor spectral_norm; leave them out.")
        self._refuse_without_effect()
        return super().for_clients(num_clients, descriptor_dim)

    def _refuse_without_effect(self) -> None:
        """Reject settings that would be ignored."""
        has_common = self.head != "dense" or (self.generated and self.rest == "shared")
        shared = "rest='shared'" if self.generated else "generated=('last',)"
        for name, has_effect, needed in (
            ("rest", self.generated, "layers that are generated, as generated=('last',)"),
            ("shared_lr", has_common, f"layers that are shared: head='added', 'low-rank' or 'chunked', or {shared}"),
            ("fixed_layers", not (self.generated and self.rest == "frozen"), "rest='shared'"),
            ("local_start", self.head != "dense", "head='added', 'low-rank' or 'chunked'"),
            ("rank", self.head == "low-rank", "head='low-rank'"),
            ("chunk_size", self.head == "chunked", "head='chunked'"),
        ):
            value = getattr(self, name)
            if not has_effect and value != getattr(PFedHNShared, name):
                raise UserError(f"{name} = {value!r} has no effect without {needed}; give that too, or leave it out.")

    @property
    def uses(self) -> Uses:
        return super().uses._replace(published=("phi", "common"))

    @property
    def hypernetwork(self) -> Hypernetwork:
        form = (self.hidden_dim, self.num_hidden, self.linear, self.spectral_norm)
        return Hypernetwork(self.rows.dim, *form, self.head, self.rank, self.chunk_size)

    def roles(self, model: Model) -> Roles:
        rest: Role = self.rest if self.generated else "generated"
        fixed = () if model.frozen else self.fixed_layers  # they are no parameters of a model that has them frozen
        layers = {"personal": self.personal, "generated": self.generated, "frozen": fixed}
        return assign_roles(model, rest=rest, settings={"frozen": "fixed_layers"}, **layers)

    def frozen(self, model: Model) -> Collection[str]:
        return self.roles(model).frozen

    def common(self, model: Model) -> Shapes:
        """The parameters of w."""
        roles = self.roles(model)
        return roles.shared if self.head == "dense" else roles.shared | roles.generated

    def base(self, model: Model, shared: Any) -> Params:
        """W of one architecture."""
        return {name: shared.common[f"{model.name}/{name}"] for name in self.common(model)}

    def init_shared(self, models: Mapping[str, Model], starts: Mapping[str, Params], key: keys.Key) -> Any:
        common = {f"{n}/{part}": starts[n][part] for n, model in models.items() for part in self.common(model)}
        return OnShared(*super().init_shared(models, starts, key), common)

    def send(self, model: Model, shared: Any, row: Row) -> Params:
        return self.publish(model, shared, row) if self.local_start == "personal" else self.base(model, shared)

    def publish(self, model: Model, shared: Any, row: Row) -> Params:
        generated = super().send(model, shared, row)
        common = self.base(model, shared)
        return generated | {name: generated[name] + x if name in generated else x for name, x in common.items()}

    def receive(self, shared: Any, groups: Sequence[Group]) -> tuple[Any, list[Row]]:
        to_ends = groups if self.local_start == "personal" else [self.to_end(shared, group) for group in groups]
        stepped: tuple[Any, list[Row]] = super().receive(shared, to_ends)
        after, rows = stepped
        moved = {
            f"{group.model.name}/{name}": update[name].sum(0)
            for group, update in zip(groups, weighted_updates(self.rule, groups), strict=True)
            for name in self.common(group.model)
        }
        common = {name: x - self.shared_lr * moved[name] if name in moved else x for name, x in shared.common.items()}
        return after._replace(common=common), rows

    def to_end(self, shared: Any, group: Group) -> Group:
        """Updates of clients that started from w, as if they had started from theirs: what is added comes on top."""
        added = super().send(group.model, shared, group.rows)
        added = added if group.parts is None else weighted(added, group.parts)
        return group._replace(updates={name: group.updates[name] + x for name, x in added.items()})
