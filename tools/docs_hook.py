"""What the documentation site takes from the project's metadata, so that it is written in one place."""

import tomllib
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def on_config(config: Any) -> Any:
    """Called by MkDocs: the version at the foot of every page, and a link to the repository where one is named."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    config.copyright = f"pfedhn {project['version']} · {project['license']}"
    config.repo_url = project.get("urls", {}).get("Repository")
    return config
