"""`PoolingMethods`: what `LLM` offers with embedding, classification and scoring models. Names are vLLM's."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import msgspec

from octavo.base.errors import RequestError, wrong
from octavo.config.engine import EngineConfig
from octavo.frontend.outputs import pooling_output
from octavo.frontend.outputs.request_output import RequestOutput
from octavo.frontend.requests.options import RequestKeywords
from octavo.frontend.requests.prompts import PromptType
from octavo.frontend.requests.scoring import Scoring, pair_up
from octavo.messages.pooling import PoolingParams, PoolingTask

Prompts = PromptType | Sequence[PromptType]
GivenParams = PoolingParams | Sequence[PoolingParams] | None
Progress = bool | Callable[..., Any]


class PoolingMethods(ABC):
    """The methods; whoever has them runs requests."""

    @property
    @abstractmethod
    def _config(self) -> EngineConfig:
        """The engine's decisions."""

    @abstractmethod
    def _pool(
        self, prompts: Prompts, params: list[PoolingParams] | PoolingParams, use_tqdm: Progress, keywords: Any
    ) -> list[RequestOutput]:
        """Run a request for each prompt."""

    def encode(
        self,
        prompts: Prompts,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: Progress = True,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[pooling_output.PoolingRequestOutput[pooling_output.PoolingOutput]]:
        """Return the result of each prompt, as an array. pooling_task: None = the model's own."""
        return self._outputs(
            prompts, pooling_params, pooling_task, pooling_output.PoolingRequestOutput, use_tqdm, options
        )

    def embed(
        self,
        prompts: Prompts,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: Progress = True,
        **options: Unpack[RequestKeywords],
    ) -> list[pooling_output.EmbeddingRequestOutput]:
        """Return the vector of each prompt."""
        return self._outputs(
            prompts, pooling_params, "embed", pooling_output.EmbeddingRequestOutput, use_tqdm, options
        )

    def classify(
        self,
        prompts: Prompts,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: Progress = True,
        **options: Unpack[RequestKeywords],
    ) -> list[pooling_output.ClassificationRequestOutput]:
        """Return the probabilities of the labels for each prompt."""
        return self._outputs(
            prompts, pooling_params, "classify", pooling_output.ClassificationRequestOutput, use_tqdm, options
        )

    def reward(
        self,
        prompts: Prompts,
        pooling_params: GivenParams = None,
        *,
        use_tqdm: Progress = True,
        **options: Unpack[RequestKeywords],
    ) -> list[pooling_output.PoolingRequestOutput[pooling_output.PoolingOutput]]:
        """Return the score, or the scores of the tokens, that a reward model gives each prompt."""
        return self._outputs(
            prompts, pooling_params, None, pooling_output.PoolingRequestOutput, use_tqdm, options
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        instruction: str | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[pooling_output.ScoringRequestOutput]:
        """Return how well texts fit: 1:1, 1:N or N:N.

        By a cross-encoder's score, by the cosine of embeddings, or by MaxSim over the vectors of tokens.
        """
        use_activation = pooling_params.use_activation if pooling_params else None
        scoring = Scoring(self._config, pairs := pair_up(data_1, data_2), use_activation, instruction)
        made = self._pool(scoring.prompts, scoring.params, use_tqdm, options)
        data, every = (
            [pooling_output.data_of(output) for output in made],
            [output.prompt_token_ids or [] for output in made],
        )
        outputs = []
        for index in range(len(pairs)):
            parts = [made[place] for place in scoring.outputs_of(index)]
            ids = [token_id for part in parts for token_id in part.prompt_token_ids or ()]
            found = pooling_output.ScoringOutput(scoring.score(index, data, every))
            outputs.append(pooling_output.ScoringRequestOutput(parts[0].request_id, found, ids))
        return outputs

    def _outputs(
        self,
        prompts: Prompts,
        given: GivenParams,
        task: PoolingTask | None,
        kind: Any,
        use_tqdm: Progress,
        options: RequestKeywords,
    ) -> list[Any]:
        listed = given if isinstance(given, list | tuple) else None
        params = [_for_task(p, task) for p in listed] if listed is not None else _for_task(given, task)
        made = self._pool(prompts, params, use_tqdm, options)
        return [kind.of(output, _DATA[kind]) for output in made]


_DATA = {
    pooling_output.PoolingRequestOutput: pooling_output.PoolingOutput,
    pooling_output.EmbeddingRequestOutput: pooling_output.EmbeddingOutput,
    pooling_output.ClassificationRequestOutput: pooling_output.ClassificationOutput,
}


def _for_task(given: Any, task: PoolingTask | None) -> PoolingParams:
    params = PoolingParams() if given is None else given
    if not isinstance(params, PoolingParams):
        raise wrong("pooling_params", f"must be PoolingParams or a list of them, got {type(params).__name__}")
    if task is None:
        return params
    if params.task not in (None, task):
        raise RequestError(f"You cannot overwrite param.task={params.task!r} with {task!r}!", "task")
    return msgspec.structs.replace(params, task=task)  # checks the task
