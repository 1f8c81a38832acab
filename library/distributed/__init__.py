"""The processes of one training: their devices, what they exchange, and how one notices that another has ended."""
