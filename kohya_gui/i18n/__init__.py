"""The page in other languages."""
