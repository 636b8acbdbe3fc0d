"""The container files say what the command line understands, and give a process no more than it needs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from pfedhn.cli.app import app

FOLDER = Path(__file__).parents[2] / "deploy"
SERVICES: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def instructions(file: Path) -> dict[str, str]:
    """What a Dockerfile says, the last of each kind; lines that go on are one."""
    lines = re.sub(r"\\\n", " ", file.read_text()).splitlines()
    return {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines if line and line[0] not in "# "}


def parsed(words: list[str]) -> dict[str, Any]:
    """What the command line makes of words; an error where it does not know them."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    with command.make_context(words[0], words[1:]) as context:
        return dict(context.params)


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"]
    file = FOLDER.parent / service["build"]["dockerfile"]
    said = instructions(file)
    assert said["USER"] == "1000"
    assert said["ENTRYPOINT"] == '["pfedhn"]'
    default = json.loads(said["CMD"])
    given = parsed(service.get("command", default))
    kept = given["state"] if name == "server" else given["folder"]
    writable = [mount.split(":")[1] for mount in service["volumes"] if not mount.endswith(":ro")]
    assert any(str(kept).startswith(f"{place}/") for place in writable)
    assert parsed(default).keys() == given.keys()
    extras = re.search(r'"\.\[(.*)\]"', file.read_text())
    assert extras is not None
    assert extras[1].split(",") == (["federation"] if name == "server" else ["federation", "privacy"])
