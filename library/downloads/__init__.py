"""Models for training: what is on this computer, and what can be had from the Hugging Face Hub. No torch in here."""
