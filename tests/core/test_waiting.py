from __future__ import annotations

from interlock.waiting import SPIN_COUNT, limit_spinning


def test_waiting_threads_sleep_soon_unless_the_user_has_chosen(monkeypatch):
    import os

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
