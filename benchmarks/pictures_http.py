"""What a server's host does for pictures: time to the first token over HTTP beside text, trees in turn.

    python benchmarks/record.py pictures-http python -m benchmarks.pictures_http . ../before

A Qwen2.5-VL of one small layer each, so that hardly anything is computed. Per tree, a checkout of octavo:
the medians of rounds in turn, in ms, of a picture of 1024 x 1024 as PNG (of noise, 3 MB) and as JPEG in a
data URL, known and new, and of as many tokens of text. Prints JSON lines.
"""

import argparse
import base64
import http.client
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXT = {
    "model_type": "qwen2_5_vl_text",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 8192,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
}
VISION = {
    "model_type": "qwen2_5_vl",
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 1,
    "intermediate_size": 32,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [],
}
MARKERS = ("<|image|>", "<|video|>", "<|before|>", "<|behind|>", "<|end|>")
TEMPLATE = (
    "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}<|before|><|image|><|behind|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
)


def make_model(folder: Path) -> None:
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": TEXT,
        "vision_config": VISION,
        **{name: tokenizer.token_to_id(marker) for name, marker in zip(names, MARKERS, strict=False)},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 12_845_056}))
    settings = {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


class Server:
    def __init__(self, tree: str, model: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--load-format", "dummy", "--no-enable-prefix-caching", "--max-model-len", "4096"]
        command = [sys.executable, "-P", "-m", "octavo", "serve", str(model), "--port", str(port), *options]
        environment = os.environ | {"PYTHONPATH": str(Path(tree).resolve())}
        self.process = subprocess.Popen(command, env=environment, cwd=model, stdout=sys.stderr)
        self._line, self._model = http.client.HTTPConnection("127.0.0.1", port, timeout=60), str(model)
        while not self._answers():
            assert self.process.poll() is None
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return bool(self.ask([{"type": "text", "text": "a"}]))
        except OSError:
            self._line.close()
            return False

    def ask(self, content: list) -> tuple[float, int]:
        """Returns milliseconds and the prompt's tokens."""
        body = {"model": self._model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        said, begun = json.dumps(body).encode(), time.perf_counter()
        self._line.request("POST", "/v1/chat/completions", said, {"Content-Type": "application/json"})
        answer = self._line.getresponse()
        told = json.loads(answer.read())
        took_s = time.perf_counter() - begun
        if answer.status == 503:
            raise ConnectionRefusedError("The model is being loaded.")
        return 1000 * took_s, told["usage"]["prompt_tokens"]


def picture(seed: int, form: str) -> list:
    rng, file = np.random.default_rng(seed), io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (1024, 1024, 3), np.uint8)).save(file, form)
    url = f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        measure(Path(folder), args.trees, args.rounds)


def measure(folder: Path, trees: list[str], rounds: int) -> None:
    servers, times = {tree: Server(tree, folder) for tree in trees}, {}
    known = {form: picture(number, form) for number, form in enumerate(("PNG", "JPEG"))}
    try:
        for server in servers.values():
            lengths = [server.ask(content)[1] for content in known.values()]
        text = [{"type": "text", "text": "ab" * (lengths[0] // 2)}]
        for number in range(rounds + 1):
            new = {form: picture(100 + number, form) for form in known} if number % 3 == 0 else {}
            kinds = {"text": text, **known} | {f"new {form}": content for form, content in new.items()}
            for tree, server in sorted(servers.items(), reverse=bool(number % 2)):
                for kind, content in kinds.items():
                    times.setdefault(tree, {}).setdefault(kind, []).append(server.ask(content)[0])
        for tree, found in times.items():
            row = {"tree": Path(tree).resolve().name, "tokens": lengths[0], "rounds": rounds}
            medians = {f"{kind}_ms": round(statistics.median(each[1:]), 2) for kind, each in found.items()}
            print(json.dumps(row | medians), flush=True)
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(30)


if __name__ == "__main__":
    main()
