"""MiniMax-M2 has heads that rotate in part, a norm over all of them, and experts chosen by sigmoid."""

from octavo.runtime.models import experts
from octavo.runtime.models.arch import Arch, Config, read_arch, read_heads, size_of
from octavo.runtime.models.decoder import Decoder
from octavo.runtime.models.weights import to


class MiniMaxM2(Decoder):
    """Every layer has experts, without groups."""

    has_spare_layers = True
    WEIGHTS = Decoder.WEIGHTS.replace(
        experts.routed()
        | experts.routed("layers.*.block_sparse_moe", "w1", "w3", "w2")
        | {
            "layers.*.mlp.e_score_correction_bias": to("layers.*.mlp.choice.bias"),
            "layers.*.block_sparse_moe.e_score_correction_bias": to("layers.*.mlp.choice.bias"),
        }
    )

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        """Read how much of a head rotates, which the first checkpoints give in components."""
        given: Config = {"head_dim": 128} | config
        if given.get("rotary_dim"):
            given["partial_rotary_factor"] = size_of(given, "rotary_dim") / size_of(given, "head_dim")
        router = experts.deepseek_v3(given)._replace(epsilon=0.0)
        feed_forward = experts.read_experts(given, router, choice_bias=True)
        return read_arch(given, attention=read_heads(given, qk_norm="all_heads"), feed_forward=feed_forward)
