"""Counts what ranks and processes say to each other in one step, and measures what the host does for it.

Bytes and messages follow from the sizes of the model; nothing is sent between devices here. Host times are
measured on this machine: planning excluded, one step encoded and handed to every rank's pipe, one request
placed among the replicas.

    python -m benchmarks.scaling_counts
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from octavo.base.transport import Broadcaster, Receiver
from octavo.frontend.client.balancer import Balancer
from octavo.messages.request import EngineRequest, Limits, RequestSpec, Standing
from octavo.messages.sampling import SamplingParams
from octavo.messages.step import SchedulerOutput

LAYERS, HIDDEN, VOCAB, BYTES = 32, 4096, 128_256, 2
BATCH = 256
"""Decoding requests of one replica."""


@dataclass(frozen=True)
class Counts:
    """Per step of one replica."""

    tp_bytes: int
    """Sent by one rank in sums and gathers, as a ring does them."""
    tp_messages: int
    pp_bytes: int
    """Sent from one stage to the next, by all of its ranks."""
    pp_messages: int
    engine_messages: int


def count(tp: int, pp: int) -> Counts:
    """Count for tp x pp ranks; requests take turns, so a step has BATCH / pp of them."""
    rows = BATCH // pp
    sums = 2 * LAYERS // pp + (1 if pp == 1 else 0)
    ring = 2 * (tp - 1)
    sum_bytes = ring * rows * HIDDEN * BYTES // tp
    gather_bytes = (tp - 1) * rows * VOCAB * BYTES // tp
    return Counts(
        sums * sum_bytes + (gather_bytes if tp > 1 else 0),
        sums * ring + (tp - 1),
        (tp * rows * HIDDEN * BYTES) if pp > 1 else 0,
        tp * (pp - 1),
        tp * pp + 1,
    )


def step_of(size: int) -> SchedulerOutput:
    """A step in which `size` requests decode."""
    names = [f"request-{i:016x}" for i in range(size)]
    return SchedulerOutput(7, [], [], names, [1000] * size, [1] * size, {}, [])


def seconds_to_send(num_ranks: int) -> float:
    """Encode a step of BATCH requests and queue it for every rank."""
    with tempfile.TemporaryDirectory() as folder:
        addresses = [f"ipc://{Path(folder) / str(i)}" for i in range(num_ranks)]
        receivers = [Receiver(address, SchedulerOutput) for address in addresses]
        sender, step = Broadcaster(addresses), step_of(BATCH)
        times = []
        for _ in range(20):
            begun = time.perf_counter()
            sender.send(step)
            times.append(time.perf_counter() - begun)
            for receiver in receivers:
                receiver.receive(5)
        sender.close(0)
        for receiver in receivers:
            receiver.close()
    return sorted(times)[len(times) // 2]


def seconds_to_place(num_replicas: int, prompt: int = 1000) -> float:
    """Place one request among replicas that all have work."""
    balancer = Balancer(num_replicas)
    requests = [
        EngineRequest(
            str(i), list(range(i, i + prompt)), RequestSpec(SamplingParams(), 0), Limits(9), Standing(0.0)
        )
        for i in range(300)
    ]
    begun = time.perf_counter()
    for request in requests:
        balancer.place(request)
    return (time.perf_counter() - begun) / len(requests)


def main() -> None:
    """Print the tables of docs/scaling.md."""
    print("| devices | dp x pp x tp | MB a rank sends | its messages | MB between stages | engine messages |")
    for dp, pp, tp in ((1, 1, 8), (8, 1, 1), (2, 2, 2), (8, 1, 8), (16, 2, 2), (128, 1, 8), (64, 2, 8)):
        c = count(tp, pp)
        print(
            f"| {dp * pp * tp} | {dp} x {pp} x {tp} | {c.tp_bytes / 1e6:.1f} | {c.tp_messages} | "
            f"{c.pp_bytes / 1e6:.1f} | {dp * c.engine_messages} |"
        )
    for ranks in (1, 2, 8, 64):
        print(f"{ranks} ranks: {seconds_to_send(ranks) * 1e6:.0f} us to encode and queue a step")
    for replicas in (2, 8, 64, 1024):
        print(f"{replicas} replicas: {seconds_to_place(replicas) * 1e6:.0f} us to place 1,000 tokens")


if __name__ == "__main__":
    main()
