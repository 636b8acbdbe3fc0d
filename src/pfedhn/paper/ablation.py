"""Which part of the stronger recipe does what, and what other methods get from an average and from steps of their own.

Every run adapts at its chosen round, so one run has two accuracies: of the model as it is served, and after 50 steps of
each client's own from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pfedhn.algorithms import PLUS
from pfedhn.experiments.spec import Cell
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, Summary, display_name
from pfedhn.report.figures import lowest_shown
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import Difference, difference, interval_text
from pfedhn.studies import drawing
from pfedhn.studies.study import Found, Study, on_digits

Recipe = tuple[str, Mapping[str, Any]]
"""A method and what it is given besides its cell of Table 1."""

SMALL_EMBEDDINGS = {name: PLUS[name] for name in PLUS if name.startswith("embedding")}
ADAMW = {"optimizer": "adamw", "lr": PLUS["lr"], "weight_decay": 0.0}
AVERAGED = {"averaging": PLUS["averaging"]}
AVERAGED_FIVE = {"averaging": 0.99}  # as much past in communication steps where five clients make a step
NO_AVERAGE = {"averaging": "none"}
ADAPTED_STEPS = 50


@dataclass(frozen=True)
class Rung:
    """A recipe of the figure.

    Args:
        name: What it adds to the rung above, or what it leaves out.
        recipe: What is run.
    """

    name: str
    recipe: Recipe


WITHOUT_DECAY: Recipe = ("pfedhn", {**AVERAGED, **ADAMW, **SMALL_EMBEDDINGS})
STRONGER: Recipe = ("pfedhn-plus", {})

# One part after the other, then each one left out.
LADDER = (
    Rung("the recipe of 2021", ("pfedhn", {})),
    Rung("+ average", ("pfedhn", AVERAGED)),
    Rung("+ AdamW", ("pfedhn", {**AVERAGED, **ADAMW, "embedding_optimizer": "adam"})),
    Rung("+ small embeddings", WITHOUT_DECAY),
    Rung("+ decay = pFedHN+", STRONGER),
)
LEFT_OUT = (
    Rung("without the average", ("pfedhn-plus", NO_AVERAGE)),
    Rung("embeddings not small", ("pfedhn-plus", {"embedding_scale": 1.0})),
    Rung(
        "embeddings by Adam",
        ("pfedhn-plus", {"embedding_optimizer": "adam", "embedding_lr": "none", "embedding_momentum": "none"}),
    ),
    Rung("without decay", WITHOUT_DECAY),
    Rung("SGD for AdamW and decay", ("pfedhn", {**AVERAGED, **SMALL_EMBEDDINGS})),
)
HIGHER_RATE = Rung("the recipe of 2021 with average, rate 0.02", ("pfedhn", {**AVERAGED, "lr": 0.02}))


# As it is, and averaged. Ours has an average, so that it is left out of the first.
RECIPES: Mapping[str, tuple[Recipe, Recipe | None]] = {
    "pfedhn": (("pfedhn", {}), ("pfedhn", AVERAGED)),
    "pfedhn-pc": (("pfedhn-pc", {}), ("pfedhn-pc", AVERAGED)),
    "pfedhn-plus": (("pfedhn-plus", NO_AVERAGE), STRONGER),
    "pfedhn-plus-pc": (("pfedhn-plus-pc", NO_AVERAGE), ("pfedhn-plus-pc", {})),
    **{name: ((name, {}), (name, AVERAGED_FIVE)) for name in ("fedavg", "fedper", "fedrep", "per-fedavg")},
    **{name: ((name, {}), None) for name in ("pfedme", "ditto", "local")},
}


def recipes() -> list[Recipe]:
    """All that are run, each once."""
    named = [rung.recipe for rung in (*LADDER, *LEFT_OUT, HIGHER_RATE)]
    pairs = ([recipe for recipe in pair if recipe is not None] for pair in RECIPES.values())
    compared = [recipe for pair in pairs for recipe in sorted(pair, key=lambda recipe: bool(recipe[1]))]
    found: list[Recipe] = []
    for recipe in named + compared:
        if recipe not in found:
            found.append(recipe)
    return found


def cell(dataset: str, recipe: Recipe) -> Cell:
    method, settings = recipe
    usual = table1_cell(dataset, method, 50)
    return replace(usual, settings={**usual.settings, **settings, "adaptation_steps": ADAPTED_STEPS})


def signature(cell: Cell) -> Recipe:
    """What tells a cell's recipe from the others, also at reduced size or with other numbers of steps."""
    names = {name for _, settings in recipes() for name in settings}
    return cell.method, {name: value for name, value in cell.settings.items() if name in names}


