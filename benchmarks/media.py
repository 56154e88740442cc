"""Seconds of speech per second on the CPU: a model of whisper-tiny's shape beside transformers, both in turn.

    python benchmarks/record.py cpu-whisper python -m benchmarks.media

The weights are random, and every window of 30 seconds gets about as many tokens as speech has (100). Both
make spectrograms of the same sound, encode and decode greedily in float32, with as many threads as they
choose; transformers takes all windows of a row as one batch. Prints a JSON line per number of windows:
medians of the rounds, and how many of the tokens are the same.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from octavo import LLM, SamplingParams

RATE, SECONDS = 16_000, 30
SHAPE = {
    "vocab_size": 51865,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "decoder_start_token_id": 50258,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
PROMPT = [SHAPE["decoder_start_token_id"], 50259, 50359, 50363]
END = 50257


def make_model(folder: Path) -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**SHAPE)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.03)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return model


def make_sound(count: int) -> list[np.ndarray]:
    rng, at = np.random.default_rng(count), np.arange(SECONDS * RATE) / RATE
    tones = [np.sin(2 * np.pi * (200 + 600 * rng.random()) * at * (1 + at / 90)) for _ in range(count)]
    return [(0.4 * tone + 0.05 * rng.standard_normal(len(at))).astype(np.float32) for tone in tones]


def timed(work):
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    model, extractor = make_model(folder), WhisperFeatureExtractor()
    options = {"skip_tokenizer_init": True, "dtype": args.dtype, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, forbidden_token_ids=[END])

    def theirs(sound):
        features = extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.inference_mode():
            ids = torch.tensor([PROMPT] * len(sound))
            encoded = model.model.encoder(features)
            cache = None
            made = []
            for _ in range(args.tokens):
                out = model(
                    encoder_outputs=encoded, decoder_input_ids=ids, past_key_values=cache, use_cache=True
                )
                scores, cache = out.logits[:, -1], out.past_key_values
                scores[:, END] = -float("inf")
                scores[:, PROMPT[-1] + 1 :] = -float("inf")
                ids = scores.argmax(-1, keepdim=True)
                made.append(ids)
        return torch.cat(made, dim=1).tolist()

    with LLM(str(folder), mm_encoder_cache_gb=0.0, mm_processor_cache_gb=0.0, **options) as llm:

        def ours(sound):
            prompts = [
                {"prompt_token_ids": PROMPT, "multi_modal_data": {"audio": (one, RATE)}} for one in sound
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        for count in args.windows:
            sound, times = make_sound(count), []
            ours(sound[:1]), theirs(sound[:1])
            for _ in range(args.rounds):
                own_s, own = timed(lambda: ours(sound))  # noqa: B023
                their_s, other = timed(lambda: theirs(sound))  # noqa: B023
                times.append((own_s, their_s))
            own_s, their_s = (statistics.median(column) for column in zip(*times, strict=True))
            same = np.mean(np.array(own) == np.array(other))
            row = {"windows": count, "tokens": args.tokens, "rounds": args.rounds, "dtype": args.dtype}
            row |= {"octavo_x_real_time": round(count * SECONDS / own_s, 1)}
            row |= {"transformers_x_real_time": round(count * SECONDS / their_s, 1)}
            ratio = statistics.median(b / a for a, b in times)
            print(
                json.dumps(row | {"ratio": round(ratio, 2), "same_tokens": round(float(same), 4)}), flush=True
            )


if __name__ == "__main__":
    main()
