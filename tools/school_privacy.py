"""MR-MTL, FedAvg and Local on the School data with privacy of single examples, beside the numbers of MR-MTL's authors.

    python tools/school_privacy.py school.mat --seeds 5

The authors' setting (kenziyuliu/private-cross-silo-fl, f16ff76, runners/school): 139 schools, all in every round, 201
rounds of one epoch with minibatches of 32, a linear model, half the squared error, a rate of 0.01, gradients clipped to
norm 1, and for every school the noise with which it spends epsilon 6 at delta 1e-3. Schools take different numbers of
steps at different noise, which one run of pfedhn does not offer, so that the rounds are written here; a client's steps
and the server's are those of the methods. The mean squared error is over all test examples, after the last round.
"""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from scipy.io import loadmat
from torch import Tensor, nn

from pfedhn import keys
from pfedhn.algorithm import Group
from pfedhn.algorithms.fedavg import FedAvg
from pfedhn.algorithms.local import Local
from pfedhn.algorithms.mr_mtl import MRMTL
from pfedhn.model import Model
from pfedhn.params import put, stack, take, zeros_like
from pfedhn.privacy import Privacy, Protection, RoundCost, keyed_normal, protecting, spent
from pfedhn.sgd import Batches

EPSILON, DELTA, CLIP, RATE = 6.0, 1e-3, 1.0, 0.01
ROUNDS, BATCH_SIZE, TEST_SHARE = 201, 32, 0.2
LOWEST, HIGHEST = 1, 70  # scores, by which the authors scale
PLAIN = {"local_lr": RATE, "local_momentum": 0.0, "local_weight_decay": 0.0}
METHODS: dict[str, Any] = {
    "FedAvg": FedAvg(**PLAIN, rule="size"),
    "Local": Local(**PLAIN),
    "MR-MTL": MRMTL(**PLAIN, strength=1.0, rule="size"),
}
PUBLISHED = {"FedAvg": 0.02564, "Local": 0.02628, "MR-MTL": 0.02394}


def half_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - y).square() / 2


def read(path: str, seed: int) -> list[dict[str, Tensor]]:
    """The schools, each with its own split and its features scaled by its own training examples."""
    content, schools = loadmat(path), []
    generator = numpy.random.default_rng(seed)
    for x, y in zip(content["X"][0], content["Y"][0], strict=True):
        order = generator.permutation(len(x))
        test = order[: int(numpy.ceil(TEST_SHARE * len(x)))]
        train = order[len(test) :]
        deviation = x[train].std(0)
        scaled = (x - x[train].mean(0)) / numpy.where(deviation > 0, deviation, 1.0)
        labels = (y.flatten().astype(float) - LOWEST) / (HIGHEST - LOWEST)
        parts = {"x": scaled[train], "y": labels[train], "test_x": scaled[test], "test_y": labels[test]}
        schools.append({name: torch.tensor(part, dtype=torch.float32) for name, part in parts.items()})
    return schools


def noise_for(rate: float, steps: int) -> float:
    """The least noise that spends no more than the budget."""
    low, high = 0.1, 500.0
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if spent([RoundCost(middle, rate, steps)], DELTA) <= EPSILON else (middle, high)
    return high


def run(method: Any, schools: list[dict[str, Tensor]], seed: int) -> float:
    """The mean squared error over all test examples after the last round."""
    num_features = schools[0]["x"].shape[1]
    model = Model("linear", lambda: nn.Linear(num_features, 1), half_squared_error)
    start = zeros_like(model.fresh(seed))  # as the authors' linear models start
    shared = method.init_shared({"linear": model}, {"linear": start}, seed)
    sizes = torch.tensor([len(school["x"]) for school in schools])
    widths = sizes.clamp(max=BATCH_SIZE)
    steps = sizes // widths
    rates = zip((widths / sizes).tolist(), (steps * ROUNDS).tolist(), strict=True)
    noise = torch.tensor([noise_for(rate, count) for rate, count in rates])
    private = stack([method.init_private(model, start, seed) for _ in schools])
    generator = torch.Generator().manual_seed(seed)

    def train(count: int, shared: Any, own: Any, batches: Batches, width: Tensor, noise: Tensor, key: Tensor) -> Any:
        """One school's work, of so many steps; schools with as many are mapped together."""
        drawn = keyed_normal(key)
        privacy = Protection(Privacy(CLIP, 1.0, level="example"), width, lambda size, like: noise * drawn(size, like))
        with protecting(privacy):
            return replace(method, local_steps=count).train(model, method.send(model, shared, ()), own, batches)

    for number in range(ROUNDS):
        updates: list[Any] = [None] * len(schools)
        secrets = torch.as_tensor(keys.fold(seed, "noise", number, torch.arange(len(schools))))
        for count in steps.unique().tolist():
            some = (steps == count).nonzero().squeeze(1)
            batches = [epoch(schools[i], count, int(widths[i]), generator) for i in some.tolist()]
            given = (take(private, some), stack(batches), widths[some].float(), noise[some], secrets[some])
            update, own = torch.vmap(partial(train, count, shared))(*given)
            put(private, some, own)
            for place, i in enumerate(some.tolist()):
                updates[i] = take(update, place)
        if method.needs.communication:
            shared, _ = method.receive(shared, [Group(model, (), stack(updates), sizes)])
    nothing = Batches(*(torch.zeros(0, 1) for _ in range(3)))
    total = num_examples = 0.0
    for i, school in enumerate(schools):
        weights = method.personalize(model, method.send(model, shared, ()), take(private, i), nothing)
        outputs = model.outputs(weights, school["test_x"]).squeeze(-1)
        total += float((outputs - school["test_y"]).square().sum())
        num_examples += len(school["test_y"])
    return total / num_examples


def epoch(school: dict[str, Tensor], steps: int, width: int, generator: torch.Generator) -> Batches:
    """Minibatches of one epoch in random order, filled up to the usual size; the last incomplete one is left out."""
    order = torch.randperm(len(school["x"]), generator=generator)[: steps * width].reshape(steps, width)
    order = nn.functional.pad(order, (0, BATCH_SIZE - width))
    mask = torch.arange(BATCH_SIZE).expand(steps, -1) < width
    return Batches(school["x"][order], school["y"][order], mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, method in METHODS.items():
        found = [
            run(method, read(options.path, seed), seed) for seed in range(options.first, options.first + options.seeds)
        ]
        values = ", ".join(f"{value:.5f}" for value in found)
        print(f"{name:8} {numpy.mean(found):.5f}  (published {PUBLISHED[name]})  {values}", flush=True)


if __name__ == "__main__":
    main()
