"""A trainer in the same program sends new weights to a running engine, and goes on training.

Over HTTP it is the same with a server's address in the place of `llm`, and a device for the tensors.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, SamplingParams, WeightSender

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
)
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

with LLM(folder, skip_tokenizer_init=True, weight_transfer_config={"backend": "ipc"}) as llm:
    sender = WeightSender(llm, "ipc")
    for step in range(3):
        completion = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0]
        print(f"{llm.get_weight_version()}: {list(completion.token_ids)}")
        with torch.no_grad():  # in the place of a training step
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        sender.send(model.state_dict(), weight_version=f"step {step}")
    sender.close()
