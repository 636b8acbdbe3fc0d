"""The same app in Flower's own simulation: with `flwr run` nothing else is computed than by `pfedhn.train`."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from support import free_port, mostly_slow
from test_processes import PARTIES, SPEC, simulated, write_data

import pfedhn
from pfedhn import deploy
from pfedhn.algorithms import ALGORITHMS
from pfedhn.deploy import flower
from pfedhn.deploy.join import load_party
from pfedhn.deploy.simulated import prepare
from pfedhn.errors import UserError

APP = Path(pfedhn.__file__).parent / "deploy" / "app"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""As docs/deployment.md has it: Flower tells nobody anything, and installs nothing."""
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


class Local(Grid):
    """Flower's messages without its processes: a message is answered when it is pushed."""

    def __init__(self, num_nodes: int, config: dict[str, Any]) -> None:
        self.contexts = {
            100 + number: Context(
                1, 100 + number, {"partition-id": number, "num-partitions": num_nodes}, RecordDict(), config
            )
            for number in range(num_nodes)
        }
        self.answers: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *given: Any, **named: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def get_nodes(self) -> Iterable[Any]:
        raise AssertionError("nodes of a simulation have no keys")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = str(len(self.answers))
            message.metadata.__dict__["_message_id"] = number
            self.answers[number] = flower.client_app(message, self.contexts[message.metadata.dst_node_id])
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.answers[number] for number in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


@pytest.fixture
def identity() -> Iterator[None]:
    """Flower makes messages only inside of a run."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    yield
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = None  # type: ignore[assignment]


def spec_of(method: str) -> str:
    text = SPEC.replace('"pfedhn-pc"', f'"{method}"')
    if "local_steps" not in {field.name for field in fields(ALGORITHMS[method])}:
        text = text.replace("[settings]\nlocal_steps = 5\n", "")
    return text


def assert_models(folder: Path, data: Path, spec: str) -> None:
    expected = simulated(data, spec)
    for number, name in enumerate(PARTIES):
        mine = load_party(folder / "simulated" / name).personal_model().state_dict()
        for part, value in expected.personal_model(number).state_dict().items():
            torch.testing.assert_close(mine[part], value, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("method", mostly_slow(ALGORITHMS, "pfedhn-pc"))
@pytest.mark.slow
def test_every_method_through_the_engine_is_the_simulator(method: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "spec.toml").write_text(spec_of(method))
    given = {"state": str(tmp_path / "run"), "spec": str(tmp_path / "spec.toml"), "data": str(tmp_path / "data")}
    config = {**DEFAULTS, **given}
    grid = Local(len(PARTIES) + 1, config)  # one node is nobody
    flower.main(grid, Context(1, 0, {}, RecordDict(), config))
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["has_ended"]
    assert sorted(status["parties"]) == list(PARTIES)
    assert_models(tmp_path / "run", tmp_path / "data", spec_of(method))


def test_parties_without_a_node_are_refused(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "spec.toml").write_text(SPEC)
    given = {"state": str(tmp_path / "run"), "spec": str(tmp_path / "spec.toml"), "data": str(tmp_path / "data")}
    with pytest.raises(UserError, match="has 3 parties, and the simulation 2 nodes"):
        prepare({**DEFAULTS, **given}, 1, 2)


def test_the_app_is_laid_out_as_the_engine_asks() -> None:
    table = tomllib.loads((APP / "pyproject.toml").read_text())
    project, app = table["project"], table["tool"]["flwr"]["app"]
    assert {"name", "version", "description", "license", "dependencies"} <= project.keys()
    # Flower's version is one, here and where the package asks for it.
    (pinned,) = project["dependencies"]
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    optional = extras["optional-dependencies"]
    declared = [*optional["flower"], *optional["federation"]]
    assert pinned in optional["flower"]
    assert not any("flwr" in one for one in optional["federation"])
    assert pinned.startswith("flwr==")
    # What the code imports is asked for by name, not only by what Flower happens to need.
    names = {re.split(r"[<>=!;\[ ]", one)[0].replace("-", "_") for one in (*extras["dependencies"], *declared)}
    for file in sorted(Path(deploy.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            found = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in found:
                package = module.partition(".")[0]
                assert package in names | sys.stdlib_module_names | {"pfedhn"}, f"{file.name} imports {module}"
    assert not any("flwr" in one for one in extras["dependencies"])
    assert app["publisher"]
    for part in app["components"].values():
        module, name = part.split(":")
        assert name == "app"
        assert (APP / f"{module.replace('.', '/')}.py").exists()


@pytest.mark.slow
def test_flwr_run_simulates_the_same(tmp_path: Path) -> None:
    """Flower's own command line, its local server and its Ray actors."""
    write_data(tmp_path / "data")
    (tmp_path / "spec.toml").write_text(SPEC)
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local-in-memory:"\n'
    )
    ports = {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "", "FLWR_LOCAL_CONTROL_API_PORT": ""}
    ports = {name: str(free_port()) for name in ports}
    source = str(Path(pfedhn.__file__).parents[1])
    environment = {
        **os.environ, **QUIET, **ports, "FLWR_HOME": str(home), "PYTHONPATH": source, "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # of Flower's other programs
        "RAY_ADDRESS": "local",  # else it joins whatever cluster this machine has, another test's for example
    }  # fmt: skip
    given = " ".join(f"{name}={json.dumps(str(tmp_path / file))}" for name, file in (
        ("state", "run"), ("spec", "spec.toml"), ("data", "data"),
    ))  # fmt: skip
    command = [str(Path(sys.executable).parent / "flwr"), "run", str(APP), "--stream", "-c", given]
    command += ["--federation-config", f"num-supernodes={len(PARTIES)}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert (tmp_path / "run" / "status.json").exists(), done.stdout + done.stderr
        assert json.loads((tmp_path / "run" / "status.json").read_text())["has_ended"], done.stdout + done.stderr
        assert_models(tmp_path / "run", tmp_path / "data", SPEC)
    finally:
        for process in local_servers(ports["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"]):
            os.kill(process, signal.SIGTERM)


def local_servers(port: str) -> list[int]:
    """Flower leaves its local server behind, detached: the one that listens here."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "--simulation" in words and port in words:
            found.append(int(place.name))
    return found


def test_to_look_for_answers_takes_as_long_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(flower.time, "sleep", slept.append)
    grid: Any = SimpleNamespace()
    assert flower.Flower(grid, dict, 10.0, lambda event: None).arrivals(0.2) == []
    assert slept == [0.2]
