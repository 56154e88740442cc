"""An NVIDIA GPU, served by the torch twins until it has kernels of its own."""

import torch

from octavo.base.errors import ConfigError
from octavo.runtime.kernels.ref.table import ref_table
from octavo.runtime.platforms.platform import Platform


class CUDAPlatform(Platform):
    """One GPU."""

    @classmethod
    def create(cls, device: torch.device, threads: int) -> "CUDAPlatform":
        """Make `device` current. Raises ConfigError when torch sees no such GPU."""
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            raise ConfigError(
                f"device={str(device)!r}: torch sees {count} GPUs here; use device='cpu', or a CUDA torch."
            )
        torch.set_num_threads(threads)
        torch.cuda.set_device(device)
        return cls(device, ref_table())

    def available_memory_bytes(self) -> int:
        """Free memory of the GPU."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Activations have the type of the weights."""
        return dtype
