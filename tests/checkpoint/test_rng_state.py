"""Generators go on exactly where they stood, through JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch

from slimefsdp.checkpoint.save_load import generator_states, restore_generators

CPU = torch.device("cpu")


def draws() -> list[float]:
    values = [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1)]
    return [*values, float(np.random.rand()), float(np.random.standard_normal())]


def test_every_generator_goes_on_where_it_stood_also_between_the_two_halves_of_a_gaussian_pair() -> None:
    random.gauss(0, 1)  # makes two, and keeps one
    np.random.standard_normal()
    saved = json.loads(json.dumps(generator_states(CPU)))
    first, second = draws(), draws()
    restore_generators(saved, CPU, Path())
    assert draws() == first and draws() == second
    restore_generators(saved, CPU, Path())  # the states were not consumed
    assert draws() == first != second


def test_a_generator_that_was_not_saved_stays() -> None:
    saved = generator_states(CPU)
    del saved["python"], saved["numpy"]
    random.seed(5)
    expected = random.Random(5).random()
    restore_generators(saved, CPU, Path())
    assert random.random() == expected
