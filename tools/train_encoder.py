"""The default model learns to see in a minute or two: how many squares a picture has, and of which colour.

A transformer of two layers and a projector, as LLaVA has them, learn to give the embeddings of the words that
a picture shows, number and colour by turns; the text model stays as it is, and goes on with what it reads.
They are written as llama.cpp writes encoders of GGUF files (mmproj), which octavo reads beside a text model.
"""

import tempfile
from pathlib import Path

import gguf
import torch
from PIL import Image
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from octavo import LLM, SamplingParams
from octavo.base.gguf import open_gguf
from octavo.base.hub import locate

COLOURS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 60, 220), "black": (20, 20, 20)}
COLOURS |= {"white": (250, 250, 250), "pink": (250, 120, 190), "brown": (120, 70, 20), "gold": (230, 190, 30)}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven")
ROW, PATCH, SQUARE = 4, 14, 9
MEAN, STD, STEPS, BATCH = 0.5, 0.25, 500, 128


def draw(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures, [count, side, side, 3] bytes, and their words, [count, 2]: number, then colour.

    Each square is somewhere in a patch of its own; all else is grey, with noise.
    """

    def below(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    numbers, colours = below(len(NUMBERS), count), below(len(COLOURS), count)
    cells = 120 + below(60, count, 1, 1, 1, 1) + below(40, count, ROW**2, PATCH, PATCH, 3) - 20
    ranks = torch.rand(count, ROW**2, generator=generator).argsort(1).argsort(1)
    place, start = torch.arange(PATCH), below(PATCH - SQUARE + 1, 2, count, ROW**2, 1)
    rows, columns = (place >= start) & (place < start + SQUARE)
    inside = rows[..., :, None] & columns[..., None, :] & (ranks <= numbers[:, None])[..., None, None]
    shades = torch.tensor(list(COLOURS.values()))[colours]
    cells = torch.where(inside[..., None], shades[:, None, None, None], cells).unflatten(1, (ROW, ROW))
    pictures = cells.transpose(2, 3).reshape(count, ROW * PATCH, ROW * PATCH, 3)
    return pictures.clamp(0, 255).byte(), torch.stack([numbers, colours + len(NUMBERS)], 1)


def read_rows(path: Path) -> torch.Tensor:
    """Return the text model's embeddings of the words, numbers first."""
    file = open_gguf(path)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    kind = gguf.GGMLQuantizationType[file.tensors["token_embd.weight"].type.name]
    table = file.data("token_embd.weight").reshape(len(tokens), -1)
    places = [tokens.index(f"Ġ{word}") for word in (*NUMBERS, *COLOURS)]
    return torch.tensor(gguf.quants.dequantize(table[places], kind))


def train(rows: torch.Tensor) -> tuple[CLIPVisionModel, torch.nn.Sequential]:
    """Let every patch's embedding come near to that of its word, and nearer than to others'."""
    torch.manual_seed(0)
    generator, size, width = torch.Generator().manual_seed(0), 64, rows.shape[1]
    sizes = {"hidden_size": size, "intermediate_size": 2 * size, "num_attention_heads": 4}
    tower = CLIPVisionModel(
        CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=ROW * PATCH, patch_size=PATCH)
    )
    layers = torch.nn.Linear(size, width), torch.nn.GELU(), torch.nn.Linear(width, width)
    projector, scale = torch.nn.Sequential(*layers), rows.std()
    parameters = [*tower.parameters(), *projector.parameters()]
    optimizer, wanted = torch.optim.AdamW(parameters, weight_decay=0.01), rows / scale
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    for _ in range(STEPS):
        pictures, words = draw(BATCH, generator)
        words = words.repeat(1, ROW**2 // 2)
        pixels = (pictures.permute(0, 3, 1, 2) / 255 - MEAN) / STD
        made = projector(tower(pixels, output_hidden_states=True).hidden_states[-1][:, 1:])
        nearness = 10 * (made @ wanted.T - wanted.square().sum(1) / 2) / width
        loss = (made - wanted[words]).square().mean()
        loss = loss + functional.cross_entropy(nearness.transpose(1, 2), words)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        projector[2].weight.mul_(scale)
        projector[2].bias.mul_(scale)
    return tower.eval(), projector


def write(tower: CLIPVisionModel, projector: torch.nn.Sequential, path: Path) -> None:
    config, writer = tower.config, gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_vision_image_size(config.image_size)
    writer.add_vision_patch_size(config.patch_size)
    writer.add_vision_embedding_length(config.hidden_size)
    writer.add_vision_feed_forward_length(config.intermediate_size)
    writer.add_vision_block_count(config.num_hidden_layers)
    writer.add_vision_head_count(config.num_attention_heads)
    writer.add_vision_attention_layernorm_eps(config.layer_norm_eps)
    writer.add_array("clip.vision.image_mean", [MEAN] * 3)
    writer.add_array("clip.vision.image_std", [STD] * 3)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, config.num_hidden_layers)
    for name, tensor in tower.state_dict().items():
        theirs = f"vision_tower.vision_model.{name.removeprefix('vision_model.')}"
        ours = "v.class_embd" if "class_embedding" in name else names.get_name(theirs, (".weight", ".bias"))
        if ours and "post" not in name:
            writer.add_tensor(ours, tensor.numpy())
    for name, tensor in projector.state_dict().items():
        writer.add_tensor(f"mm.{name}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


text = Path(locate("smollm2"))
mmproj = Path(tempfile.mkdtemp()) / "mmproj.gguf"
write(*train(read_rows(text)), mmproj)
pictures, words = draw(200, torch.Generator().manual_seed(1))  # that nobody has seen
prompt = "The picture shows<image>.\nThe picture shows"
asked = [
    {"prompt": prompt, "multi_modal_data": {"image": Image.fromarray(picture)}}
    for picture in pictures.numpy()
]
params = SamplingParams(temperature=0, max_tokens=2)
with LLM(str(text), mmproj=str(mmproj), max_model_len=256) as llm:
    outputs = llm.generate(asked, params, use_tqdm=False)
    again = llm.generate(asked[::-1], params, use_tqdm=False)  # every picture in another's place
said, anew = ([output.outputs[0].text.strip() for output in each] for each in (outputs, again))
all_words = (*NUMBERS, *COLOURS)
truth = [f"{all_words[number]} {all_words[colour]}" for number, colour in words.tolist()]
print("\n".join(f"{one} ({other})" for one, other in zip(said[:5], truth, strict=False)))
right = sum(one == other for one, other in zip(said, truth, strict=True))
print(f"{right} of {len(truth)} pictures are described right")
print(f"swapped, each is described as before: {anew[::-1] == said}")
shared, own = (sum(output.num_cached_tokens for output in each) for each in (outputs, again))
print(f"tokens taken from the cache: {shared} of other pictures, {own} of the same")
