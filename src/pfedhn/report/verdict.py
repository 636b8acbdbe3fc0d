"""A verdict on a report: which method to use, how sure that is, who gains, and what to try next."""

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy
from rich.console import Group
from rich.text import Text

from pfedhn.experiments.spec import flat_fields, method_name
from pfedhn.report.entries import Column, Entry, Report, column_text, counted, display_name, seeds_alike
from pfedhn.report.failures import GUESSES, LEAST_EVALUATIONS, Failure, failure_of, failure_texts, num_evaluations
from pfedhn.report.gains import Measure, MeasureName, Numbers, Pairs, losses_of, paired, scores_beside
from pfedhn.storage.schema import Yardstick

LATE = 0.9  # of the steps: a best round from there on asks for more
LEAST_SEEDS = 3
MOST_SUGGESTIONS = 2

ALONE = ("local", "own-linear", *GUESSES)  # a method and yardsticks of clients that share nothing
SIMPLEST = ("local", "fedavg", "fedavg-ft", "fedper-intercept", "fedper")  # before all others, these by what they send

Answer: TypeAlias = Literal["yes", "unclear", "no"]


@dataclass(frozen=True)
class Difference:
    """The recommended method against another model on the same test examples; positive numbers are gains.

    Args:
        name: The other method, or the yardstick.
        title: As sentences call it.
        value: The other's score.
        gain: The recommended method's gain, the mean over seeds: in points of accuracy, or in units of the loss.
        interval: The ends of the 95 % interval of the gain; None with a single client.
        better: Clients that gain, by the mean over seeds.
        worse: Clients that lose.
        num_clients: Clients with test examples.
        num_seeds: Seeds in which both have the same split.
        is_yardstick: Whether it is not federated learning at all, nor part of the experiment.
        needs_all_data: Whether it needs the examples of all clients in one place.
    """

    name: str
    title: str
    value: float
    gain: float
    interval: tuple[float, float] | None
    better: int
    worse: int
    num_clients: int
    num_seeds: int
    is_yardstick: bool = False
    needs_all_data: bool = False

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


@dataclass(frozen=True)
class Verdict:
    """What the runs on one data set and number of clients say.

    Args:
        dataset: The data set.
        clients: The number of clients.
        split: What tells the split from others of this data set; empty if there are none.
        measure: What is compared: the log loss or RMSE over test examples of a table; otherwise the accuracy over
            clients, or the loss over examples of a task without accuracy.
        recommended: The label of the method to use; None if none learned anything, or none can be chosen.
        scores: Its test scores, means over seeds.
        digits: Of its scores and differences after the point.
        differences: From Local, from FedAvg, from the runner-up if Local is recommended, and from yardsticks.
        federate: Whether federated learning beats training alone; None if nothing says so.
        failures: Methods that learned nothing.
        learned: Whether any method learned something.
        is_long_enough: Whether some run was evaluated three times after it began to train.
        has_validation: Whether there are validation examples, without which no method can be chosen.
        suggestions: What to try next, the most promising first.
        methods: The labels of all methods that are compared.
    """

    dataset: str
    clients: int
    split: str
    measure: MeasureName
    recommended: str | None
    scores: Mapping[str, float]
    digits: int
    differences: tuple[Difference, ...]
    federate: Answer | None
    failures: tuple[Failure, ...]
    learned: bool
    is_long_enough: bool
    has_validation: bool
    suggestions: tuple[str, ...]
    methods: tuple[str, ...]

    @property
    def learned_nothing(self) -> bool:
        """Whether no method learned anything in runs that were long enough to."""
        return self.is_long_enough and not self.learned

    def difference(self, name: str) -> Difference | None:
        return next((difference for difference in self.differences if difference.name == name), None)


