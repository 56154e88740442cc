"""The table of Triton kernels: every op for an NVIDIA GPU. Activations have any floating-point type.

Importing this module needs the package `triton`; without it, the CUDA platform takes the references.
"""

from functools import partial

from octavo.runtime.kernels.adapters import AdapterKernels
from octavo.runtime.kernels.attention import AttentionKernels
from octavo.runtime.kernels.experts import ExpertKernels
from octavo.runtime.kernels.linear import LinearKernels, SplitProduct
from octavo.runtime.kernels.norms import NormKernels
from octavo.runtime.kernels.peers import PeerKernels
from octavo.runtime.kernels.recurrent import RecurrentKernels
from octavo.runtime.kernels.ref.blocks import select_inputs
from octavo.runtime.kernels.ref.cache import distance_attention
from octavo.runtime.kernels.ref.elementwise import join
from octavo.runtime.kernels.sampling import SamplingKernels, TruncateAndDraw
from octavo.runtime.kernels.steps import StepKernels
from octavo.runtime.kernels.table import KernelTable
from octavo.runtime.kernels.triton import blocks, edits, eight_bits, elementwise, experts, peers, recurrent
from octavo.runtime.kernels.triton.adapters import LowRankChanges, group
from octavo.runtime.kernels.triton.arranged import arrange
from octavo.runtime.kernels.triton.attention import paged_attention
from octavo.runtime.kernels.triton.both_sides import attend_packed
from octavo.runtime.kernels.triton.chained import CHAIN_KERNELS
from octavo.runtime.kernels.triton.changed_experts import block_experts
from octavo.runtime.kernels.triton.draws import draw
from octavo.runtime.kernels.triton.latent_prompts import latent_prompts
from octavo.runtime.kernels.triton.launch import Counters
from octavo.runtime.kernels.triton.matmul import Matmul
from octavo.runtime.kernels.triton.noise import row_limits
from octavo.runtime.kernels.triton.replaced import change_lookup, replace
from octavo.runtime.kernels.triton.routing import route
from octavo.runtime.kernels.triton.scores import score
from octavo.runtime.kernels.triton.split_keys import merge_parts
from octavo.runtime.kernels.triton.steps import begin_step, end_step, mask_step
from octavo.runtime.kernels.triton.store import store_kv
from octavo.runtime.kernels.triton.truncation import truncate


def cuda_table() -> KernelTable:
    """Return every op as a Triton kernel."""
    counters = Counters()
    matmul, changes = Matmul(counters), LowRankChanges()
    return KernelTable(
        name="triton",
        attention=AttentionKernels(
            store_kv,
            partial(paged_attention, counters),
            elementwise.rotary_tables,
            elementwise.cut_chunks,
            distance_attention,
            latent_prompts,
            merge_parts,
            attend_packed,
        ),
        norms=NormKernels(elementwise.rms_norm, elementwise.add_norm, layer_norm=elementwise.layer_norm),
        activate=elementwise.activate,
        linear=LinearKernels(
            matmul=matmul,
            gated_matmul=matmul.gated,
            block_dequantize=blocks.block_dequantize,
            block_matmul=partial(blocks.block_matmul, counters),
            select_inputs=select_inputs,
            join=join,
            block_feed_forward=partial(eight_bits.feed_forward, counters),
            explain=blocks.explain,
            arrange=arrange,
            split_product=SplitProduct(matmul.split, elementwise.add_norm),
        ),
        experts=ExpertKernels(
            route,
            experts.dense_experts,
            block_experts,
            placed_experts=experts.placed_experts,
            arrange=experts.arrange_stack,
        ),
        recurrent=RecurrentKernels(recurrent.causal_conv, recurrent.scan, recurrent.gate),
        sampling=SamplingKernels(
            TruncateAndDraw(partial(draw, counters), truncate),
            row_limits,
            edits.widen,
            edits.forbid,
            edits.ban,
            edits.penalize,
            edits.count,
            score,
        ),
        steps=StepKernels(partial(begin_step, counters), mask_step, end_step, CHAIN_KERNELS),
        adapters=AdapterKernels(changes, replace, change_lookup, changes.multiply, group),
        peers=PeerKernels(peers.sum_ranks, peers.sum_add_norm, peers.gather, peers.choose_among),
    )
