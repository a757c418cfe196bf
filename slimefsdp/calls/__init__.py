"""Defines the calls of a training loop. `slimefsdp.Trainer` on one rank and a driver's `WorkerGroup` have these calls.

A call is defined once, by its signature, docstring, `@call` declaration and body; the body runs on a rank. Drivers also
import these classes, so modules that need transformers are imported inside of bodies.
"""
