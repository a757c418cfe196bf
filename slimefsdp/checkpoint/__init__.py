"""What survives a process: checkpoints, and Hugging Face folders in and out."""
