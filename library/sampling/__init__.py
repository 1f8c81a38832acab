"""Pictures of a base model with finished LoRA files: side by side, with one seed, over strengths or epochs."""
