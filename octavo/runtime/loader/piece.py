"""A `Piece` is one tensor on its way from a file to a parameter; every format's reader yields them."""

from dataclasses import dataclass

from octavo.runtime.quantization.parameter import Stored


@dataclass(frozen=True, slots=True)
class Piece:
    """A Piece says where a tensor belongs.

    origin: file and tensor, for messages; parameter, shard: its place; tensor: whole, as stored
    """

    origin: str
    parameter: str
    shard: str
    tensor: Stored
