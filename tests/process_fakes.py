"""Fakes for processes: loaded there by name, they take their orders from the config (`checkpoint.config`).

fault:      "place:action"; place = load, or the id of a step; action = raise, config, exit, hang, compute
fault_rank: the rank that fails (FakeWorker)
deadly:     a token; a prompt with it ends the process (ObedientExecutor)
step_s:     how long a step lasts (ObedientExecutor)
gate:       a FIFO: each byte written to it lets one step through (ObedientExecutor)
refuses:    a file; while it is there, replica 1 refuses one command of the workers (ObedientExecutor)
"""

import dataclasses
import os
import time
from pathlib import Path

from octavo.base.errors import ConfigError, RequestError, Unsupported
from octavo.engine.executor.multiprocess import MultiprocessExecutor
from octavo.messages.kv import HeadsKV, KVCacheGroup, ModelReady
from octavo.messages.step import ModelRunnerOutput
from tests.fakes import FakeExecutor, fake_config

EXECUTOR = "tests.process_fakes:ObedientExecutor"
RANKS = "tests.process_fakes:FakeRanks"
WORKER = "tests.process_fakes:FakeWorker"
EXACT_RANKS = "tests.process_fakes:ExactRanks"


def process_config(executor=EXECUTOR, *, tp=1, **orders):
    """A resolved config with `orders` for the fakes."""
    config = fake_config()
    return dataclasses.replace(
        config,
        parallel=dataclasses.replace(
            config.parallel, distributed_executor_backend=executor, tensor_parallel_size=tp
        ),
        checkpoint=dataclasses.replace(config.checkpoint, config={**config.checkpoint.config, **orders}),
    )


def is_alive(pid):
    """Whether the process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, timeout_s):
    """Poll `condition`; returns whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def fail_at(place, config, rank=0):
    """Carry out the config's order if it is for this place and rank."""
    orders = config.checkpoint.config
    faulty_place, _, action = orders.get("fault", "").partition(":")
    if place != faulty_place or rank != orders.get("fault_rank", 0):
        return
    match action:
        case "raise":
            raise RuntimeError("the fake was told to fail")
        case "config":
            raise ConfigError("the option is wrong")
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "compute":
            end_s = time.monotonic() + 1.5
            while time.monotonic() < end_s:
                pass


class ObedientExecutor(FakeExecutor):
    """FakeExecutor that fails as told."""

    def start(self, config):
        fail_at("load", config)
        path = config.checkpoint.config.get("gate")
        self._gate = os.open(path, os.O_RDWR) if path else None
        return super().start(config)

    def call(self, verb, arguments):
        if verb == "unsendable":
            return [object()]
        refuses = self.config.checkpoint.config.get("refuses")
        if refuses and self.config.parallel.data_parallel_rank == 1 and Path(refuses).exists():
            Path(refuses).unlink()
            raise RequestError("told to refuse")
        return [verb, arguments, os.getpid()]

    def _run(self, step):
        fail_at(str(step.step_id), self.config)
        deadly = self.config.checkpoint.config.get("deadly")
        if any(deadly in new.token_ids for new in step.new_requests):
            os._exit(3)
        time.sleep(self.config.checkpoint.config.get("step_s", 0))
        if self._gate is not None:
            os.read(self._gate, 1)
        self.steps.clear()  # nobody can read them here, and a soak would call them a leak
        return super()._run(step)


class FakeRanks(MultiprocessExecutor):
    """Real processes around FakeWorkers."""

    def __init__(self):
        super().__init__(WORKER)


class Done:
    """A step that waits for nothing."""

    is_ready = True

    def __init__(self, output):
        self.read = lambda: output


class FakeWorker:
    """A Worker without torch: its sampled tokens tell step and rank."""

    def __init__(self, config, rank, init_method):
        self.config, self.rank, self.init_method = config, rank, init_method
        self.masks = []

    def load(self):
        fail_at("load", self.config, self.rank)
        spec = HeadsKV(1, 4, "float32", 32)
        return ModelReady([KVCacheGroup(spec, (0,))], 1000 + self.rank)

    def allocate(self, plan):
        self.plan = plan

    def execute(self, step):
        fail_at(str(step.step_id), self.config, self.rank)
        token = 1000 * self.rank + step.step_id
        return Done(ModelRunnerOutput(step.step_id, [[token] for _ in step.request_ids]))

    def sample(self, masks):
        self.masks.append(masks.indexes)

    def call(self, verb, arguments):
        match verb:
            case "echo":
                return arguments
            case "masks":
                return self.masks
            case "whoami":
                return [self.rank, os.getpid(), self.init_method, os.environ.get("GLOO_SOCKET_IFNAME")]
            case "unsendable":
                return object()
            case "plan":
                return self.plan.num_blocks
            case "refuse" | "sleep" if self.rank in arguments["ranks"]:
                raise {"own": RequestError, "other": Unsupported, "bug": KeyError}[arguments["kind"]]("no")
            case "refuse" | "sleep":
                return None
        raise ValueError(f"no verb {verb}")

    def close(self):
        self.plan = None


class ExactRanks(MultiprocessExecutor):
    """Real processes around ExactWorkers."""

    def __init__(self):
        super().__init__("tests.process_fakes:ExactWorker")


class ExactWorker(FakeWorker):
    """Computes what a FakeExecutor does, on every rank."""

    def load(self):
        fail_at("load", self.config, self.rank)
        self._fake = FakeExecutor()
        return self._fake.start(self.config)

    def allocate(self, plan):
        self._fake.allocate(plan)

    def execute(self, step):
        time.sleep(self.config.checkpoint.config.get("step_s", 0))
        self._fake.steps.clear()
        return Done(self._fake._run(step))
