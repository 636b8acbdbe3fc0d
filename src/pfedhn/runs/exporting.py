"""Models to take away from a run: files and cards for its clients."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pfedhn.data.arrays import Arrays
from pfedhn.engine.evaluate import SplitResult
from pfedhn.model import Model
from pfedhn.runs.card import model_card, test_scores
from pfedhn.runs.portable import Card, Portable, check_ending, file_names, index, write_model
from pfedhn.runs.scores import scores_of
from pfedhn.system.files import given_path, make_folder, write_atomically

if TYPE_CHECKING:
    from pfedhn.runs.run import Run


def export(run: "Run", client: int | str, path: str | Path, last: bool, data: Arrays | None) -> Path:
    """Write a client's model and its card. Arguments as `Run.export`."""
    file = given_path(path)
    check_ending(file)
    if isinstance(client, str) and client in run.joined:
        return run.joined[client].export(file)
    model = run.personal_model(client, last, data=data)
    network = portable_of(run, run.plan.model_of(run.plan.clients.number_of(client)).name)
    return write_model(file, network, model, card_of(run, client))


def export_all(run: "Run", folder: str | Path, ending: str, last: bool) -> dict[str, Path]:
    """Write the model of every client into a folder. Arguments as `Run.export_all`."""
    place = given_path(folder)
    check_ending(Path(f"model{ending}"))
    make_folder(place)
    clients = [run.plan.clients.name_of(number) for number in range(run.plan.num_clients)]
    files = {client: place / f"{name}{ending}" for client, name in zip(clients, file_names(clients), strict=True)}
    for client, file in files.items():
        run.export(client, file, last=last)
    cards = {files[client].name: run.card(client) for client in clients}
    write_atomically(place / "README.md", index(cards).encode())
    return files


def portable_of(run: "Run", architecture: str) -> Portable:
    """A target network ready to be written; it is traced once, however many clients run it."""
    made = run.portables
    if architecture not in made:
        model, clients = run.plan.models[architecture], run.plan.clients
        dtype: torch.dtype = getattr(torch, clients.dtype)
        dtype = model.dtype if dtype.is_floating_point else dtype
        made[architecture] = Portable(copy.deepcopy(model.testing_module).cpu(), clients.shape, dtype)
    return made[architecture]


def card_of(run: "Run", client: int | str) -> Card:
    """The card of a client of the run."""
    clients = run.plan.clients
    place = clients.number_of(client)
    test = scores_of(run.chosen.splits["test"]) if run.result is None else run.result.test
    assert test.clients is not None
    assert test.client_examples is not None
    total, count = test.clients[place], test.client_examples[place]
    table = None if clients.reading is None else clients.reading.table
    return _card(
        run,
        clients.name_of(place),
        run.plan.model_of(place),
        test_scores(total / count if count else None, count, test.has_accuracy),
        None if table is None else table.fill_of(clients.name_of(place)),
    )


def new_card(run: "Run", client: str, model: Model, test: SplitResult, fill: Sequence[float] | None) -> Card:
    """The card of a client that joined the run, by what it scored."""
    count = int(test.count.sum())
    mean = None if not count else test.score if test.metric is not None else -test.score
    return _card(run, client, model, test_scores(mean, count, test.metric is not None), fill)


def _card(run: "Run", client: str, model: Model, test: Mapping[str, Any], fill: Sequence[float] | None) -> Card:
    plan = run.plan
    return model_card(
        client,
        model,
        run.description,
        test,
        run=run.origin.name,
        method=run.origin.method,
        algorithm=plan.algorithm,
        chosen_step=run.chosen.step,
        steps=run.state.round * plan.clients_per_round,
        seed=plan.seed,
        fill=fill,
    )
