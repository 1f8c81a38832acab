"""The processes of one training: their devices, their communication, and noticing that another has ended."""
