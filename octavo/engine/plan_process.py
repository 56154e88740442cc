"""`python -m octavo.engine.plan_process DEVICE_BYTES`: the MemoryPlan of the EngineConfig on standard input.

For servers of several models, which import no torch: the plan must be known before another model gives way.
The plan is JSON. A fault is told as {"error": …}; {"unknown": …} is one that only loading can tell.
"""

import sys

import msgspec

from octavo.base.errors import OctavoError, Unsupported
from octavo.config.engine import EngineConfig
from octavo.engine.memory_plan import plan_memory


def main(arguments: list[str]) -> int:
    """Write the plan. Returns the exit code."""
    try:
        config = EngineConfig.from_msgpack(sys.stdin.buffer.read())
        told: object = plan_memory(config, int(arguments[0]))
    except Unsupported as error:
        told = {"unknown": str(error)}
    except OctavoError as error:
        told = {"error": str(error)}
    sys.stdout.buffer.write(msgspec.json.encode(told))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
