"""How examples lie in the memory of a device: images channels last, and on a GPU as bytes.

Such a byte says which of its channel's values a pixel has. Pictures come with 256 values a channel, and still have no
more when they have been normalized. Decoded, they are the same bits as before, in a quarter of the memory.
"""

import torch
from torch import Tensor
from torch.nn import functional

WITH_BYTES = ("cuda",)  # kinds of devices whose memory is worth it
NUM_VALUES = 256
BYTES_AT_ONCE = 1 << 26  # of the images; what is computed from them takes several times as much
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stored(x: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor | None]:
    """Examples as a device keeps them: their values, or bytes and what these stand for.

    Args:
        x: All examples, on any device.
        device: Where they go.
    """
    found = compact(x, device) if torch.device(device).type in WITH_BYTES else None
    return (in_fast_order(x.to(device)), None) if found is None else found


def in_fast_order(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def compact(x: Tensor, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    """Images [M, C, H, W] as bytes of the same shape, channels last, and the values [C, 256] that these stand for.

    Args:
        x: What may be images, on any device.
        device: Where the result goes; no more than a part of `x` itself is ever there.

    Returns:
        None if some channel has more values, so that bytes would not do.
    """
    if x.ndim != 4 or x.dtype not in DTYPES or not x.numel():
        return None
    at_once = max(1, BYTES_AT_ONCE // x[:1].nbytes)
    values = [x.new_empty(0, device=device) for _ in range(x.shape[1])]
    for part in x.split(at_once):
        for channel, pixels in enumerate(part.to(device).unbind(1)):
            values[channel] = torch.cat([values[channel], pixels.unique()]).unique()
            if len(values[channel]) > NUM_VALUES:
                return None
    # Filled up with the largest, so that every line is in order; the first of equals is the one that is found.
    palette = torch.stack([torch.cat([known, known[-1:].expand(NUM_VALUES - len(known))]) for known in values])
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device, memory_format=torch.channels_last)
    for part, place in zip(x.split(at_once), codes.split(at_once), strict=True):
        images = part.to(device)
        for channel, pixels in enumerate(images.unbind(1)):
            place[:, channel] = torch.searchsorted(palette[channel], pixels.contiguous())
        decoded = decode(place.permute(0, 2, 3, 1), palette).permute(0, 3, 1, 2)
        if not torch.equal(*(values.flatten().view(torch.uint8) for values in (decoded, images))):
            return None  # two zeros, for instance
    return codes, palette


def decode(codes: Tensor, palette: Tensor) -> Tensor:
    """The values of bytes [..., C], whose last axis is that of the channels."""
    starts = NUM_VALUES * torch.arange(len(palette), dtype=torch.int32, device=codes.device)
    return functional.embedding(codes.to(torch.int32) + starts, palette.reshape(-1, 1)).squeeze(-1)
