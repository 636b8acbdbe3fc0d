"""Flower's own simulation (`flwr run`): every party on one machine, in processes that come and go.

Messages, signatures and checks are those of a network. The folder of such a run is that of a server, with a folder for
every party beside it, so that `pfedhn status` and `pfedhn export` read it too.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from pfedhn.data.catalogue import load
from pfedhn.data.federation import Federation
from pfedhn.data.partition import by_classes
from pfedhn.deploy.join import ENROLLED, remember
from pfedhn.deploy.signing import load_or_make_key, public_text
from pfedhn.deploy.site import Site
from pfedhn.errors import UserError
from pfedhn.system.files import given_path, make_folder, reading, write_atomically

EXAMPLE = """
method = "pfedhn-pc"
model = "mlp-32"
clients = {num_nodes}
cohort_size = {num_nodes}
steps = {steps}
evaluate_every = {evaluate_every}
seeds = [0]
settings = {{local_steps = 20}}
[data]
classes = 10
shape = [64]
"""


def folder_of(config: Mapping[str, Any], run: int) -> Path:
    """The folder of a run."""
    given = str(config["state"])
    return given_path(given) if given else Path(tempfile.gettempdir()) / f"pfedhn-simulation-{run}"


def prepare(config: Mapping[str, Any], run: int, num_nodes: int) -> Site:
    """The server's folder and those of all parties; what is there already goes on."""
    folder = folder_of(config, run)
    make_folder(folder, mode=0o700)
    spec = given_path(str(config["spec"] or folder / "example.toml"))
    data = given_path(str(config["data"] or folder / "data"))
    if not config["spec"]:
        text = EXAMPLE.format(num_nodes=num_nodes, steps=20 * num_nodes, evaluate_every=5 * num_nodes)
        write_atomically(spec, text.encode())
    site = Site.make(folder, spec)
    if not config["data"]:
        _write_digits(data, num_nodes)
    with reading(data):
        places = {place.stem: place for place in sorted(data.iterdir()) if not place.name.startswith(".")}
    if len(places) > num_nodes:
        raise UserError(f"{data} has {len(places)} parties, and the simulation {num_nodes} nodes; give it as many.")
    networks, server = list(site.plan.models), public_text(site.key.public_key())
    for number, (name, place) in enumerate(places.items()):
        own = folder / "simulated" / name
        make_folder(own, mode=0o700)
        site.invitations.invite(name, site.address, "", public_text(load_or_make_key(own / "key").public_key()))
        told = {"run": site.run, "spec": site.spec_text, "server": server, "invitation": "", "key": "key"}
        write_atomically(own / ENROLLED, json.dumps(told).encode())
        remember(own, name, place.absolute(), networks[number % len(networks)])
    return site


def _write_digits(folder: Path, num_nodes: int) -> None:
    """Handwritten digits, of which every party sees two kinds."""
    digits = load("digits")
    federation = Federation.from_arrays(digits.x, digits.y, partition=by_classes(2, num_clients=num_nodes))
    for client in range(num_nodes):
        own = folder / f"party-{client:03d}"
        make_folder(own)
        rows = torch.cat([part.of(client) for part in federation.splits.values()])
        numpy.save(own / "x.npy", federation.x[rows].numpy())
        numpy.save(own / "y.npy", federation.y[rows].numpy())
