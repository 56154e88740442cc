"""Pictures and speech on a GPU: time to the first token beside text, pictures in flight, windows of speech.

    python benchmarks/record.py gpu-media python -m benchmarks.gpu_media

Shapes of Qwen2.5-VL-7B and of Whisper large-v3-turbo with dummy weights in bfloat16. A row has the medians of
runs in turn: a prompt of text, one with as many tokens of a new picture of 1024 x 1024, the same picture
prepared but to be encoded again, and one that is known altogether; prefixes are not cached. Then 64 requests
with pictures of 512 x 512 at once, and windows of 30 seconds with 100 tokens each. Prints JSON lines.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from octavo import LLM, SamplingParams

IMAGE, BEFORE, BEHIND = 151655, 151652, 151653
QWEN = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "torch_dtype": "bfloat16",
    "image_token_id": IMAGE,
    "video_token_id": 151656,
    "vision_start_token_id": BEFORE,
    "vision_end_token_id": BEHIND,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
WHISPER = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "torch_dtype": "bfloat16",
    "vocab_size": 51866,
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 4,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "decoder_start_token_id": 50258,
    "eos_token_id": 50257,
}
RATE, SECONDS, TOKENS = 16_000, 30, 100
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def engine(config: dict, settings: dict, **options) -> LLM:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    common = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    return LLM(str(folder), **common | options)


def seconds(work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def picture(rng: np.random.Generator, side: int) -> Image.Image:
    return Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8))


def prompt(image: Image.Image) -> dict:
    ids = [100, 101, BEFORE, IMAGE, BEHIND, *range(200, 216)]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": image}}


def first_tokens(llm: LLM, rounds: int) -> dict:
    rng = np.random.default_rng(0)

    def run(asked) -> float:
        return seconds(lambda: llm.generate(asked, ONE, use_tqdm=False))

    [known] = llm.generate(prompt(picture(rng, 1024)), ONE, use_tqdm=False)
    length, times = len(known.prompt_token_ids), {"text": [], "new": [], "prepared": [], "repeated": []}
    for number in range(rounds + 1):
        asked = prompt(picture(rng, 1024))
        found = {"text": run([rng.integers(1000, 90_000, length).tolist()]), "new": run(asked)}
        llm.llm_engine.reset_encoder_cache()
        found |= {"prepared": run(asked), "repeated": run(asked)}
        for name, took in found.items() if number else ():
            times[name].append(took)
    medians = {name: round(1000 * statistics.median(each), 2) for name, each in times.items()}
    row = {"row": "first token", "prompt_tokens": length, "rounds": rounds}
    return row | {f"{name}_ms": took for name, took in medians.items()}


def in_flight(llm: LLM, count: int, tokens: int) -> dict:
    rng, params = np.random.default_rng(1), ONE.clone()
    params.max_tokens = tokens
    took = []
    for _ in range(3):
        asked = [prompt(picture(rng, 512)) for _ in range(count)]
        took.append(seconds(lambda: llm.generate(asked, params, use_tqdm=False)))  # noqa: B023
    took_s = statistics.median(took)
    row = {"row": "in flight", "requests": count, "tokens_each": tokens, "seconds": round(took_s, 3)}
    return row | {"images_per_s": round(count / took_s, 1), "out_tok_s": round(count * tokens / took_s)}


def speech(llm: LLM, windows: int) -> dict:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    rng, at = np.random.default_rng(2), np.arange(SECONDS * RATE) / RATE
    took, prepared = [], []
    for _ in range(3):
        tones = [np.sin(2 * np.pi * (200 + 600 * rng.random()) * at) for _ in range(windows)]
        sounds = [(0.4 * t + 0.05 * rng.standard_normal(len(at))).astype(np.float32) for t in tones]
        asked = [
            {"prompt_token_ids": [50258, 50259, 50360, 50364], "multi_modal_data": {"audio": (s, RATE)}}
            for s in sounds
        ]
        process = llm.llm_engine.input_processor.process
        prepared.append(seconds(lambda: [process(one) for one in asked]))  # noqa: B023
        took.append(seconds(lambda: llm.generate(asked, params, use_tqdm=False)))  # noqa: B023
    took_s = statistics.median(took)
    row = {"row": "speech", "windows": windows, "tokens_each": TOKENS, "prepared": "before"}
    row |= {"preparation_s": round(statistics.median(prepared), 3), "seconds": round(took_s, 3)}
    return row | {"x_real_time": round(windows * SECONDS / took_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, nargs="*", default=[1, 16, 64])
    args = parser.parse_args()
    print(json.dumps({"row": "device", "gpu": torch.cuda.get_device_name()}), flush=True)
    with engine(QWEN, {"max_pixels": 12_845_056}, max_model_len=4096, max_num_seqs=64) as llm:
        print(json.dumps(first_tokens(llm, args.rounds)), flush=True)
        print(json.dumps(in_flight(llm, 64, 32)), flush=True)
    with engine(WHISPER, {"feature_size": 128}, max_num_seqs=64) as llm:
        for windows in args.windows:
            print(json.dumps(speech(llm, windows)), flush=True)


if __name__ == "__main__":
    main()
