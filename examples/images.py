"""Ask about pictures, offline: a tiny LLaVA with random weights; a real one's name may stand in its place."""

import tempfile

import numpy as np
import transformers
from PIL import Image

from octavo import LLM, SamplingParams

TEXT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
VISION = TEXT | {"num_attention_heads": 2, "image_size": 28, "patch_size": 7}
config = transformers.LlavaConfig(
    text_config={"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, **TEXT},
    vision_config={"model_type": "clip_vision_model", **VISION},
    image_token_index=98,
)
folder = tempfile.mkdtemp()
transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
settings = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
transformers.CLIPImageProcessorPil(**settings).save_pretrained(folder)

noise = np.random.default_rng(0).integers(0, 255, (2, 40, 30, 3), dtype=np.uint8)
first, second = (Image.fromarray(pixels) for pixels in noise)
with LLM(folder, skip_tokenizer_init=True, block_size=16, max_model_len=256) as llm:
    params = SamplingParams(temperature=0, max_tokens=4)
    for name, images in (("one", [first]), ("two", [first, second]), ("the first again", [first])):
        prompt = [5, 6, *[98] * len(images), 7, 8]  # a marker for each picture, with a real model <image>
        asked = {"prompt_token_ids": prompt, "multi_modal_data": {"image": images}}
        [output] = llm.generate(asked, params, use_tqdm=False)
        known = output.num_cached_tokens
        print(f"{name}: {len(output.prompt_token_ids)} tokens, {known} known; {output.outputs[0].token_ids}")
