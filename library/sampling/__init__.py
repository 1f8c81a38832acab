"""Images of a base model with LoRA files: side by side, with one seed, over strengths or epochs."""
