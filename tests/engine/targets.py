"""Networks of the kinds that people have, small, in one table; and what every executor makes of each."""

import logging
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from support import CHANNELS, NUM_CLASSES, SIDE, assert_close, make_federation, memories_of, personal, simulate
from torch import Tensor, nn

from pfedhn.algorithms import ALGORITHMS
from pfedhn.engine.executors import EXECUTORS
from pfedhn.engine.network import build_model
from pfedhn.engine.rounds import rounds
from pfedhn.errors import UserError
from pfedhn.models import ResNet

COLUMNS = (*EXECUTORS, "captured")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(CHANNELS * SIDE, 5, batch_first=True), nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.permute(0, 2, 1, 3).flatten(2))[0][:, -1])


class Tied(nn.Module):
    """One matrix that is used forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.decode = nn.Linear(CHANNELS * SIDE * SIDE, 5), nn.Linear(5, CHANNELS * SIDE * SIDE)
        self.again = nn.Linear(CHANNELS * SIDE * SIDE, 5)
        self.again.weight = self.code.weight
        self.out = nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.decode(self.code(x.flatten(1)).relu())))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, 3, 3), nn.BatchNorm2d(3)
        self.out = nn.Linear(48, NUM_CLASSES)
        self.conv.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(CHANNELS * SIDE * SIDE, 5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, NUM_CLASSES)
    )


class DroppedAttention(nn.Module):
    """Its attention drops by a rate that it hands on to PyTorch, not by a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(CHANNELS * SIDE, 1, dropout=0.4, batch_first=True)
        self.out = nn.Linear(CHANNELS * SIDE, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(1, 2).flatten(2)
        return self.out(self.attend(rows, rows, rows, need_weights=False)[0].mean(1))


class Adapted(nn.Module):
    """A vision transformer whose attention learns by LoRA."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = ViTConfig(image_size=SIDE, patch_size=3, num_channels=CHANNELS, num_labels=NUM_CLASSES, **sizes)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        self.net = get_peft_model(ViTForImageClassification(config), lora)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def resnet(norm: Any) -> Callable[[], nn.Module]:
    return lambda: ResNet(NUM_CLASSES, 4, norm, (1, 1), CHANNELS)


TARGETS: dict[str, Callable[[], nn.Module]] = {
    "ResNet with BatchNorm": resnet("batch"),
    "ResNet with GroupNorm": resnet("group"),
    "LSTM": Recurrent,
    "transformer with LoRA": Adapted,
    "tied weights": Tied,
    "frozen layers": Frozen,
    "dropout": dropped,
    "dropout inside attention": DroppedAttention,
}


class Heard(logging.Handler):
    """What a run says of how it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.sentences.append(record.getMessage())


@cache
def road(target: str, executor: str) -> Any:
    """All that a run leaves behind, in float64, and what it said; or the sentence that refuses it."""
    federation = make_federation().to(DEVICE)
    algorithm = ALGORITHMS["pfedhn"](local_steps=3, hidden_dim=4, embedding_dim=3, local_lr=0.1, personal=("last",))
    heard, logger = Heard(), logging.getLogger("pfedhn")
    logger.addHandler(heard)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of slow paths inside vmap
            networks = {"net": build_model("net", TARGETS[target], federation)}
            simulation = simulate(algorithm, federation, networks, rounds=3, cohort=3, executor=executor)
            state = simulation.initial_state()
            for _ in rounds(simulation, state):
                pass
            assert state.best is not None
            loss = state.best.evaluation.splits["test"].loss
            return (memories_of(state), personal(simulation, state), loss), heard.sentences
    except UserError as error:
        return str(error)
    finally:
        logger.removeHandler(heard)


def outcome(target: str, executor: str) -> str:
    """What a run of this network does: it agrees with the loop to rounding, in float64, or is refused."""
    result = road(target, executor)
    if isinstance(result, str):
        return "refused: " + ("draws of its own" if "draws" in result else "no rule for `torch.vmap`")
    found, said = result
    assert_close(found, road(target, "loop")[0])
    assert all(value.dtype == torch.float64 for value in found[1][0].values() if value.is_floating_point())
    return "agrees, step by step" if any("slower" in sentence for sentence in said) else "agrees"


def table() -> str:
    lines = [f"| network | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {target} | {' | '.join(outcome(target, name) for name in COLUMNS)} |" for target in TARGETS]
    return "\n".join(lines)
