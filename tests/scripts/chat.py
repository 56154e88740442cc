"""One conversation, then a batch of them, through the model's chat template or another."""

from vllm import LLM, SamplingParams
from vllm.entrypoints.chat_utils import load_chat_template

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATE = "{% for m in messages %}" + TURN + "{% endfor %}<|im_start|>assistant\n"


def main():
    llm = LLM(model="smollm2", max_model_len=1024, enforce_eager=True)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    [output] = llm.chat(conversation, params, use_tqdm=False)
    print("one:", output.outputs[0].text)
    batch = llm.chat([conversation] * 3, sampling_params=params, use_tqdm=True)
    print("batch:", len({answer.outputs[0].text for answer in batch}), "text")
    [output] = llm.chat(conversation, params, use_tqdm=False, chat_template=load_chat_template(TEMPLATE))
    print("template:", output.outputs[0].text)


if __name__ == "__main__":
    main()
