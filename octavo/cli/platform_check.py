"""Check a platform: its kernels against the references, its methods, and a small model against the CPU.

For who brings octavo to another device (docs/platforms.md). The status is 1 if something is wrong.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.base.registry import load_object, load_plugins
from octavo.config.resolve_parallel import check_device

_CHECK = "octavo.runtime.platforms.conformance:check"
EXAMPLES = """
  octavo platform-check cpu      # the platform of CPUs
  octavo platform-check numpy    # one that an installed package brings
"""
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_VOCABULARY, _LAYERS = 320, 2
_PROMPTS = [[5, 9, 200, 17], list(range(40, 80)), [7]]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name", metavar="NAME", help="The device: cpu, cuda, or what an installed package brings."
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="Threads of CPU kernels.")


def run(args: argparse.Namespace) -> int:
    """Print a line for each check; status 1 when one of them fails."""
    load_plugins()
    check_device(args.name, must_be_here=True)
    is_wrong = False
    for subject, problem in (*load_object(_CHECK)(args.name, args.threads), *_model(args.name)):
        is_wrong = is_wrong or bool(problem)
        print(f"{'!!' if problem else 'ok'}  {subject}{': ' if problem else ''}{problem}", flush=True)
    return int(is_wrong)


def _model(device: str) -> Iterator[tuple[str, str]]:
    """Generate by a small model with random weights, there and on the CPU."""
    with tempfile.TemporaryDirectory(prefix="octavo-platform-") as folder:
        _write_model(Path(folder))
        there, here = (_answers(folder, name) for name in (device, "cpu"))
    for subject, ours, theirs in zip(("greedy", "seeded"), there, here, strict=True):
        tokens, scores = ours[0] == theirs[0], np.abs(np.subtract(ours[1], theirs[1])).max()
        same = f"its log probabilities differ from the CPU's by {scores:.2g}" if scores > 1e-2 else ""
        yield f"a model, {subject}", same or ("" if tokens else "its tokens are not those of the CPU")


def _answers(folder: str, device: str) -> list[tuple[list[int], list[float]]]:
    """Return tokens, and log probabilities of the prompts, of greedy and of seeded requests."""
    from octavo import LLM, SamplingParams, TokensPrompt  # loads torch

    options: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
    answers = []
    with LLM(folder, device=device, max_model_len=128, max_num_seqs=4, **options) as llm:
        for temperature in (0.0, 0.8):
            params = SamplingParams(
                temperature=temperature, seed=3, max_tokens=12, prompt_logprobs=0, ignore_eos=True
            )
            prompts = [TokensPrompt(prompt_token_ids=ids) for ids in _PROMPTS]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            scored = [entry for output in outputs for entry in (output.prompt_logprobs or ()) if entry]
            values = [logprob.logprob for entry in scored for logprob in entry.values()]
            answers.append(([t for output in outputs for t in output.outputs[0].token_ids], values))
    return answers


def _write_model(folder: Path) -> None:
    """Write a Llama with random weights, far from ties."""
    from safetensors.numpy import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "num_hidden_layers": _LAYERS,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **_SIZES,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(_weights()), folder / "model.safetensors")


def _weights() -> Iterator[tuple[str, Any]]:
    size, inner, kv = _SIZES["hidden_size"], _SIZES["intermediate_size"], 32
    random = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return (random.standard_normal(shape) / shape[-1] ** 0.5 * 2).astype(np.float32)

    yield "model.embed_tokens.weight", draw(_VOCABULARY, size)
    yield "lm_head.weight", draw(_VOCABULARY, size)
    yield "model.norm.weight", np.ones(size, np.float32)
    for layer in range(_LAYERS):
        shapes = {"q": (size, size), "k": (kv, size), "v": (kv, size), "o": (size, size)}
        for name, shape in shapes.items():
            yield f"model.layers.{layer}.self_attn.{name}_proj.weight", draw(*shape)
        for name, shape in {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}.items():
            yield f"model.layers.{layer}.mlp.{name}_proj.weight", draw(*shape)
        for name in ("input", "post_attention"):
            yield f"model.layers.{layer}.{name}_layernorm.weight", np.ones(size, np.float32)
