"""Every model at every site: after training, parties test each other's models, if both sides consent.

The server asks each party anew what it consents to (`hello`), then sends it, one after the other, the weights that it
publishes for the others, and gets scores. It does not say whose model it sends. Nothing is stored before the end, so a
server that is killed repeats its questions.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from pfedhn.deploy.contacts import Contacts
from pfedhn.deploy.plan import exchange_of
from pfedhn.deploy.questions import Question, Questions
from pfedhn.deploy.state import ServerState
from pfedhn.engine.plan import Plan
from pfedhn.system.files import read_text, write_atomically

SHARE, TEST = "share-model", "test-others"
CONSENTS = (SHARE, TEST)
"""What a party may consent to: that others test its model, and that it tests those of others."""

WANTED, FOUND = "across-wanted", "across.json"  # in the server's folder: the request, and the result
ASKED_AT_ONCE = 64  # parties
STANDARD_ERRORS = 2.0  # from which a difference is not put down to chance
MAX_SHOWN = 30  # sites and models on the page


def request(folder: Path) -> None:
    """Ask the server of this folder to compare all models; one that is killed does so when it is back."""
    write_atomically(folder / WANTED, b"", mode=0o600)


def is_requested(folder: Path) -> bool:
    return (folder / WANTED).exists()


def withdraw(folder: Path) -> None:
    (folder / WANTED).unlink(missing_ok=True)


def found(folder: Path) -> dict[str, Any] | None:
    """The result of the last comparison; None if there was none."""
    file = folder / FOUND
    table: dict[str, Any] | None = json.loads(read_text(file)) if file.exists() else None
    return table


def why_not(plan: Plan, is_adapted: bool | None = False) -> str | None:
    """Why a party's model cannot be tested by others; None if the server publishes all of it."""
    if is_adapted:
        return (
            "Parties fine-tune the chosen model on their own examples, so their models cannot travel; compare the "
            "models of a run without `adaptation_steps`."
        )
    exchange = plan.exchange
    for name, model in plan.models.items():
        start = plan.initial_models()[name]
        private = exchange.algorithm.init_private(model, {part: start[part] for part in model.shapes}, 0)
        are_private = bool(model.statistics) and exchange.algorithm.needs.statistics != "shared"
        if pytree.tree_leaves(private) or are_private or exchange.num_personal_batches(model):
            return (
                f"{exchange.method_name} keeps private layers at each party, which cannot travel; compare the models "
                "of a method whose models the server makes as a whole, such as pfedhn or fedavg."
            )
    return None


