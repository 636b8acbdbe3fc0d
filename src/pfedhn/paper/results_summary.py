"""The short results page and the block of results in the README."""

from collections.abc import Sequence
from statistics import median

from pfedhn.paper.comparison import OURS, RECIPES, Place, counts_text, grouped, places_of
from pfedhn.paper.experiments import BEYOND_THE_PAPER
from pfedhn.paper.pages import filled, markdown, picture, shown_figure, wrapped
from pfedhn.paper.results_figures import TRAFFIC, raced, said_of_bytes
from pfedhn.paper.stored_tables import SAME_TRAINING, SEEDS, STRONGER
from pfedhn.report.entries import Report, display_name
from pfedhn.report.pairs import interval_text
from pfedhn.report.tables import number_text


def summary(every: Sequence[Report]) -> str:
    """The page of one screen: our accuracies, how far they are from the paper's, and what that says."""
    places = [place for place in places_of(every) if place.is_summarized]
    labels = list(dict.fromkeys(entry.label for place in places for entry in place.report.entries if entry.results))
    heading = ["method", *(place.name for place in places)]
    table = [heading, *grouped(labels, lambda label: [ours(label, place) for place in places])]
    differences = [[display_name(label), *(from_paper(label, place) for place in places)] for label in labels]
    against, gains, of_bytes = stronger_table(places_of(every)), gains_table(places_of(every)), ""
    if raced(every):
        of_bytes = f"{said_of_bytes(every)}\n\n{shown_figure(TRAFFIC, 'Accuracy against bytes')}"
    return filled(
        "results",
        said=said(every),
        table=markdown(table),
        against=f"{AGAINST}\n\n{markdown(against)}" if len(against) > 1 else "",
        gains=f"{GAINS}\n\n{markdown(gains)}" if len(gains) > 1 else "",
        bytes=of_bytes,
        differences=markdown([heading, *(line for line in differences if any(line[1:]))]),
    )


AGAINST = """\
Our two main variants minus the best method that is not ours, over all seeds that both have, in points with 95 %
intervals:"""
GAINS = "Our variants minus the paper's methods, seed by seed, from the smallest difference to the largest:"


def ours(label: str, place: Place) -> str:
    """Our accuracy, bold if it leads."""
    entry = place.entry(label)
    if entry is None:
        return ""
    if not (found := entry.test()):
        return entry.diverged_text
    text = number_text(found, 1)
    text += "" if found.num_seeds == len(SEEDS) else f" ({counts_text(found, entry)})"
    return f"**{text}**" if label in place.leaders else text


def from_paper(label: str, place: Place) -> str:
    entry = place.entry(label)
    found = None if entry is None else entry.difference()
    return "" if found is None else f"{found:+.1f}"


def said(every: Sequence[Report]) -> str:
    """Write the findings, in sentences that are made of the numbers."""
    places = [place for place in places_of(every) if place.is_summarized]
    lines = []
    for is_ours, what in (
        (True, "pFedHN and pFedHN-PC, with their authors' learning rates,"),
        (False, "The paper's six baselines, tuned on its grids,"),
    ):
        entries = [entry for place in places for entry in place.entries if (entry.cell.method in OURS) is is_ours]
        gaps = [gap for entry in entries if (gap := entry.difference()) is not None]
        if gaps:
            lines.append(
                f"- {what} differ from the paper by {min(gaps):+.1f} to {max(gaps):+.1f} points "
                f"(median {median(gaps):+.1f})."
            )
    if decided := [place for place in places if place.leaders]:
        ahead = sum(bool(place.leaders & set(OURS)) for place in decided)
        lines.append(
            f"- With the paper's settings, pFedHN or pFedHN-PC is best, or tied with the best of all methods, in "
            f"{ahead} of {len(decided)} columns."
        )
    lines += _said_of_stronger(places_of(every))
    pairs = [(place.entry("local"), place.entry("fedavg")) for place in places]
    over = [a.mean - b.mean for one, other in pairs if one and other and (a := one.test()) and (b := other.test())]
    if over:
        lines.append(
            f"- Training alone (Local) beats one shared model (FedAvg) by {min(over):.0f} to {max(over):.0f} points. "
            "On splits like these, compare with Local."
        )
    return "\n".join(map(wrapped, lines))


def _said_of_stronger(every: Sequence[Place]) -> list[str]:
    """Count the columns in which our variants lead."""
    told = []
    stronger = set(STRONGER)
    for is_summarized, where in ((True, "columns where they have three seeds"), (False, "columns of MNIST")):
        places = [place for place in every if place.is_summarized is is_summarized and place.leaders]
        places = [place for place in places if stronger & place.judged.keys()]
        if not places:
            continue
        leading = [place for place in places if place.leaders & stronger]
        behind = sum(not any(map(place.wins_a_seed, place.leaders & stronger)) for place in leading)
        rivals = [name for name in BEYOND_THE_PAPER if name not in STRONGER]
        missing = [name for name in rivals if not all(name in place.judged for place in places)]
        few = ", ".join(map(display_name, missing))
        told.append(
            f"- One of our variants is best, or tied with the best, in {len(leading)} of the {len(places)} {where}."
            + (f" In {behind} of them, it is worse than the best on every seed." if behind else "")
            + (f" {listed}." if (listed := _counts(places)) else "")
            + (f" {few} {'have' if ',' in few else 'has'} fewer than three seeds in some of these." if few else "")
        )
    return told


