"""What `./setup.sh test` leaves to `./setup.sh test --all`: tests that show for one more family, size or way what other
tests show already, and take about half of the time of all tests.

Each name is a test function, with its file where other files have one of that name. Its value is the patterns of the
parameters that every run tries; () leaves out all of it. Of other slow tests with three or more sets of parameters,
every run tries the first and the last; if that is SD 1.5, whose U-Net is SDXL's again and takes several times as long
as a transformer, the last of another family. Quick tests, and whatever guards files, settings and the page's doors,
belong in every run.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

TWO = ("sdxl_train_network", "flux_train_network")  # a U-Net and a transformer
ADAPTERS = ("*train_network",)  # each family once
SD15 = re.compile(r"(?<![a-z\d]_)\b(train_network|train_db|train_textual_inversion|fine_tune|sd15)(?![a-z\d_])")
FOLDERS_OF_GUARDS = ("security", "runs", "api")  # every run tries all parameters of their tests
TESTED_ALWAYS: dict[str, tuple[str, ...]] = {
    # ---- bench
    "test_text_encoders_compiled_if_that_is_requested": (),
    "test_flops_are_those_that_are_really_done": (),
    "test_both_ways_draw_with_the_same_settings": ("anima",),
    "test_a_step_and_an_image_are_timed_in_every_way": (),
    "test_a_step_of_the_other_family": (),
    "test_every_part_of_a_model_is_measured": (),
    "test_transformers_of_diffusers": (),
    # ---- comparing
    "test_every_family_is_compared_with_prompts_of_its_captions": TWO,
    # ---- compile
    "test_a_budget_keeps_its_share_and_gradients_stay": (),
    "test_a_run_starts_anew_after_a_process_compiled_something_else": (),
    "test_without_known_inputs_the_first_block_costs_a_second_graph": (),
    "test_a_later_run_of_the_same_process_is_not_held_back": (),
    "test_a_resumed_training_compiles_the_size_that_comes_next": (),
    "test_what_is_computed_again_eagerly_draws_the_same_dropout": (),
    "test_pairs::test_adapters_of_sdxl": (),
    "test_pairs::test_a_whole_sdxl": (),
    "test_pairs::test_a_whole_flux": (),
    "test_a_compiler_that_dies_at_a_later_size_costs_no_step": ("2-False",),
    "test_one_process_compiles_first_and_the_others_find_its_graphs": (),
    "test_a_run_resumed_after_the_takeover_is_equal_bit_for_bit": (),
    "test_two_processes_that_draw_different_sizes_train_as_without_compiling": (),
    "test_products_in_8_bits_that_a_machine_lacks_are_left_out": ("flux_train_network",),
    "test_a_compiler_that_dies_leaves_an_eager_training": ("flux_train_network",),
    "test_pairs::test_adapters_of_flux": ("checkpointing*",),
    "test_another_process_compiles_and_the_training_finds_all_of_it": (),
    "test_attention_is_kept_at_a_small_price_and_gradients_stay": (),
    "test_checkpoints_that_are_asked_of_every_operation_are_found_again": (),
    "test_compiling_is_really_tried": (),
    "test_compiled_code_of_one_kernel_is_not_taken_for_that_of_another": (),
    "test_each_of_twelve_sizes_is_compiled_in_the_first_step_that_meets_it": (),
    "test_generated_code_agrees_too": (),
    "test_gradients_of_many_sizes_are_those_of_eager": (),
    "test_graphs_are_as_many_as_predicted": ("many sizes-deep",),
    "test_numbers_are_those_of_eager_and_graphs_as_many_as_predicted": ("backends",),
    "test_one_graph_per_class_and_eager_numbers": ("0-*", "3-*"),
    "test_one_size_is_compiled_before_the_first_step_and_no_number_changes": ("flux_train",),
    "test_relatives_need_their_familys_graphs_for_five_sizes_and_lengths": (),
    "test_repeated_and_resumed_runs_are_equal_bit_for_bit": (),
    "test_sizes_and_lengths_are_one_graph_for_each_kind_of_block": ("anima*",),
    "test_the_compiler_gets_up_while_something_is_loaded_and_leaves_no_trace": (),
    "test_the_winner_is_kept_remembered_and_changes_no_number": (),
    "test_without_the_compilers_tools_a_training_is_eager": TWO,
    "test_images_keep_their_order_between_compiled_blocks": ("sdxl*",),
    # ---- contract
    "test_a_saved_model_loads_as_it_was_trained": ("sdxl_train", "flux_train"),
    "test_a_saved_lora_loads_as_it_was_trained": ("sdxl_train_network", "train_network"),
    "test_the_same_seed_gives_the_same_run_and_another_seed_another": ("flux_train_network",),
    "test_the_loss_falls_in_7_steps": ("sdxl_train_network", "flux_train_network"),
    "test_resuming_after_step_3_equals_6_straight_steps": ("sdxl_train_network", "flux_train_network"),
    "test_chosen_steps_are_saved_and_patience_ends_a_training_also_after_a_resume": ("flux_train_network",),
    "test_samples_from_captions_need_no_prompt_file": ADAPTERS,
    "test_sizes_and_variants_of_captions_train_and_resume": ("flux_train_network",),
    # ---- families
    "test_16_bit_tiles_differ_from_the_whole_no_more_than_16_bits_do": ("SDXL",),
    "test_a_base_model_is_the_same_with_every_prefix": TWO,
    "test_another_vae_in_either_layout": ("ldm", "diffusers", "folder"),
    "test_flux_2_dev::test_captions_are_encoded_as_the_pipeline_does": (),
    "test_one_graph_for_each_kind_of_block_over_all_buckets": (),
    # ---- memory
    "test_trainings_are_the_same": ("flux half",),
    "test_trainings_learn_the_same": ("sdxl*",),
    "test_blocks_compile_as_one_graph_and_are_not_compiled_again": ("flux*",),
    "test_compiled_blocks_have_them_too": ("flux*",),
    "test_products_in_their_own_format_give_nearly_the_same": ("fp8",),
    "test_averages_samples_and_states_see_the_true_weights": (),
    "test_a_file_in_8_bits_is_taken_unchanged": ("flux_train_network",),
    "test_compiled_gradients_are_the_same_for_few_blocks_some_and_all": ("qwen_image_train",),
    "test_every_family_learns_nearly_the_same": ("flux_train_network",),
    "test_gradients_are_the_same_for_every_number_of_blocks": ("sdxl_train",),
    "test_losses_and_weights_are_the_same": ("flux_train_network",),
    "test_losses_are_close_and_compiled_ones_too": ("zimage*",),
    "test_text_encoders_that_learn_recompute_too": ("flux*",),
    "test_trainings_learn_nearly_the_same_compiled_and_swapped_too": ("flux_2*",),
    # ---- methods
    "test_a_compiled_block_switches_its_adapters_off_and_on": (),
    "test_every_preset_that_is_offered_adapts_something": ("train_network",),
    "test_an_assistant_equals_a_merged_lora_in_steps_and_none_when_off": ("flux", "zimage", "krea_2"),
    "test_an_assistant_works_beside_any_adapter_and_any_weights": ("lycoris*", "some layers", "int8 products"),
    # ---- page
    "test_every_option_is_called_as_its_field_is": ("textual-inversion",),
    "test_windows_show_their_own_runs_also_after_the_server_was_gone": (),
    "test_folder_allowed_during_a_request_is_not_requested_again": (),
    "test_rare_settings_names_tabs_and_the_data_set_tab": (),
    "test_a_model_is_downloaded_with_its_parts_and_filled_in": (),
    "test_the_panel_says_so_and_the_training_goes_on": (),
    "test_training_without_captions_needs_one_confirmation": (),
    "test_response_for_another_form_is_dropped_or_requested_again": (),
    "test_the_panel_opens_the_comparison_of_its_run": (),
    "test_what_gpus_do_is_shown_while_a_run_works": (),
    "test_what_the_form_knows_is_reported_before_the_whole_check_is_done": (),
    "test_a_config_goes_through_download_and_upload": (),
    "test_the_other_tabs_are_made_ahead_and_ask_nothing_before_they_are_opened": (),
    "test_browser::test_stop_after_this_step": (),
    "test_browser::test_stop_now_saves_a_state_to_resume_from": (),
    "test_two_loras_are_merged_and_nothing_is_overwritten": (),
    "test_only_what_the_chosen_relative_takes_is_shown": (),
    "test_prompts_are_written_while_one_types": (),
    "test_reports_while_typing": (),
    "test_masks_are_painted_with_a_finger": (),
    "test_masks_are_made_by_a_model_shown_and_painted_with_the_mouse": (),
    "test_regularisation_and_dataset_file_of_a_tab_can_be_opened_alone": (),
    "test_tensorboard_is_started_on_demand_behind_the_door": (),
    "test_named_folders_are_rows_and_a_change_is_written_into_a_file": (),
    "test_two_browsers_change_one_queue": (),
    "test_fields_and_text_stay_in_step": (),
    "test_a_look_at_another_family_leaves_a_loaded_config_as_it_was": (),
    "test_the_lab_in_a_browser": (),
    "test_each_tab_opens_on_its_start_one_click_is_the_defaults_and_one_more_the_start_again": (),
    "test_the_queue_and_a_run_can_be_read_and_touched": ("dark",),
    "test_words_stand_out_from_their_ground": ("dark",),
    "test_under_a_path_of_a_proxy_everything_works": ("path cut",),
    "test_data_sets_without_a_training_become_those_of_the_form": ("musubi-tuner",),
    "test_the_data_sets_and_prompts_of_a_config_arrive_on_the_page": ("ai-toolkit",),
    "test_axe_finds_nothing_in_any_room": ("True-dark",),
    "test_no_section_unfolds_to_nothing": ("LoRA",),
    "test_the_buttons_of_a_training_fit_onto_small_phones": ("ja",),
    "test_on_a_phone_the_tabs_are_one_row_that_is_scrolled_and_the_keyboard_gets_there": ("ja-JP",),
    "test_every_option_comes_back_as_it_was_filled_in": ("*-sdxl", "*-flux", "lora-anima"),
    # ---- sampling
    "test_a_training_with_images_by_another_kernel_is_the_same": (),
    "test_a_batch_is_decided_together_and_close_to_one_by_one": TWO,
    "test_compiled_blocks_give_the_image_of_eager_ones": ("qwen_image_21*", "flux_train_network"),
    "test_engine::test_compiled_images_are_the_eager_ones": ("sdxl*", "qwen_image_train*"),
    "test_every_sampler_generates": ("ddim", "dpmsolver++", "euler_a", "heun", "lcm", "pndm", "dpm_2"),
    "test_files_at_other_strengths_are_neither_replayed_nor_left_out": ("flux_train_network",),
    "test_no_step_waits_for_the_device": ("sdxl*-ddim*", "flux*euler_a"),
    "test_previews_change_neither_losses_nor_graphs_of_a_training": ("flux_train_network-eager",),
    "test_previews_of_a_training_skip_only_where_that_is_set": ("flux*",),
    "test_recorded_images_are_the_eager_ones_bit_for_bit": TWO,
    "test_tiles_show_the_same_images_and_the_log_says_so_once": TWO,
    "test_without_memory_recordings_go_first_and_then_the_batch_of_both_prompts": TWO,
    # ---- tools
    "test_checked_merged_and_sampled_as_it_was_trained": ("full",),
    "test_diffusers_generates_the_same_with_a_converted_sdxl_file": ("kohya",),
    "test_diffusers_adds_the_same_to_every_layer": ("flux*", "sdxl-locon*", "qwen*", "zimage*", "anima*"),
    "test_there_and_back_is_the_same_to_the_bit": ("flux*", "sdxl-1-*"),
    "test_every_key_is_one_that_comfyui_reads": (
        "*-networks.*",
        "*-locon-()",
        "*-loha-()",
        "*-lokr-()",
        "sdxl-lokr*",
        "flux-lokr*",
    ),
    # ---- toy
    "test_a_third_family_works_everywhere": (),
    # ---- train
    "test_a_training_is_resumed_beside_it": (),
    "test_accelerate_launches_it_on_two_machines_by_its_own_options": (),
    "test_swapped_blocks_are_left_alone": (),
    "test_chroma_whose_approximator_stays_unchanged": (),
    "test_two_shares_have_nothing_in_common_and_are_all_together": (),
    "test_older_ones_learn_in_eight_bits_with_swapped_blocks": (),
    "test_from_the_last_state_it_goes_on_as_if_nothing_had_been": (),
    "test_where_one_of_two_processes_is_killed_the_other_says_so_and_both_go_on": (),
    "test_samples_and_validation_are_left_as_they_are": (),
    "test_of_what_one_cannot_read_no_process_begins_a_step": (),
    "test_trainings_are_disturbed_from_the_second_step_and_resume_exactly": (),
    "test_the_error_is_printed_where_the_processes_cannot_be_parted": (),
    "test_the_other_scripts_as_well": (),
    "test_captions_tell_the_small_model_of_flux_what_is_in_an_image": (),
    "test_caches_on_disk_are_read_again": (),
    "test_sixteen_bits_stay_where_eight_gain_little": (),
    "test_whole_matrices_of_lokr_are_saved_in_float16_and_gone_on_with": (),
    "test_the_sizes_of_every_familys_matrices_are_found": ("flux", "sd15"),
    "test_the_demo_makes_models_and_pairs_for_them": (),
    "test_early_steps_compile": (),
    "test_a_training_imports_nothing_that_it_does_not_use": (),
    "test_a_lora_learns_from_one_to_three_references": (),
    "test_the_fastest_is_used_remembered_and_kept_by_a_resumed_training": (),
    "test_the_denoiser_gets_its_inputs_on_its_own_device": (),
    "test_a_training_survives_30_deaths": ("of states by time",),
    "test_a_state_goes_on_with_other_numbers_of_processes": (),
    "test_losses_and_files_are_those_of_whole_models": (),
    "test_a_layer_has_one_graph_for_all_sizes_of_control_images": (),
    "test_a_file_that_is_missing_or_of_another_family_is_named_by_the_check": TWO,
    "test_compiled_the_further_passes_need_no_graph_more": ("LoRA",),
    "test_early_steps_change_no_number": ("flux*",),
    "test_a_training_and_its_states_are_the_same": ("flux*",),
    "test_accumulating_two_batches_of_one_equals_a_batch_of_two": ("flux*",),
    "test_training_does_not_notice": ("flux*",),
    "test_a_flat_folder_trains_the_same_and_its_metadata_names_it": ("flux*",),
    "test_the_result_and_the_record_are_there_at_the_end": ("flux*",),
    "test_what_is_cached_is_not_read_again": ("flux*",),
    "test_what_is_learned_from_them_does_not_depend_on_checkpoints": ("flux*",),
    "test_a_planted_error_breaks_the_bound_of_the_error": (),
    "test_bf16_is_close_to_float32": TWO,
    "test_captions_tell_that_of_sdxl_what_is_in_an_image_unless_another_layer_is_read": (),
    "test_checkpointing_holds_with_encoders_that_learn": ("flux*", "anima*"),
    "test_chosen_blocks_alone_are_compiled": (),
    "test_lllite::test_compiled_it_needs_the_predicted_graphs_and_gives_the_same_losses": (),
    "test_files_beside_the_files": ("deep*",),
    "test_half_weights_train_like_float32_ones": ("flux_train", "anima_train"),
    "test_nothing_in_a_step_waits_for_the_device": ("*_train_network", "flux*"),
    "test_now_drops_the_batches_of_an_unfinished_step": ("in the*", "at its*"),
    "test_samples_and_saves_on_demand_change_no_number": ("flux_train_network",),
    "test_six_sizes_and_lengths_need_the_graphs_of_one_length": (),
    "test_sizes_of_images_and_references_need_the_predicted_graphs": (),
    "test_small_updates_add_up": ("AdamW-loaded*", "Adafactor-full*", "AdamW8bit-full*"),
    "test_steps_are_those_of_a_merged_lora_and_samples_those_of_none": ("flux*",),
    "test_three_sizes_need_the_predicted_graphs_and_give_the_same_losses": (),
    "test_training_goes_on_from_a_file_of_sd_scripts_names_and_compiled_losses_are_the_eager_ones": (),
    "test_twice_interrupted_is_bit_for_bit_the_same": ("flux_train_network",),
    "test_weights_and_losses_are_those_of_a_training_without_it": ("compiled",),
    "test_without_accumulation_the_step_is_finished": ("flux*",),
    # ---- setup
    "test_a_set_up_that_is_killed_anywhere_ends_healthy_when_it_is_run_again": (),
}


def mark_exhaustive(items: Sequence[Any]) -> None:
    """Mark the tests that only `./setup.sh test --all` runs."""
    groups: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        groups.setdefault((item.path, item.originalname), []).append(item)
    for (path, name), group in groups.items():
        patterns = TESTED_ALWAYS.get(name, TESTED_ALWAYS.get(f"{path.stem}::{name}"))
        if patterns is not None:
            kept = [item for item in group if any(fnmatchcase(_parameters(item), pattern) for pattern in patterns)]
        elif group[0].get_closest_marker("slow") and path.parent.name not in FOLDERS_OF_GUARDS:
            others = [item for item in group[1:] if not SD15.search(_parameters(item))]
            kept = [group[0], (others or group)[-1]]
        else:
            continue
        for item in group:
            if item not in kept:
                item.add_marker("exhaustive")


def _parameters(item: Any) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""
