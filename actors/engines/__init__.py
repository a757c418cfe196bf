"""The engines that sample, in runs and for the service: the embedded one, and those of servers such as vLLM."""
