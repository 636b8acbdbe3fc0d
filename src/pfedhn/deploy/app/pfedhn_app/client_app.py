"""A party's side."""

from pfedhn.deploy.relay import app

__all__ = ["app"]
