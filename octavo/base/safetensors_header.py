"""The head of a safetensors file, without the library: where its tensors are, and of which shapes."""

import json
from pathlib import Path
from typing import Any

_MOST_BYTES = 100 << 20


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return what the head says of each tensor, and where the first begins. Raises OSError, ValueError.

    Checked is that each has a shape, and a place in the file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_BYTES:
            raise ValueError(f"a header of {length} bytes")
        start, size = 8 + length, path.stat().st_size
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, row in header.items():
                first, last = row["data_offsets"]
                if not 0 <= first <= last <= size - start or not isinstance(row["shape"], list):
                    raise ValueError(f"{name} is not in the file")
        except (RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(repr(error)) from error
    return header, start
