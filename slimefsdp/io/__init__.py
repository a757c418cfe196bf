"""Files: strict JSON, locks, atomic folders, and safetensors files that are checked before they are read."""
