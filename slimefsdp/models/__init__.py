"""Builds the modules that are sharded from Hugging Face folders."""
