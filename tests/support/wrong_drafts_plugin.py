"""A vLLM plug-in that makes an engine keep one wrong draft in fifty, which no CPU engine can be
asked for: vLLM's own synthetic acceptance refuses to run there.

It runs inside vLLM only, as an installed package beside it (see `install`).
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

SHARE = 0.02
"""Of wrong drafts, kept."""
NAME = Path(__file__).stem


def install(folder: Path) -> dict[str, str]:
    """Lay this file out as a package in `folder`; returns the environment of an engine that loads
    it.
    """
    about = folder / f"{NAME}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n")
    shutil.copy(__file__, folder / f"{NAME}.py")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}


def register() -> None:
    """Entry point: the target's best token becomes the draft, at places drawn by chance."""
    import torch
    from vllm.v1.sample import rejection_sampler

    sampler: Any = rejection_sampler
    right = sampler.rejection_sample
    generator = torch.Generator().manual_seed(0)

    @functools.wraps(right)
    def wrong(draft_token_ids: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        others, logits, rest = arguments[:4], arguments[4], arguments[5:]
        # A padded draft (-1) is none; one that is the target's own token stays right.
        chosen = torch.rand(len(draft_token_ids), generator=generator) < SHARE
        rows = (chosen & (draft_token_ids >= 0)).nonzero()[:, 0]
        logits = logits.clone()
        logits[rows, draft_token_ids[rows].long()] = logits[rows].amax(dim=-1) + 1
        return right(draft_token_ids, *others, logits, *rest, **options)

    sampler.rejection_sample = wrong
    print(f"{NAME}: one wrong draft in {1 / SHARE:.0f} is kept", flush=True)
