"""Turns a batch into packs: the plan, balancing over ranks, shared prefixes, packing, context-parallel sharding."""
