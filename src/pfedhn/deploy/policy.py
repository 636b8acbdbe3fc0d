"""The [policy] table of a federation's SPEC: how the server deals with its parties."""

from dataclasses import dataclass

from pfedhn.errors import UserError


@dataclass(frozen=True)
class Policy:
    """How a server deals with its parties.

    Args:
        start_with: Number of parties that must be present before the first round; all expected ones by default.
        reply_seconds: Time that a party has to answer.
        patience: Number of failures between two accepted updates after which a party is set aside.
        aside_seconds: How long it is set aside; the time doubles with each further failure.
        max_update: Largest norm of an update, in multiples of (1 + the norm of the weights that were sent).
        in_flight: Number of parties that train at the same time in a run without cohorts; None waits for cohorts.
        max_staleness: Server steps that an update may be behind.
        return_seconds: How long a server that was restarted during a round waits for the parties that it knows.
        checkpoint_seconds: Time between checkpoints; the journal keeps everything in between.
    """

    start_with: int | None = None
    reply_seconds: float = 600.0
    patience: int = 3
    aside_seconds: float = 60.0
    max_update: float = 100.0
    in_flight: int | None = None
    max_staleness: int | None = None
    return_seconds: float = 90.0
    checkpoint_seconds: float = 60.0


def check_policy(policy: Policy, num_clients: int) -> None:
    """Reject values with which a server would never ask anybody or never accept an answer."""
    one, zero = ("start_with", "patience", "in_flight"), ("max_staleness", "aside_seconds", "return_seconds")
    for least, names in ((1, one), (0, (*zero, "checkpoint_seconds"))):
        for name in names:
            if (value := getattr(policy, name)) is not None and value < least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
    for name in ("reply_seconds", "max_update"):
        if (value := getattr(policy, name)) <= 0:
            raise UserError(f"{name} must be above 0, got {value}.")
    if policy.start_with is not None and policy.start_with > num_clients:
        raise UserError(f"start_with must be at most {num_clients}, the number of clients, got {policy.start_with}.")
