"""`DispatchMode`: torch's TorchDispatchMode, typed, and without the seconds that the first use of one takes.

torch tells its compiler to skip what a mode does, and imports all of it for that. Nothing here is compiled.
"""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A subclass defines `__torch_dispatch__(func, types, args, kwargs)`, to which every operation goes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
