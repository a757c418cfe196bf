"""Bytes, operations and seconds of training, estimated from config.json and the settings. No weights are read."""
