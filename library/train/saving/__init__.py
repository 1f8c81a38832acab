"""What a training saves and resumes: LoRA files and checkpoints, states, and the lock of their names."""
