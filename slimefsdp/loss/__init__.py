"""Pure losses: tensors in, tensors out. One other function, in `reduce.py`, owns normalisation."""
