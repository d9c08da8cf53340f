"""Put faults into a copy of the package, one at a time, and see the tests catch them.

``python tests/faults.py [WORD ...]`` tries the faults whose file or test has one of the
words in it, by default all; ``test_faults.py`` sees that each still fits the code.
"""

import concurrent.futures
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "optax_lossscale"
COPIED = ("optax_lossscale", "tests", "notebooks", "README.md", "pyproject.toml")
PROCESSES = 2


class Fault(NamedTuple):
    """One line made wrong, and the test that should fail then.

    Attributes:
        file: where, below ``optax_lossscale``.
        right: the text as it stands there, once.
        wrong: what it is replaced by.
        test: a test file below ``tests``, ``::`` and the name of a test; behind a
            further ``::`` the word slow, if the default run does not have it.
    """

    file: str
    right: str
    wrong: str
    test: str


# fmt: off
FAULTS = [Fault(*fault) for fault in (
    # The rules
    ("_rules/growth.py", "growth_tracker >= interval", "growth_tracker > interval", "rules/test_dynamic.py::test_the_rule_equals_the_oracle_on_any_run"),
    ("_rules/growth.py", "jnp.maximum(scale, jnp.clip(scale * growth, minimum, maximum))", "jnp.clip(scale * growth, minimum, maximum)", "rules/test_dynamic.py::test_out_of_range_a_growth_never_lowers_and_a_backoff_never_raises"),
    ("_rules/growth.py", "jnp.minimum(scale, jnp.clip(scale * backoff, minimum, maximum))", "jnp.clip(scale * backoff, minimum, maximum)", "rules/test_dynamic.py::test_out_of_range_a_growth_never_lowers_and_a_backoff_never_raises"),
    ("_rules/growth.py", '"change": grows | backs_off', '"change": backs_off', "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("_rules/soundness.py", "jnp.where(jnp.isnan(scale)", "jnp.where(jnp.isinf(scale)", "rules/test_dynamic.py::test_a_scale_that_is_nan_starts_again"),
    ("_rules/dynamic.py", "growth_interval: int = 2000", "growth_interval: int = 1000", "integration/test_book.py::test_the_tables_of_rules_name_every_argument_with_its_default"),
    ("_rules/fixed.py", "(scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)", "scale <= LARGEST_SCALE", "rules/test_every_rule.py::test_any_loaded_state_gives_a_sound_one_of_the_same_structure"),
    ("_rules/base.py", "if rule.__module__.partition", "if True or rule.__module__.partition", "rules/test_base.py::test_a_users_rule_restores_itself_and_the_base_only_those_of_the_package"),
    ("_rules/base.py", '        check_flag("grads_finite", grads_finite)\n', "", "test_state.py::test_a_flag_that_is_not_one_boolean_is_refused"),
    ("_rules/headroom.py", "(1 - 2.0**-12) * top", "(1 + 2.0**-12) * top", "rules/test_headroom.py::test_an_overflow_lowers_the_headroom_scale_by_its_factor_and_no_more"),
    ("_rules/headroom.py", "jnp.maximum(remembered * decay, seen)", "jnp.maximum(remembered, seen)", "rules/test_headroom.py::test_the_headroom_rule_follows_at_once_and_forgets_slowly"),
    ("_rules/log_normal.py", "memory.fast_mean / (1 - memory.fast_weight)", "memory.fast_mean", "rules/test_log_normal.py::test_the_log_normal_rule_equals_its_oracle"),
    ("_rules/log_normal.py", "memory = select(known, memory, old)", "pass", "rules/test_log_normal.py::test_all_zero_gradients_leave_the_log_normal_rule_alone"),
    ("_rules/tolerant.py", "overflows / steps >= tolerance", "overflows / steps > tolerance", "rules/test_tolerant.py::test_the_tolerant_rule_equals_its_oracle"),
    ("_rules/tolerant.py", "jnp.where(change.grows | change.backs_off, 0, steps)", "jnp.where(change.backs_off, 0, steps)", "rules/test_tolerant.py::test_the_tolerant_rule_equals_its_oracle"),
    ("_rules/verbatim.py", "return -1 if self.first_growth_late else 0", "return 0", "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("_rules/verbatim.py", "if self.clips_every_step:", "if False:", "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("_rules/arguments.py", "lambda x: 0 < x < 1,", "lambda x: 0 < x <= 1,", "rules/test_arguments.py::test_a_bad_argument_is_refused_by_the_name_that_the_user_gave"),
    ("_rules/soundness.py", "jnp.where(in_range, scale, normal(old.loss_scale, 1.0))", "scale", "rules/test_soundness.py::test_the_range_holds_whatever_is_injected"),
    ("_rules/base.py", "if self._given_as_arrays:", "if False:", "rules/test_base.py::test_an_injected_schedule_compiles_nothing_after_the_first_steps"),
    ("_rules/headroom.py", "(mantissa > bound)", "(mantissa >= bound)", "rules/test_headroom.py::test_the_bound_holds_to_the_last_bit_and_no_scale_is_given_away"),
    ("_validation.py", "if not accepts(rounded):", "if False:", "rules/test_arguments.py::test_an_argument_is_refused_that_is_out_of_range_in_float32"),
    # The ground
    ("_state.py", "consecutive_skips=jnp.where(grads_finite, 0, consecutive_skips)", "consecutive_skips=consecutive_skips", "test_state.py::test_a_finite_step_ends_the_run_of_skips_and_keeps_the_total"),
    ("_state.py", "    rule_state: Any = ()\n", "    rule_state: Any = None\n", "test_state.py::test_a_state_without_a_memory_has_an_empty_one_that_adds_no_leaf"),
    ("_finite.py", "return real + imag", "return real", "test_finite.py::test_both_parts_of_a_complex_number_count"),
    ("_finite.py", "across(jax.lax.pmin, flag", "across(jax.lax.pmax, flag", "test_finite.py::test_with_an_axis_name_every_member_gets_the_same_answer"),
    ("_tree.py", "jax.lax.complex(leaf(x.real), leaf(x.imag))", "x * factor(x.dtype)", "gradients/test_by_hand.py::test_infinite_parts_of_complex_gradients_stay_what_they_are"),
    ("_tree.py", ".bits >= 32 else jnp.float32", ".bits >= 16 else jnp.float32", "gradients/test_by_hand.py::test_gradients_come_back_in_float32_or_wider"),
    ("_gradients/at_scale.py", "unscale(scaled_grads, scale)", "scaled_grads", "gradients/test_value_and_grad.py::test_value_and_gradients_equal_jaxs_bit_for_bit"),
    ("_gradients/at_scale.py", "<= 65504.0:", "< 65504.0:", "gradients/test_value_and_grad.py::test_a_float16_loss_warns_once_while_tracing"),
    ("_gradients/at_scale.py", "if x != _DEFAULTS[name]", "if True", "integration/test_differentiators.py::test_arguments_at_their_defaults_are_not_passed_on"),
    ("_gradients/at_scale.py", "if not (_is_pair(result) and _is_pair(result[0])):", "if False:", "integration/test_differentiators.py::test_what_returns_something_else_is_refused"),
    ("_gradients/scale_backward.py", "_multiplied(scaled_grads, exact_power(-octaves))", "_multiplied(scaled_grads, scale)", "gradients/test_scale_backward.py::test_values_and_gradients_are_those_of_the_function"),
    ("_gradients/scale_backward.py", "jnp.where(jnp.isfinite(magnitude), jnp.clip(octaves, -126, 126), 0)", "jnp.clip(octaves, -126, 126)", "gradients/test_scale_backward.py::test_nan_and_infinity_pass_at_scale_1"),
    ("_gradients/scale_backward.py", "headroom: float = 6.0", "headroom: float = 5.0", "gradients/test_scale_backward.py::test_the_scale_is_the_one_that_is_suggested_for_the_cotangent"),
    ("_gradients/scale_backward.py", "x.value if x.perturbed else None", "x.value if is_inexact(x.value) else None", "gradients/test_scale_backward.py::test_inputs_in_float16_that_are_not_differentiated_do_not_warn"),
    ("_gradients/scale_backward.py", "    if not isinstance(cotangent, SymbolicZero):\n", "    if True:\n", "gradients/test_scale_backward.py::test_values_and_gradients_are_those_of_the_function"),
    ("_gradients/scale_backward.py", "across(jax.lax.pmax, devices * largest, axis_name)", "devices * largest", "gradients/test_scale_backward.py::test_devices_agree_on_a_scale_where_they_are_told_the_axis"),
    ("_gradients/scale_backward.py", "devices * largest, axis_name", "largest, axis_name", "gradients/test_scale_backward.py::test_sums_over_devices_fit"),
    ("_gradients/scale_backward.py", "x = jnp.abs(jax.lax.stop_gradient(x)", "x = (jax.lax.stop_gradient(x)", "gradients/test_scale_backward.py::test_a_block_whose_gradients_add_up_although_its_cotangent_does_not_is_trained"),
    ("_gradients/scale_backward.py", "jax.lax.stop_gradient(x)", "x", "gradients/test_scale_backward.py::test_second_derivatives_across_devices_are_those_of_the_function::slow"),
    ("_gradients/scale_backward.py", "        check_axes(program.jaxpr, axis_name)\n", "", "gradients/test_scale_backward.py::test_collectives_of_the_backward_pass_alone_are_seen"),
    ("_gradients/staged.py", "[_ARRAY if isinstance(x, jax.Array) else x for x in outputs]", "[x for x in outputs]", "gradients/test_scale_backward.py::test_no_tracer_outlives_its_trace"),
    ("_gradients/retries.py", "jnp.asarray(scale_state.loss_scale)", "scale_state.loss_scale", "gradients/test_retries.py::test_a_restored_state_is_one_like_any_other"),
    ("_gradients/retries.py", "(x, as_varying(scale, x))", "(x,)", "gradients/test_retries.py::test_parameters_cut_across_devices_need_no_more_memory"),
    ("_gradients/retries.py", "            check_axes(program.jaxpr, axis_name)\n", "", "gradients/test_retries.py::test_devices_that_would_decide_alone_are_refused"),
    ("_gradients/checks.py", "    if axes:\n", "    if False:\n", "gradients/test_scale_backward.py::test_a_missing_axis_is_refused"),
    ("_gradients/checks.py", '("returns", outputs)', '("returns", [])', "gradients/test_scale_backward.py::test_float16_at_the_border_is_warned_of_where_the_block_is_called"),
    ("_gradients/staged.py", "        _check_unchanged(leaves, (args, kwargs))\n", "", "gradients/test_scale_backward.py::test_a_function_that_changes_its_arguments_is_refused"),
    ("_gradients/retries.py", "sound & ~finite", "~finite", "gradients/test_retries.py::test_it_does_as_its_docstring_says"),
    ("_gradients/retries.py", "carry.attempts <= max_retries", "carry.attempts < max_retries", "gradients/test_retries.py::test_it_does_as_its_docstring_says"),
    ("_gradients/retries.py", "jnp.where(attempts > 1, 0,", "jnp.where(attempts > 0, 0,", "gradients/test_retries.py::test_without_an_overflow_it_is_value_and_grad_and_the_state_that_came_in"),
    ("_gradients/retries.py", "carry.scale * backoff_factor, SMALLEST_SCALE", "carry.scale * backoff_factor, 0", "gradients/test_retries.py::test_the_scale_stays_a_normal_number"),
    ("_gradients/retries.py", "all_finite(x, axis_name) for x", "all_finite(x) for x", "gradients/test_retries.py::test_members_of_an_ensemble_repeat_alone_or_together"),
    ("_gradients/retries.py", "jax.lax.optimization_barrier((x, as_varying(scale, x)))[0]", "x", "gradients/test_retries.py::test_the_program_holds_the_function_once_and_needs_no_more_memory"),
    ("_gradients/retries.py", "_check_agreement(zeros[0], first_scale, axis_name)", "pass", "gradients/test_retries.py::test_devices_with_models_of_their_own_repeat_alone"),
    ("_gradients/retries.py", "[known.get(id(v)) for v in program.jaxpr.outvars]", "[None for v in program.jaxpr.outvars]", "gradients/test_in_place.py::test_the_loop_does_not_carry_what_is_as_it_was"),
    ("_gradients/retries.py", "output = copies.update(output, contents)", "pass", "gradients/test_in_place.py::test_a_module_changes_once_however_often_its_gradients_are_repeated"),
    ("_gradients/in_place.py", "merge_context(_CONTEXT, True)", "merge_context(_CONTEXT, False)", "gradients/test_in_place.py::test_a_module_changes_once_however_often_its_gradients_are_repeated"),
    ("_gradients/in_place.py", "[*copies, *returned]", "copies", "gradients/test_in_place.py::test_arguments_may_share_variables_and_be_variables_and_come_back"),
    ("_gradients/in_place.py", '"Pytree", nnx.Object) | nnx.Variable', '"Pytree", nnx.Object)', "gradients/test_in_place.py::test_arguments_may_share_variables_and_be_variables_and_come_back"),
    ("_gradients/in_place.py", 'getattr(nnx, "Pytree", nnx.Object)', "nnx.Pytree", "gradients/test_in_place.py::test_flax_without_pytree_has_objects"),
    ("_gradients/in_place.py", "        _nnx().update(objects, _nnx().state(others))\n", "        pass\n", "gradients/test_in_place.py::test_a_module_changes_once_however_often_its_gradients_are_repeated"),
    ("_gradients/in_place.py", "_put_in(objects, *flat)", "new", "gradients/test_in_place.py::test_a_module_changes_once_however_often_its_gradients_are_repeated"),
    ("_rules/growth.py", "(exponent + 127) << 23", "(exponent + 126) << 23", "rules/test_dynamic.py::test_powers_of_two_are_exact"),
    ("_find.py", "if len(found) > 1:", "if len(found) > 2:", "test_find.py::test_a_state_with_two_scales_is_refused_with_their_paths"),
    ("_find.py", "isinstance(node, wrappers) and _hides(node, state)", "False", "transform/test_composition.py::test_a_scale_whose_rule_does_not_see_overflows_is_refused"),
    ("_precision.py", "if math.isfinite(rounded(tie)):", "if False:", "diagnostics/test_report.py::test_elements_at_the_limits_are_counted_as_rounding_has_it"),
    ("_validation.py", "if isinstance(value, bool | np.bool_):", "if False:", "rules/test_fixed.py::test_a_bad_scale_is_refused_with_a_way_out"),
    ("_jax_internals.py", "    if axes is None:\n", "    if False:\n", "test_jax_internals.py::test_a_jax_that_does_not_tell_is_refused"),
    ("_public.py", "for x in methods", "for x in ()", "test_public.py::test_every_example_of_a_method_is_run_too"),
    ("_find.py", "optax.PartitionState: (", "tuple: (", "transform/test_composition.py::test_a_scale_whose_rule_does_not_see_overflows_is_refused"),
    ("_find.py", "concrete and is_in_jit()", "concrete and False", "gradients/test_value_and_grad.py::test_a_scale_that_is_a_constant_of_the_program_is_warned_of"),
    ("_jax_internals.py", 'in ("jit", "pmap", "shard_map")', "is not None", "gradients/test_value_and_grad.py::test_other_states_are_not_warned_of"),
    ("_state.py", "return canonical(state)", "return state", "transform/test_rule.py::test_whatever_number_is_put_into_the_state_the_run_goes_on_in_float32"),
    ("_applied.py", "applied & all_finite(still, axis_name)", "applied", "test_applied.py::test_new_values_are_kept_where_applied_and_finite"),
    ("_finite.py", "& exponent == exponent", "& exponent > exponent", "test_finite.py::test_one_bad_element_is_found_wherever_it_is"),
    # The transformation
    ("_transform/evaluation.py", "        and uses[var] == 1\n", "", "transform/test_evaluation.py::test_both_layouts_agree_on_every_construct"),
    ("_transform/evaluation.py", "        and var.aval == jax.typeof(old)\n", "", "transform/test_shard_map.py::test_a_leaf_whose_type_a_mask_would_change_is_masked_at_the_end"),
    ("_transform/masks.py", "jax.core.Tracer) and is_staging():", "jax.core.Tracer):", "transform/test_staged.py::test_an_inner_transformation_may_look_at_numbers_where_there_are_some"),
    ("_transform/staged.py", "if closed_jaxpr.effects:", "if False:", "transform/test_evaluation.py::test_what_cannot_be_evaluated_again_is_masked_in_the_plain_layout"),
    ("_transform/sanitized.py", "jnp.where(apply, g, stand_in(g))", "g", "transform/test_sanitized.py::test_a_step_that_is_skipped_is_given_finite_numbers"),
    ("_transform/evaluation.py", "leaves[i] = jnp.where(apply, leaves[i], old)", "pass", "transform/test_optimizers.py::test_a_wrapped_optimizer"),
    ("_transform/evaluation.py", "                value = jax.lax.select_n(apply, early[var], value)\n", "                pass\n", "transform/test_optimizers.py::test_a_wrapped_optimizer"),
    ("_transform/evaluation.py", "        and var not in steers\n", "", "transform/test_staged.py::test_a_skipped_step_ends_whatever_a_loop_or_a_callback_depends_on"),
    ("_transform/evaluation.py", "        and jnp.ndim(old) > 0\n", "", "transform/test_step.py::test_checkify_finds_no_division_by_zero_in_a_skipped_first_step"),
    ("_transform/staged.py", "sane = sanitized(apply, given, differentiated=True)", "sane = sanitized(apply, given, differentiated=False)", "transform/test_step.py::test_derivatives_through_skipped_steps_are_finite_and_right::slow"),
    ("_transform/staged.py", "_with_derivatives_of(plain, fast) if has_rule else fast", "fast", "transform/test_step.py::test_derivatives_through_skipped_steps_are_finite_and_right::slow"),
    ("_transform/evaluation.py", "elif may_be_left_out(eqn) and", "elif False and", "transform/test_step.py::test_in_a_skipped_step_no_line_search_is_made"),
    ("_transform/staged.py", "    if steers.isdisjoint(variables):\n", "    if True:\n", "transform/test_staged.py::test_a_skipped_step_ends_whatever_a_loop_or_a_callback_depends_on"),
    ("_transform/staged.py", "s if var in steers else x", "s", "transform/test_staged.py::test_only_what_steers_is_sanitized"),
    ("_transform/steering.py", "return eqn.invars[:1]  # which branch", "return []", "transform/test_steering.py::test_what_steers_is_found"),
    ("_transform/steering.py", "if found.intersection(eqn.outvars):", "if False:", "transform/test_steering.py::test_what_steers_is_found"),
    ("_transform/sanitized.py", "jnp.where(apply, x, _large(x))", "x", "transform/test_sanitized.py::test_a_step_that_is_skipped_is_given_finite_numbers"),
    ("_transform/sanitized.py", "% 3) ** 2", "% 1) ** 2", "transform/test_sanitized.py::test_where_a_derivative_is_taken_neither_they_nor_their_deviations_are_zero"),
    ("_jax_internals.py", 'in ("JVPTrace", "LinearizeTrace")', 'in ("JVPTrace",)', "test_jax_internals.py::test_a_derivative_that_is_taken_of_what_is_computed_here_is_seen"),
    ("_transform/types.py", 'strong = hasattr(new, "dtype") and not getattr(new, "weak_type", False)', 'strong = hasattr(new, "dtype")', "transform/test_with_loss_scaling.py::test_types_never_change_and_one_trace_serves_the_whole_run"),
    ("_transform/extra_args.py", ' and name != "grads_finite"', "", "transform/test_extra_args.py::test_a_line_search_is_spared_the_flag::slow"),
    ("_transform/inner.py", "    if found:\n        # Gradients of other shapes", "    if False:\n        # Gradients of other shapes", "transform/test_inner.py::test_a_state_that_grows_is_refused"),
    ("_transform/rule.py", "jax.tree.map(as_before, new_state, state)", "new_state", "transform/test_rule.py::test_the_types_of_the_scale_state_hold_whatever_a_rule_returns"),
    ("_transform/with_loss_scaling.py", "grads_finite &= flag", "pass", "transform/test_extra_args.py::test_a_flag_that_is_false_skips_the_step_and_moves_the_scale"),
    ("_transform/with_loss_scaling.py", "apply = grads_finite & value_finite", "pass", "transform/test_extra_args.py::test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale"),
    ("_transform/with_loss_scaling.py", "new_scale_state = select(value_finite, new_scale_state, skipped)", "pass", "transform/test_extra_args.py::test_a_loss_that_is_not_finite_skips_the_step_and_leaves_the_scale"),
    ("_transform/with_loss_scaling.py", "everywhere(grads_finite, axis_name)", "grads_finite", "transform/test_shard_map.py::test_data_parallel_shard_map_equals_one_device"),
    ("_transform/with_loss_scaling.py", "        check_agreement(apply, scale_state, axis_name)\n", "", "transform/test_shard_map.py::test_devices_that_would_decide_differently_are_refused"),
    ("_transform/types.py", "state = jax.tree.map(_strong, first)", "state = first", "transform/test_with_loss_scaling.py::test_types_never_change_and_one_trace_serves_the_whole_run"),
    ("_transform/types.py", "if changed:\n        state, _ = _widened(init, params, state, is_open)", "if False:\n        pass", "transform/test_types.py::test_adams_second_moment_of_small_gradients_is_not_zero"),
    ("_transform/types.py", "        if new_rank[0] > rank[0]:", "        if False:", "transform/test_types.py::test_a_state_that_changes_its_kind_is_refused"),
    ("_transform/masks.py", "-0.0 if jnp.isrealobj(x)", "0.0 if jnp.isrealobj(x)", "transform/test_masks.py::test_added_to_any_number_a_skipped_update_changes_no_bit"),
    ("_transform/inner.py", "if found and cause is not None:", "if False:", "transform/test_inner.py::test_an_error_about_per_example_gradients_is_its_own"),
    ("_transform/rounding.py", "jnp.where(is_zero, master, ", "(", "transform/test_rounding.py::test_an_update_takes_a_parameter_to_its_rounded_master_weight"),
    ("_transform/rounding.py", " & (master == master)", "", "transform/test_sharding.py::test_master_weights_may_be_sharded_where_parameters_are_replicated"),
    ("_transform/rounding.py", "- 1) + odd)", "- 1))", "transform/test_rounding.py::test_rounding_is_that_of_a_cast"),
    ("_transform/rounding.py", "jnp.abs(x) < float(narrow.tiny)", "False", "transform/test_rounding.py::test_rounding_is_that_of_a_cast"),
    ("_transform/rounding.py", "return rounded(*primals, dtype), tangents[0]", "return rounded(*primals, dtype), 0 * tangents[0]", "transform/test_master_weights.py::test_training_can_be_differentiated_as_in_float32"),
    ("_transform/rounding.py", "if jnp.finfo(narrow).bits >= 16 else update.astype(narrow)", "if True else update", "transform/test_rounding.py::test_updates_of_float8_are_float8_and_exact_within_a_factor_of_two"),
    ("_transform/master_weights.py", "return optax.apply_updates(master, update)", "return master", "transform/test_master_weights.py::test_a_run_equals_that_of_float32_parameters_cast_in_the_loss"),
    ("_transform/master_weights.py", "                extra_args[name] = jax.tree.map(wide, x)\n", "                pass\n", "transform/test_master_weights.py::test_what_goes_in_is_wide"),
    ("_transform/master_weights.py", "        _check_params(params, state.master_weights, dtype)\n", "", "transform/test_master_weights.py::test_parameters_must_be_given_and_those_of_the_state"),
    ("_transform/master_weights.py", "or has_master_weights(inner_state)", "", "transform/test_master_weights.py::test_other_parameters_are_not_warned_of"),
    ("_transform/inner.py", "if not has_master_weights(inner_state):", "if True:", "transform/test_master_weights.py::test_the_parameters_are_the_rounded_master_weights_after_every_step"),
    ("_transform/inner.py", "        grads = _as_types_of(params, updates)\n        _check_like_params(inner, inner_state, \"updates\", grads, None)", "        _check_like_params(inner, inner_state, \"updates\", updates, None)", "transform/test_master_weights.py::test_an_error_about_gradients_names_gradients"),
    ("_transform/types.py", "shape_at.get(path, x)", "shape_at[path]", "transform/test_master_weights.py::test_moments_beside_the_copies_are_made_as_for_float32"),
    ("_transform/outcome.py", "is_nonfinite(new) & (new_bits != old_bits)", "is_nonfinite(new)", "transform/test_outcome.py::test_what_was_not_finite_may_stay_so_and_is_no_obstacle"),
    ("_transform/outcome.py", "return bad | _bad_change(new.astype(dtype_of(param)), param)", "return bad", "transform/test_outcome.py::test_parameters_that_only_their_type_makes_overflow_are_seen"),
    ("_transform/outcome.py", "return joined + rest", "return joined", "transform/test_outcome.py::test_wherever_it_is_it_is_found"),
    ("_transform/evaluation.py", "apply &= _read(known, jaxpr.outvars[0])", "pass", "transform/test_outcome.py::test_no_optimizer_puts_anything_bad_anywhere"),
    ("_transform/evaluation.py", "if known and not may_be_repeated(eqn):", "if False:", "transform/test_outcome.py::test_an_ensemble_a_loop_and_effects"),
    ("_transform/masks.py", "            apply &= usable\n", "            pass\n", "transform/test_outcome.py::test_the_two_kinds_of_skip"),
    ("_transform/masks.py", "                _, new_updates, new_state = update(apply)\n", "                pass\n", "transform/test_outcome.py::test_derivatives_are_those_without_the_skipped_step"),
    ("_transform/with_loss_scaling.py", "innocent = applied | ~grads_finite", "innocent = applied | grads_finite", "transform/test_outcome.py::test_the_two_kinds_of_skip"),
    ("_transform/with_loss_scaling.py", "everywhere(usable, axis_name)", "usable", "transform/test_outcome.py::test_all_devices_decide_alike"),
    ("_transform/steering.py", "        read <= written\n", "        True\n", "transform/test_steering.py::test_what_may_be_repeated"),
    ("_diagnostics/stopped.py", "tracker > 0 or", "tracker >= 0 or", "diagnostics/test_stopped.py::test_where_gradients_overflowed_it_does_not"),
    # Diagnosis
    ("_diagnostics/counting.py", "scaled < normal_limit,", "scaled <= normal_limit,", "diagnostics/test_report.py::test_elements_at_the_limits_are_counted_as_rounding_has_it"),
    ("_diagnostics/counting.py", "high < 2 ** (31 - _BITS)", "high < 2**31", "diagnostics/test_report.py::test_counts_that_do_not_fit_stay_at_the_largest"),
    ("_diagnostics/report.py", "across(jax.lax.psum, counts, axis_name)", "counts", "diagnostics/test_report.py::test_members_of_an_ensemble_may_be_added_up"),
    ("_diagnostics/table.py", "key=_Row.badness, reverse=True", "key=_Row.badness", "diagnostics/test_table.py::test_worst_are_nonfinite_then_overflow_then_underflow_then_subnormal_then_zero"),
    ("_diagnostics/counting.py", "[b > _INF for b in bits]", "[part != part for part in parts]", "diagnostics/test_fast_math.py::test_fast_math_changes_no_count::slow"),
    ("_diagnostics/counting.py", "high + (low >> _BITS)", "high", "diagnostics/test_report.py::test_arrays_that_do_not_fit_are_counted_digit_by_digit"),
    ("_diagnostics/guard.py", "jax.lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x", "x", "diagnostics/test_in_context.py::test_inside_of_a_function_that_is_differentiated_they_are_constants"),
    ("_diagnostics/suggestion.py", "as_float32(lost_before - lost)", "as_float32(lost_before)", "diagnostics/test_suggestion.py::test_the_suggested_scale_is_the_largest_that_leaves_the_headroom"),
    ("_diagnostics/suggestion.py", "exponent - (mantissa == 0.5)", "exponent", "diagnostics/test_suggestion.py::test_every_rule_takes_what_is_suggested"),
    ("_diagnostics/guard.py", "if not _is_traced((scale_state, grads)) and not is_staging():", "if False:", "diagnostics/test_guard.py::test_without_compiling_nothing_is_compiled"),
    ("_diagnostics/guard.py", "due &= jax.lax.axis_index(axis_name) == 0", "pass", "diagnostics/test_guard.py::test_of_one_state_on_all_devices_the_first_speaks"),
    ("_diagnostics/stopped.py", "(beyond > 0)", "(beyond >= 0)", "diagnostics/test_guard.py::test_it_raises_at_one_step_more_than_allowed"),
    ("_diagnostics/stopped.py", "(beyond - 1) % every == 0", "beyond % every == 0", "diagnostics/test_guard.py::test_a_compiled_loop_calls_the_host_beyond_the_limit_alone"),
    # Other systems
    ("presets/_torch.py", "init_scale: float = 2.0**16", "init_scale: float = 2.0**15", "presets/test_defaults.py::test_the_defaults_are_the_systems_own"),
    ("presets/_flax.py", "growth_interval=interval + 1", "growth_interval=interval", "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("presets/_megatron.py", 'hysteresis_refill="growth",\n    )', 'hysteresis_refill="finite",\n    )', "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("presets/_keras.py", '_COUNTER, _SCALE = "2", "3"', '_COUNTER, _SCALE = "3", "2"', "presets/test_saved_states.py::test_the_run_goes_on_as_recorded"),
    ("presets/_saved.py", "math.prod(value.shape) == 1", "True", "presets/test_saved_states.py::test_a_saved_form_that_makes_no_sense_is_refused"),
    ("presets/_fairseq.py", "strict = strict and lowest == min_loss_scale", "strict = False", "presets/test_fairseq.py::test_fairseqs_floor_is_the_last_scale_above_its_minimum"),
    ("presets/_mpx.py", "_LARGEST_HALF = 65504.0", "_LARGEST_HALF = 65536.0", "presets/test_conformance.py::test_the_scale_takes_the_recorded_course"),
    ("presets/_build.py", "return max(number, SMALLEST_SCALE)", "return number", "presets/test_fairseq.py::test_fairseqs_floor_is_the_last_scale_above_its_minimum"),
    # Pictures and the demonstration
    ("plots/_gradient_range.py", "octaves + shift, color=BLUE", "octaves, color=BLUE", "plots/test_gradient_range.py::test_the_histogram_counts_each_octave_before_and_after"),
    ("plots/_loss_scale.py", 'where="post"', 'where="pre"', "plots/test_loss_scale.py::test_the_scale_is_drawn_by_steps_on_a_log2_axis"),
    ("_demo/task.py", "np.inf if step == poisoned_step else 1.0", "1.0", "test_main.py::test_a_short_run_records_every_step_and_skips_the_poisoned_one::slow"),
)]
# fmt: on


def run(copy: Path, test: str) -> int:
    """The exit status of pytest on one test in a copy of the project."""
    file, name, *slow = test.split("::")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p"]
    command += ["no:cacheprovider", "-m", "slow" if slow else "not slow"]
    cache = str(ROOT / ".pytest_cache" / "jax")
    environment = {"PYTHONPATH": str(copy), "JAX_COMPILATION_CACHE_DIR": cache}
    return subprocess.run(
        [*command, "--override-ini=addopts=--import-mode=importlib"]
        + [f"tests/{file}", "-k", name],
        cwd=copy,
        env={**os.environ, **environment},
        capture_output=True,
    ).returncode


def try_out(fault: Fault, copies: "queue.Queue[Path]") -> str:
    """Whether the test passes without the fault and fails with it."""
    copy = copies.get()
    path = copy / PACKAGE.name / fault.file
    text = path.read_text()
    try:
        assert text.count(fault.right) == 1, fault
        path.write_text(text.replace(fault.right, fault.wrong))
        status = run(copy, fault.test)
        path.write_text(text)
        if status == 1 and run(copy, fault.test) != 0:
            status = -1
    finally:
        copies.put(copy)
    outcomes = {0: "MISSED", 1: "caught", -1: "fails without the fault too"}
    return outcomes.get(status, f"pytest ended with {status}")


def main() -> None:
    words = sys.argv[1:] or [""]
    faults = [f for f in FAULTS if any(w in f.file or w in f.test for w in words)]
    start, copies, missed = time.monotonic(), queue.Queue(), 0
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool,
    ):
        for i in range(PROCESSES):
            copies.put(copy := Path(folder, str(i)))
            copy.mkdir()
            for name in COPIED:
                source = ROOT / name
                take = shutil.copytree if source.is_dir() else shutil.copy
                take(source, copy / name)
        outcomes = pool.map(lambda fault: try_out(fault, copies), faults)
        for fault, outcome in zip(faults, outcomes, strict=True):
            missed += outcome != "caught"
            change = f"{fault.right.strip()!r} -> {fault.wrong.strip()!r}"
            print(
                f"{outcome:7} {fault.file}: {change}\n        {fault.test}", flush=True
            )
    print(f"{len(faults) - missed} of {len(faults)} caught,", end=" ")
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
