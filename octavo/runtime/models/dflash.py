"""DFlash guesses a block of tokens at once: masks behind the last token see each other and what is before.

What is before are keys and values that each layer makes of the model's states. Used by runtime/speculative.
Source: https://arxiv.org/abs/2602.06036
"""

from typing import Any

from torch import Tensor, nn

from octavo.base.errors import BadCheckpoint, Unsupported
from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.linear import ReplicatedLinear
from octavo.runtime.layers.norm import make_norm
from octavo.runtime.layers.self_attention import SelfAttention
from octavo.runtime.models.arch import Config, read_arch, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.draft_heads import DraftArch, DraftHead, as_draft
from octavo.runtime.models.weights import WeightMap, to


def _setting(config: Config, name: str) -> Any:
    """Return what the format of the first release keeps one level below, and speculators do not."""
    return (config.get("dflash_config") or {}).get(name, config.get(name))


class DFlash(DraftHead):
    """Layers of Qwen3 that read states of several of the model's layers."""

    WEIGHTS = WeightMap(
        {**Decoder.WEIGHTS.rules, "fc": to("fc"), "hidden_norm": to("hidden_norm")},
        prefix="model.",
        ignored=(*Decoder.WEIGHTS.ignored, r"^(model\.)?(d2t|t2d)$"),
    )

    @staticmethod
    def taps(config: Config, num_layers: int = 0) -> tuple[int, ...]:
        """See DraftHead. The first release counts outputs, speculators inputs. Raises BadCheckpoint."""
        if outputs := _setting(config, "target_layer_ids"):
            return tuple(layer + 1 for layer in outputs)
        if inputs := config.get("aux_hidden_state_layer_ids"):
            return tuple(inputs)
        raise BadCheckpoint("The DFlash head's config has no target_layer_ids.")

    @staticmethod
    def arch_from_hf(config: Config) -> DraftArch:
        """Read a config of the first release, or of the speculators format, flattened. Raises Unsupported."""
        refused = ("use_swa", "causal", "sample_from_anchor", "attention_sink_bias", "attention_value_scale")
        if found := [name for name in refused if _setting(config, name)]:
            raise Unsupported(f"DFlash heads with {', '.join(found)} are not supported.")
        if not isinstance(_setting(config, "mask_token_id"), int):
            raise BadCheckpoint("The DFlash head's config has no mask_token_id.")
        arch = read_arch(config, attention=read_heads(config, qk_norm="head"))
        if any(layer.sliding_window for layer in arch.layers):
            raise Unsupported("DFlash heads with sliding windows are not supported.")
        own: Config = {
            "draft_vocab_size": size_of(config, "draft_vocab_size", size_of(config, "vocab_size")),
            "num_states": len(DFlash.taps(config)),
            "state_size": size_of(config, "target_hidden_size", size_of(config, "hidden_size")),
            "has_embeddings": bool(config.get("has_embed_tokens")),
            "has_head": bool(config.get("has_lm_head")),
            "mask_id": _setting(config, "mask_token_id"),
            "block_size": size_of(config, "block_size", 1),
        }
        return as_draft(arch, **own)

    def __init__(self, arch: DraftArch, build: BuildContext) -> None:
        super().__init__(arch, build)
        size = arch.hidden_size
        self.mask_id, self.block_size = arch.mask_id, arch.block_size
        self.fc = ReplicatedLinear(build.at("fc"), arch.state_size * arch.num_states, size, bias=False)
        self.hidden_norm, self.norm = (
            make_norm(arch.norm, build.at(x), size) for x in ("hidden_norm", "norm")
        )
        self.layers = nn.ModuleList(self._layer(arch, build, index) for index in range(len(arch.layers)))

    def combine(self, hidden: Tensor) -> Tensor:
        """Project the states of the layers that are read, which stand behind the last one."""
        states: Tensor = self.fc(hidden[:, -self._arch.num_states * self._arch.state_size :])
        return states

    def keep(self, states: Tensor, batch: ForwardBatch) -> None:
        """Store keys and values of the model's states, [T, hidden_size], at the places of their tokens."""
        self._attention.plan(batch)
        x = self.hidden_norm(states)
        for layer in self.layers:
            assert isinstance(layer.attention, SelfAttention)
            layer.attention.keep(x, batch)

    def run(self, embeds: Tensor, states: Tensor, batch: ForwardBatch) -> Tensor:
        x, residual = embeds, None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm.add(x, residual)[0]
