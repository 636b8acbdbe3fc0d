"""Models to take away: files that run without this package, and a card that says how each was trained."""

import copy
import io
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save
from torch import Tensor, nn

from pfedhn.data.description import Description
from pfedhn.data.reading import ClientReading, TableReading, label_card, reading_card
from pfedhn.engine.plan import Plan
from pfedhn.errors import UserError, closest, first_line, missing_extra
from pfedhn.model import Model
from pfedhn.models import squared_error
from pfedhn.runs.pipeline import TablePipeline, script, script_name
from pfedhn.storage.identity import settings_of
from pfedhn.storage.schema import to_json
from pfedhn.system.environment import environment
from pfedhn.system.files import given_path, make_folder, write_atomically
from pfedhn.system.reference import Code

Card: TypeAlias = Mapping[str, Any]
"""What a file says of its model, as plain values: see `model_card`."""

ALL = "all clients'"
CHATTY = "torch.onnx._internal.exporter._registration"  # it warns of every optional library that is not installed


@dataclass(frozen=True, eq=False)
class Portable:
    """A target network, traced once: each of its models then differs only in weights and takes milliseconds.

    Of a run on a table, what is traced is the network with what is around it: see `TablePipeline`.
    """

    module: nn.Module  # any model of this network, on the CPU
    shape: Sequence[int]  # of one example
    dtype: torch.dtype
    table: TableReading | None = None  # how the run read its table
    has_classes: bool = False

    @staticmethod
    def of(model: Model, clients: Description) -> "Portable":
        dtype: torch.dtype = getattr(torch, clients.dtype)
        dtype = model.dtype if dtype.is_floating_point else dtype
        module = copy.deepcopy(model.testing_module).cpu()
        table = None if clients.reading is None else clients.reading.table
        if table is None or clients.shape != (len(table.inputs),):
            return Portable(module, clients.shape, dtype)
        has_classes = clients.classes is not None
        return Portable(module, (len(table.features),), dtype, table, has_classes)

    def content(self, model: nn.Module, ending: str, card: Card, reading: ClientReading | None = None) -> bytes:
        """The bytes of a file for a model of this network.

        Args:
            model: The client's.
            ending: One of FORMATS; .safetensors holds the network alone.
            card: Of the model.
            reading: How the client's cells of a table become inputs.
        """
        if self.table is not None and ending != ".safetensors":
            model = TablePipeline(model, self.table, reading, self.has_classes, self.dtype)
        state = {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()}
        logging.getLogger(CHATTY).setLevel(logging.ERROR)
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of its own old names
            return FORMATS[ending](self, state, json.dumps(card))

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        batch = torch.export.Dim("batch", min=1)
        module = self.module
        if self.table is not None:
            module = TablePipeline(module, self.table, None, self.has_classes, self.dtype).eval()
        try:
            return torch.export.export(
                module, (torch.zeros(2, *self.shape, dtype=self.dtype),), dynamic_shapes=({0: batch},)
            )
        except Exception as error:  # whatever a network does that cannot be traced
            raise UserError(
                f"the network cannot be traced for batches of any size ({first_line(error)}); take .safetensors, which "
                "needs no trace, or let its forward pass not depend on the numbers or on the batch."
            ) from error

    @cached_property
    def onnx(self) -> Any:
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise missing_extra("writing ONNX", "export") from error
        program = self.program
        try:
            exported = torch.onnx.export(program, (), dynamo=True, optimize=False, verbose=False, input_names=["x"])
        except Exception as error:
            raise UserError(
                f"the network has no form in ONNX ({first_line(error)}); take .pt2 or .safetensors."
            ) from error
        assert exported is not None
        graph = exported.model.graph
        for value in (*graph.inputs, *graph.outputs, *(part for node in graph for part in node.outputs)):
            if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
                value.shape[0] = "batch"
        if len(graph.outputs) == 1:
            graph.outputs[0].name = "outputs"
        return exported.model


