"""Models for training: those on this computer, and downloads from the Hugging Face Hub. Needs no torch."""
