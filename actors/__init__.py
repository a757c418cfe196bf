"""The Ray edge of slimefsdp: worker processes, the driver's handle on them, rollouts and the command line."""
