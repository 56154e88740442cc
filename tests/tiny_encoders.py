"""Small random encoders, made by transformers so that errors show: the oracle of the pooling tests."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedModel

_FEWEST = {
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 96,
    "max_position_embeddings": 160,
}
TINY: dict[str, dict[str, Any]] = {
    "BertModel": _FEWEST | {"model_type": "bert", "pad_token_id": 0},
    "RobertaModel": _FEWEST | {"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1},
    "XLMRobertaModel": _FEWEST | {"model_type": "xlm-roberta", "pad_token_id": 4, "type_vocab_size": 1},
    "DistilBertModel": {"model_type": "distilbert", "vocab_size": 131, "dim": 48, "n_layers": 3}
    | {"n_heads": 6, "hidden_dim": 96, "max_position_embeddings": 160},
    "GteModel": _FEWEST | {"model_type": "gte"},
    "JinaEmbeddingsV3Model": _FEWEST | {"model_type": "jina_embeddings_v3"},
    "ModernBertModel": _FEWEST
    | {"model_type": "modernbert", "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    | {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 24, "num_hidden_layers": 4},
    "MPNetModel": _FEWEST | {"model_type": "mpnet", "pad_token_id": 1},
    "NomicBertModel": _FEWEST | {"model_type": "nomic_bert"},
}


def make_encoder(kind: Any, architecture: str, **changes: Any) -> PreTrainedModel:
    """A model of transformers' class `kind`: attention is sharp, and norms and biases matter."""
    config = AutoConfig.for_model(**TINY[architecture] | changes)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = kind._from_config(config) if hasattr(kind, "_from_config") else kind(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif weight.ndim == 1:
                weight.normal_(std=0.2)
            else:
                weight.normal_(std=1.0 if "embeddings" in name else 2.5 * weight.shape[-1] ** -0.5)
    return model.float().eval()


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write the checkpoint, and a tokenizer whose words are w0 … (every letter is a token otherwise)."""
    model.save_pretrained(folder)
    make_tokenizer(model.config.vocab_size).save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A BERT-like tokenizer: [CLS] words [SEP], types 0 and 1."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {
        word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(vocab_size - len(special)))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(special)
    return tokenizer
