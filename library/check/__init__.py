"""What is checked and estimated before a training starts."""
