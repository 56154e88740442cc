"""Find the paragraph that answers a question: vectors of texts, and scores of pairs.

octavo pull minilm && python examples/embeddings.py
"""

from octavo import LLM

QUESTION = "What do plants eat?"
PARAGRAPHS = [
    "Trains run on rails, and mountain trains on cogs.",
    "Plants make sugar of light, water and air.",
    "Bread is made of flour, water, salt and yeast.",
]

with LLM("minilm") as llm:
    [question] = llm.embed(QUESTION, use_tqdm=False)
    print(f"{question.outputs.hidden_size} numbers, the first: {question.outputs.embedding[0]:.4f}")
    scores = [output.outputs.score for output in llm.score(QUESTION, PARAGRAPHS, use_tqdm=False)]

for score, paragraph in sorted(zip(scores, PARAGRAPHS, strict=True), reverse=True):
    print(f"{score:.3f} {paragraph}")
