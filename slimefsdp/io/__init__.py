"""Files: strict JSON, locks, whole folders or none, safetensors checked before they are read."""
