"""An adapter that a rank cannot read ends its request, also where another rank can, which answers."""

from types import SimpleNamespace

import pytest
import torch

from octavo.base.errors import RequestError
from octavo.messages.adapters import AdapterRef
from octavo.runtime.distributed.context import ParallelContext
from octavo.runtime.distributed.group import Group
from octavo.runtime.kernels.adapters import LowRank
from octavo.runtime.worker.adapters import AdaptersPart


class Sites:
    """Those of a model that notes what is put into slots."""

    slots = SimpleNamespace(num_slots=3, device=torch.device("cpu"))

    def __init__(self):
        self.put_in = {}

    def broken(self):
        return {"q": LowRank(torch.ones(1, 2), torch.full((1, 2), torch.nan))}

    def put(self, slot, changes, wholes):
        self.put_in[slot] = changes


class Pool:
    """What this rank's disk says."""

    def get(self, ref):
        raise RequestError("gone")


@pytest.mark.parametrize(
    ("tp", "pp", "is_told"),
    [(0, 1, True), (1, 1, False), (0, 0, False), (1, 0, False)],
    ids=["answers", "beside it", "before it", "neither"],
)
def test_a_rank_that_fails_alone_makes_nan(tp, pp, is_told):
    sites, parallel = Sites(), ParallelContext(tp=Group(tp, 2), pp=Group(pp, 2))
    part = AdaptersPart(Pool(), sites, parallel, 2)
    ref = AdapterRef("mine", ())
    request = SimpleNamespace(request_id="a", spec=SimpleNamespace(adapter=ref))
    slot = part.read(request)
    assert part.has_failed
    if is_told:
        assert slot is None and not sites.put_in
    else:
        assert sites.put_in[slot]["q"].up.isnan().all() and part.read(request) == slot
