"""Which part of the stronger recipe does what, and what other methods get from an average and from fine-tuning.

Every run adapts at its chosen round, so one run has two accuracies: of the model as it is served, and after 50 steps of
each client's own from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from pfedhn.algorithms import PLUS
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry, display_name
from pfedhn.report.figures import lowest_shown
from pfedhn.report.findings import Finding
from pfedhn.report.pairs import Difference, difference, interval_text
from pfedhn.report.study import Found, Study, on_digits

Recipe = tuple[str, Mapping[str, Any]]
"""A method and what it is given besides its cell of Table 1."""

SMALL_EMBEDDINGS = {name: PLUS[name] for name in PLUS if name.startswith("embedding")}
ADAMW = {"optimizer": "adamw", "lr": PLUS["lr"], "weight_decay": 0.0}
AVERAGED = {"averaging": PLUS["averaging"]}
AVERAGED_FIVE = {"averaging": 0.99}  # as much past in communication steps where five clients make a step
NO_AVERAGE = {"averaging": "none"}
ADAPTED_STEPS = 50

PAPER: Recipe = ("pfedhn", {})
STRONGER: Recipe = ("pfedhn-plus", {})
WITHOUT_DECAY: Recipe = ("pfedhn", {**AVERAGED, **ADAMW, **SMALL_EMBEDDINGS})
BY_ADAM = {"embedding_optimizer": "adam", "embedding_lr": "none", "embedding_momentum": "none"}

# One part after the other, then each one left out.
LADDER: Mapping[str, Recipe] = {
    "the recipe of 2021": PAPER,
    "+ average": ("pfedhn", AVERAGED),
    "+ AdamW": ("pfedhn", {**AVERAGED, **ADAMW, "embedding_optimizer": "adam"}),
    "+ small embeddings": WITHOUT_DECAY,
    "+ decay = pFedHN+": STRONGER,
}
LEFT_OUT: Mapping[str, Recipe] = {
    "without the average": ("pfedhn-plus", NO_AVERAGE),
    "embeddings not small": ("pfedhn-plus", {"embedding_scale": 1.0}),
    "embeddings by Adam": ("pfedhn-plus", BY_ADAM),
    "without decay": WITHOUT_DECAY,
    "SGD for AdamW and decay": ("pfedhn", {**AVERAGED, **SMALL_EMBEDDINGS}),
}
HIGHER_RATE: Mapping[str, Recipe] = {"the recipe of 2021 with average, rate 0.02": ("pfedhn", {**AVERAGED, "lr": 0.02})}

# As it is, and averaged. Ours has an average, so that it is left out of the first.
RECIPES: Mapping[str, tuple[Recipe, Recipe | None]] = {
    "pfedhn": (PAPER, ("pfedhn", AVERAGED)),
    "pfedhn-pc": (("pfedhn-pc", {}), ("pfedhn-pc", AVERAGED)),
    "pfedhn-plus": (("pfedhn-plus", NO_AVERAGE), STRONGER),
    "pfedhn-plus-pc": (("pfedhn-plus-pc", NO_AVERAGE), ("pfedhn-plus-pc", {})),
    **{name: ((name, {}), (name, AVERAGED_FIVE)) for name in ("fedavg", "fedper", "fedrep", "per-fedavg")},
    **{name: ((name, {}), None) for name in ("pfedme", "ditto", "local")},
}


def recipes() -> list[Recipe]:
    """All that are run, each once."""
    named = [*LADDER.values(), *LEFT_OUT.values(), *HIGHER_RATE.values()]
    for pair in RECIPES.values():
        named += sorted((recipe for recipe in pair if recipe is not None), key=lambda recipe: bool(recipe[1]))
    return [recipe for number, recipe in enumerate(named) if recipe not in named[:number]]


def cell(dataset: str, recipe: Recipe) -> Cell:
    method, settings = recipe
    usual = table1_cell(dataset, method, 50)
    return replace(usual, settings={**usual.settings, **settings, "adaptation_steps": ADAPTED_STEPS})


def signature(cell: Cell) -> Recipe:
    """What tells a cell's recipe from the others, also at reduced size or with other numbers of steps."""
    names = {name for _, settings in recipes() for name in settings}
    return cell.method, {name: value for name, value in cell.settings.items() if name in names}


class Row(NamedTuple):
    """A recipe that was run: its models as served and after the clients' own steps."""

    name: str
    served: Entry
    adapted: Entry
    above: Entry | None = None  # what it is compared with, as served

    @property
    def step(self) -> Difference | None:
        """What the recipe adds to the one it is compared with, as models are served."""
        return None if self.above is None else difference(self.served, self.above)


def run_of(found: Found, recipe: Recipe | None, name: str = "") -> Row | None:
    """A recipe's runs; None if there are none."""
    if recipe is None:
        return None
    wanted = signature(cell(found.study.name.removeprefix("ablation-"), recipe))
    for entry in found.entries:
        if signature(entry.cell) == wanted:
            served = {seed: replace(r, test=r.unadapted.test) for seed, r in entry.results.items() if r.unadapted}
            adapted = {seed: replace(r, test=(r.adapted or r).test) for seed, r in entry.results.items() if r.unadapted}
            return Row(name, replace(entry, results=served), replace(entry, results=adapted)) if adapted else None
    return None


