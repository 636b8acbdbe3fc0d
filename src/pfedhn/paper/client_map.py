"""Section 5.5: do the learned embeddings know which clients are alike?

CIFAR-100 has 20 coarse classes; five clients share each. t-SNE draws the embeddings in a plane; beside the picture
stand numbers from the embeddings themselves, against the same numbers with shuffled groups. At the rate of the
hypernetwork an embedding moves little and stays near its random start, so cells with larger rates stand beside.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.experiments.finished import Finished
from pfedhn.experiments.spec import Cell
from pfedhn.paper import drawing
from pfedhn.paper.experiments import table1_cell
from pfedhn.report.entries import Entry
from pfedhn.report.findings import Finding
from pfedhn.report.study import Found, Study, on_digits, setting, varied
from pfedhn.report.tables import number_text

NUM_SHUFFLES = 1_000
EMBEDDING_RATES = (0.3, 1.0)
COARSE = (
    "aquatic mammals", "fish", "flowers", "food containers", "fruit and vegetables", "household electrical devices",
    "household furniture", "insects", "large carnivores", "large man-made outdoor things",
    "large natural outdoor scenes", "large omnivores and herbivores", "medium-sized mammals",
    "non-insect invertebrates", "people", "reptiles", "small mammals", "trees", "vehicles 1", "vehicles 2",
)  # fmt: skip


def compute(finished: Finished) -> Mapping[str, Any]:
    """Places in the plane, each client's group, and how well the groups stay together."""
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    embeddings = finished.embeddings().numpy()
    held = [tuple(c for c, share in enumerate(row) if share > 0) for row in finished.federation.class_shares.tolist()]
    kinds = list(dict.fromkeys(held))  # clients with the same classes are a group
    groups = numpy.array([kinds.index(classes) for classes in held])
    perplexity = min(10.0, (len(groups) - 1) / 3)
    plane = TSNE(2, perplexity=perplexity, init="pca", random_state=0).fit_transform(embeddings.astype(numpy.float32))
    generator = numpy.random.default_rng(0)
    shuffled = [generator.permutation(groups) for _ in range(NUM_SHUFFLES)]
    nearest = neighbors(embeddings)
    start = finished.run.simulation.initial_state().memories.rows.embedding.double().cpu().numpy()
    has_silhouette = 1 < len(kinds) < len(groups)
    return {
        "plane": plane,
        "group": groups,
        "classes": [list(classes) for classes in kinds],
        "purity": purity(nearest, groups),
        "kept": float((nearest == neighbors(start)).mean()),
        "shuffled_purity": [purity(nearest, labels) for labels in shuffled],
        "silhouette": float(silhouette_score(embeddings, groups)) if has_silhouette else None,
        "shuffled_silhouette": [float(silhouette_score(embeddings, part)) for part in shuffled[:100]]
        if has_silhouette
        else [],
    }


def neighbors(embeddings: NDArray[numpy.float64]) -> NDArray[numpy.int64]:
    """The nearest other client of each."""
    distances = numpy.linalg.norm(embeddings[:, None] - embeddings[None], axis=-1)
    numpy.fill_diagonal(distances, numpy.inf)
    nearest: NDArray[numpy.int64] = distances.argmin(1)
    return nearest


def purity(nearest: NDArray[numpy.int64], groups: NDArray[numpy.int64]) -> float:
    """The fraction of clients whose nearest other client is of their own group."""
    return float((groups[nearest] == groups).mean())


