"""The Ray cluster: connecting, starting one, placing processes, what its failures mean, cleaning up."""
