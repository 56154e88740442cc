"""A picture on the CPU: a model of SmolVLM-256M's shape beside transformers, both in turn.

    python benchmarks/record.py cpu-pictures python -m benchmarks.pictures

The weights are random, in bfloat16 on both sides. A picture is cut into squares of 512 x 512, each of which
becomes 64 tokens. Rows have the medians of rounds in turn with new pictures: seconds to the first token, with
the picture's preparation, and tokens a second behind it; and for which part of octavo's tokens transformers,
which reads them, finds the same next one, there and behind another picture. With --repeated: seconds to the
first token of a picture that is known, behind text that is not, beside as many tokens of text.

Prints JSON lines.
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
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from octavo import LLM, SamplingParams
from tests.tiny_media import IMAGE, save_tokenizer

TEXT = {
    "model_type": "llama",
    "vocab_size": 49280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
}
SQUARES = {"max_image_size": {"longest_edge": 512}}
EXACT = {"temperature": 0, "ignore_eos": True, "detokenize": False}


def make_model(folder: Path, longest: int):
    torch.manual_seed(0)
    config = SmolVLMConfig(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, scale_factor=4)
    model = SmolVLMForConditionalGeneration(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    settings = SQUARES | {"size": {"longest_edge": longest}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model, SmolVLMImageProcessorPil(**settings)


def theirs(model, processor, image: Image.Image, ids: list[int], count: int) -> tuple[float, float]:
    begun = time.perf_counter()
    pixels = processor([[image]], return_tensors="pt")["pixel_values"].to(torch.bfloat16)
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), pixel_values=pixels, use_cache=True, logits_to_keep=1)
        token, first = out.logits[:, -1:].argmax(-1), time.perf_counter()
        for _ in range(count - 1):
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
            int(token)
    return first - begun, (count - 1) / (time.perf_counter() - first)


def agreement(model, processor, image: Image.Image, ids: list[int], tokens: list[int]) -> float:
    """The share of tokens behind a picture that transformers takes for the likeliest there."""
    pixels = processor([[image]], return_tensors="pt")["pixel_values"].to(torch.bfloat16)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids + tokens[:-1]]), pixel_values=pixels).logits
    return float((logits[0, len(ids) - 1 :].argmax(-1) == torch.tensor(tokens)).float().mean())


def ours(llm: LLM, image: Image.Image, count: int) -> tuple[float, float, list[int], list[int]]:
    asked = {"prompt_token_ids": [5, IMAGE, 7, 8], "multi_modal_data": {"image": image}}
    begun = time.perf_counter()
    [output] = llm.generate(asked, SamplingParams(max_tokens=1, **EXACT), use_tqdm=False)
    first = time.perf_counter()
    # The picture, its embeddings and its prefix are known now.
    [whole] = llm.generate(asked, SamplingParams(max_tokens=count, **EXACT), use_tqdm=False)
    took, again = first - begun, time.perf_counter()
    llm.generate(asked, SamplingParams(max_tokens=1, **EXACT), use_tqdm=False)
    rest = (again - first) - (time.perf_counter() - again)
    return took, (count - 1) / rest, list(output.prompt_token_ids), list(whole.outputs[0].token_ids)


def repeated(llm: LLM, image: Image.Image, rounds: int) -> dict[str, float | int]:
    """Medians in turn: a known picture behind new text, and as many tokens of text. No prefix is shared."""
    rng, took = np.random.default_rng(1), ([], [])
    one, ids = SamplingParams(max_tokens=1, **EXACT), [IMAGE]
    for number in range(rounds + 2):
        texts = [[int(i) for i in rng.integers(3, 100, count)] for count in (8, len(ids))]
        picture = {"prompt_token_ids": [*texts[0], IMAGE], "multi_modal_data": {"image": image}}
        for kept, asked in zip(took, (picture, {"prompt_token_ids": texts[1]}), strict=True):
            begun = time.perf_counter()
            [output] = llm.generate(asked, one, use_tqdm=False)
            if number > 1:  # the first encodes, and tells how long the text has to be
                kept.append(time.perf_counter() - begun)
            if asked is picture:
                ids = output.prompt_token_ids
    known, text = map(statistics.median, took)
    found = {"repeated_first_token_s": round(known, 4), "text_first_token_s": round(text, 4)}
    return {
        "prompt_tokens": len(ids),
        "rounds": rounds,
        **found,
        "more_than_text": round(known / text - 1, 3),
    }


def compare(args: argparse.Namespace, longest: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    model, processor = make_model(folder, longest)
    own, other, agreed = [], [], []
    with LLM(str(folder), max_model_len=4096) as llm:
        if args.repeated:
            image = Image.fromarray(rng.integers(0, 255, (1024, 1024, 3), np.uint8))
            print(json.dumps({"longest_edge": longest, **repeated(llm, image, args.rounds)}), flush=True)
            return
        for number in range(args.rounds + 1):
            image = Image.fromarray(rng.integers(0, 255, (1024, 1024, 3), np.uint8))
            *mine, ids, tokens = ours(llm, image, args.tokens)
            if args.profile:
                print(json.dumps({"ours": mine, "tokens": len(ids)}), flush=True)
                continue
            their = theirs(model, processor, image, ids, args.tokens)
            pictures = image, Image.new("RGB", image.size)
            agreed.append([agreement(model, processor, each, ids, tokens) for each in pictures])
            for made, kept in ((mine, own), (their, other)) if number else ():
                kept.append(made)
    if args.profile:
        return
    (own_s, own_rate), (their_s, their_rate) = (
        [statistics.median(column) for column in zip(*made, strict=True)] for made in (own, other)
    )
    row = {"longest_edge": longest, "prompt_tokens": len(ids), "rounds": args.rounds, "dtype": "bfloat16"}
    row |= {"octavo_first_token_s": round(own_s, 3), "transformers_first_token_s": round(their_s, 3)}
    row |= {"octavo_tok_s": round(own_rate, 1), "transformers_tok_s": round(their_rate, 1)}
    same, with_another = (round(statistics.mean(column), 3) for column in zip(*agreed, strict=True))
    row |= {"same_tokens": same, "same_tokens_of_another_picture": with_another}
    ratios = {
        "first_token_ratio": round(their_s / own_s, 2),
        "tok_s_ratio": round(own_rate / their_rate, 2),
    }
    print(json.dumps(row | ratios), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--longest", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--repeated", action="store_true", help="a known picture beside text, nothing else")
    args = parser.parse_args()
    for longest in args.longest:
        with tempfile.TemporaryDirectory() as folder:
            compare(args, longest, Path(folder))


if __name__ == "__main__":
    main()
