"""`Pieces`: texts longer than the model takes, embedded in pieces whose vectors are averaged.

Used by `LLM` and by the server where `pooler_config` has enable_chunked_processing. The tokens of a text are
cut every max_model_len tokens; its vector is the mean of the pieces' vectors in float32, each counted as
often as it has tokens, before they are cut to the dimensions asked for and normalised.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec
import numpy as np

from octavo.base.errors import RequestError
from octavo.config.pooling import PoolingConfig
from octavo.frontend.outputs.pooling_output import data_of
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.input_processor import InputProcessor
from octavo.frontend.requests.options import RequestKeywords, TokenizationOptions
from octavo.frontend.requests.prompts import PromptType
from octavo.messages.pooling import Pooled, PoolingParams


class Pieces:
    """What prompts become: `prompts` and `params`, with `owners`, the prompts that they are of."""

    def __init__(
        self,
        processor: InputProcessor,
        config: PoolingConfig,
        prompts: Sequence[PromptType],
        params: Sequence[PoolingParams],
        options: TokenizationOptions,
    ) -> None:
        """Raises RequestError for a text that is longer than max_embed_len."""
        self._config, self._given = config, params
        self.prompts: list[PromptType] = []
        self.params: list[PoolingParams] = []
        self.owners: list[int] = []
        is_cut = config.enable_chunked_processing and options.truncate_prompt_tokens is None
        for owner, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            embeds = (asked.task or config.tasks[0]) == "embed"
            ids = processor.long_ids(prompt, options) if is_cut and embeds else []
            if config.max_embed_len and len(ids) > config.max_embed_len:
                raise RequestError(
                    f"This model's maximum embedding input length is {config.max_embed_len} tokens. However, "
                    f"you requested {len(ids)} tokens in the input for embedding generation. Please reduce "
                    "the length of the input.",
                    "input",
                )
            step = processor.max_model_len
            parts: list[PromptType] = [ids[start : start + step] for start in range(0, len(ids), step)]
            bare = msgspec.structs.replace(asked, use_activation=False, dimensions=None)
            self.prompts += parts or [prompt]
            self.params += [bare] * len(parts) or [asked]
            self.owners += [owner] * max(1, len(parts))

    def spread(self, keywords: RequestKeywords) -> RequestKeywords:
        """Return keywords of which some have a value for each prompt, with one for each piece."""
        spread = {
            name: [value[owner] for owner in self.owners]
            if isinstance(value, list) and len(value) == len(self._given)
            else value
            for name, value in keywords.items()
        }
        return cast("RequestKeywords", spread)

    def joined(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Return an output for each prompt, of those for the pieces."""
        every: list[list[RequestOutput]] = [[] for _ in self._given]
        for owner, output in zip(self.owners, outputs, strict=True):
            every[owner].append(output)
        return [
            parts[0] if len(parts) == 1 else self._join(parts, params)
            for parts, params in zip(every, self._given, strict=True)
        ]

    def _join(self, parts: list[RequestOutput], params: PoolingParams) -> RequestOutput:
        if failed := [part for part in parts if part.pooled is None]:
            return failed[0]
        ids = [part.prompt_token_ids or [] for part in parts]
        counts = np.array([len(some) for some in ids], np.float32)
        vector = (counts[:, None] * np.stack([data_of(part) for part in parts])).sum(0) / counts.sum()
        vector = vector[: params.dimensions]
        normalizes = self._config.normalize if params.use_activation is None else params.use_activation
        if normalizes:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        pooled = Pooled(vector.astype(np.float32).tobytes(), list(vector.shape))
        return replace(parts[0], prompt_token_ids=[token for some in ids for token in some], pooled=pooled)
