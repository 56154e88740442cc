"""The core in the caller's process, loaded by name."""

import pytest

from octavo.base.errors import ConfigError, EngineDead, OctavoError
from octavo.frontend.client.inproc import InprocClient
from octavo.messages.request import FinishReason
from tests.fakes import expected_output, fake_request
from tests.process_fakes import process_config


def started(**orders):
    client = InprocClient(process_config(**orders))
    return client, client.start()


def test_requests():
    client, ready = started()
    assert (ready.plan.num_blocks, ready.max_model_len) == (64, 64)
    batch = [fake_request(f"r{i}", [i, 1], 8, seed=i) for i in range(12)]
    for request in batch:
        client.add(request)
    client.abort(["r3"])
    client.add(fake_request("long", [1] * 100))
    tokens, reasons = {}, {}
    while client.has_work():
        for output in client.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    assert reasons.pop("long") is FinishReason.ERROR
    assert reasons == dict.fromkeys((f"r{i}" for i in range(12) if i != 3), FinishReason.LENGTH)
    for request in batch:
        if request.request_id != "r3":
            assert tokens[request.request_id] == expected_output(request, 64)[0]
    client.close()
    client.close()


def test_call():
    client, _ = started()
    assert client.call("reset_prefix_cache") is True
    assert client.call("collective_rpc", {"verb": "echo", "arguments": {"a": 1}})[:2] == ["echo", {"a": 1}]
    with pytest.raises(OctavoError, match="Unknown command"):
        client.call("nonsense")
    client.close()


def test_a_failing_step_is_the_end():
    client, _ = started(fault="1:raise")
    client.add(fake_request("a", [1]))
    client.step()
    with pytest.raises(EngineDead, match="RuntimeError: the fake was told to fail"):
        client.step()
    client.close()


def test_a_config_error_at_the_start():
    with pytest.raises(ConfigError, match="the option is wrong"):
        started(fault="load:config")


def test_after_the_end():
    client, _ = started()
    client.add(fake_request("a", [1]))
    client.close()
    for call in (lambda: client.add(fake_request("b", [1])), client.step, lambda: client.call("sleep")):
        with pytest.raises(EngineDead, match=r"The engine has been shut down\."):
            call()
    client.abort(["a"])
