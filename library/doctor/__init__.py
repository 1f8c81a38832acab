"""`kohya doctor`: what this machine has, what is missing or broken, and which settings suit it."""
