"""The import path under which vLLM's users know the parameters of a request."""

from octavo.frontend.beam_search_params import BeamSearchParams
from octavo.messages.sampling import RepetitionDetectionParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearchParams", "RepetitionDetectionParams", "RequestOutputKind", "SamplingParams"]
