"""The calls of a training loop; `slimefsdp.Trainer` on one rank and a driver's `WorkerGroup` have the same ones.

Each call is defined once, in a module of this package: its signature, docstring and `@call` declaration, and its body,
which is what one rank does. Drivers import these classes too, so bodies import the modules that need transformers.
"""
