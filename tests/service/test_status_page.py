"""The status page in headless Chromium, where one is installed: what it shows, and that the browser finds no fault."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from starlette.testclient import TestClient

from actors.service.app import make_app
from actors.service.serve import listening
from actors.service.service import Service
from slimefsdp.config import config_from_dict
from tests.support.service import service_tree
from tests.support.service_standins import LOCAL, Engine, Group, new_run
from tests.support.waiting import PATIENCE_S, wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def served(untied: Path, tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a service, and the runs that it has."""
    config = config_from_dict(service_tree(untied, tmp_path, service={"model_name": "tiny/model"}))
    assert config.run.dir is not None
    config.run.dir.mkdir()
    service = Service(config, cast(Any, Group(config.run.dir)), Engine(2))
    app = make_app(service)
    runs = [new_run(TestClient(app, LOCAL)) for _ in range(2)]
    listener = listening(config)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started)
    yield "http://{}:{}/".format(*listener.getsockname()), runs
    server.should_exit = True
    thread.join(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_shows_every_run_and_the_browser_has_nothing_to_say(
    served: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, runs = served
    browser = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom", url),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert [run for run in runs if run not in browser.stdout] == [], browser.stdout + browser.stderr
    assert "tiny/model" in browser.stdout
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
