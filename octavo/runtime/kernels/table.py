"""`KernelTable`: every kernel the runtime may call, as plain functions in families.

Platforms build a table once, at construction (`cpu_table`, `cuda_table`, `ref_table`); layers and attention
back ends hold it, or the family they need, and call its fields. Each family has a file of its own with the
signature and meaning of its kernels; `ref/` holds the references in torch that say what is right. A new
family is one file and one field here. Callers are right about shapes by construction: a kernel may `assert`
them.
"""

from dataclasses import dataclass

from octavo.runtime.kernels.activations import Activate, Xielu, xielu
from octavo.runtime.kernels.adapters import AdapterKernels
from octavo.runtime.kernels.attention import AttentionKernels
from octavo.runtime.kernels.experts import ExpertKernels
from octavo.runtime.kernels.linear import LinearKernels
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.peers import PeerKernels
from octavo.runtime.kernels.recurrent import RecurrentKernels
from octavo.runtime.kernels.sampling import SamplingKernels
from octavo.runtime.kernels.steps import StepKernels


@dataclass(frozen=True)
class KernelTable:
    """One implementation of every family; a platform may exchange one."""

    name: str
    attention: AttentionKernels
    norms: NormKernels
    activate: Activate
    linear: LinearKernels
    experts: ExpertKernels
    recurrent: RecurrentKernels
    sampling: SamplingKernels
    steps: StepKernels
    adapters: AdapterKernels
    xielu: Xielu = xielu
    peers: PeerKernels | None = None
    """Where devices may read each other's memory."""
