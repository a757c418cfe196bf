"""What a step takes before anything is launched: memory, FLOPs, seconds. No torch, but in calibrate.py."""
