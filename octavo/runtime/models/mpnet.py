"""MPNet adds to every score what its layers learned together of the distance between query and key."""

from dataclasses import replace

from torch import Tensor

from octavo.runtime.batch import ForwardBatch
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.distance_bias import BUCKETS, DistanceBias
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models.arch import Arch, Config, expect
from octavo.runtime.models.bert import Bert, Roberta
from octavo.runtime.models.encoder import EncoderArch
from octavo.runtime.models.weights import WeightMap, qkv, to


class MPNet(Bert):
    """Counts positions as RoBERTa does, and has no types of tokens."""

    WEIGHTS = WeightMap(
        {
            **{
                stem: target
                for stem, target in Bert.WEIGHTS.rules.items()
                if ".attention." not in stem and "token_type" not in stem
            },
            **qkv("encoder.layer.*.attention.attn.?", "layers.*.attention.qkv"),
            "encoder.layer.*.attention.attn.o": to("layers.*.attention.out"),
            "encoder.layer.*.attention.LayerNorm": to("layers.*.attention_norm"),
            "encoder.relative_attention_bias": to("distances.table"),
        },
        prefix="mpnet.",
        ignored=tuple(pattern.replace("roberta", "mpnet") for pattern in Roberta.WEIGHTS.ignored),
    )
    MASKED_HEAD = Roberta.MASKED_HEAD
    CLASSIFIER = Roberta.CLASSIFIER

    def __init__(self, arch: Arch, build: BuildContext) -> None:
        super().__init__(arch, build)
        heads = arch.layers[0].attention
        assert isinstance(heads, HeadsArch)
        self.distances = DistanceBias(build.at("distances"), heads.num_heads)

    @staticmethod
    def arch_from_hf(config: Config) -> Arch:
        expect(config, relative_attention_num_buckets=BUCKETS)
        arch = Roberta.arch_from_hf({"layer_norm_eps": 1e-12} | config)
        assert isinstance(arch, EncoderArch)
        return replace(arch, num_token_types=0)

    def embed(self, batch: ForwardBatch) -> Tensor:
        self.distances.add_to(batch)
        return super().embed(batch)
