"""A snapshot is a model's name: the same tokens from mapped weights, or a reason why not."""

import json
import subprocess
import sys

import pytest

from octavo import BadCheckpoint, ConfigError, SamplingParams
from octavo.cli.main import main
from octavo.config import EngineArgs, resolve
from tests.tiny_models import make_oracle, save, tiny_config

pytestmark = pytest.mark.matrix(3)

PROMPTS = [[i + 1] * (20 + i) for i in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
SMALL = ["--skip-tokenizer-init", "--num-gpu-blocks-override", "400"]


def tokens(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """Of a tiny model."""
    folder = tmp_path_factory.mktemp("snapshots") / "tiny"
    assert main(["snapshot", str(tiny_llama), str(folder), *SMALL]) == 0
    return folder


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"dtype": "bfloat16"}),
        ("LlamaForCausalLM", {"quantization": "int8_per_channel_weight_only"}),
        pytest.param("LlamaForCausalLM", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        ("LlamaForCausalLM", {"enable_lora": True}),
        ("Gemma3ForCausalLM", {}),
        ("MixtralForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {}),
        ("Qwen3NextForCausalLM", {}),
        ("GPT2LMHeadModel", {}),
    ],
)
def test_the_same_tokens(architecture, options, make_llm, tmp_path):
    """Whatever the layers; the options come from the snapshot."""
    model = save(make_oracle(tiny_config(architecture)), tmp_path / "model")
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags = [word for word in flags if word != "True"]
    assert main(["snapshot", str(model), str(tmp_path / "kept"), *SMALL, *flags]) == 0
    expected = tokens(make_llm(model, **{"dtype": "auto"} | options))
    for file in model.iterdir():
        file.unlink()  # nothing of it is needed
    llm = make_llm(tmp_path / "kept", dtype="auto")
    assert tokens(llm) == expected
    assert llm.collective_rpc("describe")[0]["weight_bytes"] > 0
    llm.sleep(2)
    llm.wake_up()
    assert tokens(llm) == expected


def test_the_default_model_and_its_tokenizer(smollm2_path, tmp_path, capsys):
    assert main(["snapshot", "smollm2", str(tmp_path / "kept")]) == 0
    capsys.readouterr()
    answers = []
    for model in ("smollm2", str(tmp_path / "kept")):
        assert (
            main(["generate", "--model", model, "--max-tokens", "8", "What is the capital of France?"]) == 0
        )
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] and "Paris" in answers[0]


def refused(folder, reason, error=ConfigError, **options):
    with pytest.raises(error, match=reason):
        resolve(EngineArgs(model=str(folder), **options))


def test_what_does_not_suit_is_refused(folder, tiny_llama, make_llm, capsys, monkeypatch):
    refused(folder, "is a snapshot of dtype='float32', asked for is 'bfloat16'", dtype="bfloat16")
    refused(folder, "of tensor_parallel_size=1, asked for is 2", tensor_parallel_size=2)
    assert main(["snapshot", str(tiny_llama), str(folder)]) == 2
    assert "is there already" in capsys.readouterr().err
    other = folder.with_name("other")
    assert main(["snapshot", str(folder), str(other), *SMALL]) == 2
    assert "is a snapshot itself" in capsys.readouterr().err and not other.exists()
    about = json.loads((folder / "snapshot.json").read_text())
    monkeypatch.setattr("octavo.config.snapshot.__version__", "99")
    refused(folder, "is a snapshot by octavo 0.* this is 99: make it again")
    monkeypatch.undo()
    (folder / "snapshot.json").write_text(json.dumps(about | {"machine": "a GPU"}))
    with pytest.raises(ConfigError, match="is a snapshot for a GPU, this is a CPU"):
        make_llm(folder, dtype="auto")
    (folder / "snapshot.json").write_text(json.dumps(about))
    weights = folder / "rank0.weights"
    weights.chmod(0o666)
    refused(folder, "can be written by others: a snapshot holds kernels, which are code")
    weights.chmod(0o600)
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    refused(folder, "rank0.weights has been changed or cut off", BadCheckpoint)
    weights.write_bytes(content)
    index = folder / "rank0.json"
    whole = index.read_text()
    index.write_text(whole.replace("layers", "leyers"))
    with pytest.raises(BadCheckpoint, match="cannot be used"):
        make_llm(folder, dtype="auto")
    index.write_text(whole)
    assert tokens(make_llm(folder, dtype="auto"))


START = """
import json, sys
from octavo import LLM, SamplingParams
from octavo.runtime import late_modules
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
llm = LLM(sys.argv[1], skip_tokenizer_init=True, num_gpu_blocks_override=400, profiler_dir=sys.argv[2])
prompts = json.loads(sys.argv[3])
told = lambda: [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
first, waiting = told(), len(late_modules._FINDER._waiting)
llm.start_profile()
assert told() == first
llm.stop_profile()
print(first, waiting, len(late_modules._FINDER._waiting), sep="\\n")
"""


def test_a_start_imports_less_of_torch(folder, make_llm, tmp_path):
    """What is left is there when the profiler wants it."""
    command = [sys.executable, "-c", START, str(folder), str(tmp_path), str(PROMPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, waiting, left = done.stdout.splitlines()[-3:]
    assert json.loads(first) == tokens(make_llm(folder, dtype="auto"))
    assert int(waiting) > 10 and left == "0" and list(tmp_path.iterdir())


def test_updates_of_weights_go_on_from_a_snapshot(folder, make_llm, tmp_path):
    llm, oracle = make_llm(folder, dtype="auto"), make_oracle(tiny_config("LlamaForCausalLM"), 1)
    other = save(oracle, tmp_path)
    before, expected = tokens(llm), tokens(make_llm(other))
    llm.update_weights_from_disk(str(other))
    assert tokens(llm) == expected != before
    llm.update_weights_from_disk(str(folder))
    assert tokens(llm) == before
