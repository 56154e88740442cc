"""Round a model's weights, as `octavo quantize` does, and run the file that it wrote."""

import tempfile
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.cli.main import main as octavo

PROMPT = "The capital of France is"


def main():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        octavo(["quantize", "smollm2", str(path), "--to", "gguf:Q8_0"])
        with LLM(str(path)) as llm:
            [output] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        print(f"{path.stat().st_size >> 20} MiB: {PROMPT}{output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
