"""How a batch becomes packs: the plan, balancing over ranks, shared prefixes, packing, context-parallel sharding."""
