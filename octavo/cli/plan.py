"""Say what memory a model will take, before it is loaded: weights, steps, KV cache, per rank.

Reads the model's config and headers only. With --device-memory it plans for a GPU that need not be here.
The exit status is 1 when the engine could not start; then the last line says what to change.
"""

import argparse
from typing import Any

import msgspec

from octavo.base.registry import load_object
from octavo.cli.flags import add_engine_flags, engine_options
from octavo.cli.units import whole_number
from octavo.config.args import EngineArgs
from octavo.config.resolve import resolve

_PLAN = "octavo.engine.memory_plan:plan_memory"

EXAMPLES = """\
  octavo plan org/name --max-model-len 32k
  octavo plan org/name --device-memory 80GiB -tp 4
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument(
        "--device-memory",
        type=whole_number,
        default=0,
        metavar="BYTES",
        help="Memory of each device, as 80GiB; the device is then cuda unless --device says otherwise "
        "(default: what is free here now).",
    )
    parser.add_argument("--json", action="store_true", help="Print the plan as JSON, in bytes.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; status 1 if it cannot work."""
    if args.model_tag:
        args.model = args.model_tag
    options = engine_options(args)
    if args.device_memory:
        options.setdefault("device", "cuda")
    plan = load_object(_PLAN)(
        resolve(EngineArgs.from_options(options), needs_device=False), args.device_memory
    )
    print(msgspec.json.encode(plan).decode() if args.json else _table(plan))
    return 1 if plan.problem else 0


def _table(plan: Any) -> str:
    lent = " (lent by the system)" if plan.device == "cpu" else ""
    on_host = f"  {_size(plan.host_weight_bytes).strip()} of them in host memory"
    rows = [
        ("model", f"{plan.model} ({plan.architecture}), {plan.dtype}"),
        ("device", f"{plan.device} x {plan.num_ranks}; all figures are of one rank"),
        ("weights", _size(plan.weight_bytes) + on_host * bool(plan.host_weight_bytes)),
        *[("", f"{count} x {kind}") for kind, count in plan.matrices.items()],
        (
            "largest step",
            f"{_size(plan.step_bytes)}  {plan.max_num_batched_tokens} tokens, {plan.max_num_seqs} requests"
            + lent,
        ),
        ("recorded steps", _size(plan.recorded_bytes)),
        ("tables", _size(plan.table_bytes)),
        *[("adapters", _size(plan.adapter_bytes))] * bool(plan.adapter_bytes),
        ("KV cache", f"{_size(plan.kv_bytes)}  of {_size(plan.kv_available_bytes).strip()} that are left"),
        ("per token", f"{_size(plan.kv_bytes_per_token)}  {plan.kv_cache_dtype}"),
        ("per block", f"{_size(plan.kv_bytes_per_block)}  {plan.block_size} tokens"),
        *[("per request", f"{_size(plan.state_bytes)}  states")] * bool(plan.state_bytes),
        ("room for", f"{plan.num_blocks} blocks, {plan.num_tokens} tokens"),
        ("", f"{plan.num_sequences:.1f} requests of max_model_len={plan.max_model_len} at once"),
        ("swap space", f"{_size(plan.host_bytes)}  of host memory"),
    ]
    lines = [f"{name:<15} {value}" for name, value in rows]
    return "\n".join([*lines, plan.problem or "It fits."])


def _size(num_bytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):8.2f} {unit}"
    return f"{num_bytes:8d} B  "
