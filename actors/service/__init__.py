"""The HTTP service that unmodified clients of the Tinker API train and sample with."""
