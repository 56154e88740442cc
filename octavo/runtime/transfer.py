"""Arrays on their way from the host to the device, in copies that neither side waits for.

Used by the worker and the sampler. Copies in the other direction are in sampling/output.
"""

from collections.abc import Callable

import numpy as np
import torch

Array = np.ndarray  # of int64 unless said otherwise
Send = Callable[[list[Array], torch.device], list[torch.Tensor]]
"""See `send`."""
_MANY = 32768
"""So many numbers torch would copy with all its threads, which wait for cores that other processes use."""


def to_device(array: Array, device: torch.device) -> torch.Tensor:
    """Return a tensor of the same values on `device`; on a CPU it may be the array's own memory."""
    return staged(array, device).to(device, non_blocking=True)


def send(arrays: list[Array], device: torch.device) -> list[torch.Tensor]:
    """Bring several int64 arrays to the device in one copy."""
    joined = to_device(np.concatenate(arrays, axis=None), device)
    parts = torch.split(joined, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def staged(array: Array, device: torch.device) -> torch.Tensor:
    """Return `array` in memory that `device` can copy from while the host goes on: pinned, if it is a GPU's.

    torch takes such memory back only when the copy is done, and hands it out again without asking the driver.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if array.size < _MANY:
        return tensor.pin_memory()
    pinned = torch.empty_like(tensor, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned
