"""The import path under which vLLM's users know the outputs of a request."""

from octavo.frontend.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