def _counts(places: Sequence[Place]) -> str:
    """Count how often each of our variants leads or ties, and how often it is then worse on every seed."""
    told: list[str] = []
    for name in RECIPES:
        leading = [place for place in places if name in place.leaders]
        behind = sum(not place.wins_a_seed(name) for place in leading)
        if leading:
            num_judged = sum(name in place.judged for place in places)
            verb = "" if told else "leads or ties "
            text = f"{display_name(name)} {verb}in {len(leading)} of {num_judged}"
            told.append(text + (f" (worse on every seed in {behind})" if behind else ""))
    return ", ".join(told)


def stronger_table(places: Sequence[Place]) -> list[list[str]]:
    """A line for each column in which a recipe of ours was run: how far each is from the best method that is not."""
    lines = [["column", "the best other", *(text for mine in RECIPES for text in (display_name(mine), "interval"))]]
    for place in places:
        means = {entry.label: summary.mean for entry in place.entries if (summary := entry.test())}
        others = [label for label in means if label not in STRONGER]
        if not others or not any(mine in means for mine in RECIPES):
            continue
        best = max(others, key=lambda label: means[label])
        line = [place.name, display_name(best)]
        for mine in RECIPES:
            gap = place.minus(mine, best)
            line += ["", ""] if gap is None else [f"{gap.mean:+.1f}", interval_text(gap, digits=1)]
        lines.append(line)
    return lines


def gains_table(places: Sequence[Place]) -> list[list[str]]:
    """A row for each of our variants: how much better it is than the method of the paper that it changes."""
    lines = [["difference", "points", "columns with a point or more"]]
    for mine, theirs in STRONGER.items():
        gaps = [place.minus(mine, theirs) for place in places if place.is_summarized and mine not in SAME_TRAINING]
        gains = [gap.mean for gap in gaps if gap is not None and gap.ends]
        if gains:
            pair = f"{display_name(mine)} minus {display_name(theirs)}"
            most = f"{sum(gain >= 1 for gain in gains)} of {len(gains)}"
            lines.append([pair, f"{min(gains):+.1f} to {max(gains):+.1f}", most])
    return lines


README_MARKS = ("<!-- results -->\n", "<!-- end of results -->")
NAMED = ("local", "fedavg", "pfedhn", *RECIPES)  # the methods with a column in README


def readme_block(every: Sequence[Report]) -> str:
    """Write what README says of the results, between its two marks: a finding, a table and a figure."""
    places = [place for place in places_of(every) if place.is_summarized and place.means]
    num_methods = len({label for place in places for label in place.means})
    parts = [readme_finding(places), README_TABLE_IS.format(num_methods=num_methods), markdown(readme_table(places))]
    if raced(every):
        parts.append(picture(TRAFFIC, f"Test accuracy against megabytes per client. {said_of_bytes(every)}", "docs"))
    return "\n\n".join(filter(None, parts)) + "\n"


def readme_finding(places: Sequence[Place]) -> str:
    """Count the rows in which our best method leads, and those in which the paper's does."""
    decided = [place for place in places if place.leaders]
    counts = {name: sum(name in place.leaders for place in decided) for name in ("pfedhn", *RECIPES)}
    best = max(RECIPES, key=lambda name: counts[name])
    if not counts[best]:
        return ""
    first = f"**{display_name(best)} is best, or tied with the best, in {counts[best]} of {len(decided)} rows.**"
    return f"{first} pFedHN with the paper's settings is in {counts['pfedhn']}."


def readme_table(places: Sequence[Place]) -> list[list[str]]:
    """A row for each column of Table 1: the methods that README names, and the best of the others that are not ours."""
    lines = [["data set, clients", "Local", "FedAvg", "best other method", "pFedHN", *map(display_name, RECIPES)]]
    for place in places:

        def mean(label: str, place: Place = place) -> str:
            text = f"{place.means[label]:.1f}" if label in place.means else ""
            return f"**{text}**" if label in place.leaders else text

        others = [label for label in place.means if label not in (*NAMED, *STRONGER)]
        rival = max(others, key=lambda label: place.means[label], default=None)
        other = "" if rival is None else f"{mean(rival)} ({display_name(rival)})"
        shown = [mean(label) for label in NAMED]
        lines.append([place.name, *shown[:2], other, *shown[2:]])
    return lines


README_TABLE_IS = """\
The table is the paper's Table 1, run again with {num_methods} methods. It shows the test accuracy of each client's own
model on its own test examples, in percent, as the mean over clients and over three seeds. **Bold** is the best of all
methods, or tied with it: the 95 % interval of the paired difference contains zero. pFedHN+ and pFedHN-S are ours.
pFedHN+ has [stronger settings](docs/fidelity.md#our-stronger-recipe); pFedHN-S adds a generated part to a shared model.
See the [results](docs/results.md) for every method, with deviations and intervals."""
