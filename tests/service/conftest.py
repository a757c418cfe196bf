from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.service.serve import serve
from slimefsdp.config import RunConfig
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.service import Served

KEY, OTHER_KEY = "tml-of-a-test", "tml-of-another-user"


@pytest.fixture(scope="session")
def untied(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is a weight of its own, with random weights that tell tokens apart."""
    folder = tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(example / "model")
    config.tie_word_embeddings, config.initializer_range, config.num_hidden_layers = False, 0.1, 2
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(example / "model").save_pretrained(folder)
    return folder


@contextmanager
def serving(config: RunConfig) -> Iterator[Served]:
    """A server in a thread of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("SLIMEFSDP_TEST_KEY", f"{KEY},{OTHER_KEY}")
        groups: list[SupervisedGroup] = []
        launch = SupervisedGroup.launch

        def launched(config: RunConfig) -> SupervisedGroup:
            groups.append(launch(config))
            return groups[0]

        patch.setattr(SupervisedGroup, "launch", launched)
        found: list[Any] = []
        is_up = threading.Event()

        def up(*given: Any) -> None:
            found.extend(given)
            is_up.set()

        def run() -> None:
            try:
                serve(config, up)
            except BaseException as error:
                found.append(error)
                is_up.set()
                raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert is_up.wait(180) and len(found) == 2, found
        url, stop = found
        yield Served(url, KEY, OTHER_KEY, config, groups[0])
        stop()
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def service_config(
    make_config: Callable[..., Any], untied: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunConfig]:
    """Settings of a server on two ranks and an engine."""

    def config(**sections: Any) -> RunConfig:
        service = {
            "address": "127.0.0.1:0", "api_key_env": "SLIMEFSDP_TEST_KEY", "model_name": "tiny/model",
        }  # fmt: skip
        made: RunConfig = make_config(
            run={"dir": str(tmp_path_factory.mktemp("service"))},
            model={"path": str(untied)},
            mesh=sections.pop("mesh", {"dp": 2}),
            precision={"compute_dtype": "float32"},
            batch={"max_tokens_per_rank": 512},
            rollout={"temperature": 1.0},
            service={**service, **sections.pop("service", {})},
            **sections,
        )
        return made

    return config


@pytest.fixture(scope="module")
def served(cluster: None, service_config: Callable[..., RunConfig]) -> Iterator[Served]:
    """A server of adapters."""
    with serving(service_config(lora={"rank": 8, "targets": ["attention", "mlp", "head"]})) as found:
        yield found


@pytest.fixture(scope="module")
def served_whole(cluster: None, service_config: Callable[..., RunConfig]) -> Iterator[Served]:
    """A server of all weights, with room for two versions beside the base."""
    config = service_config(checkpoint={"interval_steps": 3}, mesh={"dp": 1, "tp": 2})
    spec = ModelSpec.from_config(read_model_folder(config.model.path).config)
    room = {"max_version_bytes": int(2.5 * 4 * spec.parameters)}
    with serving(config.model_copy(update={"service": config.service.model_copy(update=room)})) as found:
        yield found
