"""`Generic` runs a causal language model of transformers' over octavo's paged cache.

The loader calls `probe` on the model that transformers has built and filled, then makes a `Generic` of it and
calls `verify`. Everything but attention runs as transformers wrote it, all requests of a step as one row of
tokens. Its attention layers call the function that the config names, through transformers' attention
interface (https://huggingface.co/docs/transformers/attention_interface): `attend` is ours.

Every module of the model carries our `Link` as `octavo`; nothing is global but the names of two functions.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from octavo.base.errors import OctavoError, Unsupported
from octavo.messages.kv import KVCacheSpec
from octavo.runtime.batch import ForwardBatch, GroupTables
from octavo.runtime.layers.attention import Attention, make_cache
from octavo.runtime.layers.build import BuildContext
from octavo.runtime.layers.self_attention import HeadsArch
from octavo.runtime.models.interface import Model

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query position, key position) to whether they may meet; broadcast."""

ATTENTION = "octavo"
PROBE = "octavo_probe"

_HARMLESS = frozenset({"position_ids", "cache_position"})
_PROBE_TOKENS = 3
_FAR = (1 << 20) + 1
"""A position beyond every context; odd, so that no chunk of a power of two ends there."""
_OTHER = -1


@dataclass(frozen=True)
class AttentionCall:
    """An AttentionCall says how one attention layer calls."""

    module: nn.Module
    heads: HeadsArch
    sliding_window: int

    def kv_spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return the layer's cache, in numbers of this type. Raises Unsupported."""
        return self.heads.kv_spec(1, dtype, self.sliding_window)


@dataclass(eq=False)
class Link:
    """The Link is what the model's modules know of us.

    calls, output_type: what the probe saw: attention layers in their order, the form of the backbone's answer
    layers, batch:      our layer for each of its attention modules, and the step that runs
    """

    calls: list[AttentionCall] = field(default_factory=list)
    output_type: type[Any] = object
    layers: dict[nn.Module, Attention] = field(default_factory=dict)
    batch: ForwardBatch | None = None


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks: [1, heads, T, head_dim] each, to [1, T, heads, head_dim]."""
    del attention_mask, others  # the probe has read them
    link: Link = module.octavo
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    assert link.batch is not None
    return link.layers[module](q, k, v, link.batch).view(1, *q.shape), None


def record(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """Note the call while probing, and answer zeros. Raises Unsupported for what `attend` cannot do."""
    calls = module.octavo.calls
    if any(call.module is module for call in calls):
        raise Unsupported("it runs one attention layer twice in a step")
    if key.shape[-1] != value.shape[-1]:
        raise Unsupported(
            f"its keys have {key.shape[-1]} numbers per head, its values {value.shape[-1]}; the cache keeps "
            "as many of either"
        )
    if query.shape[0] != 1 or query.shape[2] != key.shape[2] or query.shape[-1] != key.shape[-1]:
        raise Unsupported("its attention looks at other things than the prompt (cross attention)")
    unknown = sorted(n for n, x in others.items() if isinstance(x, Tensor) and n not in _HARMLESS)
    if unknown:
        raise Unsupported(f"its attention takes {', '.join(unknown)}, which octavo's kernels do not know")
    scale, window = others.get("scaling"), others.get("sliding_window") or 0
    heads = HeadsArch(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[-1],
        scale=key.shape[-1] ** -0.5 if scale is None else float(scale),
        soft_cap=float(others.get("softcap") or 0.0),
    )
    calls.append(
        AttentionCall(module, heads, window if attention_mask is None else _window_of(attention_mask))
    )
    return torch.zeros_like(query).transpose(1, 2), None


def measure(mask_function: MaskFunction, device: torch.device, **others: Any) -> Tensor:
    """Return, while probing, what `mask_function` means for our kernels, as a tensor [1, 1, 1, 1].

    Holds the size of the sliding window, 0 for causal attention, _OTHER for anything else.
    """
    return torch.full((1, 1, 1, 1), _read_mask(mask_function, device), device=device)


def _read_mask(mask_function: MaskFunction, device: torch.device) -> int:
    keys = torch.arange(_FAR + 2, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)

    def seen_from(query: int) -> Tensor:
        return keys[mask_function(zero, zero, zero + query, keys).broadcast_to(keys.shape)]

    size = len(seen_from(_FAR))
    for query in (_FAR, _FAR - 1, _FAR // 3):
        if not torch.equal(seen_from(query), keys[max(0, query + 1 - size) : query + 1]):
            return _OTHER
    return 0 if size == _FAR + 1 else size or _OTHER


def _window_of(mask: Tensor) -> int:
    if mask.numel() != 1:
        raise Unsupported("it builds an attention mask of its own")
    if int(mask) == _OTHER:
        raise Unsupported("its mask is neither causal nor a sliding window (chunks, or both directions)")
    return int(mask)


AttentionInterface.register(ATTENTION, attend)
AttentionInterface.register(PROBE, record)
AttentionMaskInterface.register(PROBE, measure)


@torch.inference_mode()
def probe(hf: PreTrainedModel) -> Link:
    """Link `hf` to us and see how its attention layers call. Raises Unsupported with the reason."""
    link = Link()
    for module in hf.modules():
        module.octavo = link  # type: ignore[assignment]  # modules take any attribute
    hf.set_attn_implementation(PROBE)
    tokens = torch.arange(_PROBE_TOKENS, device=hf.device)
    try:
        output = hf.base_model(input_ids=tokens[None], position_ids=tokens[None], use_cache=False)
    except Exception as error:
        _refuse(hf, str(error) if isinstance(error, OctavoError) else repr(error), error)
    finally:
        hf.set_attn_implementation(ATTENTION)
    if not link.calls:
        _refuse(hf, "it does not use transformers' attention interface")
    link.output_type = type(output)
    return link


def _refuse(hf: PreTrainedModel, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise Unsupported(
        f"{type(hf).__name__} of transformers cannot run over octavo's paged cache: {reason}."
    ) from cause


class _Given(nn.Module):
    """Stands in for the backbone where only the head shall run: answers what it is given."""

    def __init__(self, output_type: type[Any]) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *ids: None, inputs_embeds: Tensor, **others: Any) -> Any:
        """Return the hidden states [1, rows, hidden_size] in the form that the backbone answers in."""
        return self._output_type(last_hidden_state=inputs_embeds)


class Generic(Model):
    """Runs a model of transformers' with octavo's attention layers. `hf` has been probed."""

    is_recordable = False  # nobody knows what its code looks at on the host

    def __init__(self, hf: PreTrainedModel, link: Link, build: BuildContext) -> None:
        super().__init__()
        self._backend = build.attention
        self.link = link
        self.hf = hf
        self.head = copy.copy(hf)
        self.head._modules = {**hf._modules, hf.base_model_prefix: _Given(link.output_type)}
        dtype = build.kv_dtype
        link.layers = {
            call.module: Attention(
                build, i, call.kv_spec(dtype), scale=call.heads.scale, soft_cap=call.heads.soft_cap
            )
            for i, call in enumerate(link.calls)
        }
        self.layers = nn.ModuleList(link.layers.values())

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.hf.parameters())

    def forward(self, batch: ForwardBatch) -> Tensor:
        self._backend.plan(batch)
        self.link.batch = batch
        rows = {"input_ids": batch.input_ids[None], "position_ids": batch.positions[None]}
        if batch.given_embeds is not None:
            embeddings = self.hf.get_input_embeddings()(rows.pop("input_ids"))
            rows["inputs_embeds"] = batch.with_given_embeds(embeddings[0])[None]
        try:
            hidden: Tensor = self.hf.base_model(**rows, use_cache=False).last_hidden_state[0]
        finally:
            self.link.batch = None  # it holds the cache
        return hidden if batch.wanted is None else hidden[batch.wanted]

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits: by the model's own head, with the factors and caps that belong to it."""
        logits: Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float()