class Both(NamedTuple):
    """What a recipe reaches as its model is served, and after the clients' own steps."""

    served: Entry
    adapted: Entry


def both(found: Found, recipe: Recipe) -> Both | None:
    """A recipe's runs; None where there are none."""
    wanted = signature(cell(dataset_of(found.study.name), recipe))
    for entry in found.entries:
        if signature(entry.cell) == wanted:
            found_both = {seed: result for seed, result in entry.results.items() if result.unadapted is not None}
            served = {seed: replace(r, test=r.unadapted.test) for seed, r in found_both.items() if r.unadapted}
            adapted = {seed: replace(r, test=(r.adapted or r).test) for seed, r in found_both.items()}
            return Both(replace(entry, results=served), replace(entry, results=adapted)) if adapted else None
    return None


class Row(NamedTuple):
    """A rung that was run, and the one that it is compared with."""

    name: str
    runs: Both
    above: Both | None

    @property
    def step(self) -> Difference | None:
        """What the rung adds to the one it is compared with, as models are served."""
        return None if self.above is None else difference(self.runs.served, self.above.served)


def rows(found: Found, rungs: Sequence[Rung], above: Recipe | None = None) -> list[Row]:
    """Rungs that were run, each against the one before it, or all against `above`."""
    known = [(rung.name, runs) for rung in rungs if (runs := both(found, rung.recipe)) is not None]
    fixed = None if above is None else both(found, above)
    before = [None, *(runs for _, runs in known)]
    return [
        Row(name, runs, other if above is None else fixed) for (name, runs), other in zip(known, before, strict=False)
    ]


def mean(entry: Entry) -> Summary:
    found = drawing.accuracy(entry)
    assert found is not None
    return found


def draw(found: Found) -> Finding:
    ladder, left_out, more = rows(found, LADDER), rows(found, LEFT_OUT, STRONGER), rows(found, [HIGHER_RATE])
    lines = [["recipe", "as served", "after own steps", "compared with", "difference", "95 % interval", "seeds"]]
    for row in (*ladder, *left_out, *more):
        compared = "pFedHN+" if row in left_out else "the row above"
        step = row.step
        lines.append(
            [
                *(row.name, drawing.text(mean(row.runs.served)), drawing.text(mean(row.runs.adapted))),
                *(["", "", ""] if step is None else [compared, f"{step.mean:+.2f}", interval_text(step)]),
                drawing.seeds_of(row.runs.served),
            ]
        )
    shown = [row.runs.served for row in (*ladder, *left_out, *more)]
    table = chances(found)
    tables = [(lines, drawing.caption(shown, LADDER_CAPTION))] if shown else []
    if len(table) > 1:
        tables.append((table, drawing.caption(found.entries, CHANCES_CAPTION)))
    figures = {"": partial(picture, found.title, ladder, left_out)} if ladder or left_out else {}
    return Finding(found.study.name, found.title, sentence(found, ladder, left_out), tables, figures)


LADDER_CAPTION = (
    f" As served: the model that a client is given. After own steps: {ADAPTED_STEPS} SGD steps of the client's own "
    "from it, on its training examples; the round is chosen without them. Differences are of models as served, seed by "
    "seed."
)
CHANCES_CAPTION = (
    f" As is: the newest model. Averaged: a moving average of what the server has. Adapted: {ADAPTED_STEPS} SGD steps "
    "of the client's own at the chosen round. Empty: not run, or not meant to be."
)


def chances(found: Found) -> list[list[str]]:
    """A line for each method: as it is, averaged, adapted and both."""
    lines = [["method", "as is", "averaged", "adapted", "both", "seeds"]]
    for name, (plain, averaged) in RECIPES.items():
        one = both(found, plain)
        other = None if averaged is None else both(found, averaged)
        if one is None and other is None:
            continue
        served = [drawing.text(None if runs is None else mean(runs.served)) for runs in (one, other)]
        adapted = [drawing.text(None if runs is None else mean(runs.adapted)) for runs in (one, other)]
        counts = dict.fromkeys(drawing.seeds_of(runs.served) for runs in (one, other) if runs is not None)
        lines.append([display_name(name), *served, *adapted, " or ".join(counts)])
    return lines


