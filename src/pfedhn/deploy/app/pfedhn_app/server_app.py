"""The server's side."""

from pfedhn.deploy.flower import app

__all__ = ["app"]