def _safetensors(portable: Portable, state: Mapping[str, Tensor], card: str) -> bytes:
    return save(dict(state), {"format": "pt", "card": card})


def _pt2(portable: Portable, state: Mapping[str, Tensor], card: str) -> bytes:
    held = portable.program.state_dict
    for name in held:
        value = state[name]
        held[name] = nn.Parameter(value, requires_grad=False) if isinstance(held[name], nn.Parameter) else value
    file = io.BytesIO()
    torch.export.save(portable.program, file, extra_files={"card.json": card})
    return file.getvalue()


def _onnx(portable: Portable, state: Mapping[str, Tensor], card: str) -> bytes:
    model = portable.onnx
    import onnx_ir

    for name, initializer in model.graph.initializers.items():
        if name in state:
            initializer.const_value = onnx_ir.tensor(state[name].numpy(), name=name)
    model.metadata_props["card"] = card
    content: bytes = onnx_ir.serde.serialize_model(model).SerializeToString()
    return content


FORMATS: dict[str, Callable[[Portable, Mapping[str, Tensor], str], bytes]] = {
    ".safetensors": _safetensors,
    ".onnx": _onnx,
    ".pt2": _pt2,
}
"""Makers of a file's content, by its ending."""


def check_ending(path: Path) -> str:
    """Return the extension of a file's name, if there is such a format."""
    if path.suffix not in FORMATS:
        raise UserError(f"{path.name} names no format of models; {closest(path.suffix, FORMATS)}")
    return path.suffix


def write_model(
    path: str | Path, network: Portable, model: nn.Module, card: Card, reading: ClientReading | None = None
) -> Path:
    """Write a model, and its card beside it; return the file of the model.

    Beside an ONNX file of a table's model there is also a script that predicts the rows of a CSV file with it.

    Args:
        path: Of the model's file; its ending is one of FORMATS.
        network: The model's.
        model: The client's.
        card: Of the model.
        reading: How the client's cells of a table become inputs.
    """
    file = given_path(path)
    ending = check_ending(file)
    write_atomically(file, network.content(model, ending, card, reading))
    write_atomically(file.with_suffix(".md"), to_markdown(card).encode())
    if network.table is not None and ending == ".onnx":
        write_atomically(file.with_name(script_name(file.name)), script(file.name).encode())
    return file


def write_models(
    folder: str | Path, ending: str, clients: Sequence[str], write: Callable[[str, Path], Card]
) -> dict[str, Path]:
    """Write a file for every client, and a README.md that lists them; the files by client.

    Args:
        folder: Created if it does not exist.
        ending: One of FORMATS.
        clients: Their names.
        write: Writes the model of a client and returns its card.
    """
    place = given_path(folder)
    check_ending(Path(f"model{ending}"))
    make_folder(place)
    files = {client: place / f"{name}{ending}" for client, name in zip(clients, file_names(clients), strict=True)}
    cards = {file.name: write(client, file) for client, file in files.items()}
    write_atomically(place / "README.md", index(cards).encode())
    return files


