"""A choice, a regular expression, a JSON schema and a grammar."""

from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


class Colour(StrEnum):
    red = "red"
    blue = "blue"


class Car(BaseModel):
    brand: str
    colour: Colour


GRAMMAR = """
root ::= "SELECT " column " FROM " table
column ::= "a" | "b"
table ::= "t1" | "t2"
"""


def main():
    llm = LLM(model="smollm2", max_model_len=512)

    def ask(prompt, max_tokens=40, **form):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, structured_outputs=StructuredOutputsParams(**form)
        )
        return llm.generate(prompt, sampling_params=params, use_tqdm=False)[0].outputs[0].text

    print("choice:", ask("Is this good or bad? 'What a lovely day!'", choice=["Positive", "Negative"]))
    print("regex:", ask("An e-mail address of Alan Turing:", regex=r"[a-z]{3,8}@[a-z]{3,8}\.com"))
    print("json:", Car.model_validate_json(ask("A car as JSON:", 100, json=Car.model_json_schema())))
    print("grammar:", ask("An SQL query:", grammar=GRAMMAR))


if __name__ == "__main__":
    main()