def sentence(found: Found, ladder: Sequence[Row], left_out: Sequence[Row]) -> str:
    """What to see in the figure, of what was run."""
    parts = []
    steps = {row.name: row.step.mean for row in ladder if row.step is not None}
    if steps:
        first, last = (
            f"{row.name.split(' = ')[-1]} ({mean(row.runs.served).mean:.1f} %)" for row in (ladder[0], ladder[-1])
        )
        largest = max(steps, key=lambda name: steps[name])
        parts.append(f'From {first} to {last}, the largest step is "{largest}" ({steps[largest]:+.1f} points).')
    costs = {row.name: row.step.mean for row in left_out if row.step is not None}
    if costs:
        dearest = min(costs, key=lambda name: costs[name])
        parts.append(f'Of what is left out of pFedHN+, "{dearest}" changes most ({costs[dearest]:+.1f}).')
    gains = {
        name: difference(runs.adapted, runs.served)
        for name, recipe in (
            ("the recipe of 2021", LADDER[0].recipe),
            ("pFedHN+", STRONGER),
            ("FedAvg", ("fedavg", {})),
        )
        if (runs := both(found, recipe)) is not None
    }
    told = [f"{gap.mean:+.1f} to {name}" for name, gap in gains.items() if gap is not None]
    if told:
        parts.append(f"{ADAPTED_STEPS} steps of each client's own add {', '.join(told)}.")
    return " ".join(parts) or "No run that this compares is finished yet."


def picture(title: str, ladder: Sequence[Row], left_out: Sequence[Row]) -> Any:
    """Rungs from top to bottom; under them pFedHN+ without each part. A dot as served, a diamond after own steps."""
    seeds = set.intersection(*(set(row.runs.served.results) for row in (*ladder, *left_out)))
    named = (("one part after the other", ladder), ("pFedHN+ with one change", left_out))
    groups = [(name, rungs) for name, rungs in named if rungs]
    heights = [len(rungs) + 0.6 for _, rungs in groups]
    figure, all_axes = drawing.titled(
        8.4, 1.5 + 0.36 * sum(heights), title, 1, len(groups), sharex=True, squeeze=False, height_ratios=heights
    )
    values = {
        row.name: (_of_seeds(row.runs.served, seeds), _of_seeds(row.runs.adapted, seeds))
        for row in (*ladder, *left_out)
    }
    shown = [value for pair in values.values() for value in pair]
    floor = lowest_shown(shown, min(shown))  # a recipe that does not train must not press the others together
    left = min(value for value in shown if value >= floor) - 0.3
    color = drawing.COLORS[0]
    for axes, (name, rungs) in zip(all_axes[:, 0], groups, strict=True):
        places = list(range(len(rungs)))
        served, adapted = ([values[row.name][number] for row in rungs] for number in (0, 1))
        if rungs is ladder:
            axes.step(served, places, color=color, linewidth=1.2, alpha=0.6)
        axes.plot(served, places, "o", color=color, markersize=8, label="as served")
        label = f"after {ADAPTED_STEPS} steps of each client's own"
        axes.plot(adapted, places, "D", color=drawing.PAPER, fillstyle="none", markersize=7, label=label)
        for place, value, other in zip(places, served, adapted, strict=True):
            is_below = " (below)" if min(value, other) < left else ""
            text = f"{value:.1f} \N{RIGHTWARDS ARROW} {other:.1f}{is_below}"
            axes.annotate(text, (1.02, place), xycoords=axes.get_yaxis_transform(), va="center", fontsize=9)
        if LADDER[-1].name in values:
            axes.axvline(values[LADDER[-1].name][0], color=color, linestyle=":", linewidth=1.0, zorder=0)
        axes.set_yticks(places, [row.name for row in rungs])
        axes.set_ylim(len(rungs) - 0.4, -0.6)
        axes.set_xlim(left, max(shown) + 0.3)
        drawing.heading(axes, name)
        drawing.finished_axes(axes, "", "", legend=False)
    all_axes[-1, 0].set_xlabel("test accuracy in %, over clients")
    marks = drawing.legend_of(all_axes[:, 0])
    figure.legend(marks.values(), marks, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def _of_seeds(entry: Entry, seeds: Iterable[int]) -> float:
    """The mean over seeds that all rungs have, or over its own where there is none."""
    wanted = set(seeds)
    kept = {seed: result for seed, result in entry.results.items() if seed in wanted} or entry.results
    return mean(replace(entry, results=kept)).mean


def small(cell: Cell) -> Cell:
    reduced = on_digits(cell)
    return replace(reduced, settings={**reduced.settings, "adaptation_steps": 5})


def dataset_of(name: str) -> str:
    """`ablation-cifar10` -> `cifar10`."""
    return name.removeprefix("ablation-")


STUDIES = tuple(
    Study(
        f"ablation-{dataset}",
        f"{called}, 50 clients: what each part of a recipe does",
        tuple(cell(dataset, recipe) for recipe in recipes()),
        draw,
        small=small,
    )
    for dataset, called in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))
)
