"""Print documents in the order in which they fit a query: score, number and text of each.

By a score of a cross-encoder, or the cosine of two embeddings. "-" reads documents from standard
input, one a line; --json prints lines of JSON. Without --model, the built-in minilm embeds.
"""

import argparse
import json

import octavo
from octavo.cli.embed import WHOLE, pooling_args, read_texts
from octavo.cli.flags import add_engine_flags

EXAMPLES = """\
  octavo rerank "What do plants eat?" "Plants make sugar of light." "Trains run on rails."
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("query", metavar="QUERY", help="What is looked for.")
    parser.add_argument("documents", nargs="*", metavar="DOC", help='A text; "-" = lines of standard input.')
    parser.add_argument("--json", action="store_true", help="Print a line of JSON per document.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Score the documents; what is too long is cut."""
    documents = read_texts(args.documents, "document")
    with octavo.LLM.from_engine_args(pooling_args(args)) as llm:
        outputs = llm.score(args.query, documents, use_tqdm=False, tokenization_kwargs=WHOLE)
    scores = [output.outputs.score for output in outputs]
    for index in sorted(range(len(documents)), key=lambda i: -scores[i]):
        if args.json:
            told = {"index": index, "relevance_score": scores[index], "document": documents[index]}
            print(json.dumps(told, ensure_ascii=False))
        else:
            print(f"{scores[index]:8.4f}  {index:4}  {documents[index]}")
    return 0
