"""KV caches shared by several engines: tokens stay the same, and what one computed the next need not."""

import asyncio
import random
import time

import pytest

from octavo import AsyncLLM, EngineArgs, SamplingParams
from octavo.base.errors import ConfigError, Unsupported
from octavo.config import KVTransferConfig

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)


def storage(folder, role="kv_both", **extra):
    return KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_role=role,
        kv_connector_extra_config={"shared_storage_path": str(folder), **extra},
    )


def prompts(count=3, length=70):
    generator = random.Random(5)
    return [[generator.randrange(128) for _ in range(length)] for _ in range(count)]


def ask(llm, work, **fields):
    outputs = llm.generate([{"prompt_token_ids": ids, **fields} for ids in work], PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs], [o.num_cached_tokens for o in outputs]


def files(folder):
    return sorted(path for path in folder.rglob("*-*-*") if path.is_file())


def await_files(folder, count):
    for _ in range(1000):
        if len(files(folder)) == count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{len(files(folder))} files, not {count}")


@pytest.fixture
def make_engine(make_llm):
    """An engine; asked, and shut down, so that the next one starts from the files alone."""

    def run(path, work, folder=None, role="kv_both", extra=None, fields=None, **options):
        config = storage(folder, role, **(extra or {})) if folder else None
        llm = make_llm(path, kv_transfer_config=config, **options)
        tokens, cached = ask(llm, work, **(fields or {}))
        stats = llm.llm_engine.stats
        llm.shutdown()
        return tokens, cached, stats

    return run


def test_a_second_engine_finds_what_the_first_computed(tiny_model, make_engine, tmp_path):
    work = prompts()
    expected, _, _ = make_engine(tiny_model, work)
    first, cached, stats = make_engine(tiny_model, work, tmp_path)
    assert first == expected and cached == [0, 0, 0]
    assert (stats.external_queries, stats.external_hits) == (192, 0)
    second, cached, stats = make_engine(tiny_model, work, tmp_path)
    assert second == expected and cached == [64, 64, 64]
    assert (stats.external_queries, stats.external_hits) == (192, 192)


def test_longer_prompts_go_on_from_there(tiny_model, make_engine, tmp_path):
    work = prompts()
    make_engine(tiny_model, work, tmp_path)
    longer = [[*ids, *ids[:40]] for ids in work]
    expected, _, _ = make_engine(tiny_model, longer)
    found, cached, _ = make_engine(tiny_model, longer, tmp_path, num_gpu_blocks_override=60)
    assert found == expected and cached == [64, 64, 64]


def test_damaged_files_are_computed_anew(tiny_llama, make_engine, tmp_path):
    work = prompts(4)
    expected, _, _ = make_engine(tiny_llama, work, tmp_path)
    blocks = files(tmp_path)
    assert len(blocks) == 16
    generator = random.Random(1)
    for path in blocks:
        whole = path.read_bytes()
        match generator.randrange(4):
            case 0:
                path.write_bytes(whole[: generator.randrange(len(whole))])
            case 1:
                path.unlink()
            case 2:
                path.write_bytes(generator.choice(blocks).read_bytes() if len(blocks) > 1 else b"")
    found, cached, _ = make_engine(tiny_llama, work, tmp_path)
    assert found == expected
    assert sum(cached) < 4 * 64


def test_salts_part_tenants(tiny_llama, make_engine, tmp_path):
    work = prompts(1)
    make_engine(tiny_llama, work, tmp_path, fields={"cache_salt": "a"})
    for salt, expected in (("b", 0), ("a", 64)):
        _, cached, _ = make_engine(tiny_llama, work, tmp_path, "kv_consumer", fields={"cache_salt": salt})
        assert cached == [expected]


def test_roles(tiny_llama, make_engine, tmp_path):
    work = prompts(1)
    make_engine(tiny_llama, work, tmp_path, "kv_consumer")
    assert files(tmp_path) == []
    make_engine(tiny_llama, work, tmp_path, "kv_producer")
    assert len(files(tmp_path)) == 4
    assert make_engine(tiny_llama, work, tmp_path, "kv_producer")[1] == [0]
    assert make_engine(tiny_llama, work, tmp_path, "kv_consumer")[1] == [64]


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"block_size": 8}, {"kv_cache_dtype": "bfloat16"}]
)
def test_other_numbers_are_not_exchanged(tiny_llama, make_engine, tmp_path, options):
    work = prompts(1)
    make_engine(tiny_llama, work, tmp_path)
    assert make_engine(tiny_llama, work, tmp_path, **options)[1] == [0]


