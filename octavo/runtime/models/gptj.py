"""GPT-J has one norm for attention and MLP side by side, rotates neighbours, and biases the head."""

from octavo.runtime.layers.rotary import Rope
from octavo.runtime.models.arch import Arch, Config, read_arch, read_dense, read_norm, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.gpt2 import usual_names
from octavo.runtime.models.weights import WeightMap, qkv, to


class GPTJ(Decoder):
    """GPT-J has biases in the MLP and the head only."""

    WEIGHTS = WeightMap(
        {
            "wte": to("embed_tokens"),
            "ln_f": to("norm"),
            "lm_head": to("lm_head"),
            "h.*.ln_1": to("layers.*.attention_norm"),
            **qkv("h.*.attn.?_proj", "layers.*.attention.qkv"),
            "h.*.attn.out_proj": to("layers.*.attention.out"),
            "h.*.mlp.fc_in": to("layers.*.mlp.up"),
            "h.*.mlp.fc_out": to("layers.*.mlp.down"),
        },
        prefix="transformer.",
        ignored=(r"\.attn\.(masked_)?bias$", r"\.attn\.embed_positions$"),  # the causal mask, the rope
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read GPT-2's names; `rotary_dim` components of a head rotate."""
        config = usual_names(config)
        return read_arch(
            config,
            feed_forward=read_dense(config, gated=False, bias=True),
            rope=Rope(dim=size_of(config, "rotary_dim", 64), interleaved=True),
            residual="parallel",
            norms=frozenset({"attention_in"}),
            norm=read_norm(config),
            head_bias=True,
        )