def draw(found: Found) -> Finding:
    names = ["purity", "shuffled (95 %)", "silhouette", "shuffled (95 %)", "kept", "accuracy"]
    lines = [["method", "seed", *names]]
    figures: dict[str, Callable[[], Any]] = {}
    said: list[tuple[float, str]] = []
    shuffled: list[float] = []
    limits: list[float] = []
    for entry, numbers in found.computed:
        label = called(found, entry)
        for seed, values in numbers.items():
            chance = float(numpy.percentile(values["shuffled_purity"], 95))
            silhouette, other = values["silhouette"], values["shuffled_silhouette"]
            lines.append(
                [
                    label,
                    str(seed),
                    f"{100 * values['purity']:.0f} %",
                    f"{100 * chance:.0f} %",
                    "" if silhouette is None else f"{silhouette:.3f}",
                    f"{numpy.percentile(other, 95):.3f}" if other else "",
                    f"{100 * values['kept']:.0f} %" if "kept" in values else "",  # earlier versions did not compute it
                    f"{100 * (entry.results[seed].test.client_mean or 0):.2f}",
                ]
            )
            shuffled.append(100 * float(numpy.mean(values["shuffled_purity"])))
            limits.append(100 * chance)
            if not figures or values["purity"] > chance:  # the paper's recipe, and what is worth looking at
                name = re.sub(r"[^\w.]+", "-", label.removeprefix(entry.label))
                title, dataset = f"{found.title}: {label}", entry.cell.dataset
                figures.setdefault(entry.cell.method + name, partial(picture, title, values, dataset))
        mean = drawing.over_seeds(100 * values["purity"] for values in numbers.values())
        said.append((-mean.mean, f"{number_text(mean, 0)} % with {label}"))
    told, chances = "not computed yet", ""
    if said:
        told = ", ".join(text for _, text in sorted(said))
        usual = f"{numpy.mean(shuffled):.0f} %"
        chances = f"; shuffled groups give {usual}, and at most {max(limits):.0f} % in 95 of 100 shuffles"
    return found.finding(
        "Clients with the same mark have the same classes, and nobody told the server so. In the paper they lie "
        f"together. Clients whose nearest neighbor has their classes here: {told}{chances}. A share no larger than "
        "that means that nearest neighbors do not show who is alike.",
        [(lines, CAPTION)],
        figures,
    )


CAPTION = (
    "Purity: how often the nearest embedding belongs to a client of the same group. Silhouette: from -1 to 1, near 1 "
    "where groups are tight and apart. Beside each, what 95 of 100 shuffles do not exceed. Kept: clients whose nearest "
    "neighbor is still the one of the random start."
)


def called(found: Found, entry: Entry) -> str:
    """The method, and the rate of its embeddings where several were run."""
    if len([cell for cell in found.cells if cell.method == entry.cell.method]) == 1:
        return entry.label
    rate = setting(entry.cell, "embedding_lr")
    return f"{entry.label}, embedding rate {setting(entry.cell, 'lr') if rate is None else rate:g}"


def picture(title: str, values: Mapping[str, Any], dataset: str) -> Any:
    import matplotlib

    figure, axes = drawing.titled(9.4, 6.2, title)
    plane, groups = numpy.array(values["plane"]), numpy.array(values["group"])
    number = len(values["classes"])
    colors = matplotlib.colormaps["turbo"](numpy.linspace(0.03, 0.97, number))
    names = COARSE if dataset == "cifar100" and number == len(COARSE) else None
    for group in range(number) if names else sorted(range(number), key=lambda group: values["classes"][group]):
        mine, held = plane[groups == group], values["classes"][group]
        text = names[group] if names else f"{'classes' if len(held) > 1 else 'class'} {', '.join(map(str, held))}"
        marker = drawing.MARKERS[group % len(drawing.MARKERS)]  # with the color, so that nobody needs the color alone
        style = {"color": colors[group], "edgecolors": "white", "linewidths": 0.6, "label": text}
        area = 120 if marker == "*" else 62  # a star fills little of it
        axes.scatter(mine[:, 0], mine[:, 1], s=area, marker=marker, **style)
    axes.set(xticks=[], yticks=[], xlabel="t-SNE of the embeddings", ylabel="")
    axes.spines[:].set_color("#CCCCCC")
    chance = float(numpy.mean(values["shuffled_purity"]))
    axes.set_title(
        f"each mark is a client; {100 * values['purity']:.0f} % have a nearest neighbor of their own group "
        f"({100 * chance:.0f} % if groups are shuffled)",
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def cells() -> tuple[Cell, ...]:
    found = []
    for method in ("pfedhn", "pfedhn-pc", "pfedhn-plus", "pfedhn-plus-pc"):
        partition = {"rule": "by_coarse_class", "clients_per_class": 5}
        found.append(replace(table1_cell("cifar100", method, 100), partition=partition))
        if method == "pfedhn":
            found += [varied(found[-1], embedding_lr=rate) for rate in EMBEDDING_RATES]
    return tuple(found)


STUDY = Study(
    "client-map",
    "Section 5.5: a map of clients (CIFAR-100, 100 clients, 20 coarse classes)",
    cells(),
    draw,
    compute,
    partial(on_digits, clients=20, steps=200, partition={"rule": "by_classes", "classes_per_client": 1}),
)
