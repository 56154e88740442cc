"""How the model is spread over processes and devices."""

from dataclasses import dataclass, replace
from typing import Any

from octavo.base.devices import kind_of
from octavo.config.option import TARGET, Concern, option

ALL_LAYERS = -1


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(metaclass=Concern):
    """Ranks and where they run."""

    device: str = option(
        "auto",
        "Where the model runs: cpu, cuda, rocm, xpu, mps, or what an installed package brings; auto = cuda "
        "or rocm if there is one.",
    )
    tensor_parallel_size: int = option(1, "Ranks that share each layer.")
    pipeline_parallel_size: int = option(1, "Stages that have some of the layers each.")
    decode_context_parallel_size: int = option(
        1,
        "Ranks of tensor_parallel_size that divide the tokens of the KV cache, where they would keep copies: "
        "of models with fewer key heads than ranks, and with latent attention.",
    )
    cp_kv_cache_interleave_size: int = option(
        1, "Tokens side by side that one of these ranks keeps; it divides block_size."
    )
    enable_expert_parallel: bool = option(
        False,
        "Give each rank of tensor_parallel_size some of the experts whole, not a part of each; the ranks of "
        "all replicas share them.",
    )
    enable_eplb: bool = option(
        False, "Move experts between the ranks of enable_expert_parallel, by how many tokens choose them."
    )
    eplb_config: dict[str, Any] = option(
        {}, "How: num_redundant_experts, step_interval, window_size, log_balancedness, as in vLLM."
    )
    data_parallel_size: int = option(
        1,
        "Replicas of the model; requests are balanced between them. They share nothing, or with "
        "enable_expert_parallel the experts.",
    )
    data_parallel_rpc_port: int = option(
        0, "TCP port at which replicas that share experts meet; 0 = a free one."
    )
    data_parallel_hybrid_lb: bool = option(
        False,
        "Start data_parallel_size_local of the replicas here and balance between these; something else does "
        "between such servers.",
    )
    data_parallel_size_local: int = option(0, "Replicas that start here; 0 = all.")
    data_parallel_start_rank: int = option(0, "Number of the first of them.")
    enable_elastic_ep: bool = option(
        False, "Let replicas be added and drained while serving, also beside a single one."
    )
    nnodes: int = option(1, "Machines that share the ranks of an engine, in equal numbers.")
    node_rank: int = option(0, "Which of them this is; the engine itself runs on node 0.")
    master_addr: str = option("127.0.0.1", "Address of node 0, where it listens for the other nodes.")
    master_port: int = option(29501, "TCP port of node 0 for the other nodes.")
    node_timeout: float = option(
        20.0, "Seconds without a sign of life after which nodes are lost to each other; shorter breaks pass."
    )
    distributed_timeout_seconds: int = option(
        600, "Seconds that ranks and nodes wait for each other, at the start and within a step."
    )
    data_parallel_rank: int = option(
        -1, "Which of the replicas this engine is, where others balance between engines; -1 = all are here."
    )
    distributed_executor_backend: str = option(
        "auto",
        "inproc: the core's process; mp: one process per rank; ray: the same, where Ray places them; "
        "external_launcher: this process is one of the ranks that torchrun started; or an Executor class of "
        "your own.",
        ("auto", "inproc", "uni", "mp", "ray", "external_launcher", TARGET),
    )
    disable_custom_all_reduce: bool = option(
        False, "Let NCCL make all sums over GPUs, also those that kernels over peer memory make sooner."
    )
    cpu_threads: int = option(0, "Threads of CPU kernels per rank; 0 = the cores this process may use.")
    enforce_eager: bool = option(False, "Capture no CUDA graphs; on a CPU, record no calls.")
    cpu_offload_gb: float = option(
        0.0, "GiB of weights per GPU that stay in host memory; they are copied to the GPU ahead of their use."
    )
    cpu_offload_experts: int = option(
        0,
        "So many of the first layers keep experts in host memory, where the GPU reads them; all (or -1).",
        words={"all": ALL_LAYERS},
    )
    expert_cache_gb: float = option(
        1.0, "GiB per GPU for copies of the most used of these experts (cpu_offload_experts)."
    )
    offload_group_size: int = option(
        0, "Layers per group, the last of which keep their weights in host memory; 0 = no groups."
    )
    offload_num_in_group: int = option(1, "Layers of each group that keep their weights in host memory.")
    offload_prefetch_step: int = option(
        1, "Layers whose weights are copied ahead of their use; each takes a buffer on the GPU."
    )

    @property
    def device_kind(self) -> str:
        """Return the device's name without a number."""
        return kind_of(self.device)

    def on_device(self, number: int) -> "ParallelConfig":
        """Return it for one device of that kind."""
        return self if self.device_kind == "cpu" else replace(self, device=f"{self.device_kind}:{number}")

    @property
    def num_replicas(self) -> int:
        """Return how many replicas start here."""
        if self.data_parallel_rank >= 0:
            return 1
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def first_replica(self) -> int:
        """Return the number of the first of them."""
        return max(self.data_parallel_rank, self.data_parallel_start_rank)

    @property
    def shares_experts(self) -> bool:
        """Return True if replicas have some of the experts each."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def world_size(self) -> int:
        """Return how many ranks a replica has."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def node_ranks(self) -> range:
        """Return the ranks of this node. Ray places ranks one by one: each is a node, beside the engine's."""
        if self.distributed_executor_backend == "ray":
            return range(max(0, self.node_rank - 1), self.node_rank)
        count = self.world_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def output_rank(self) -> int:
        """Return the rank that answers: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size
