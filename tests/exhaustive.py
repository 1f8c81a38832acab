"""What `./setup.sh test` leaves to `./setup.sh test --all`: tests that show for one more family, size or way what other
tests show already, and cost a third of the time of all tests.

Each name is a test function, with its file where other files have one of that name. Its value are patterns of the
parameters that every run tries; () leaves out all of it. Tests that are quick, and whatever guards files, settings and
the page's doors, belong in every run.
"""

from fnmatch import fnmatchcase
from typing import Any

TWO = ("sdxl_train_network", "flux_train_network")  # a U-Net and a transformer
ADAPTERS = ("*train_network",)  # each family once
TESTED_ALWAYS: dict[str, tuple[str, ...]] = {
    # ---- bench
    "test_a_step_and_a_picture_are_timed_in_every_way": ("flux",),
    "test_a_step_of_the_other_family": (),
    "test_every_part_of_a_model_is_measured": (),
    "test_transformers_of_diffusers": ("Wan*",),
    # ---- comparing
    "test_every_family_is_compared_with_prompts_of_its_captions": TWO,
    # ---- compile
    "test_a_compiler_that_dies_leaves_an_eager_training": ("flux_train_network",),
    "test_pairs::test_adapters_of_flux": ("checkpointing*", "lycoris+checkpointing*"),
    "test_another_process_compiles_and_the_training_finds_all_of_it": (),
    "test_attention_is_kept_at_a_small_price_and_gradients_stay": ("flux_train_network",),
    "test_checkpoints_that_are_asked_of_every_operation_are_found_again": ("*own_gradients*",),
    "test_compiling_is_really_tried": (),
    "test_each_of_twelve_sizes_is_compiled_in_the_first_step_that_meets_it": ("",),
    "test_generated_code_agrees_too": (),
    "test_gradients_of_many_sizes_are_those_of_eager": ("sdxl_train_network",),
    "test_graphs_are_as_many_as_predicted": ("many sizes-deep", "a dozen sizes-deep", "any batch-deep"),
    "test_numbers_are_those_of_eager_and_graphs_as_many_as_predicted": ("model by size", "backends"),
    "test_one_graph_per_class_and_eager_numbers": ("0-*", "3-*"),
    "test_one_size_is_compiled_before_the_first_step_and_no_number_changes": ("flux_train",),
    "test_relatives_need_their_familys_graphs_for_five_sizes_and_lengths": ("kontext",),
    "test_repeated_and_resumed_runs_are_equal_bit_for_bit": ("3",),
    "test_sizes_and_lengths_are_one_graph_for_each_kind_of_block": ("anima*", "qwen_image_train*"),
    "test_the_compiler_gets_up_while_something_is_loaded_and_leaves_no_trace": (),
    "test_the_winner_is_kept_remembered_and_changes_no_number": (),
    "test_without_the_compilers_tools_a_training_is_eager": TWO,
    # ---- contract
    "test_chosen_steps_are_saved_and_patience_ends_a_training_also_after_a_resume": (
        "flux_[t2]*",
        "*inversion",
        "*lllite",
    ),
    "test_resuming_after_step_3_equals_6_straight_steps": ADAPTERS,
    "test_samples_from_captions_need_no_prompt_file": ADAPTERS,
    "test_sizes_and_variants_of_captions_train_and_resume": (
        "flux_[t2]*",
        "qwen_image_train_network",
        "*inversion",
        "*lllite",
    ),
    "test_the_loss_falls_in_7_steps": ADAPTERS,
    "test_the_same_seed_gives_the_same_run_and_another_seed_another": ADAPTERS,
    # ---- families
    "test_a_base_model_is_the_same_with_every_prefix": TWO,
    "test_another_vae_in_either_layout": ("ldm", "diffusers", "folder"),
    "test_flux_2_dev::test_captions_are_encoded_as_the_pipeline_does": (),
    "test_one_graph_for_each_kind_of_block_over_all_buckets": (),
    # ---- memory
    "test_averages_samples_and_states_see_the_true_weights": (),
    "test_a_file_in_8_bits_is_taken_unchanged": ("flux_[t2]*", "qwen*"),
    "test_compiled_gradients_are_the_same_for_few_blocks_some_and_all": ("flux_train_network", "qwen_image_train"),
    "test_every_family_learns_nearly_the_same": ("flux_train_network", "zimage*"),
    "test_gradients_are_the_same_for_every_number_of_blocks": ("sdxl_train", "qwen_image_train", "zimage_train"),
    "test_losses_and_weights_are_the_same": ("flux*", "*_train_network"),
    "test_losses_are_close_and_compiled_ones_too": ("flux_[t2]*", "zimage*"),
    "test_text_encoders_that_learn_recompute_too": ("flux*",),
    "test_trainings_learn_nearly_the_same_compiled_and_swapped_too": ("flux_2*", "zimage*"),
    # ---- methods
    "test_it_equals_a_merged_lora_in_steps_and_none_when_off": ("flux", "zimage", "krea_2"),
    "test_it_stands_beside_any_adapter_and_any_weights": ("lycoris*", "some layers", "int8 products"),
    # ---- page
    "test_every_option_comes_back_as_it_was_filled_in": ("lora-*", "*-sdxl", "*-flux"),
    # ---- sampling
    "test_a_batch_is_decided_together_and_close_to_one_by_one": TWO,
    "test_compiled_blocks_give_the_picture_of_eager_ones": ("qwen*", "flux_train_network"),
    "test_engine::test_compiled_pictures_are_the_eager_ones": ("sdxl*", "qwen*"),
    "test_every_sampler_generates": ("ddim", "dpmsolver++", "euler_a", "heun", "lcm", "pndm", "dpm_2"),
    "test_files_at_other_strengths_are_neither_replayed_nor_left_out": ("flux_train_network",),
    "test_no_step_waits_for_the_device": ("*-ddim*", "*-euler_a"),
    "test_previews_change_neither_losses_nor_graphs_of_a_training": ("flux_train_network-compiled", "sdxl*eager"),
    "test_previews_of_a_training_skip_only_where_that_is_set": ("flux*",),
    "test_recorded_pictures_are_the_eager_ones_bit_for_bit": TWO,
    "test_tiles_show_the_same_pictures_and_the_log_says_so_once": TWO,
    "test_without_memory_recordings_go_first_and_then_the_batch_of_both_prompts": TWO,
    # ---- tools
    "test_checked_merged_and_sampled_as_it_was_trained": ("full",),
    "test_diffusers_generates_the_same_with_a_converted_sdxl_file": ("kohya",),
    "test_diffusers_adds_the_same_to_every_layer": ("flux*", "sdxl-locon*", "qwen*", "zimage*", "anima*"),
    "test_there_and_back_is_the_same_to_the_bit": ("flux*", "sdxl-1-*"),
    "test_every_key_is_one_that_comfyui_reads": ("*-networks.*", "*-locon-()", "*-lokr*", "*-loha-()"),
    # ---- toy
    "test_a_third_family_works_everywhere": (),
    # ---- train
    "test_a_layer_has_one_graph_for_all_sizes_of_control_images": (),
    "test_a_file_that_is_missing_or_of_another_family_is_named_by_the_check": ADAPTERS,
    "test_a_planted_error_breaks_the_bound_of_the_error": ("wrong_sign",),
    "test_bf16_is_close_to_float32": TWO,
    "test_captions_tell_that_of_sdxl_what_is_in_a_picture_unless_another_layer_is_read": (),
    "test_checkpointing_holds_with_encoders_that_learn": ("flux*", "anima*"),
    "test_chosen_blocks_alone_are_compiled": ("shallow*",),
    "test_lllite::test_compiled_it_needs_the_predicted_graphs_and_gives_the_same_losses": (),
    "test_files_beside_the_files": ("deep*",),
    "test_half_weights_train_like_float32_ones": ("flux_train", "anima_train"),
    "test_nothing_in_a_step_waits_for_the_device": ("*_train_network", "flux*"),
    "test_now_drops_the_batches_of_an_unfinished_step": ("in the*", "at its*"),
    "test_samples_and_saves_on_demand_change_no_number": TWO,
    "test_six_sizes_and_lengths_need_the_graphs_of_one_length": (),
    "test_sizes_of_images_and_references_need_the_predicted_graphs": (),
    "test_small_updates_add_up": ("AdamW-*", "Adafactor-full*", "AdamW8bit-full*"),
    "test_steps_are_those_of_a_merged_lora_and_samples_those_of_none": ("flux*",),
    "test_three_sizes_need_the_predicted_graphs_and_give_the_same_losses": ("flux*",),
    "test_training_goes_on_from_a_file_of_sd_scripts_names_and_compiled_losses_are_the_eager_ones": (),
    "test_twice_interrupted_is_bit_for_bit_the_same": ("flux_train_network", "anima*"),
    "test_weights_and_losses_are_those_of_a_training_without_it": ("flux_train_network*", "qwen*network*"),
    "test_without_accumulation_the_step_is_finished": ("flux*",),
}


def is_exhaustive(item: Any) -> bool:
    """Return whether only `./setup.sh test --all` runs a test."""
    patterns = TESTED_ALWAYS.get(item.originalname, TESTED_ALWAYS.get(f"{item.path.stem}::{item.originalname}"))
    if patterns is None:
        return False
    parameters = item.callspec.id if hasattr(item, "callspec") else ""
    return not any(fnmatchcase(parameters, pattern) for pattern in patterns)
