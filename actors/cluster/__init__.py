"""The Ray cluster: starting or joining it, placing processes, explaining its failures, and cleaning up."""
