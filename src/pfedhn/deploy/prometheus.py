"""The server's numbers in the text format of Prometheus, version 0.0.4."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pfedhn.deploy.board import Board

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


@dataclass
class Metric:
    """A metric with its values by labels; one without values is left out."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: dict[Labels, float | int | bool | None] = field(default_factory=dict)

    def add(self, value: float | int | bool | None, **labels: str) -> "Metric":
        self.values[tuple(labels.items())] = value
        return self

    def lines(self) -> Iterator[str]:
        known = {labels: value for labels, value in self.values.items() if value is not None}
        if not known:
            return
        yield f"# HELP pfedhn_{self.name} {_escaped(self.help)}"
        yield f"# TYPE pfedhn_{self.name} {self.kind}"
        for labels, value in known.items():
            inside = ",".join(f'{name}="{_quoted(text)}"' for name, text in labels)
            yield f"pfedhn_{self.name}{f'{{{inside}}}' if inside else ''} {_number(value)}"


def to_text(board: Board) -> str:
    """All metrics of a server."""
    return "".join(f"{line}\n" for metric in _metrics(board) for line in metric.lines())


def _metrics(board: Board) -> Iterator[Metric]:
    shown, now = board.shown, board.clock()
    status = shown.status
    parties: Mapping[str, Any] = status.get("parties", {})
    about = {name: str(value) for name, value in board.about.items()}
    yield Metric("info", "gauge", "What this server runs.").add(1, **about)
    yield Metric("start_time_seconds", "gauge", "When the server started, in seconds since 1970.").add(board.began)
    yield Metric("rounds_total", "counter", "Rounds that were completed.").add(status.get("round"))
    yield Metric("rounds_planned", "gauge", "Rounds of the whole run.").add(status.get("num_rounds"))
    yield Metric("has_ended", "gauge", "Whether training has ended.").add(status.get("has_ended"))
    yield Metric("updates_accepted_total", "counter", "Updates that were accepted.").add(status.get("accepted"))
    since = None if shown.updated is None else max(0.0, now - shown.updated)
    yield Metric(
        "seconds_since_update",
        "gauge",
        "Seconds since the last accepted update; absent until the first since the start.",
    ).add(since)
    yield _by_party(parties)
    yield Metric("parties_connected", "gauge", "Parties that are connected.").add(
        sum(bool(one["is_present"]) for one in parties.values())
    )
    yield Metric("parties_known", "gauge", "Parties that have taken part.").add(len(parties))
    yield _of(parties, "party_connected", "Whether a party is connected.", "is_present")
    yield _of(parties, "party_set_aside", "Whether a party is suspended after failures.", "is_aside")
    yield _of(parties, "party_budget_spent", "Whether a party has spent its privacy budget.", "is_spent")
    weights = Metric("weights_bytes_total", "counter", "Bytes of weights to parties and of updates from them.")
    yield weights.add(status.get("bytes_down"), direction="down").add(status.get("bytes_up"), direction="up")
    wire = Metric("messages_bytes_total", "counter", "Bytes of all messages since the server started.")
    yield wire.add(status.get("wire_down"), direction="down").add(status.get("wire_up"), direction="up")
    yield from _scores(board)
    for name, value in board.counts().items():
        yield Metric(f"{name}_total", "counter", COUNTS.get(name, name)).add(value)


COUNTS = {
    "strangers": "Requests without a valid key or token.",
    "connections_refused": "Connections that were closed because too many were open.",
}


def _by_party(parties: Mapping[str, Any]) -> Metric:
    metric = Metric(
        "answers_refused_total", "counter", "Answers that were refused since the server started, by reason."
    )
    for name, party in parties.items():
        for reason, count in party["refused"].items():
            metric.add(count, party=name, reason=reason)
    return metric


def _of(parties: Mapping[str, Any], name: str, words: str, part: str) -> Metric:
    metric = Metric(name, "gauge", words)
    for party, values in parties.items():
        metric.add(bool(values.get(part)), party=party)
    return metric


def _scores(board: Board) -> Iterator[Metric]:
    shown = board.shown
    kind = "loss" if shown.is_loss else "accuracy"
    yield Metric("evaluated_round", "gauge", "The round that was tested last.").add(shown.status.get("evaluated"))
    total = Metric(kind, "gauge", f"The {kind} at that round over the examples of all parties, by split.")
    own = Metric(f"party_{kind}", "gauge", f"A party's {kind} when it was tested last, by split.")
    if shown.evaluations:
        for split, value in shown.evaluations[-1].mean.items():
            total.add(value, split=split)
    for party, scores in shown.latest.items():
        for split, value in scores.items():
            own.add(value, party=party, split=split)
    yield total
    yield own


def _number(value: float | int | bool | None) -> str:
    assert value is not None
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(int(value) if isinstance(value, bool) else value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
