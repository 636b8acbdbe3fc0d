"""The server's side."""

from pfedhn.deploy.flower import server_app as app

__all__ = ["app"]
