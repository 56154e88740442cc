"""Benchmarks of servers without a model: the tokenizer's tokens are bytes."""

import gc

import pytest

from octavo.bench import serve
from octavo.bench.data_options import DataOptions
from octavo.bench.load_options import LoadOptions, ReportOptions
from octavo.bench.serve import ServeBench
from tests.fakes import ByteTokenizer


@pytest.fixture(autouse=True)
def byte_tokens(monkeypatch):
    monkeypatch.setattr(serve, "locate", lambda name: name)
    monkeypatch.setattr(serve, "load_tokenizer", lambda folder: ByteTokenizer())
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # or each run looks through all that the tests hold


@pytest.fixture
def bench_of():
    """A benchmark of a server, from options of any kind."""

    def make(server, body=None, **options):
        options = {"base_url": server.url, "disable_tqdm": True, "num_prompts": 4, "input_len": 8, **options}
        kinds = (DataOptions, LoadOptions, ReportOptions)
        parts = [{k: v for k, v in options.items() if k in kind.__dataclass_fields__} for kind in kinds]
        assert {name for part in parts for name in part} == set(options)
        data, load, report = (kind(**part) for kind, part in zip(kinds, parts, strict=True))
        return ServeBench(data=data, load=load, report=report, body=body or {})

    return make