def to_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain values, and in words; numbers that are not finite are None."""
    found: dict[str, Any] = _plain(asdict(verdict))
    return found | {"learned_nothing": verdict.learned_nothing, "sentences": to_text(verdict)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verdicts(report: Report) -> list[Verdict]:
    """Judge every column of a report that has a finished or a diverged run.

    The method is chosen by the mean validation score over the seeds that all methods share, among those that learned
    something. Of methods at most one standard error of the difference behind the best, the simplest is recommended:
    Local, FedAvg, FedAvg with fine-tuning, FedPer, then whichever sends the fewest bytes. Test scores choose nothing;
    they lend the standard error, and they say by how much the method differs from others.
    """
    found = []
    for column in report.columns:
        groups = _groups(report.in_column(column))
        names = _splits([group[0] for group in groups])
        found += [_verdict(column, name, group, report.yardsticks) for name, group in zip(names, groups, strict=True)]
    return found


def _groups(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Entries that have runs, those with the same examples together; one that diverged is with the first."""
    groups: list[list[Entry]] = []
    for entry in entries:
        if entry.results:
            home = next((group for group in groups if any(seeds_alike(entry, other) for other in group)), None)
            if home is None:
                groups.append([entry])
            else:
                home.append(entry)
    diverged = [entry for entry in entries if entry.diverged and not entry.results]
    if groups:
        groups[0] += diverged
        return groups
    return [diverged] if diverged else []


def _splits(firsts: Sequence[Entry]) -> list[str]:
    """What tells the data of groups from each other."""
    tables = [flat_fields(entry.cell) for entry in firsts] if len(firsts) > 1 else [{} for _ in firsts]
    differing = [name for name in tables[0] if len({repr(table.get(name)) for table in tables}) > 1] if tables else []
    data = [name for name in differing if name.partition(".")[0] in DATA_FIELDS]
    return [", ".join(f"{name}={table.get(name)}" for name in data) for table in tables]


DATA_FIELDS = (
    *("partition", "split", "folds", "stratify", "data_seed", "labels", "columns", "read", "task", "sizes", "part"),
)


def _verdict(
    column: Column, split: str, entries: Sequence[Entry], yardsticks: Mapping[str, tuple[Yardstick, ...]]
) -> Verdict:
    measure = Measure.of(entries)
    failures = [failure for entry in entries if (failure := failure_of(entry, yardsticks)) is not None]
    failed = {failure.label for failure in failures}
    learned = [entry for entry in entries if entry.label not in failed]
    scores = _validation_scores(measure, [entry for entry in learned if entry.results])
    chosen = _recommended(measure, scores)
    differences = [] if chosen is None else _differences(measure, chosen, entries, scores, yardsticks)
    values = {} if chosen is None else _test_scores(measure, chosen)
    return Verdict(
        *column,
        split,
        measure.name,
        None if chosen is None else chosen.label,
        values,
        _digits(measure, values.get(measure.name)),
        tuple(differences),
        None if chosen is None else _answer(chosen, differences),
        tuple(failures),
        bool(learned),
        any(num_evaluations(entry) >= LEAST_EVALUATIONS for entry in entries),
        any(result.validation.examples for entry in entries for result in entry.results.values()),
        tuple(_suggestions(chosen, entries, bool(learned), [failure.reason for failure in failures])),
        tuple(entry.label for entry in entries),
    )


def _validation_scores(measure: Measure, entries: Sequence[Entry]) -> list[tuple[Entry, float]]:
    """Entries and their mean validation scores, best first, over the seeds that all of them have if there are any."""
    splits = [{(seed, one.partition_sha256) for seed, one in entry.results.items()} for entry in entries]
    common = {seed for seed, _ in set.intersection(*splits)} if splits else set()
    found = []
    for entry in entries:
        results = [result for seed, result in entry.results.items() if not common or seed in common]
        score = statistics.fmean(map(measure.on_validation, results))
        if math.isfinite(score):
            found.append((entry, score))
    return sorted(found, key=lambda pair: -pair[1])


