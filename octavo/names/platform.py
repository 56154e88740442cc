"""`current_platform`: vLLM's questions about the device at hand, answered by torch."""

import gc
import random
from typing import Any

import torch


class CurrentPlatform:
    """The device that an engine would take here: the first GPU, else the CPU."""

    @property
    def device_type(self) -> str:
        """cuda or cpu."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda_alike(self) -> bool:
        """Whether it is a GPU that torch calls cuda."""
        return self.device_type == "cuda"

    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.is_cuda_alike() and torch.version.hip is None

    def is_rocm(self) -> bool:
        """Whether it is an AMD GPU."""
        return self.is_cuda_alike() and torch.version.hip is not None

    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return not self.is_cuda_alike()

    def is_tpu(self) -> bool:
        """Never: only a name that is asked for (`device`) makes octavo take another device."""
        return False

    is_xpu = is_hpu = is_neuron = is_out_of_tree = is_tpu

    def get_device_name(self, device_id: int = 0) -> str:
        """The GPU's name; cpu."""
        return torch.cuda.get_device_name(device_id) if self.is_cuda_alike() else "cpu"

    def device_count(self) -> int:
        """GPUs; 1 for a CPU."""
        return torch.cuda.device_count() if self.is_cuda_alike() else 1

    def get_device_capability(self, device_id: int = 0) -> Any:
        """(major, minor) of a GPU; None for a CPU."""
        return torch.cuda.get_device_capability(device_id) if self.is_cuda_alike() else None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes of a GPU, or of the machine."""
        if self.is_cuda_alike():
            return int(torch.cuda.get_device_properties(device_id).total_memory)
        import psutil

        return int(psutil.virtual_memory().total)

    def seed_everything(self, seed: int | None) -> None:
        """Seed Python and torch. octavo's own noise comes from `seed` of requests and engines alone."""
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)


current_platform = CurrentPlatform()
set_random_seed = current_platform.seed_everything


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of engines that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