@torch.inference_mode()
def verify(model: Generic, build: BuildContext) -> None:
    """Compare `model` to transformers' own attention on a few tokens. Raises Unsupported if they differ.

    Two requests, computed in three steps together, find state that is kept outside attention, tokens that see
    another request's, positions that are not followed, and a head that does more than is known here.
    """
    hf = model.hf
    generator = torch.Generator().manual_seed(0)
    vocab_size = hf.config.get_text_config().vocab_size
    prompts = [torch.randint(vocab_size, (n,), generator=generator).to(build.device) for n in (13, 9)]
    hf.set_attn_implementation("eager")
    try:
        expected = [hf(input_ids=prompt[None], use_cache=False).logits[0].float() for prompt in prompts]
        hf.set_attn_implementation(ATTENTION)
        found = _run_in_steps(model, prompts, build)
    except Exception as error:
        _refuse(hf, repr(error), error)
    tolerance = torch.finfo(build.compute_dtype).eps ** 0.5
    for ours, theirs in zip(found, expected, strict=True):
        difference = float((ours - theirs).norm() / theirs.norm())
        if not difference <= tolerance:  # nor is it NaN
            _refuse(hf, f"its logits differ by {difference:.1%} from those with transformers' own attention")


def _run_in_steps(model: Generic, prompts: list[Tensor], build: BuildContext) -> list[Tensor]:
    """Return the logits of all positions, computed in three steps; each prompt has a block of its own."""
    block_size = max(map(len, prompts))
    specs = [call.kv_spec(build.compute_dtype) for call in model.link.calls]
    caches = [make_cache(spec, len(prompts), block_size, build.device) for spec in specs]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for third in range(3):
        pieces = [torch.arange(len(p), device=build.device).tensor_split(3)[third] for p in prompts]
        lengths = [len(piece) for piece in pieces]
        ends = [int(piece[-1]) + 1 for piece in pieces]
        tables = torch.arange(len(prompts), dtype=torch.int32, device=build.device)[:, None]
        slots = torch.cat([piece + r * block_size for r, piece in enumerate(pieces)])
        batch = ForwardBatch(
            input_ids=torch.cat([p[piece] for p, piece in zip(prompts, pieces, strict=True)]),
            positions=torch.cat(pieces),
            cu_q_lens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=build.device),
            kv_lens=torch.tensor(ends, dtype=torch.int32, device=build.device),
            kv_caches=caches,
            groups=[GroupTables(tables, slots)],
            group_of_layer=[0] * len(caches),
        )
        hidden = model.forward(batch)
        logits = torch.split(model.logits(hidden), lengths)
        for part, piece in zip(parts, logits, strict=True):
            part.append(piece)
    return [torch.cat(part) for part in parts]
