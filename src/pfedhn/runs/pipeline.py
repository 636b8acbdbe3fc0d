"""A network of a table together with what is around it, so that a file of it takes the table's own values."""

import torch
from torch import Tensor, nn

from pfedhn.data.cells import MARKS
from pfedhn.data.reading import ClientReading, TableReading
from pfedhn.statistics import MAX_DEVIATIONS

SCRIPT = '''"""Predict the rows of a CSV file with {file}: python {script} rows.csv (pandas and onnxruntime)."""

import json
import sys
from pathlib import Path

import onnxruntime
import pandas

EMPTY = {empty}
model = onnxruntime.InferenceSession(Path(__file__).with_name({file!r}))
card = json.loads(model.get_modelmeta().custom_metadata_map["card"])
columns = card["input"]["columns"]
rows = pandas.read_csv(sys.argv[1], header=None, dtype=str, keep_default_na=False, encoding="utf-8-sig")
rows = rows[1:].set_axis(rows.iloc[0].str.strip(), axis=1)
if missing := [column["name"] for column in columns if column["name"] not in rows]:
    sys.exit(f"{{sys.argv[1]}} has no column {{missing[0]!r}}, which the model was trained on.")
features = []
for column in columns:
    cells = rows[column["name"]].str.strip()
    if "texts" not in column:  # a number; an empty cell is NaN, which the model fills in
        features.append(pandas.to_numeric(cells.mask(cells.str.lower().isin(EMPTY))))
    elif unknown := set(cells) - {{"", *column["texts"]}}:
        sys.exit(f"The model does not know {{sorted(unknown)}} in column {{column['name']!r}}.")
    else:
        features += [cells == text for text in column["texts"]]
x = pandas.concat(features, axis=1).astype(card["input"]["dtype"]).to_numpy()
outputs = model.run(None, {{"x": x}})[0].reshape(len(x), -1)  # probabilities, or numbers in the label's units
names = card["class_names"] or list(range(card["classes"])) if card["classes"] else [card["label"]["name"]]
pandas.DataFrame(outputs, columns=names).to_csv(sys.stdout, index=False)
'''


class TablePipeline(nn.Module):
    """A table's encoded features in, probabilities of the classes or numbers in the units of the label out.

    A feature that is NaN stands for an empty cell.

    Args:
        network: Of one client; it takes the features filled in, flagged and scaled.
        table: How the run read its table.
        reading: How the client's cells become inputs; as all clients together if None.
        has_classes: Whether the network's outputs are of classes.
        dtype: Of the features.
    """

    def __init__(
        self,
        network: nn.Module,
        table: TableReading,
        reading: ClientReading | None,
        has_classes: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.network, self.table, self.has_classes = network, table, has_classes
        width, (fill, scaling) = len(table.features), reading or ClientReading(None, table.scaling)
        self.fill: Tensor
        self.register_buffer("fill", torch.tensor((torch.nan,) * width if fill is None else tuple(fill), dtype=dtype))
        mean, deviation = ((0.0,), (1.0,)) if scaling is None else (scaling.mean, scaling.deviation)
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(mean, dtype=dtype))
        self.deviation: Tensor
        self.register_buffer("deviation", torch.tensor(deviation, dtype=dtype))
        self.flagged: Tensor
        self.register_buffer("flagged", torch.tensor(table.flagged_places, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        is_empty = x.isnan()
        x = torch.where(is_empty, self.fill, x)
        if self.table.flagged:
            x = torch.cat([x, is_empty[:, self.flagged].to(x.dtype)], 1)
        if self.table.scaling is not None:
            x = ((x - self.mean) / self.deviation).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS)
        outputs: Tensor = self.network(x)
        unscaled: Tensor = self.table.unscaled(outputs)
        return outputs.softmax(-1) if self.has_classes else unscaled


def script_name(file: str) -> str:
    """The name of the script beside a model's file."""
    return f"predict_{file.rpartition('.')[0]}.py"


def script(file: str) -> str:
    """A program that predicts the rows of a CSV file with the ONNX file of a table's model beside it."""
    return SCRIPT.format(file=file, script=script_name(file), empty=("", *MARKS))
