"""The calls that a training loop makes: `slimefsdp.Trainer` on one rank and a driver's `WorkerGroup` have the same.

Each call is defined once, in one of these files: signature, docstring, `@call` with what else is known of it, and as
the body what one rank does. A driver has these classes too, without torch: bodies import what they need.
"""
