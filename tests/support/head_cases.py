"""Log-probs through [rows, vocab] tensors, and what an operation makes anew."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def naive_log_probs(hidden, weight, targets, temperature=1.0, softcap=None):
    """Log-probs and entropy through [rows, vocab] tensors."""
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = (logits / temperature).log_softmax(-1)
    return log_softmax.gather(1, targets[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(-1)


def random_case(rows, hidden_dim, vocab, dtype=torch.float64, seed=0, scale=1.0):
    """hidden, weight (both leaves), targets, and one weight per output for a scalar loss."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, hidden_dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (scale * torch.randn(vocab, hidden_dim, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    loss_weights = torch.randn(2, rows, generator=generator, dtype=torch.float64)
    return hidden, weight.requires_grad_(), targets, loss_weights


def chunk_bytes_for(rows_per_chunk, vocab, dtype=torch.float64):
    return rows_per_chunk * vocab * dtype.itemsize * 2


def worst(one, other) -> float:
    return (one.detach().double() - other.detach().double()).abs().max().item()


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that any operation makes anew: no views, nothing in place."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tensors_in((args, kwargs))}
        made = [leaf for leaf in tensors_in(result) if leaf.untyped_storage().data_ptr() not in given]
        self.elements = max([self.elements, *(leaf.numel() for leaf in made)])
        return result


def tensors_in(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
