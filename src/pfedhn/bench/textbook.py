"""pFedHN as a textbook writes it: modules, optimizers, data loaders. Yardstick of the bench and twin of the tests."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset

from pfedhn import keys
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.engine.simulate import Simulation
from pfedhn.engine.state import State
from pfedhn.params import Params


class Hypernetwork(nn.Module):
    """An embedding per client, a trunk, and one linear head per tensor of the target; made from the engine's phi."""

    def __init__(self, target: nn.Module, phi: Params, embeddings: Tensor) -> None:
        super().__init__()
        *trunk, weights, biases = phi.values()
        linears = [_linear(*layer) for layer in zip(trunk[::2], trunk[1::2], strict=True)]
        self.names, self.shapes = list(phi), {name: value.shape for name, value in target.named_parameters()}
        sizes = [shape.numel() for shape in self.shapes.values()]
        self.embedding = nn.Embedding.from_pretrained(embeddings.clone(), freeze=False)
        self.trunk = nn.Sequential(linears[0], *(layer for linear in linears[1:] for layer in (nn.ReLU(), linear)))
        self.heads = nn.ModuleList(map(_linear, weights.split(sizes), biases.split(sizes)))

    def forward(self, client: Tensor) -> Params:
        features = self.trunk(self.embedding(client))
        return {name: head(features).view(s) for (name, s), head in zip(self.shapes.items(), self.heads, strict=True)}

    def phi(self) -> Params:
        heads = (torch.cat([head.get_parameter(part) for head in self.heads]) for part in ("weight", "bias"))
        return dict(zip(self.names, [value.detach() for value in (*self.trunk.parameters(), *heads)], strict=True))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0]).to(weight)
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def rounds(simulation: Simulation, state: State, data: Dataset[Any]) -> Iterator[Hypernetwork]:
    """Plain pFedHN round by round from a fresh `state`, on the minibatches of `data` that the engine draws."""
    spec, (model,), batch_size = simulation.algorithm, simulation.models.values(), simulation.schedule.batch_size
    assert isinstance(spec, PFedHN)
    target = model.with_weights({}).train()
    h = Hypernetwork(target, state.memories.shared.phi, state.memories.rows.embedding).to(model.device)
    rates = {h.embedding.weight: spec.rows.lr}
    groups = [{"params": p, "lr": rates.get(p, spec.server.lr)} for p in h.parameters()]
    server = optim.SGD(groups, momentum=spec.server.momentum, weight_decay=spec.server.weight_decay)
    rows = replace(simulation.federation, x=torch.arange(len(simulation.federation.x)))
    for number in range(simulation.num_rounds):
        client = torch.tensor(simulation.cohort(number))
        drawn = rows.batches(client, keys.fold(simulation.seed, "batches", number), spec.local_steps, batch_size)
        batches = [x[mask].tolist() for x, mask in zip(drawn.x[0], drawn.mask[0], strict=True)]
        theta = h(client.to(model.device))
        target.load_state_dict(theta, strict=False)
        local = optim.SGD(target.parameters(), spec.local_lr, spec.local_momentum, weight_decay=spec.local_weight_decay)
        for x, y in DataLoader(data, batch_sampler=batches, num_workers=0):
            local.zero_grad()
            model.per_example_loss(target(x.to(model.device)), y.to(model.device)).mean().backward()
            nn.utils.clip_grad_norm_(target.parameters(), spec.local_clip or torch.inf)
            local.step()
        server.zero_grad()
        distances = [(theta[name] - value.detach()).square().sum() for name, value in target.named_parameters()]
        (torch.stack(distances).sum() / 2).backward()  # along theta - theta~ into phi and every embedding
        nn.utils.clip_grad_norm_(h.parameters(), spec.server.clip or torch.inf)
        server.step()
        yield h
