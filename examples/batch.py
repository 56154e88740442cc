"""Many prompts, each with its own parameters, answered in one batch and written as JSON lines."""

import json
import sys

from octavo import LLM, SamplingParams

QUESTIONS = {"What is the capital of France?": 16, "Name three animals.": 24, "What is 2 + 2?": 12}

with LLM() as llm:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in QUESTIONS.values()]
    for question, output in zip(QUESTIONS, llm.chat(conversations, params), strict=True):
        completion = output.outputs[0]
        answer = {"question": question, "answer": completion.text, "ended_by": completion.finish_reason}
        json.dump(answer, sys.stdout)
        print()
