"""Looks at one candidate: the level each is judged by, so that all of them together err no more
often than one. Pure.

An inconclusive rule names the prompts or rounds it still needs. Measuring them and deciding again
is another look at data that hold the old ones, and looks at an unspent level alpha err more often
each time (P. Armitage, C. McPherson & B. Rowe, JRSS A 132, 1969). Nobody knows beforehand how many
looks there will be, so look k spends

    alpha_k = alpha * 6 / (pi^2 k^2),        sum over k = 1, 2, ... of alpha_k = alpha,

and by the union bound the chance that any of any number of looks errs is at most alpha, whatever
made one look again. Alpha spending is that of K. Lan & D. DeMets (Biometrika 70, 1983); a series
that sums to one, for looks without an end, is the stitching of S. Howard, A. Ramdas, J. McAuliffe &
J. Sekhon (Annals of Statistics 49, 2021, section 3.1; there 1 / (zeta(s) k^s), here s = 2).

The first look pays most often, so it is what the series was chosen by: where a whole alpha had a
power of 0.80 (48 prompts, 0.025), 0.61 alpha has 0.73; halving (alpha / 2, alpha / 4, ...) has 0.71
there and a sixth of this one's level at the tenth look; s = 3 has 0.78 and two thirds of this one's
level at the second look, which decides most of what the first left open.
"""

from __future__ import annotations

import math

from pydantic import Field

from components.errors import ConfigError
from components.settings import GateSettings


class SpentSettings(GateSettings):
    """Gate settings whose levels are those of one look."""

    look: int = Field(ge=1, description="which look at the candidate the levels are of, from 1")


def spent(alpha: float, look: int) -> float:
    """Level of look `look` (from 1), of a level `alpha` over all of them.

    Raises:
        ConfigError: a look before the first.
    """
    if look < 1:
        raise ConfigError("looks are counted from 1", got=str(look), expected="1 or more")
    return alpha * 6 / (math.pi * look) ** 2


def at_look(settings: GateSettings, look: int) -> GateSettings:
    """The settings that look `look` is judged by: `alpha` and `non_inferiority_alpha` spent, all
    else alike.

    Args:
        settings: the recipe's.
        look: at this candidate, from 1.

    Raises:
        ConfigError: a look before the first, or levels that were spent before.
    """
    if isinstance(settings, SpentSettings):
        raise ConfigError(
            f"these levels are those of look {settings.look} already",
            expected="the recipe's settings",
        )
    levels = {
        name: spent(getattr(settings, name), look) for name in ("alpha", "non_inferiority_alpha")
    }
    return SpentSettings.model_validate({**settings.model_dump(), **levels, "look": look})


def next_level(alpha: float, settings: GateSettings) -> float:
    """Level of the look after this one, that what is still to be measured will be judged by.

    Args:
        alpha: a level of `settings`.
        settings: of `at_look`; levels that were never spent are planned for as they are.
    """
    if not isinstance(settings, SpentSettings):
        return alpha
    return alpha * spent(1.0, settings.look + 1) / spent(1.0, settings.look)