def _recommended(measure: Measure, scores: Sequence[tuple[Entry, float]]) -> Entry | None:
    """The simplest of the methods that are at most one standard error behind the best on validation."""
    if not scores:
        return None
    best, most = scores[0]
    level = [best]
    for entry, score in scores[1:]:
        pairs = paired(measure, best, scores_beside(measure, entry, best))
        if most - score <= (0.0 if pairs is None else pairs.standard_error()):
            level.append(entry)
    return min(level, key=_simplicity)


def _simplicity(entry: Entry) -> tuple[int, float]:
    name = method_name(entry.cell)
    place = SIMPLEST.index(name) if name in SIMPLEST else len(SIMPLEST)
    results = entry.results.values()
    return place, statistics.fmean(result.bytes_up + result.bytes_down for result in results)


def _differences(
    measure: Measure,
    chosen: Entry,
    entries: Sequence[Entry],
    scores: Sequence[tuple[Entry, float]],
    yardsticks: Mapping[str, tuple[Yardstick, ...]],
) -> list[Difference]:
    ranked = [entry for entry, _ in scores]
    ranked += [entry for entry in entries if entry.results and entry not in ranked]  # those that learned nothing
    rivals: dict[str, tuple[Entry, str]] = {}
    for name, title in (("local", "training alone (Local)"), ("fedavg", "one shared model (FedAvg)")):
        same = [entry for entry in ranked if method_name(entry.cell) == name]
        if same and method_name(chosen.cell) != name:
            rivals[name] = same[0], title
    others = [entry for entry in ranked if method_name(entry.cell) not in ("local", "fedavg")]
    if method_name(chosen.cell) == "local" and others:
        rivals[others[0].label] = others[0], f"the runner-up ({display_name(others[0].label)})"
    found = []
    for name, (entry, title) in rivals.items():
        pairs = paired(measure, chosen, scores_beside(measure, entry, chosen))
        found.append(_difference(pairs, name, title))
    if measure.is_detailed:
        for name, (title, needs_all_data, values) in _by_name(chosen, yardsticks).items():
            found.append(_difference(paired(measure, chosen, values), name, title, True, needs_all_data))
    return [difference for difference in found if difference is not None]


def _by_name(
    entry: Entry, yardsticks: Mapping[str, tuple[Yardstick, ...]]
) -> dict[str, tuple[str, bool, dict[int, Numbers]]]:
    """Title, whether it needs all data, and scores of clients by seed, of each yardstick on an entry's splits."""
    found: dict[str, tuple[str, bool, dict[int, Numbers]]] = {}
    for seed, result in entry.results.items():
        for one in yardsticks.get(result.rows, ()):
            found.setdefault(one.name, (one.title, one.needs_all_data, {}))[2][seed] = losses_of(one.detailed)
    return found


def _difference(
    pairs: Pairs | None, name: str, title: str, is_yardstick: bool = False, needs_all_data: bool = False
) -> Difference | None:
    if pairs is None:
        return None
    gain, gains = pairs.gain(), pairs.client_gains()
    zeros = pairs._replace(ours=numpy.zeros_like(pairs.ours))
    value = -pairs.measure.sign * zeros.gain()
    return Difference(
        name,
        title,
        value,
        gain,
        pairs.interval(),
        int((gains > 0).sum()),
        int((gains < 0).sum()),
        len(gains),
        len(pairs.weights),
        is_yardstick,
        needs_all_data,
    )


