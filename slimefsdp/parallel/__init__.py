"""Meshes, sharding and residency: functions that take a model and give it back."""
