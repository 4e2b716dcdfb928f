"""A plugin in the HTTP process: its routes stand behind the key, its options reach requests."""

from __future__ import annotations

import textwrap

import httpx
import pytest

from server.harness import serving
from tinymodels import write_tiny_hf

MODULE = """
    from sanic.response import json

    from interlock.hookspec import hookimpl


    class Greeter:
        api_version = 1

        @hookimpl
        def interlock_routes(self, app):
            @app.get("/greeting")
            async def greeting(request):
                return json({"hello": "world"})
"""


WITNESS = """
    import os
    import pathlib

    with pathlib.Path(os.environ["WITNESS"]).open("a") as file:
        print(os.getpid(), "import", file=file)

    from interlock.hookspec import hookimpl


    def note(what):
        with pathlib.Path(os.environ["WITNESS"]).open("a") as file:
            print(os.getpid(), what, file=file)


    class Witness:
        api_version = 1

        def __init__(self):
            note("load")

        @hookimpl
        def interlock_configure(self):
            note("configure")

        @hookimpl
        def interlock_requests_finished(self, requests):
            note("use")
"""


def install(folder, monkeypatch, name, source):
    """An installed distribution with one plugin, on the path of the processes of this test."""
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    target = f"{name}:{name.capitalize()}"
    (info / "entry_points.txt").write_text(f"[interlock.plugins]\n{name} = {target}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return name


@pytest.fixture
def greeter(tmp_path, monkeypatch):
    return install(tmp_path, monkeypatch, "greeter", MODULE)


def test_each_process_loads_a_plugin_once_before_its_use(tmp_path, monkeypatch):
    """(PLG-04) The HTTP process and the engine process of a running server."""
    witness = install(tmp_path, monkeypatch, "witness", WITNESS)
    monkeypatch.setenv("WITNESS", str(tmp_path / "seen"))
    folder = write_tiny_hf(tmp_path / "model")
    sets = {"engine__num_blocks": 16, "engine__threads": 1}
    with (
        serving(str(folder), real=True, plugins=witness, **sets) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).is_success
        pids = [server.process.pid, server.engine().pid]
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    calls = {pid: [what for other, what in seen if int(other) == pid] for pid in pids}
    assert {int(pid) for pid, _ in seen} == set(pids)
    assert calls[pids[1]] == ["import", "load", "configure", "use"]
    # It runs no engine; it makes an object to learn the settings and one for the routes.
    assert calls[pids[0]] == ["import", "load", "load"]


def test_a_plugins_route_stands_behind_the_key(greeter):
    with (
        serving(plugins=greeter, server__api_key="secret") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.get("/greeting").status_code == 401
        http.headers["authorization"] = "Bearer secret"
        assert http.get("/greeting").json() == {"hello": "world"}
        assert "/greeting" in http.get("/metrics").text
        body = {"prompt": "!say ok", "plugins": {"greeter": {"loud": True}}, "cache_salt": "s"}
        assert http.post("/v1/completions", json=body).status_code == 200
        for options in ({"greter": {}}, {"greeter": {"x": 2**70}}):
            answer = http.post("/v1/completions", json={**body, "plugins": options})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"].startswith("plugins")
