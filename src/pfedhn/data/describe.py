"""Show how many examples of each class every client has, as a table and as a figure.

Axes: [N] clients, those that join later last; [C]lasses.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from pfedhn.data.arrays import SPLITS
from pfedhn.data.federation import Federation
from pfedhn.errors import UserError, missing_extra, some

FIGURES = (".png", ".pdf", ".svg")  # endings of files that figures are drawn to
LARGE = 20  # of the mean or deviation of a column or a label; networks are made for 1


def describe(federation: Federation) -> str:
    """A text table: each client's examples per split and its classes; the middle is left out past 20 clients.

    Examples:
        >>> import numpy, pfedhn
        >>> from pfedhn.data.describe import describe
        >>> x, y = numpy.zeros((300, 8)), numpy.arange(300) % 3
        >>> rule = pfedhn.by_classes(1, num_clients=3)
        >>> print(describe(pfedhn.Federation.from_arrays(x, y, rule, split=(0.8, 0.1, 0.1), stratify=True)))
        client  train  validation  test  classes (% of the client's examples)
             0     80          10    10  0 (100)
             1     80          10    10  2 (100)
             2     80          10    10  1 (100)
         total    240          30    30
        unused      0           0     0
    """
    parts = _parts(federation)
    sizes = {name: [size for part in parts for size in part.splits[name].size.tolist()] for name in SPLITS}
    number = federation.num_clients + federation.num_joining
    names: list[list[str]] = [[] for _ in range(number + 1)]
    if federation.names is not None:
        names = [["name"], *([part.name_of(client)] for part in parts for client in range(part.num_clients))]
    has_classes = federation.num_classes is not None
    lines = [["client", *names[0], *SPLITS, "classes (% of the client's examples)" if has_classes else ""]]
    counts = _counts(federation, SPLITS) if has_classes else None
    classes: Sequence[Any] = federation.class_names or range(federation.num_classes or 0)
    for client in range(number):
        mixture = "" if counts is None else _mixture(counts[client], classes)
        lines.append([str(client), *names[client + 1], *[str(sizes[name][client]) for name in SPLITS], mixture])
    if number > 20:
        lines[16:-5] = [["...", *["..." for _ in (*names[0], *SPLITS)], f"{number - 20} more clients"]]
    none = ["" for _ in names[0]]
    lines.append(["total", *none, *[str(sum(sizes[name])) for name in SPLITS], ""])
    lines.append(["unused", *none, *[str(federation.unused.get(name, 0)) for name in SPLITS], ""])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]) - 1)]
    text = [
        "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in lines
    ]
    if counts is not None:
        present = federation.y.unique().cpu().numpy()
        orphans = present[counts[:, present].sum(0) == 0]
        if len(orphans):
            text.append(f"classes without a client: {some([classes[label] for label in orphans.tolist()], 20)}")
    if federation.num_joining:
        text.append(f"joining after training: clients {federation.num_clients} to {number - 1}")
    return "\n".join(text)


def large_labels(federation: Federation) -> tuple[float, float] | None:
    """The mean and standard deviation of labels to predict, if one is too large for a network to learn well."""
    if not federation.y.is_floating_point() or not len(federation.y):
        return None
    values = federation.y.double()
    mean, deviation = float(values.mean()), float(values.std(correction=0))
    return (mean, deviation) if max(abs(mean), deviation) > LARGE else None


def check_ending(path: str | Path) -> None:
    """Refuse a file type that figures are not drawn in."""
    if (ending := Path(path).suffix.lower()) not in FIGURES:
        raise UserError(f"a figure cannot be drawn as {ending!r}; give {', '.join(FIGURES)}.")


def plot(federation: Federation, path: str | Path) -> None:
    """Draw the training examples that each client has of each class; a dot's area is their number, bars add them up.

    Args:
        federation: Whose examples to draw; clients that join later stand right of a line.
        path: The figure's file: PNG, PDF or SVG by the name's ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("drawing", "report") from error
    check_ending(path)
    if federation.num_classes is None:
        raise UserError("this federation has no classes to draw; leave the figure out.")
    counts = _counts(federation, ["train"])
    num_clients, num_classes = counts.shape
    width = min(max(0.16 * num_clients, 5.0), 13.0) + 1.2
    height = min(max(0.22 * num_classes, 2.2), 9.0)
    figure = Figure(figsize=(width, height + 1.8), layout="constrained")
    bars, dots = figure.subplots(2, 1, sharex=True, height_ratios=[1.0, height])
    color = "#1f5a94"
    # A dot just fits its cell; dots of a thousand classes would vanish, and may overlap instead. 72 points an inch.
    cell = 72 * min((width - 1.2) / num_clients, height / num_classes)
    largest = max(0.92 * cell, 3.0) ** 2
    client, label = numpy.nonzero(counts)
    area = numpy.maximum(largest * counts[client, label] / max(counts.max(), 1), 0.6)
    dots.scatter(client, label, s=area, color=color, linewidths=0)
    margin = max(0.75, 0.012 * num_classes)
    dots.set(xlabel="client", xlim=(-0.75, num_clients - 0.25))
    dots.set(ylabel="class", ylim=(num_classes - 1 + margin, -margin))
    dots.grid(color="#e8e8e8", linewidth=0.6)
    bars.bar(numpy.arange(num_clients), counts.sum(1), color=color, width=0.75)
    bars.set_ylabel("train examples")
    title = f"{num_clients} clients, {counts.sum():,} train examples, {federation.unused.get('train', 0):,} unused"
    bars.set_title(title, loc="left", fontsize=10)
    for axes, count in ((dots.xaxis, num_clients), (dots.yaxis, num_classes)):
        axes.set_ticks(
            list(range(0, count, next(step for step in (1, 2, 5, 10, 20, 50, 100, count) if count <= 26 * step)))
        )
    for axis in (bars, dots):
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=0, labelsize=8)
        if federation.num_joining:
            axis.axvline(federation.num_clients - 0.5, color="#888888", linewidth=0.8, linestyle="--")
    figure.savefig(path, dpi=150)


def _parts(federation: Federation) -> list[Federation]:
    return [federation] if federation.joining is None else [federation, federation.joining]


def _counts(federation: Federation, splits: Sequence[str]) -> NDArray[numpy.int64]:
    """[N, C]: each client's examples of each class, these splits together."""
    assert federation.num_classes is not None
    counts = []
    for part in _parts(federation):
        for client in range(part.num_clients):
            labels = [part.labels_of(part.splits[name].of(client)).cpu().numpy() for name in splits]
            counts.append(numpy.bincount(numpy.concatenate(labels), minlength=federation.num_classes))
    return numpy.stack(counts)


def _mixture(counts: NDArray[numpy.int64], classes: Sequence[Any]) -> str:
    order = [label for label in numpy.argsort(-counts, kind="stable") if counts[label]]
    return some([f"{classes[label]} ({100 * counts[label] / counts.sum():.0f})" for label in order], 6)
