"""Estimates bytes, FLOPs and seconds of training from config.json and the settings, without reading weights."""
