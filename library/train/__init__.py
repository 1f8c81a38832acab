"""Training: the loop, what it steps, what it says and what it keeps."""
