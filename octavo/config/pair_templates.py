"""How families of rerankers want a query and a document put: the texts of their authors.

What stands before and behind is never cut; `instruction` is what is asked of the model unless a request says
something else.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PairTemplate:
    """A PairTemplate is three texts. body: with {instruction}, {query} and {document}"""

    before: str
    body: str
    after: str
    instruction: str = ""

    def fill(self, query: str, document: str, instruction: str | None) -> str:
        """Return the body for two texts."""
        asked = self.instruction if instruction is None else instruction
        places = {"{instruction}": asked, "{query}": query, "{document}": document}
        parts = [self.body]
        for place, text in places.items():
            if place in self.body:
                head, _, tail = parts.pop().partition(place)
                parts += [head, text, tail]
        return "".join(parts)


PAIR_TEMPLATES = {
    "qwen3": PairTemplate(
        before=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n"
        ),
        body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
    "gemma": PairTemplate(
        before="",
        body="A: {query}\nB: {document}",
        after=(
            "\nGiven a query A and a passage B, determine whether the passage contains an answer to the "
            "query by providing a prediction of either 'Yes' or 'No'."
        ),
    ),
}
PAIR_TEMPLATES_OF = {"Qwen3": "qwen3", "Gemma": "gemma", "Gemma2": "gemma"}
"""By the beginning of their architectures' names."""
