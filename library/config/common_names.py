"""Names that people write for options, as other programs and papers call them."""

from types import MappingProxyType

_BY_OPTION = {
    "pretrained_model_name_or_path": "model base_model base checkpoint model_path model_name pretrained_model",
    "output_dir": "output output_folder output_path save_dir",
    "output_name": "name model_output_name lora_name",
    "train_data_dir": "images data data_dir dataset_dir image_dir image_folder images_dir train_dir",
    "in_json": "metadata_file",
    "resolution": "size image_size",
    "max_train_steps": "steps max_steps num_steps num_train_steps total_steps",
    "max_train_epochs": "epochs epoch max_epochs num_epochs num_train_epochs",
    "learning_rate": "lr",
    "text_encoder_lr": "text_encoder_learning_rate te_lr",
    "train_batch_size": "batch batch_size",
    "gradient_accumulation_steps": "accumulation accumulation_steps gradient_accumulation grad_accum grad_accum_steps",
    "network_dim": "rank dim lora_rank lora_dim network_rank r",
    "network_alpha": "alpha lora_alpha",
    "network_dropout": "dropout lora_dropout",
    "network_weights": "lora lora_weights lora_path",
    "optimizer_type": "optimizer optim",
    "optimizer_args": "weight_decay betas",
    "lr_scheduler": "scheduler lr_schedule",
    "lr_warmup_steps": "warmup warmup_steps",
    "max_grad_norm": "grad_clip gradient_clipping clip_grad_norm grad_norm",
    "min_snr_gamma": "min_snr snr_gamma",
    "mixed_precision": "precision dtype train_dtype bf16 fp16",
    "save_every_n_steps": "save_every save_steps checkpointing_steps",
    "sample_every_n_steps": "sample_every sample_steps_interval validation_steps",
    "sample_prompts": "prompts prompt validation_prompt validation_prompts",
    "caption_extension": "caption_ext captions_extension",
    "caption_dropout_rate": "caption_dropout",
    "fp8_base": "fp8",
    "gradient_checkpointing": "checkpointing grad_checkpointing",
    "blocks_to_swap": "block_swap swap_blocks",
    "resume": "resume_from resume_from_checkpoint",
    "compile": "torch_compile use_compile",
}
_BY_DATASET_KEY = {
    "image_dir": "train_data_dir data_dir images image_folder images_dir img_folder folder",
    "conditioning_data_dir": "mask_dir mask_folder mask_path masks",
    "batch_size": "train_batch_size batch",
    "num_repeats": "dataset_repeats repeats repeat",
    "caption_extension": "caption_ext captions_extension",
    "caption_dropout_rate": "caption_dropout",
}
# A common name -> the option that it means.
COMMON_NAMES = MappingProxyType({name: option for option, names in _BY_OPTION.items() for name in names.split()})
# The same for keys of dataset files.
DATASET_NAMES = MappingProxyType({name: key for key, names in _BY_DATASET_KEY.items() for name in names.split()})
