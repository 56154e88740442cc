"""`import vllm` in processes that a program under octavo.as_vllm starts: on their path, not imported here."""

import sys

import octavo

sys.modules[__name__] = octavo

import octavo.as_vllm  # noqa: E402  # it asks what `vllm` is
