"""`Piece`: one tensor on its way from a file to a parameter; what every format's reader yields."""

from dataclasses import dataclass

from octavo.runtime.quantization.parameter import Stored


@dataclass(frozen=True, slots=True)
class Piece:
    """origin: file and tensor, for messages; parameter, shard: where it belongs; tensor: whole, as stored."""

    origin: str
    parameter: str
    shard: str
    tensor: Stored
