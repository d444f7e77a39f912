"""Environment families by name, or by dotted path from anybody's package.

Built-in modules are imported only when they are asked for, so that this module stays light.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from mopd.environments.base import EnvironmentFamily

FAMILIES = {
    "textworld_express": "mopd.environments.textworld_express:TextWorldExpressFamily",
    "scienceworld": "mopd.environments.scienceworld:ScienceWorldFamily",
    "babyai": "mopd.environments.babyai:BabyAIFamily",
    "gymnasium_text": "mopd.environments.gymnasium_text:GymnasiumTextFamily",
    "reasoning_gym": "mopd.environments.reasoning_gym:ReasoningGymFamily",
    "jsonl_tasks": "mopd.environments.jsonl_tasks:JsonlTasksFamily",
    "verifiers": "mopd.environments.verifiers_tasks:VerifiersFamily",
    "openenv": "mopd.environments.openenv:OpenEnvFamily",
}


class EnvironmentConfigError(ValueError):
    """An environment name or option that does not exist; the message lists what does."""


def make_family(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentFamily:
    """Build a family of environments.

    `name` is one of FAMILIES, or `package.module:factory` (also `package.module.factory`) where the factory is any
    callable that takes the options as keyword arguments and returns an EnvironmentFamily.

    Raises EnvironmentConfigError for an unknown name, an unknown option, options of a wrong type, or an object that is
    not a family.
    """
    factory = _factory(name)
    options = {str(key): value for key, value in dict(options or {}).items()}
    if not callable(factory):
        raise EnvironmentConfigError(f"environment {name!r} is a {type(factory).__name__}, not something to call")
    parameters = _parameters(factory)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known = [p.name for p in parameters.values() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        for key in options:
            if key not in known:
                raise EnvironmentConfigError(
                    f"environment {name!r} has no option {key!r}; its options are: {', '.join(known) or '(none)'}"
                )
    missing = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in options
    ]
    if missing:
        raise EnvironmentConfigError(f"environment {name!r} needs the option {missing[0]!r}")
    try:
        family = factory(**options)
    except TypeError as error:
        raise EnvironmentConfigError(f"environment {name!r} refuses its options {options}: {error}") from error
    if not isinstance(family, EnvironmentFamily):
        raise EnvironmentConfigError(
            f"environment {name!r} returned a {type(family).__name__}, which lacks some of: name, version, "
            "system_prompt, tasks, create, close (see mopd.environments.base.EnvironmentFamily)"
        )
    return family


def _parameters(factory: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some built-in types tell nothing about their arguments
        return inspect.signature(lambda **options: options).parameters


def _factory(name: str) -> Any:
    path = FAMILIES.get(name, name)
    module_name, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator:
        raise EnvironmentConfigError(
            f"unknown environment {name!r}; built in are: {', '.join(FAMILIES)}; "
            "your own goes by dotted path, package.module:factory"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise EnvironmentConfigError(
                f"environment {name!r}: there is no module {error.name!r} on the Python path"
            ) from error
        raise EnvironmentConfigError(
            f"environment {name!r} needs the Python package {error.name!r}: install it into this environment"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise EnvironmentConfigError(f"environment {name!r}: module {module_name!r} has no {attribute!r}") from error