def test_other_weights_are_not_exchanged(tiny_llama, make_engine, tmp_path):
    work = prompts(1)
    copy = tmp_path / "model"
    copy.mkdir()
    for path in tiny_llama.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    make_engine(copy, work, tmp_path)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert make_engine(copy, work, tmp_path)[1] == [0]


def test_the_folder_stays_within_its_bound(tiny_llama, make_engine, tmp_path):
    make_engine(tiny_llama, prompts(1), tmp_path)
    size = files(tmp_path)[0].stat().st_size
    make_engine(tiny_llama, prompts(8), tmp_path, extra={"max_bytes": 5 * size})
    assert 1 <= len(files(tmp_path)) <= 5


def test_an_engine_forgets_and_reads_again(tiny_llama, make_llm, tmp_path):
    work = prompts(1)
    llm = make_llm(tiny_llama, kv_transfer_config=storage(tmp_path))
    expected = ask(llm, work)
    assert llm.reset_prefix_cache()
    await_files(tmp_path, 4)
    assert ask(llm, work) == (expected[0], [64])
    assert llm.llm_engine.stats.external_hits == 64


def test_the_files_can_be_forgotten_too(tiny_llama, make_llm, tmp_path):
    work = prompts(1)
    llm = make_llm(tiny_llama, kv_transfer_config=storage(tmp_path))
    expected, _ = ask(llm, work)
    assert llm.reset_prefix_cache(reset_connector=True) is True
    assert files(tmp_path) == [], "nor does what waited to be written come"
    assert ask(llm, work) == (expected, [0])
    await_files(tmp_path, 4)
    reader = make_llm(tiny_llama, kv_transfer_config=storage(tmp_path, "kv_consumer"))
    assert reader.reset_prefix_cache(reset_connector=True) is False
    assert ask(reader, work) == (expected, [64])


def test_a_core_in_its_own_process_and_its_metrics(tiny_llama, make_engine, tmp_path):
    """While one engine's answers grow, another's prompts are read beside its loop."""
    work = prompts()
    expected, _, _ = make_engine(tiny_llama, work, tmp_path)

    async def run():
        args = EngineArgs(
            model=str(tiny_llama),
            dtype="float32",
            skip_tokenizer_init=True,
            num_gpu_blocks_override=400,
            kv_transfer_config=storage(tmp_path),
        )
        engine = AsyncLLM.from_engine_args(args)
        try:
            tokens, cached = [], []
            for i, ids in enumerate(work):
                async for output in engine.generate({"prompt_token_ids": ids}, PARAMS, f"r{i}"):
                    last = output
                tokens.append(last.outputs[0].token_ids)
                cached.append(last.num_cached_tokens)
            metrics = {metric.name: getattr(metric, "value", None) for metric in await engine.get_metrics()}
            return tokens, cached, metrics
        finally:
            await engine.shutdown()

    tokens, cached, metrics = asyncio.run(run())
    assert tokens == expected and cached == [64, 64, 64]
    assert metrics["vllm:external_prefix_cache_hits"] == 192


@pytest.mark.slow
def test_each_rank_keeps_its_heads(tiny_llama, make_llm, tmp_path):
    work = prompts(2)
    llm = make_llm(tiny_llama, kv_transfer_config=storage(tmp_path), tensor_parallel_size=2)
    expected, _ = ask(llm, work)
    await_files(tmp_path, 2 * 2 * 4)
    llm.reset_prefix_cache()
    assert ask(llm, work) == (expected, [64, 64])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"kv_connector": "MooncakeConnector"}, "'MooncakeConnector' is not supported"),
        (storage("/tmp/x", "kv_sender"), "kv_role must be one of kv_both, kv_producer, kv_consumer"),
        ({"kv_connector": "SharedStorageConnector", "kv_role": "kv_both"}, "must hold 'shared_storage_path'"),
        (storage("/tmp/x", max_bytes=0), "max_bytes must be a whole number above 0"),
        (storage("/tmp/x", max_size=1), "has no max_size"),
        ({"kv_connector": "SharedStorageConnector", "kv_rank": 0}, "has no kv_rank"),
    ],
)
def test_what_octavo_has_not_is_refused(tiny_llama, make_llm, config, text):
    with pytest.raises((ConfigError, Unsupported), match=text):
        make_llm(tiny_llama, kv_transfer_config=config)


def test_it_needs_the_prefix_cache(tiny_llama, make_llm, tmp_path):
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        make_llm(tiny_llama, kv_transfer_config=storage(tmp_path), enable_prefix_caching=False)
