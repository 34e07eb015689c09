"""Tiers: which cases of the long parametrised tests the quick tier and each long run take."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rotation import is_taken

from graphllm.formats import BLOCK_FORMATS

# One block format of each module of graphllm/formats; the quick tier compiles kernels for these.
QUICK_FORMATS = ("q8_0", "q4_k", "iq4_nl", "mxfp4")

# Tests of each block format, and their parameter that is its name. Other values of the parameter,
# such as f16, are in the quick tier.
BY_FORMAT = {
    "cpu/test_cpu_experts.py::test_experts": "name",
    "cpu/test_cpu_experts.py::test_many_tokens_on_one_expert": "name",
    "cpu/test_cpu_experts.py::test_head_linear_equals_linear": "name",
    "cpu/test_cpu_isa.py::test_microkernels_compile_for_arm": "name",
    "cpu/test_cpu_isa.py::test_quantisers_compile_for_arm": "name",
    "cpu/test_cpu_linear.py::test_linear": "name",
    "cpu/test_cpu_linear.py::test_the_largest_sums_fit": "name",
    "cpu/test_cpu_linear.py::test_threads_change_nothing": "name",
    "formats/test_block_formats.py::test_a_model_file": "name",
    "formats/test_block_formats.py::test_embedding": "name",
    "formats/test_block_formats.py::test_infinite_and_nan_scales_stop_the_load": "name",
    "formats/test_block_formats.py::test_linear": "name",
    "ops/test_ops_generated.py::test_cpu_block_formats": "form",
    "ops/test_ops_generated.py::test_cpu_linear_options": "form",
}

# Of each of these tests the quick tier runs every n-th case (0: none); the other cases carry the
# marker `long`. Together they take most of the time of the suite, and their cases differ little.
QUICK_EVERY = {
    "api/test_api.py::test_invalid_sampling_values": 5,
    "api/test_api.py::test_the_memory_of_the_demo_is_freed": 0,
    "chat/test_chat.py::test_a_hostile_template_ends_soon": 4,
    "chat/test_chat_injection.py::test_no_text_becomes_a_control_token": 5,
    "chat/test_chat_limits.py::test_a_hostile_template_is_bounded": 4,
    "cli/test_bench.py::test_a_written_file_is_the_same_model": 0,
    "cli/test_bench.py::test_every_family_and_type_loads": 6,
    "cli/test_bench.py::test_invalid_input_is_one_line": 3,
    "cli/test_cli.py::test_a_template_in_the_file": 0,
    "cli/test_cli.py::test_an_error_is_one_line": 4,
    "cli/test_cli.py::test_an_error_of_a_chat_is_one_line": 11,
    "cli/test_cli.py::test_an_error_of_a_model_file_names_its_line": 3,
    "cli/test_cli.py::test_flags_reach_the_sampler": 0,
    "cli/test_cli.py::test_help_shows_an_example": 4,
    "cli/test_cli.py::test_several_prompts_one_after_another": 0,
    "cli/test_output.py::test_hostile_text_is_escaped_at_a_terminal": 12,
    "cli/test_output.py::test_names_and_errors_are_escaped_in_a_pipe": 3,
    "cli/test_plan_verb.py::test_invalid_input_is_one_line": 3,
    "cli/test_usage_errors.py::test_a_usage_error_is_one_line": 8,
    "cli/test_usage_errors.py::test_unusable_standard_streams": 3,
    "core/test_lifetimes.py::test_short_lived_graphs_are_right_and_leave_nothing": 2,
    "cpu/test_arm64.py::test_every_op": 0,
    "cpu/test_arm64.py::test_linears_give_the_same_bits": 0,
    "cpu/test_arm64.py::test_the_demo_gives_the_same_tokens": 0,
    "cpu/test_cpu_isa.py::test_every_op_and_the_same_bits": 0,
    "cpu/test_cpu_isa.py::test_without_float16_in_hardware_there_is_no_cpu_backend": 0,
    "cpu/test_cpu_probe_kernels.py::test_no_kernel_computes_more_per_instruction_than_the_probe": 3,
    "cpu/test_cpu_thread_pool.py::test_kernels_are_cached_until_any_source_changes": 0,
    "cpu/test_kernel_cache.py::test_a_process_with_a_poisoned_cache": 0,
    "cpu/test_machine_code.py::test_a_warm_process_imports_no_compiler": 0,
    "cpu/test_user_kernels.py::test_every_sample_on_avx2": 0,
    "cpu/test_user_kernels.py::test_kernels_of_other_sources_are_not_loaded": 0,
    "cuda/test_cuda_compile.py::test_compiles_without_spills": 20,
    "cuda/test_cuda_compile.py::test_only_timed_builds_read_the_clock": 0,
    "cuda/test_cuda_compile.py::test_timed_builds_compile_without_spills": 10,
    "cuda/test_cuda_plans.py::test_experts_of_every_format_use_known_modules": 6,
    "cuda/test_cuda_plans.py::test_mixtures_run_entirely_on_the_gpu": 3,
    "cuda/test_cuda_plans.py::test_models_use_known_modules_only": 9,
    "cuda/test_cuda_plans.py::test_tensor_cores_are_used_where_they_are_new_enough": 0,
    "engine/test_batching.py::test_random_requests_get_what_they_get_alone": 2,
    "engine/test_decode_ahead.py::test_requests_in_any_order": 2,
    "engine/test_decode_ahead.py::test_tokens_up_to_the_end_of_the_context": 4,
    "engine/test_kv_cache.py::test_q8_0_on_the_demo": 0,
    "engine/test_kv_cache.py::test_rollback_of_the_demo": 0,
    "engine/test_placement.py::test_no_room_is_one_line": 3,
    "engine/test_placement.py::test_offload_fills_the_memory": 0,
    "engine/test_placement.py::test_out_of_memory_names_the_allocation": 0,
    "engine/test_threads.py::test_the_demo_and_another_model_at_once": 0,
    "engine/test_trace.py::test_a_patch_with_zeros_equals_zero_weights": 2,
    "engine/test_trace.py::test_every_scope_of_the_real_model_in_float": 0,
    "engine/test_trace.py::test_every_scope_of_the_real_model_quantised": 0,
    "formats/test_quantize_on_load.py::test_bits_equal_quantise": 5,
    "formats/test_quantize_on_load.py::test_extreme_values": 4,
    "fuzz/test_robustness.py::test_an_unsupported_format": 3,
    "fuzz/test_robustness.py::test_an_unwritable_cache_prints_a_line": 3,
    "fuzz/test_robustness.py::test_damaged_headers_give_an_error_or_run": 0,
    "fuzz/test_robustness.py::test_numbers_out_of_range": 4,
    "models/test_builtin_models.py::test_logits_agree_with_transformers": 5,
    "models/test_chatglm.py::test_logits": 4,
    "models/test_configs.py::test_varied_keys_agree_or_are_refused": 4,
    "models/test_define_a_model.py::test_the_page_runs": 0,
    "models/test_gemma3.py::test_a_prompt_longer_than_the_window_and_a_chunk": 0,
    "models/test_gemma3.py::test_a_seed_gives_the_same_first_token_on_cpu_and_reference": 0,
    "models/test_gguf_logits.py::test_logits_are_those_of_the_directory_and_of_llama_cpp": 4,
    "models/test_gguf_logits.py::test_parameters_are_counted_as_llama_cpp_does": 4,
    "models/test_validate.py::test_a_fault_is_named": 3,
    "models/test_validate.py::test_a_random_model_of_each_family_passes": 5,
    "ops/test_costs.py::test_of_every_family": 4,
    "ops/test_ops_generated.py::test_cpu_attention": 3,
    "ops/test_sampling_distributions.py::test_filters_and_penalties_as_transformers": 3,
    "ops/test_sampling_distributions.py::test_frequencies": 14,
    "quality/test_mix_search.py::test_a_mix_is_better_than_a_type_of_its_size": 0,
    "reports/test_compare.py::test_a_small_model_against_another_backend": 0,
    "reports/test_diff.py::test_a_fused_kernel_of_the_real_model_off_by_1_percent": 2,
    "reports/test_diff.py::test_an_error_is_one_line": 4,
    "reports/test_diff.py::test_the_real_model_agrees": 5,
}

# Of the cases of each of these tests that are not in the quick tier, a run takes one part of this
# many, another one each day; see rotation.py.
PARTS = {
    "cli/test_bench.py::test_every_family_and_type_loads": 3,
    "cli/test_output.py::test_hostile_text_is_escaped_at_a_terminal": 2,
    "cpu/test_arm64.py::test_every_op": 2,
    "cpu/test_arm64.py::test_linears_give_the_same_bits": 2,
    "cpu/test_arm64.py::test_the_demo_gives_the_same_tokens": 2,
    "cpu/test_cpu_experts.py::test_experts": 2,
    "cpu/test_cpu_isa.py::test_microkernels_compile_for_arm": 6,
    "cuda/test_cuda_compile.py::test_compiles_without_spills": 12,
    "cuda/test_cuda_compile.py::test_timed_builds_compile_without_spills": 4,
    "cuda/test_cuda_plans.py::test_experts_of_every_format_use_known_modules": 2,
    "cuda/test_cuda_plans.py::test_models_use_known_modules_only": 2,
    "formats/test_block_formats.py::test_linear": 2,
    "ops/test_ops_generated.py::test_cpu_block_formats": 2,
    "ops/test_ops_generated.py::test_cpu_linear_options": 2,
    "ops/test_sampling_distributions.py::test_frequencies": 2,
    "ops/test_sampling_distributions.py::test_frequencies_of_many_ids": 3,
}

_counts: Counter[str] = Counter()
_turns: Counter[str] = Counter()


def is_quick(test: str, parameters: dict[str, Any]) -> bool:
    """Whether the quick tier runs a case of ``test``. Cases come in the order of collection."""
    form = parameters.get(BY_FORMAT.get(test, ""), "")
    if form in BLOCK_FORMATS and form not in QUICK_FORMATS:
        return False
    every, number = QUICK_EVERY.get(test, 1), _counts[test]
    _counts[test] += 1
    return every > 0 and number % every == 0


def is_in_part(test: str) -> bool:
    """Whether this run takes a case of ``test`` that is not quick. Cases come in the order of
    collection."""
    number = _turns[test]
    _turns[test] += 1
    return is_taken(number, PARTS.get(test, 1))
