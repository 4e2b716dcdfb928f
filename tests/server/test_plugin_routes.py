"""A plugin in the HTTP process: its routes stand behind the key, its options reach requests."""

from __future__ import annotations

import textwrap

import httpx
import pytest

from server.harness import serving

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


@pytest.fixture
def greeter(tmp_path, monkeypatch):
    """An installed distribution with one plugin, on the path of the processes of this test."""
    (tmp_path / "greeter.py").write_text(textwrap.dedent(MODULE))
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[interlock.plugins]\ngreeter = greeter:Greeter\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "greeter"


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