def _test_scores(measure: Measure, entry: Entry) -> dict[str, float]:
    """The measure, and others that people know, means over seeds; accuracies and AUC in percent."""
    found: dict[str, list[float]] = {}
    for result in entry.results.values():
        if not result.test.examples:
            continue
        detailed = result.detailed
        loss = float(measure.root(result.test.loss))
        values: dict[str, float | None]
        if detailed is not None and measure.is_detailed:
            name = "rmse" if measure.name == "RMSE" else "log_loss"
            values = {measure.name: detailed.examples.get(name), "accuracy": detailed.clients.get("accuracy")}
            values |= {"AUC": detailed.examples.get("auc"), "R2": detailed.examples.get("r2")}
        else:
            values = {measure.name: result.test.client_mean if measure.name == "accuracy" else loss}
        for key, value in values.items():
            if value is not None:
                found.setdefault(key, []).append(100 * value if key in ("accuracy", "AUC") else value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def _digits(measure: Measure, value: float | None) -> int:
    if measure.name == "accuracy":
        return 1
    if measure.name == "log loss" or value is None or not 0 < abs(value) < math.inf:
        return 3
    more = 1 if abs(value) >= 10 else 0  # or gains of a hundredth of it would be lost
    return min(4, max(0, 2 + more - math.floor(math.log10(abs(value)))))


def _answer(chosen: Entry, differences: Sequence[Difference]) -> Answer | None:
    alone = [difference for difference in differences if difference.name in ALONE]
    is_alone = method_name(chosen.cell) == "local"
    if is_alone and all(difference.is_yardstick for difference in differences):
        return None  # nothing federated was run
    if any(difference.is_clear and difference.gain < 0 for difference in alone):
        return "no"
    if is_alone:
        return "unclear" if any(_is_better(difference) for difference in differences) else "no"
    if not alone:
        return None
    return "yes" if all(difference.is_clear for difference in alone) else "unclear"


# What to try next


def _suggestions(chosen: Entry | None, entries: Sequence[Entry], learned: bool, reasons: Sequence[str]) -> list[str]:
    methods = {method_name(entry.cell) for entry in entries}
    tune = f"`pfedhn tune {name}`" if (name := _file_name(entries)) else "`pfedhn tune`"
    if not learned:
        if all(reason == "guess" for reason in reasons):
            return [f"The columns may say little about the label (see the pooled yardsticks); or run {tune}."]
        return [f"Lower the learning rates, or run {tune}."]
    found = []
    if "local" not in methods:
        found.append('Try next: the method "local"; without it nothing says whether federating pays.')
    if chosen is not None and _ends_at_its_best(chosen):
        found.append("Try next: more steps; the best round is among the last.")
    if methods <= {"local", "fedavg", "fedavg-ft"} and len(methods) > 1:
        found.append('Try next: "fedper" and "pfedhn-shared", which personalize the model.')
    if not any(name.endswith("lr") for entry in entries for name in entry.cell.settings):
        found.append(f"Try next: {tune}; all learning rates are defaults.")
    if chosen is not None and len(chosen.results) < (needed := chosen.cell.folds or LEAST_SEEDS):
        reason = "the other folds test other examples" if chosen.cell.folds else "fewer than three seeds may be luck"
        found.append(f"Try next: `--seeds {','.join(map(str, range(needed)))}`; {reason}.")
    return found[:MOST_SUGGESTIONS]


def _ends_at_its_best(entry: Entry) -> bool:
    late = [result.chosen_step >= LATE * result.steps for result in entry.results.values()]
    return num_evaluations(entry) >= LEAST_EVALUATIONS and 2 * sum(late) > len(late)


def _file_name(entries: Sequence[Entry]) -> str | None:
    """The file of the experiment, as the command of a run names it."""
    for entry in entries:
        for result in entry.results.values():
            try:
                words = shlex.split(result.command)
            except ValueError:  # a stranger's file may hold anything
                continue
            if words[:2] == ["pfedhn", "run"] and len(words) > 2 and words[2].endswith(".toml"):
                return shlex.quote(words[2].rpartition("/")[2])
    return None


# In words


def data_text(verdict: Verdict) -> str:
    """The data that the verdict is about."""
    return ", ".join(filter(None, [column_text((verdict.dataset, verdict.clients)), verdict.split]))


def to_terminal(found: Sequence[Verdict]) -> Group:
    """Verdicts for a terminal, the first sentence of each in bold."""
    parts: list[Any] = []
    for verdict in found:
        first, *rest = to_text(verdict)
        heading = "Verdict" if len(found) == 1 else f"Verdict: {data_text(verdict)}"
        parts += [Text(heading, style="bold"), Text(first, style="bold"), *map(Text, rest)]
        parts += [*([Text(note(verdict), style="dim")] if verdict.differences else []), ""]
    return Group(*parts)


def note(verdict: Verdict) -> str:
    """How the numbers come about."""
    over = "clients" if verdict.measure == "accuracy" else "test examples"
    return (
        "The method is the simplest of those that validation cannot tell from the best. Scores and gains are means "
        f"over {over} and seeds; intervals hold the gain with 95 % confidence, by a bootstrap over clients and seeds."
    )


def to_text(verdict: Verdict) -> list[str]:
    """A verdict in short sentences, the answer first."""
    found = []
    if verdict.recommended is not None:
        found += _advice(verdict)
        found += [_difference_text(verdict, difference) for difference in verdict.differences]
        if any(difference.needs_all_data for difference in verdict.differences):
            found.append("The pooled models need all data in one place.")
    elif verdict.learned:
        reason = "the score is not a number" if verdict.has_validation else "no client has validation examples"
        found.append(f"No method can be recommended: {reason}.")
    elif len(verdict.failures) > 1:
        found.append("No method learned anything.")
    found += failure_texts(verdict.failures)
    return [*found, *verdict.suggestions]


def _is_better(found: Difference) -> bool:
    """Whether a federated method is clearly better on test examples than the recommended one."""
    return not found.is_yardstick and found.is_clear and found.gain < 0


def _advice(verdict: Verdict) -> list[str]:
    name = display_name(verdict.recommended or "")
    scores = ", ".join(_score_text(verdict, measure, value) for measure, value in verdict.scores.items())
    found = []
    alone = [difference for difference in verdict.differences if difference.name in ALONE]
    if verdict.federate == "no":
        better = [difference for difference in alone if difference.gain < 0 and difference.is_clear]
        who = better[0].title if better and better[0].is_yardstick else "training alone"
        found.append(f"Do not federate this: {who} is {'better' if better else 'as good'}.")
    elif verdict.federate == "unclear":
        rivals = [difference.title for difference in verdict.differences if _is_better(difference)]
        reason = f"on test examples, {rivals[0]} is better" if rivals else "training alone may be as good"
        found.append(f"Whether federated learning pays here is unclear: {reason}.")
    if not scores:
        found.append(f"Use {name}: it is best on validation, and no client has test examples.")
    elif len(verdict.methods) == 1:
        found.append(f"Only {name} was run: {scores}.")
    elif verdict.federate == "no":
        found.append(f"Of the methods, take {name}: {scores}.")
    else:
        found.append(f"Use {name}: {scores}.")
    return found


def _score_text(verdict: Verdict, name: str, value: float) -> str:
    if name in ("accuracy", "AUC"):
        return f"{name} {value:.1f} %"
    return f"{name} {_number(value, verdict.digits if name == verdict.measure else 2)}"


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # never -0.0


def _difference_text(verdict: Verdict, found: Difference) -> str:
    unit = " points" if verdict.measure == "accuracy" else ""
    ends = found.interval
    if ends is not None and found.is_clear and found.gain < 0:
        ends = -ends[1], -ends[0]
    interval = "" if ends is None else f" (95 %: {' to '.join(_number(end, verdict.digits) for end in ends)})"
    is_size = found.is_clear or ends is None
    amount = f"{_number(abs(found.gain) if is_size else found.gain, verdict.digits)}{unit}{interval}"
    counts = "" if found.is_yardstick else f"; {found.better} of {_clients(found)} gain, {found.worse} lose"
    subject = found.title[0].upper() + found.title[1:]
    if is_size:
        text = f"It beats {found.title} by {amount}" if found.gain > 0 else f"{subject} is better by {amount}"
    else:
        text = f"{subject} cannot be told apart: the gain is {amount}"
    return f"{text}{counts}."


def _clients(found: Difference) -> str:
    return counted(found.num_clients, "client")


def complaint(verdict: Verdict) -> str:
    """The error of a run in which no method learned anything."""
    hint = verdict.suggestions[0]
    return f"no method learned anything on {data_text(verdict)}; {hint[0].lower()}{hint[1:]}"
