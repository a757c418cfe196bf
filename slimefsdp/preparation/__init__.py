"""What the driver decides about a batch before the ranks see it: checks, advantages, the plan. No torch."""
