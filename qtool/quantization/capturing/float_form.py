"""The float graph that quantization begins with: a model captured, and its operators in one spelling.

Here is the order of the rewrites. Those of ``simplify`` hold for every target and are in the float reference too; those
of ``spell_for`` give a graph the operators that a target's runtime is quickest with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from qtool.graphs.complex_numbers import spell_scatters
from qtool.graphs.edits import remove_identities, set_training
from qtool.quantization.capturing.capture import DROPOUT_LAYERS, capture
from qtool.quantization.capturing.faint_masks import thin_masks
from qtool.quantization.capturing.fidelity import require_faithful
from qtool.quantization.capturing.parametrized import with_stored_weights
from qtool.quantization.integers import label
from qtool.quantization.rewrites.affines import write_affines
from qtool.quantization.rewrites.attention import drop_masks, write_attention
from qtool.quantization.rewrites.axis_sums import write_axis_sums
from qtool.quantization.rewrites.bounds import write_bounds
from qtool.quantization.rewrites.branches import merge_branches
from qtool.quantization.rewrites.chomps import drop_chomps
from qtool.quantization.rewrites.chosen_rows import write_chosen_rows
from qtool.quantization.rewrites.clipping import clip_early
from qtool.quantization.rewrites.constants import fold_computed
from qtool.quantization.rewrites.einsums import write_einsums
from qtool.quantization.rewrites.filled_groups import fill_groups
from qtool.quantization.rewrites.formulas import write_formulas
from qtool.quantization.rewrites.input_affines import fold_ahead
from qtool.quantization.rewrites.late_expands import expand_late
from qtool.quantization.rewrites.matrices import flatten_linears
from qtool.quantization.rewrites.maxima import write_maxima
from qtool.quantization.rewrites.norms import fold_batch_norm, write_norms
from qtool.quantization.rewrites.products import write_products
from qtool.quantization.rewrites.repeated_inputs import repeat_inputs
from qtool.quantization.rewrites.scales import fold_scales, fold_size
from qtool.quantization.rewrites.shuffles import write_rows
from qtool.quantization.rewrites.slopes import write_slopes
from qtool.quantization.rewrites.spreads import write_spreads
from qtool.quantization.rewrites.steep_gates import write_steep_gates
from qtool.quantization.rewrites.transposed import write_transposed
from qtool.quantization.rewrites.written_norms import write_norms_whole
from qtool.quantization.targets import Target
from qtool.recipe import QuantizeConfig


def float_form(
    model: nn.Module, example: Any, *, merged: bool = True, dropout: bool = False, axes: tuple[int, ...] = ()
) -> GraphModule:
    """The captured float model in evaluation form: the reference of every comparison.

    Batch-norm is folded; unless they are not to be ``merged``, parallel branches are one convolution and activations
    stand behind the layers that take them in. ``dropout`` keeps that in the graph, switched off. Raises QtoolError
    where it does not compute what ``model`` does.
    """
    graph = capture(with_stored_weights(model), example, train=dropout, norms=False, axes=axes)
    if dropout:
        set_training(graph, batch_norm=False, dropout=False)
    else:
        remove_identities(graph)
    fold_batch_norm(graph)
    simplify(graph, example, merged=merged)
    require_faithful(graph, model, example)
    label(graph)
    return graph


class FloatForms:
    """The float form of a model as each config has it, captured once: what all candidates of a search begin with.

    Nothing may change a form, nor the model's weights, while they are in use. With ``dropout`` that is in them.
    """

    def __init__(self, model: nn.Module, *, dropout: bool = False) -> None:
        self.model, self.dropout = model, dropout
        self._made: dict[tuple[bool, tuple[int, ...]], GraphModule] = {}

    def __call__(self, config: QuantizeConfig, example: Any) -> GraphModule:
        """See ``float_form``; every ``example`` is a batch of the same kind."""
        merged, axes = config.engine == "pt2e", tuple(config.dynamic_axes or ())
        if (merged, axes) not in self._made:
            self._made[merged, axes] = float_form(self.model, example, merged=merged, dropout=self.dropout, axes=axes)
        return self._made[merged, axes]

    def trained(self) -> FloatForms:
        """Those of a graph that is to be trained: with dropout, where the model has it."""
        drops = any(isinstance(module, DROPOUT_LAYERS) and module.p > 0 for module in self.model.modules())
        return FloatForms(self.model, dropout=True) if drops and not self.dropout else self


def simplify(graph: GraphModule, example: Any, *, merged: bool = True, train: bool = False) -> None:
    """Writes a captured graph with fewer operators that compute the same, in place.

    On ``example`` it is measured how far attention's scores are apart.
    """
    if merged and not train:
        write_bounds(graph)
    if merged:
        write_formulas(graph)
        write_einsums(graph)
        write_chosen_rows(graph)
        write_maxima(graph)
        write_axis_sums(graph)
        write_spreads(graph)
        merge_branches(graph, train=train)
        drop_chomps(graph)
        clip_early(graph)
    if merged and not train:
        write_slopes(graph)
        expand_late(graph)
    fold_computed(graph, train=train)
    if merged:
        write_norms_whole(graph)  # whose weight may be 1 + w
    drop_masks(graph)
    spell_scatters(graph)
    thin_masks(graph, example)


def spell_for(target: Target, graph: GraphModule, overrides: Mapping[str, str], *, train: bool) -> None:
    """Writes a graph's operators as the target's runtime is quickest with them, in place."""
    write_steep_gates(graph)
    fold_scales(graph)
    if not train:
        fold_batch_norm(graph)  # one that a factor stood before
    write_norms(graph, convolve=not target.scales_in_float, before=fold_size)
    fold_ahead(graph, target, vectors=not target.scales_in_float)
    write_transposed(graph, overrides, train=train)
    if target.group_width is not None:
        fill_groups(graph, overrides, target.group_width)
    if target.channels_last:
        write_rows(graph, overrides)
        repeat_inputs(graph, overrides)
    if target.flat_linears:
        flatten_linears(graph)
    write_products(graph, target.products)
    if not target.scales_in_float:
        write_affines(graph, target)
    if target.attention:
        write_attention(graph)
