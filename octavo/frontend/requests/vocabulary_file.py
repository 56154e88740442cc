"""The vocabulary of a tokenizer as a file, for those who match bytes: the core's grammars and the checkers.

Made by the front when the first request asks for structured output; gone with the object.
"""

import weakref
from hashlib import sha256

import msgspec

from octavo.base.transport import Mailbox
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.messages.structured import Vocabulary


class VocabularyFile:
    """A file in a private directory, named by its content: whoever has read it once knows it again."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: list[int]) -> None:
        """vocab_size: number of logits. Takes about 2 s for 262,144 tokens of SentencePiece."""
        content = msgspec.msgpack.encode(
            Vocabulary(
                tokens=[tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
                special_ids=sorted(i for i in tokenizer.special_ids if i < vocab_size),
                end_ids=end_ids,
            )
        )
        mailbox = Mailbox.create()  # a directory that does not outlive its makers
        self.path = mailbox.path / sha256(content).hexdigest()
        self.path.write_bytes(content)
        self.close = weakref.finalize(self, mailbox.close)
        """Remove it; may be called twice."""
