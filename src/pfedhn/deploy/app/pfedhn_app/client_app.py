"""A party's side."""

from pfedhn.deploy.flower import client_app as app

__all__ = ["app"]
