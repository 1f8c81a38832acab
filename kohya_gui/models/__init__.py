"""The dialog that finds base models on this computer and downloads others."""
