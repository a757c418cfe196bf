"""The Ray cluster: starting or joining one, placing processes, explaining its failures, and cleaning up."""
