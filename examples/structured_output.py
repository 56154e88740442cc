"""Output that is held to a choice, a regular expression, a JSON schema and a grammar."""

import json

from octavo import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= "SELECT " column " FROM users"
column ::= "name" | "age"
"""

with LLM() as llm:

    def ask(prompt: str, **form: object) -> str:
        params = SamplingParams(
            temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(**form)
        )
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    print("choice: ", ask("'What a lovely day!' This sounds", choice=[" happy", " sad"]))
    print("regex:  ", ask("The moon landing was on the date ", regex=r"\d{4}-\d{2}-\d{2}"))
    print("json:   ", json.loads(ask("A village, as JSON: ", json=SCHEMA)))
    print("grammar:", ask("The ages of all users, in SQL: ", grammar=GRAMMAR))
