"""Commands that ranks refuse have one status and one text over HTTP, on however many; the server goes on.

Runs with --whole alone; tests/unit/engine/test_multiprocess_executor.py has the parts.
"""

import pytest

from tests.served_process import ServeProcess

SIZES = {"one": [], "tp": ["-tp", "2"], "pp": ["-pp", "2"], "dp": ["-dp", "2"]}
REFUSALS = [
    ("/collective_rpc", {"method": "nonsense"}, 501, "Workers know no verb 'nonsense'"),
    ("/collective_rpc", {"method": "describe", "kwargs": {"a": 1}}, 400, "describe takes ()"),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "holds neither"),
    ("/init_weight_transfer_engine", {"init_info": {}}, 501, "weight_transfer_config"),
    ("/start_profile", {}, 501, "Profiling is off"),
]
ASLEEP = [
    ("/resume", {}, 400, "The engine is asleep"),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "wake_up comes before new weights"),
]


def are_refused(server, refusals):
    for path, body, status, text in refusals:
        answer = server.post(path, body)
        assert (answer.status_code, text in answer.text) == (status, True), (path, answer.text)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_status_and_text_are_those_of_one_rank(tiny_llama, sizes):
    options = ["--dtype", "float32", "--skip-tokenizer-init", "--num-gpu-blocks-override", "64"]
    options += ["--cpu-threads", "1", "--dev-mode", *sizes]
    ask = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with ServeProcess(program=["-m", "octavo", "serve", str(tiny_llama), *options]) as server:
        before = server.post("/v1/completions", ask)
        assert before.status_code == 200, before.text
        are_refused(server, REFUSALS)
        assert server.post("/sleep", {}).status_code == 200
        are_refused(server, ASLEEP)
        assert server.post("/wake_up", {}).status_code == 200
        answer = server.post("/collective_rpc", {"method": "describe"})
        assert all(rank["kv_cache_bytes"] for rank in answer.json()["results"]), "all are awake"
        assert server.post("/v1/completions", ask).json()["choices"] == before.json()["choices"]
