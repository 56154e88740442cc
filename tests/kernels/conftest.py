import pytest

from octavo.base import env
from octavo.runtime.kernels.cpu.table import cpu_table
from octavo.runtime.kernels.table import KernelTable


@pytest.fixture(scope="session", params=[1, 2], ids=lambda n: f"{n}threads")
def fast(request: pytest.FixtureRequest) -> KernelTable:
    """The compiled kernels. CI has a compiler: a build that fails must fail the tests, not skip them."""
    if env.kernels_disabled():
        pytest.skip("OCTAVO_NO_CPU_KERNELS is set")
    table = cpu_table(request.param)
    assert table.name == "cpu"
    return table