def model_card(
    client: str,
    model: Model,
    plan: Plan,
    test: tuple[float, int],
    *,
    run: str,
    method: str,
    chosen_step: int,
    steps: int,
    described: Description | None = None,
    reading: ClientReading | None = None,
    commonest: float | None = None,
) -> Card:
    """The card of a client's model.

    Args:
        client: The client's name.
        model: Its target network.
        plan: The plan of its run.
        test: The sum of its accuracies, or else of its losses, over test examples, and their number.
        run: The name of the run.
        method: The method as it is registered, or "module:qualname".
        chosen_step: Communication steps before the chosen round.
        steps: Communication steps of the whole run.
        described: The clients of the run and their examples, if more is known of them than the plan says.
        reading: How the client's cells of a table become inputs.
        commonest: The share of the commonest class among the client's training examples, if it is known.
    """
    made, code, described = environment("cpu"), Code.of(model.factory), described or plan.clients
    label, (total, count) = label_card(described.reading), test
    mean = total / count if count else None
    is_real = getattr(torch, described.dtype).is_floating_point
    return {
        "client": client,
        "run": run,
        "method": method,
        "settings": to_json(settings_of(plan.algorithm)),
        "data": described.name,
        "clients": described.clients,
        "input": {
            "shape": list(described.shape),
            "dtype": str(model.dtype).removeprefix("torch.") if is_real else described.dtype,
            "preprocessing": None if described.preprocessing is None else to_json(dict(described.preprocessing)),
            **reading_card(described.reading, described.shape, reading),
        },
        "label": label,
        "classes": described.classes,
        "class_names": None if described.class_names is None else list(described.class_names),
        "network": {
            "name": model.name,
            "factory": code.name,
            "arguments": to_json(code.arguments),
            "keywords": to_json(code.keywords),
            "parameters": sum(shape.numel() for shape in model.shapes.values()),
            "layers": str(model.testing_module),
        },
        "test": {
            "examples": count,
            "accuracy": mean if plan.has_metric else None,
            "loss": None if plan.has_metric else mean,
            "error": _error(label, model, mean),
            "commonest": commonest if plan.has_metric else None,
        },
        "chosen_step": chosen_step,
        "steps": steps,
        "seed": plan.seed,
        "versions": {"pfedhn": made.pfedhn, "torch": made.torch},
    }


def _error(label: Mapping[str, Any] | None, model: Model, loss: float | None) -> float | None:
    """The root of the mean squared error in the units of a table's label; None for other losses."""
    if label is None or "deviation" not in label or loss is None or model.per_example_loss is not squared_error:
        return None
    return math.sqrt(loss)


def file_names(clients: Sequence[str]) -> list[str]:
    """A name for each client's file, without letters that no folder holds; all differ, even without regard to case."""
    names: list[str] = []
    taken: set[str] = set()
    for client in clients:
        plain = re.sub(r"[^\w.+-]+", "_", client).strip(".") or "client"
        name, number = plain, 1
        while name.lower() in taken:
            number += 1
            name = f"{plain}_{number}"
        taken.add(name.lower())
        names.append(name)
    return names


def to_markdown(card: Card) -> str:
    """The card as Markdown."""
    network, given, data = card["network"], card["input"], card["data"] or "the clients' own data"
    lines = [f"# The model of client {_plain(card['client'])}", "", _scores(card), "", "| | |", "|---|---|"]
    rows: dict[str, Any] = {
        "run": card["run"],
        "trained on": f"{data}, {card['clients']:,} clients",
        "method": card["method"],
        "settings": ", ".join(f"{name} = {value}" for name, value in card["settings"].items()),
        "chosen at": f"step {card['chosen_step']:,} of {card['steps']:,}, seed {card['seed']}",
        "network": f"{network['factory']}, {network['parameters']:,} parameters",
        "input": f"[{', '.join(map(str, ['batch', *given['shape']]))}], {given['dtype']}",
        "before the input": _preprocessing(given["preprocessing"]),
        "outputs": _outputs(card),
        "made with": ", ".join(f"{name} {version}" for name, version in card["versions"].items()),
    }
    lines += [f"| {name} | {_plain(str(value))} |" for name, value in rows.items() if value]
    return "\n".join([*lines, "", *_what_goes_in(given), "```text", network["layers"], "```", ""])


