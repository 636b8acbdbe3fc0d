"""A frozen, pretrained ResNet with low-rank adapters that learn: LoRA (Hu et al., ICLR 2022)."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from pfedhn.errors import UserError
from pfedhn.models import ResNet
from pfedhn.params import Params
from pfedhn.system.files import given_path


class AdaptedConv(nn.Module):
    """A frozen convolution plus the product of two thin matrices, which is zero at first."""

    def __init__(self, base: nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.left = nn.Parameter(torch.zeros(base.out_channels, rank))
        self.right = nn.Parameter(torch.empty(rank, base.weight[0].numel()))
        nn.init.kaiming_uniform_(self.right, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + (self.left @ self.right).view_as(self.base.weight)
        return functional.conv2d(x, weight, None, self.base.stride, self.base.padding)


def adapted(num_classes: int, backbone: str, rank: int = 4) -> nn.Module:
    """The network of an experiment's cell: `model = "pfedhn.experiments.adapters:adapted"`.

    Adapters of all convolutions and the last layer learn. Each client keeps its own running statistics of BatchNorm.

    Args:
        num_classes: Outputs of the last layer, which is new.
        backbone: The directory of the run that trained a ResNet, for one client.
        rank: Rank of each adapter's product.
    """
    directory = given_path(backbone)
    changed = max((file.stat().st_mtime_ns for file in directory.glob("checkpoint-*.json")), default=0)
    weights, width, stem_stride = _backbone(directory, changed)
    network = ResNet(num_classes, width, stem_stride=stem_stride)
    network.load_state_dict(weights, strict=False)
    for name, part in list(network.named_modules()):
        if isinstance(part, nn.Conv2d):
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, AdaptedConv(part, rank))
        elif isinstance(part, nn.BatchNorm2d):
            part.requires_grad_(False)
    return network


@lru_cache(maxsize=2)
def _backbone(directory: Path, changed: int) -> tuple[Params, int, int]:
    """The weights of a trained ResNet without its last layer, its width and the stride of its stem.

    It is read again once its checkpoints have `changed`.
    """
    from pfedhn.runs.load import load

    if not (directory / "spec.toml").exists():
        raise UserError(f"{directory} holds no backbone; `pfedhn run backbone-cifar100` trains one, which takes a GPU.")
    run = load(directory, device="cpu")
    if not isinstance(network := run.personal_model(0), ResNet):
        raise UserError(f"{directory} trained a {type(network).__name__}; a backbone is a ResNet.")
    kept = {name: value for name, value in network.state_dict().items() if not name.startswith("fc.")}
    return kept, network.conv1.out_channels, network.conv1.stride[0]
