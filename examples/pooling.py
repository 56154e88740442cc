"""A model of each kind that pools, tiny and random; names of real ones may stand in their places."""

import tempfile

import transformers

from octavo import LLM

QUERY, DOCUMENTS = [5, 6, 7], [[5, 6, 7, 8], [20, 21], [9]]
SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def tiny(kind, config=transformers.BertConfig, **options):
    folder = tempfile.mkdtemp()
    made = config(**SIZES, num_attention_heads=2, max_position_embeddings=64, **options)
    getattr(transformers, kind)(made).save_pretrained(folder)
    return LLM(folder, skip_tokenizer_init=True)


with tiny("BertModel") as llm:
    outputs = llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)
    print("embed:", [len(output.outputs.embedding) for output in outputs])
    [output] = llm.encode([QUERY], pooling_task="token_embed", use_tqdm=False)
    print("a vector for each token:", output.outputs.data.shape)
with tiny("BertForMaskedLM") as llm:
    [output] = llm.embed([QUERY], use_tqdm=False)
    print("sparse:", sum(weight > 0 for weight in output.outputs.embedding), "of 99 terms")
with tiny("BertForSequenceClassification", num_labels=1) as llm:
    pairs = [{"prompt_token_ids": QUERY + document} for document in DOCUMENTS]
    scores = [output.outputs.probs[0] for output in llm.classify(pairs, use_tqdm=False)]
    print("rerank:", sorted(range(len(scores)), key=lambda i: -scores[i]))
with tiny("BertForSequenceClassification", id2label={0: "bad", 1: "good"}) as llm:
    [output] = llm.classify([QUERY], use_tqdm=False)
    print("classify:", [f"{prob:.2f}" for prob in output.outputs.probs])
with tiny("LlamaForSequenceClassification", transformers.LlamaConfig, num_labels=1, pad_token_id=0) as llm:
    [output] = llm.reward([QUERY], use_tqdm=False)
    print("reward:", output.outputs.data.shape)
