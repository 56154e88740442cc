"""`MedusaHeads` and `MLPSpeculator` guess from the model's last hidden states alone, and keep no cache.

Sources: https://arxiv.org/abs/2401.10774, https://arxiv.org/abs/2404.19124
"""

import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.base.errors import BadCheckpoint, ConfigError
from octavo.config.engine import EngineConfig
from octavo.runtime.loader.safetensors import read_tensors
from octavo.runtime.speculative.drafter import Drafter, Turn, columns
from octavo.runtime.transfer import Array, to_device
from octavo.runtime.worker.chained_steps import Links


class Heads(Drafter):
    """Owns tensors by name, whole on the model's device.

    HEAD, FIRST: names of what gives logits and of what takes the model's hidden state; * = number of a guess
    """

    reads, chains, idles = "samples", True, True
    HEAD: ClassVar[str]
    FIRST: ClassVar[str]

    def __init__(self, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
        """Read the checkpoint. Raises BadCheckpoint, and ConfigError for heads of another model."""
        assert config.draft is not None
        draft, target = config.draft.checkpoint, config.checkpoint
        stored = read_tensors(Path(draft.path))
        self._tensors = {self.rename(name): tensor.to(device, dtype) for _, name, tensor in stored}
        self.kv_specs, self.weight_bytes = [], sum(tensor.nbytes for tensor in self._tensors.values())
        for name, axis, size in ((self.HEAD, 0, target.vocab_size), (self.FIRST, 1, target.embedding_size)):
            if (found := self.tensor(name, 0).shape[axis]) != size:
                raise ConfigError(f"The heads were made for another model: {name} has {found}, not {size}.")
        self.most = self.read(draft.config)

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> int:
        """Read the heads' config; return how many tokens they guess."""

    @staticmethod
    @abstractmethod
    def rename(name: str) -> str:
        """Return our name of a tensor of the checkpoint."""

    @abstractmethod
    def guess(self, number: int, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of a guess, and the states for the next. token_ids: those before it"""

    def tensor(self, name: str, number: int) -> Tensor:
        """Return the tensor of a guess, or of an earlier one, which serves several."""
        names = (name.replace("*", str(earlier)) for earlier in range(number, -1, -1))
        found = next((self._tensors[each] for each in names if each in self._tensors), None)
        if found is None:
            raise BadCheckpoint(f"The heads lack {name.replace('*', str(number))}.")
        return found

    def propose(self, turn: Turn) -> Tensor | None:
        places = np.flatnonzero(turn.counts)
        if not places.size or turn.hidden is None:
            return None
        samples = np.searchsorted(turn.work.samples, turn.lasts[places])
        hidden, known = turn.hidden[to_device(samples, turn.hidden.device)], self._state.token_ids.view(-1)
        rows, ends = turn.rows[places], turn.ends[places]
        ids = known[to_device(self._state.places(rows, ends), known.device)]
        found: list[tuple[Array, Tensor]] = []
        for number in range(int(turn.counts.max())):
            logits, hidden = self.guess(number, hidden, ids)
            ids = self.choose(logits, rows, ends + 1 + number)
            found.append((places, ids))
        return columns(found, len(turn.rows))

    def chain(self, links: Links) -> None:
        hidden, ids = links.hidden[links.lasts], links.following[links.lasts]
        for number in range(links.end.count):
            logits, hidden = self.guess(number, hidden, ids)
            ids = links.choose(logits, number, draws=self.draws)


class MedusaHeads(Heads):
    """Each head guesses the token at one distance, by itself."""

    HEAD, FIRST = "lm_heads.*.weight", "blocks.*.layers.0.weight"

    def read(self, config: Mapping[str, Any]) -> int:
        self._num_layers = int(config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1)
        return sum(name.startswith("lm_heads.") for name in self._tensors)

    @staticmethod
    def rename(name: str) -> str:
        """See Heads; the first release numbered a head behind its blocks."""
        old = re.fullmatch(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)", name)
        if old is None:
            return name
        return f"blocks.{old[1]}.layers.{old[2]}.{old[4]}" if old[3] else f"lm_heads.{old[1]}.{old[4]}"

    def guess(self, number: int, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden
        for layer in range(self._num_layers):
            weight = self.tensor(f"blocks.*.layers.{layer}.weight", number)
            bias = self._tensors.get(f"blocks.{number}.layers.{layer}.bias")
            x = x + functional.silu(functional.linear(x, weight, bias))
        return x @ self.tensor(self.HEAD, number).t(), hidden


class MLPSpeculator(Heads):
    """Each guess mixes the token before it into a state, which begins as the model's."""

    HEAD, FIRST = "head.*.weight", "proj.*.weight"

    def read(self, config: Mapping[str, Any]) -> int:
        most = int(config.get("n_predict") or 3)
        self._is_scaled, kept = bool(config.get("scale_input")), 0.5 ** (0.5 / most)
        self._token_weight = ((1 - kept**2) * len(self.tensor(self.FIRST, 0)) / 2) ** 0.5 / kept
        return most

    @staticmethod
    def rename(name: str) -> str:
        return name.removeprefix("speculator.")

    def guess(self, number: int, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_scaled and not number:
            hidden = functional.rms_norm(hidden, hidden.shape[1:], eps=1e-6) / 2**0.5
        hidden = hidden @ self.tensor(self.FIRST, number).t()
        hidden = hidden + self._token_weight * self.tensor("emb.*.weight", number)[token_ids]
        scale, shift = (self.tensor(f"ln.*.{part}", number) for part in ("weight", "bias"))
        hidden = functional.gelu(functional.rms_norm(hidden, hidden.shape[1:], eps=1e-6) * scale + shift)
        return hidden @ self.tensor(self.HEAD, number).t(), hidden
