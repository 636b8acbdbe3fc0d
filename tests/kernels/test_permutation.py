"""The permutation on a GPU is that of `keys`, to the bit."""

import torch
from support import KERNEL_DEVICE, needs_gpu, needs_triton
from torch import Tensor

from pfedhn import keys
from pfedhn.kernels.permutation import launch_permutation_head


@needs_triton
def test_permutation_head_on_triton() -> None:
    torch.manual_seed(0)
    some, sizes = torch.randint(-(2**62), 2**62, (2, 3)), torch.tensor([1, 17, 300])

    def check(key: Tensor, size: Tensor, count: int) -> None:
        result = launch_permutation_head(key.to(KERNEL_DEVICE), size.to(KERNEL_DEVICE), count)
        assert torch.equal(result.cpu(), keys.permutation_head(key, size, count))

    check(some, sizes, 200)
    check(some[0, 0], sizes[1], 17)
    check(some, sizes, 0)
    for size in (1, 2, 3, 4, 5, 24, 25, 26, 1000, 2**31 + 11, 2**40 + 3, 2**61):
        check(some, torch.tensor(size), 20)


@needs_gpu
def test_permutation_head_on_gpu() -> None:
    some = torch.arange(-3, 3)
    assert torch.equal(keys.permutation_head(some.cuda(), 70, 64).cpu(), keys.permutation_head(some, 70, 64))
