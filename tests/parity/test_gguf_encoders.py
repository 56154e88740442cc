"""GGUF files of BERT: vectors equal transformers', pooled as the file says; texts become the same tokens."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertModel

from octavo import LLM
from octavo.base.errors import Unsupported
from octavo.base.hub import installed
from octavo.frontend.text.gguf_vocab import tokenizer_from_metadata
from octavo.runtime.models.bert import Bert
from octavo.runtime.models.weights import to
from tests.gguf_models import write_gguf
from tests.gguf_writer import ARRAY, INT32, STRING, UINT32
from tests.tiny_encoders import make_encoder, make_tokenizer
from tests.tiny_models import make_oracle, tiny_config

TOLERANCE = 1e-5
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
POOLED = {1: lambda states: states.mean(0), 2: lambda states: states[0], 3: lambda states: states[-1]}
TEXTS = ["w1 w2 w3", "", "w7", " ".join(f"w{i}" for i in range(100)), "W4\tnever w5"]


def vocabulary(tokens, control):
    """The tokenizer's metadata as llama.cpp's converter writes it."""
    kinds = [3 if i in control else 1 for i in range(len(tokens))]
    written = [
        token if i in control else token.removeprefix("##") if token.startswith("##") else f"▁{token}"
        for i, token in enumerate(tokens)
    ]
    return [
        ("tokenizer.ggml.model", STRING, "bert"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, written)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, kinds)),
    ]


def write(path, pooling_type, types=None, default="F32"):
    oracle = make_encoder(BertModel, "BertModel", **SIZES)
    vocab = make_tokenizer(oracle.config.vocab_size).get_vocab()
    entries = vocabulary(sorted(vocab, key=vocab.get), range(5))
    if pooling_type is not None:
        entries.append(("bert.pooling_type", UINT32, pooling_type))
    with torch.no_grad():
        return oracle, write_gguf(oracle, path, types or {}, default, entries)


def vectors(path, **options):
    options = {"activations": "float32"} | options
    with LLM(str(path), cpu_threads=1, dtype="float32", **options) as llm:
        return np.array([out.outputs.embedding for out in llm.embed(TEXTS, use_tqdm=False)])


@torch.no_grad()
def expected(oracle, pooling_type):
    tokenizer = make_tokenizer(oracle.config.vocab_size)
    ids = [tokenizer.encode(text).ids for text in TEXTS]
    states = [oracle(input_ids=torch.tensor([each])).last_hidden_state[0] for each in ids]
    pooled = torch.stack([POOLED[pooling_type](each) for each in states])
    return torch.nn.functional.normalize(pooled, dim=-1).numpy()


@pytest.mark.parametrize("pooling_type", POOLED)
def test_vectors(tmp_path, pooling_type):
    oracle, path = write(tmp_path / "tiny.gguf", pooling_type)
    found = vectors(path)
    assert np.abs(found - expected(oracle, pooling_type)).max() <= TOLERANCE
    other = expected(oracle, pooling_type % 3 + 1)
    assert np.abs(found - other).max() > 1e-2


@torch.no_grad()
def test_a_causal_model_embeds_if_its_file_says_how(tmp_path):
    sizes = SIZES | {"num_key_value_heads": 2}
    oracle = make_oracle(tiny_config("LlamaForCausalLM") | sizes)
    entries = [("llama.pooling_type", UINT32, 3)]
    path = write_gguf(oracle, tmp_path / "tiny.gguf", {}, entries=entries)
    ids = [5, 9, 7, 30]
    with LLM(str(path), cpu_threads=1, dtype="float32", skip_tokenizer_init=True) as llm:
        [output] = llm.embed([ids], use_tqdm=False)
    last = oracle.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    wanted = torch.nn.functional.normalize(last, dim=-1).numpy()
    assert np.abs(np.array(output.outputs.embedding) - wanted).max() <= TOLERANCE


def test_packed_blocks(tmp_path):
    types = {"token_embd": "Q8_0", "ffn_down": "Q5_1", "attn_v": "F16"}
    oracle, path = write(tmp_path / "tiny.gguf", 1, types, "Q4_0")
    found = vectors(path, activations="float32")  # by default a CPU with AMX rounds to bfloat16
    assert np.abs(found - expected(oracle, 1)).max() <= 2e-4  # sums of blocks have another order


def test_swapped_norms_are_noticed(tmp_path, monkeypatch):
    oracle, path = write(tmp_path / "tiny.gguf", 1)
    swapped = {"attn_output": "mlp_norm", "layer_output": "attention_norm"}
    rules = {f"blk.*.{name}_norm": to(f"layers.*.{place}") for name, place in swapped.items()}
    monkeypatch.setattr(Bert, "GGUF_WEIGHTS", Bert.GGUF_WEIGHTS.replace(rules))
    assert np.abs(vectors(path) - expected(oracle, 1)).max() > 1e-2


@pytest.mark.parametrize("pooling_type", [0, 4, 9])
def test_a_pooling_that_makes_no_vectors_is_refused(tmp_path, pooling_type):
    oracle, path = write(tmp_path / "tiny.gguf", pooling_type)
    with pytest.raises(Unsupported, match=f"pooling_type is {pooling_type}"):
        vectors(path)
    found = vectors(path, hf_overrides={"gguf_pooling_type": 1})
    assert np.abs(found - expected(oracle, 1)).max() <= TOLERANCE


def test_tokens_of_a_real_vocabulary():
    """WordPiece as the folder's own tokenizer, but for what stands in brackets and is no special token."""
    folder = Tokenizer.from_file(str(installed("minilm") / "tokenizer.json"))
    folder.no_truncation()
    folder.no_padding()
    vocab = folder.get_vocab()
    names = sorted(vocab, key=vocab.get)
    control = {vocab[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")}
    metadata = {
        key: content[1] if isinstance(content, tuple) else content
        for key, _, content in vocabulary(names, control)
    }
    ours = tokenizer_from_metadata(metadata)
    texts = [
        *(
            "Crème brûlée, naïve façade!",
            "Ελληνικά και Русский язык",
            "漢字かな交じり文",
            "한국어 문장입니다",
        ),
        *("नमस्ते दुनिया", "مرحبا بالعالم", "שלום עולם", "ภาษาไทย", "🙂🙃 emoji", "a\tb\n\nc", "", "x" * 101),
        *("don't [MASK] unaffable, $9.99 e.g. [x]", "supercalifragilistic", "ﬁne ½ Ⅷ"),
    ]
    for text in texts:
        assert ours.encode(text) == folder.encode(text).ids, text
    assert ours.encode("one", False) == folder.encode("one", add_special_tokens=False).ids
