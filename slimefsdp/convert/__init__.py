"""Conversion of models and checkpoints between formats, without a process group."""
