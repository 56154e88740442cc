"""How the model is spread over processes and devices."""

from dataclasses import dataclass

from octavo.config.option import TARGET, option


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks and where they run."""

    device: str = option(
        "auto", "Where the model runs; auto = cuda if there is one.", ("auto", "cpu", "cuda")
    )
    tensor_parallel_size: int = option(1, "Ranks that share each layer.")
    distributed_executor_backend: str = option(
        "auto",
        "inproc: the core's process; mp: one process per rank; or an Executor class of your own.",
        ("auto", "inproc", "uni", "mp", TARGET),
    )
    cpu_threads: int = option(0, "Threads of CPU kernels per rank; 0 = the cores this process may use.")
    enforce_eager: bool = option(False, "No device graphs.")