def _what_goes_in(given: Mapping[str, Any]) -> list[str]:
    """How an example becomes numbers, if the card says it."""
    if images := given.get("images"):
        size = f"{images['height']} x {images['width']} pixels (height x width)"
        if images["resized_with"]:
            size += f", resized with {images['resized_with']}"
        channels = f"channels {', '.join(images['channels'])}"
        values = f"each value from 0 to 1 (the pixel divided by {images['pixels_divided_by']}; of 16 bits, by 65535)"
        return ["## What goes in", "", f"Images of {size}; {channels}, in this order and first; {values}.", ""]
    if not given.get("columns"):
        return []
    lines = ["## What goes in", "", "An example is these numbers, in this order:", "", "| numbers | column | value |"]
    lines.append("|---|---|---|")
    place = 1
    for column in given["columns"]:
        last = place + len(column.get("texts", [""])) - 1
        value = "as it is" + (
            f"; NaN for an empty cell, which becomes {column['empty']:.6g}" if "empty" in column else ""
        )
        if "texts" in column:
            value = f"1 in the place of its text, 0 elsewhere: {', '.join(column['texts'])}"
        numbers = str(place) if place == last else f"{place} to {last}"
        lines.append(f"| {numbers} | {_plain(column['name'])} | {_plain(value)} |")
        place = last + 1
    lines += ["", "The script beside a model in ONNX makes these numbers of the rows of a CSV file.", ""]
    return [*lines, *_what_happens_inside(given)]


def _what_happens_inside(given: Mapping[str, Any]) -> list[str]:
    """What a file of a table's model does with the numbers before its network, and what .safetensors leaves out."""
    lines = []
    if flagged := [column["name"] for column in given["columns"] if column.get("flagged")]:
        named = ", ".join(map(_plain, flagged))
        lines += [f"Flags of empty cells follow the numbers, 1 for an empty one and 0 otherwise: of {named}.", ""]
    if scaling := given.get("scaling"):
        lines += [
            f"Each number is scaled by its mean and deviation over {scaling.get('over', ALL)} training examples, and "
            f"clipped at {scaling['clip']:g} deviations. The card inside the file has these numbers, as `scaling`.",
            "",
        ]
    if not lines:
        return []
    first = "Files in .onnx and .pt2 do this; .safetensors holds the network alone."
    return ["## What happens inside", "", first, "", *lines]


def index(cards: Mapping[str, Card]) -> str:
    """A page for a folder of models: each file's client and its score."""
    lines = ["# Personal models", "", "| file | client | test |", "|---|---|---|"]
    lines += [f"| [{name}]({name}) | {_plain(card['client'])} | {_score(card)} |" for name, card in cards.items()]
    return "\n".join([*lines, ""])


def _plain(text: str) -> str:
    """A text that fits into a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _score(card: Card) -> str:
    test = card["test"]
    if not test["examples"]:
        return "not measured"
    if test["error"] is not None:
        return f"error {test['error']:.4g}"
    if test["accuracy"] is None:
        return f"loss {test['loss']:.4f}"
    return f"{100 * test['accuracy']:.1f} %"


def _scores(card: Card) -> str:
    test = card["test"]
    if not test["examples"]:
        return "It was not measured: this client has no test examples."
    what, value = ("accuracy", _score(card)) if test["accuracy"] is not None else _score(card).split()
    if what == "error":
        what += f" (root mean square, in units of {card['label']['name']})"
    text = f"Test {what}: {value}, on {test['examples']:,} examples of this client that took no part in training."
    if test["commonest"] is None:
        return text
    return f"{text} For comparison: the commonest class is {100 * test['commonest']:.1f} % of its training examples."


def _preprocessing(steps: Mapping[str, Any] | None) -> str:
    if not steps:
        return ""
    scaled = f"less {list(steps['mean'])}, divided by {list(steps['std'])}"
    return scaled if steps["scale"] == 1 else f"pixels divided by {steps['scale']}, {scaled}"


def _outputs(card: Card) -> str:
    label, names = card["label"], card["class_names"]
    if card["classes"] is None:
        what = "numbers"
        if label is not None:
            what = f"{label['name']}, in its own units"
        if label is not None and "mean" in label:
            what += f" (.safetensors: less {label['mean']:.6g}, divided by {label['deviation']:.6g})"
        return what
    what = "number" if label is None else "probability"
    described = f"one {what} for each of {card['classes']} classes" + (f": {', '.join(names)}" if names else "")
    return described + ("" if label is None else " (.safetensors: before softmax)")
