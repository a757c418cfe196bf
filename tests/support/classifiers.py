"""Random token classifiers of transformers' own, the definition of a value model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForTokenClassification

from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.tiny_models import tiny_model


def save_classifier(path: Path, kind: str = "qwen3", labels: int = 1) -> Path:
    """A random token classifier of transformers' own, as a folder."""
    config = tiny_model(kind).config
    config.num_labels = labels
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def plain_classifier(path: Path, **options: Any) -> Any:
    """The definition of what a folder computes, every number in float64."""
    model = AutoModelForTokenClassification.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", **options
    ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def separate_values(hf: Any, batch: RolloutBatch) -> torch.Tensor:
    """[R], one plain forward a sample; the value of a response token stands in the row before it."""
    parts = []
    for sample in batch.to_samples():
        rows = hf(torch.as_tensor(np.array(sample["tokens"]))[None]).logits[0, :, 0]
        parts.append(rows[-sample["response_length"] - 1 : -1])
    return torch.cat(parts)