class Across:
    """The comparison of a server.

    Args:
        plan: Of the run.
        questions: Writes and signs messages.
        contacts: With the parties.
        folder: The server's, for request and result.
        log: Called with every event.
    """

    def __init__(
        self,
        plan: Plan,
        questions: Questions,
        contacts: Contacts,
        folder: Path,
        log: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.plan, self.questions, self.contacts, self.folder, self.log = plan, questions, contacts, folder, log
        self._greeted: set[str] | None = None  # the parties that were asked for their consents; None before
        self._left: dict[str, list[str]] | None = None  # models that a party has not been sent yet, by party
        self._authors: dict[int, str] = {}  # by the number under which a model is sent
        self._number = 0  # that was given to no model yet, so that no late answer counts for another one
        self._scores: dict[str, dict[str, Any]] = {}  # by site, then by model

    def is_wanted(self) -> bool:
        """Whether a comparison is requested and not finished; one that is withdrawn is forgotten."""
        if is_requested(self.folder):
            return True
        self._greeted = self._left = None
        return False

    def step(self, state: ServerState) -> None:
        """Ask what can be asked now; the server collects the answers."""
        if (why := why_not(self.plan, state.is_adapted)) is not None:
            self._end(state, {"why": why})
        elif self._greeted is None:
            self._greet(state)
        elif self._left is None:
            if not any(self.contacts.is_asked(name, "hello") for name in self._greeted):
                self._begin(state, self._greeted)
        else:
            self._ask(state, self._left)

    def _greet(self, state: ServerState) -> None:
        """Ask for consents anew: a party that was started again may have taken one back."""
        ready = {name for name in state.members if self.contacts.is_ready(name)}
        for name in ready:
            self.contacts.consents.pop(name, None)
            if not self.contacts.is_asked(name, "hello"):
                self.contacts.ask(self.questions.hello(name))
        self._greeted = ready or None

    def _begin(self, state: ServerState, greeted: set[str]) -> None:
        best = state.best
        consents = {name: self.contacts.consents.get(name, frozenset()) for name in sorted(greeted)}
        known = {} if best is None else best.rows
        authors = [name for name, given in consents.items() if SHARE in given and name in known]
        sites = [name for name, given in consents.items() if TEST in given]
        models = sorted({*authors, *(name for name in sites if name in known)})
        self._authors = dict(enumerate(models, self._number))
        self._number += len(models)
        self._left = {site: [one for one in models if one in authors or one == site] for site in sites}
        self._scores = {site: {} for site in sites}
        self.log({"event": "comparing", "models": len(authors), "sites": len(sites)})

    def _ask(self, state: ServerState, left: dict[str, list[str]]) -> None:
        for site, authors in left.items():
            if not self.contacts.is_ready(site):
                authors.clear()  # what it has not tested stays empty
            is_busy = any(party == site for party, _ in self.contacts.asked)
            if authors and not is_busy and self.contacts.num_asked("compare") < ASKED_AT_ONCE:
                self.contacts.ask(self._question(state, site, authors.pop(0)))
        if not any(left.values()) and not self.contacts.num_asked("compare"):
            self._end(state, {"scores": self._scores})

    def _question(self, state: ServerState, site: str, author: str) -> Question:
        """Ask a party to test another's model, that of the chosen round."""
        assert state.best is not None
        member = state.members[author]
        model = self.plan.models[member.architecture]
        weights = exchange_of(self.plan, member.phase).publish(model, state.best.shared, state.best.rows[author])
        number = next(number for number, name in self._authors.items() if name == author)
        values = {"round": state.best.round, "model": number, "architecture": member.architecture}
        return self.questions.written("compare", site, values, weights)

    def take(self, question: Question, scores: Mapping[str, Any]) -> None:
        """Note how a party's examples score with a model."""
        author = self._authors.get(question.values["model"])
        if author is not None and question.party in self._scores:
            self._scores[question.party][author] = scores

    def refused(self, name: str) -> None:
        """A party has taken its consent back, or cannot test: it is asked no more."""
        if self._left is not None and name in self._left:
            self._left[name].clear()

    def _end(self, state: ServerState, table: Mapping[str, Any]) -> None:
        number = None if state.best is None else state.best.round
        result = {"round": number, "time": round(time.time(), 3), **table}
        write_atomically(self.folder / FOUND, json.dumps(result).encode(), mode=0o600)
        withdraw(self.folder)
        self._greeted = self._left = None
        self.log({"event": "compared", "round": number} | ({"why": table["why"]} if "why" in table else {}))


# What was found.


def matrix(result: Mapping[str, Any]) -> dict[str, Any]:
    """The scores of every model at every site, which model validation chooses there, and a sentence for each site."""
    if "why" in result:
        return {"round": result["round"], "why": result["why"], "sites": [], "models": [], "findings": []}
    scores: Mapping[str, Mapping[str, Any]] = result["scores"]
    sites = [site for site in sorted(scores) if scores[site]]
    models = sorted({model for of_site in scores.values() for model in of_site})
    is_loss = any(parts["test"][1] is None for of_site in scores.values() for parts in of_site.values())
    best = [_best(scores[site], is_loss) for site in sites]
    return {
        "round": result["round"],
        "is_loss": is_loss,
        "sites": sites,
        "models": models,
        "scores": [[_score(scores[site].get(model), "test") for model in models] for site in sites],
        "best": best,
        "findings": [_finding(site, chosen, scores[site], is_loss) for site, chosen in zip(sites, best, strict=True)],
        "note": f"Test {'loss' if is_loss else 'accuracy in %'} of round {result['round']}: a line for each site, a "
        "column for each model. Marked: the model that has the best validation score at the site. Blank: no consent, "
        "or no answer.",
    }


def shortened(table: Mapping[str, Any]) -> dict[str, Any]:
    """A matrix that fits a page."""
    short = {name: part[:MAX_SHOWN] if isinstance(part, list) else part for name, part in table.items()}
    return short | {"scores": [line[:MAX_SHOWN] for line in short.get("scores", [])]}


def _score(parts: Mapping[str, Sequence[Any]] | None, split: str) -> float | None:
    if parts is None or not parts[split][2]:
        return None
    loss, metric, count = parts[split]
    return float(loss if metric is None else metric) / float(count)


def _best(models: Mapping[str, Any], is_loss: bool) -> str | None:
    """The model with the best validation score; None if there are no such scores."""
    known = {model: value for model, parts in models.items() if (value := _score(parts, "validation")) is not None}
    return None if not known else min(sorted(known), key=lambda model: known[model] if is_loss else -known[model])


def _finding(site: str, chosen: str | None, models: Mapping[str, Any], is_loss: bool) -> str:
    """Whether a site would be better served by the model of another."""
    if chosen is None or site not in models:
        return f"{site}: no validation scores, so no model is chosen."
    own, other = _score(models[site], "test"), _score(models[chosen], "test")
    if chosen == site or own is None or other is None:
        return f"{site}: its own model has the best validation score."
    if is_loss:
        return f"{site}: validation prefers the model of {chosen}; test loss {other:.4g}, its own {own:.4g}."
    count = models[site]["test"][2]
    error = math.sqrt(sum(share * (1 - share) for share in (own, other)) / count)
    numbers = f"test accuracy {100 * other:.1f} %, its own {100 * own:.1f} %, {count} examples"
    if other - own > STANDARD_ERRORS * error:
        return f"{site}: better served by the model of {chosen} ({numbers})."
    return f"{site}: validation prefers the model of {chosen}, but the difference may be chance ({numbers})."


def consents_of(values: Mapping[str, Any]) -> frozenset[str]:
    """What a party's answer to `hello` consents to; nothing if it does not say."""
    given = values.get("consents")
    return frozenset(one for one in CONSENTS if isinstance(given, list) and one in given)