def runs_of(found: Found, recipes: Mapping[str, Recipe]) -> list[Row]:
    """The recipes that were run, each compared with the one before it."""
    rows = [row for name, recipe in recipes.items() if (row := run_of(found, recipe, name)) is not None]
    return [row._replace(above=rows[place - 1].served) if place else row for place, row in enumerate(rows)]


def draw(found: Found) -> Finding:
    ladder, more, stronger = runs_of(found, LADDER), runs_of(found, HIGHER_RATE), run_of(found, STRONGER)
    left_out = [row._replace(above=stronger and stronger.served) for row in runs_of(found, LEFT_OUT)]
    lines = [["recipe", "as served", "after own steps", "compared with", "difference", "95 % interval", "seeds"]]
    for compared, rows in (("the row above", ladder), ("pFedHN+", left_out), ("the row above", more)):
        for row in rows:
            both = [drawing.accuracy_text(row.served), drawing.accuracy_text(row.adapted)]
            step = row.step
            gap = ["", "", ""] if step is None else [compared, f"{step.mean:+.2f}", interval_text(step)]
            lines.append([row.name, *both, *gap, str(len(row.served.results))])
    shown = [row.served for row in (*ladder, *left_out, *more)]
    table = chances(found)
    tables = [(lines, drawing.caption(shown, LADDER_CAPTION))] if shown else []
    if len(table) > 1:
        tables.append((table, drawing.caption(found.entries, CHANCES_CAPTION)))
    figures = {"": partial(picture, found.title, ladder, left_out)} if ladder or left_out else {}
    return found.finding(sentence(found, ladder, left_out), tables, figures)


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
    for name, pair in RECIPES.items():
        rows = [run_of(found, recipe) for recipe in pair]
        if any(rows):
            served = ["" if row is None else drawing.accuracy_text(row.served) for row in rows]
            adapted = ["" if row is None else drawing.accuracy_text(row.adapted) for row in rows]
            counts = dict.fromkeys(str(len(row.served.results)) for row in rows if row is not None)
            lines.append([display_name(name), *served, *adapted, " or ".join(counts)])
    return lines


def sentence(found: Found, ladder: Sequence[Row], left_out: Sequence[Row]) -> str:
    """What to see in the figure, of what was run."""
    parts = []
    if steps := {row.name: row.step.mean for row in ladder if row.step is not None}:
        first, last = (
            f"{row.name.split(' = ')[-1]} ({drawing.accuracy(row.served).mean:.1f} %)"
            for row in (ladder[0], ladder[-1])
        )
        largest = max(steps, key=lambda name: steps[name])
        parts.append(f'From {first} to {last}, the largest step is "{largest}" ({steps[largest]:+.1f} points).')
    if costs := {row.name: row.step.mean for row in left_out if row.step is not None}:
        dearest = min(costs, key=lambda name: costs[name])
        parts.append(f'Of what is left out of pFedHN+, "{dearest}" changes most ({costs[dearest]:+.1f}).')
    told = [
        f"{gap.mean:+.1f} to {name}"
        for name, recipe in {"the recipe of 2021": PAPER, "pFedHN+": STRONGER, "FedAvg": ("fedavg", {})}.items()
        if (row := run_of(found, recipe)) is not None and (gap := difference(row.adapted, row.served)) is not None
    ]
    if told:
        parts.append(f"{ADAPTED_STEPS} steps of each client's own add {', '.join(told)}.")
    return " ".join(parts) or "No run that this compares is finished yet."


def picture(title: str, ladder: Sequence[Row], left_out: Sequence[Row]) -> Any:
    """Recipes from top to bottom; under them pFedHN+ without each part. A dot as served, a diamond after own steps."""
    named = {"one part after the other": ladder, "pFedHN+ with one change": left_out}
    groups = {name: rows for name, rows in named.items() if rows}
    heights = [len(rows) + 0.6 for rows in groups.values()]
    figure, all_axes = drawing.titled(
        8.4, 1.5 + 0.36 * sum(heights), title, 1, len(groups), sharex=True, squeeze=False, height_ratios=heights
    )
    rows = [*ladder, *left_out]
    both = [drawing.on_common_seeds(entries) for entries in ([r.served for r in rows], [r.adapted for r in rows])]
    means = [tuple(drawing.accuracy(entry).mean for entry in pair) for pair in zip(*both, strict=True)]
    values = {row.name: pair for row, pair in zip(rows, means, strict=True)}
    shown = [value for pair in means for value in pair]
    floor = lowest_shown(shown, min(shown))  # a recipe that does not train must not press the others together
    left = min(value for value in shown if value >= floor) - 0.3
    color = drawing.COLORS[0]
    for axes, (name, rungs) in zip(all_axes[:, 0], groups.items(), strict=True):
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
        if (last := list(LADDER)[-1]) in values:
            axes.axvline(values[last][0], color=color, linestyle=":", linewidth=1.0, zorder=0)
        axes.set_yticks(places, [row.name for row in rungs])
        axes.set_ylim(len(rungs) - 0.4, -0.6)
        axes.set_xlim(left, max(shown) + 0.3)
        drawing.finish(axes, "", "", name, legend=False)
    all_axes[-1, 0].set_xlabel("test accuracy in %, over clients")
    marks = drawing.legend_of(all_axes[:, 0])
    figure.legend(marks.values(), marks, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    return figure


def small(cell: Cell) -> Cell:
    reduced = on_digits(cell)
    return replace(reduced, settings={**reduced.settings, "adaptation_steps": 5})


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
